"""Parses the values of `--pool`: one pool as KIND[,KEY=VALUE]..., or a TOML file with a table for each pool.

    --pool local,size=2                                  this machine
    --pool ssh,hosts=hosts.txt                           the hosts in a file, see `ssh.py`
    --pool ec2,template=NAME,types=g4dn.xlarge+g5.xlarge  instances, see docs/ec2.md
    --pool slurm,size=8,partition=spot                    jobs of Slurm, see docs/slurm.md
    --pool ray,size=8,num_gpus=1                          actors of a Ray cluster, see docs/ray.md
    --pool kubernetes,namespace=ml,image=IMAGE,size=8     pods, see docs/kubernetes.md
    --pool pools.toml                                    [[pool]] kind = "ssh", hosts = "hosts.txt", ...
    --config run.toml                                    the same tables beside other options, see `cli/config.py`

Every pool has a `kind`. It may have a `name` (default: its kind) and a `size`, the most workers that it ever has. The
other keys belong to the kind. The order of the pools is the order of preference.

`BUILT_IN` names the kinds that farandole has. A kind's module is imported when the kind is used. Any other name is
looked up in the entry point group `farandole.pools`, to which an installed package adds an object that is a `PoolKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.output import LONGEST_NAME, is_name
from farandole.platform.toml import read_toml
from farandole.pool.base import PoolContext, PoolKind, RemotePool
from farandole.protocol.settings import PoolTerms

COMMON = ("kind", "name", "size")
GROUP = "farandole.pools"  # group of entry points


class LocalKind:
    """This machine. `farandole run` makes this pool itself, before there is a ticket."""

    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    def is_sized(self, terms: PoolTerms) -> bool:
        del terms
        return False

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None: ...

    async def open(self, terms: PoolTerms, context: PoolContext) -> RemotePool:
        del context
        raise UsageError(f"--pool {terms.name}: a local pool needs no other host")


def _ssh() -> PoolKind:
    from farandole.pool.ssh import SshKind

    return SshKind()


def _ec2() -> PoolKind:
    from farandole.pool.ec2 import Ec2Kind

    return Ec2Kind()


def _slurm() -> PoolKind:
    from farandole.pool.slurm import SlurmKind

    return SlurmKind()


def _ray() -> PoolKind:
    from farandole.pool.ray import RayKind

    return RayKind()


def _kubernetes() -> PoolKind:
    from farandole.pool.kubernetes import KubernetesKind

    return KubernetesKind()


BUILT_IN: Mapping[str, Callable[[], PoolKind]] = {
    "local": LocalKind,
    "ssh": _ssh,
    "ec2": _ec2,
    "slurm": _slurm,
    "ray": _ray,
    "kubernetes": _kubernetes,
}


def kind_of(name: str, where: str = "--pool") -> PoolKind:
    """The kind that is called `name`. `where` begins the error.

    Raises:
        UsageError: there is no such kind, or its package can't be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    others = entry_points(group=GROUP)
    if name not in others.names:
        raise UsageError(
            f"{where}: no such kind of pool as {name!r}; there are {', '.join([*BUILT_IN, *others.names])}"
        )
    try:
        return others[name].load()
    except ImportError as error:
        raise UsageError(f"{where}: the package of the pool {name!r} can't be imported: {error}") from error


def pools(arguments: Sequence[str | Mapping[str, Any]]) -> tuple[PoolTerms, ...]:
    """Return the pools of all `--pool` arguments, and of all tables [[pool]] of `--config`, in their order.

    Raises:
        UsageError: an argument is invalid; the message names it.
    """
    result: list[PoolTerms] = []
    for text in arguments:
        if not isinstance(text, str):
            result.append(_pool(text, f"[[pool]] {len(result) + 1}"))
        elif text.endswith(".toml"):
            result += [_pool(table, f"{text}, pool {n}") for n, table in enumerate(_tables(Path(text)), 1)]
        else:
            result.append(_pool(_keys(text), f"--pool {text}"))
    for number, pool in enumerate(result):
        if pool.name in [other.name for other in result[:number]]:
            raise UsageError(
                f"two pools are called {pool.name!r}: give one of them another name, as --pool {pool.kind},name=..."
            )
    return tuple(result)


def _keys(text: str) -> dict[str, Any]:
    kind, *words = text.split(",")
    table: dict[str, Any] = {"kind": kind}
    for item in words:
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"--pool {text}: {item!r} is not KEY=VALUE")
        if key in table:
            raise UsageError(f"--pool {text}: {key} is given twice")
        table[key] = value
    return table


def _tables(path: Path) -> list[dict[str, Any]]:
    content = read_toml(path, f"--pool {path}")
    tables: Any = content.pop("pool", None)
    if content or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"--pool {path}: the file must hold one table [[pool]] for each pool, and nothing else")
    return tables


def _pool(table: Mapping[str, Any], where: str) -> PoolTerms:
    kind = str(table.get("kind", ""))
    pool_kind = kind_of(kind, where)
    allowed = (*COMMON, *pool_kind.options)
    for key in table:
        if key not in allowed:
            raise UsageError(f"{where}: {kind} has no key {key!r}; its keys are {', '.join(allowed[1:])}")
    for key in pool_kind.required:
        if key not in table:
            raise UsageError(f"{where}: {kind} needs {key}=...")
    name = str(table.get("name", kind))
    if not is_name(name) or "/" in name:
        raise UsageError(
            f"{where}: a pool's name has at most {LONGEST_NAME} characters, all of them printable, and no /"
        )
    size = table.get("size")
    if size is not None and (not str(size).isdecimal() or len(str(size)) > 9 or not 1 <= int(size) <= MAX_WORKERS):
        raise UsageError(f"{where}: size={size}: must be a whole number from 1 to {MAX_WORKERS}")
    options = {key: _option_text(value) for key, value in table.items() if key not in COMMON}
    return PoolTerms(kind=kind, name=name, size=None if size is None else int(size), options=options)


def _option_text(value: object) -> str:
    """Return the option as on the command line, where a TOML list is written as a+b."""
    return "+".join(str(each) for each in cast(list[object], value)) if isinstance(value, list) else str(value)
