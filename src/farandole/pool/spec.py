"""What `--pool` says: one pool as KIND[,KEY=VALUE]..., or a TOML file with a table for each.

    --pool local,size=2                                  this machine
    --pool ssh,hosts=hosts.txt                           hosts of a file, see `hosts_file.py`
    --pool ec2,template=NAME,types=g4dn.xlarge+g5.xlarge  instances, see docs/ec2.md
    --pool pools.toml                                    [[pool]] kind = "ssh", hosts = "hosts.txt", ...

Every pool has a `kind`, may have a `name` (default: its kind) and a `size`, more than which it never has; the rest of
its keys are its kind's. The order is that of preference.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from farandole.errors import UsageError
from farandole.membership.preference import PoolTerms
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.output import LONGEST_NAME, is_name

COMMON = ("kind", "name", "size")
KINDS: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "ssh": ("hosts", "python", "ssh"),
    "ec2": ("template", "types", "zones", "market", "slots", "region", "prices"),
}
NEEDED: Mapping[str, tuple[str, ...]] = {"ssh": ("hosts",), "ec2": ("template",)}


def pools(asked: Sequence[str]) -> tuple[PoolTerms, ...]:
    """All that `--pool` says, in its order.

    Raises:
        UsageError: something in it can't be meant; names it.
    """
    found: list[PoolTerms] = []
    for text in asked:
        if text.endswith(".toml"):
            found += [_pool(table, f"{text}, pool {n}") for n, table in enumerate(_tables(Path(text)), 1)]
        else:
            found.append(_pool(_keys(text), f"--pool {text}"))
    for number, pool in enumerate(found):
        if pool.name in [other.name for other in found[:number]]:
            raise UsageError(
                f"two pools are called {pool.name!r}: give one another name, as --pool {pool.kind},name=..."
            )
    return tuple(found)


def _keys(text: str) -> dict[str, Any]:
    kind, *words = text.split(",")
    found: dict[str, Any] = {"kind": kind}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"--pool {text}: {word!r} is no KEY=VALUE")
        if key in found:
            raise UsageError(f"--pool {text}: {key} is there twice")
        found[key] = value
    return found


def _tables(path: Path) -> list[dict[str, Any]]:
    if sys.version_info < (3, 11):
        raise UsageError(f"--pool {path}: reading TOML takes Python 3.11; give each pool as --pool KIND,KEY=VALUE")
    import tomllib

    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--pool {path}: {error.strerror if isinstance(error, OSError) else error}") from None
    tables: Any = content.pop("pool", None)
    if content or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"--pool {path}: it holds a table [[pool]] for each pool, and nothing else")
    return tables


def _pool(table: Mapping[str, Any], where: str) -> PoolTerms:
    kind = str(table.get("kind", ""))
    if kind not in KINDS:
        raise UsageError(f"{where}: no such kind of pool as {kind!r}; there are {', '.join(KINDS)}")
    allowed = (*COMMON, *KINDS[kind])
    for key in table:
        if key not in allowed:
            raise UsageError(f"{where}: {kind} has no {key!r}; it has {', '.join(allowed[1:])}")
    for key in NEEDED.get(kind, ()):
        if key not in table:
            raise UsageError(f"{where}: {kind} needs {key}=...")
    name = str(table.get("name", kind))
    if not is_name(name) or "/" in name:
        raise UsageError(
            f"{where}: a pool's name has at most {LONGEST_NAME} characters, all of them to be seen, and no /"
        )
    size = table.get("size")
    if size is not None and (not str(size).isdecimal() or len(str(size)) > 9 or not 1 <= int(size) <= MAX_WORKERS):
        raise UsageError(f"{where}: size={size}: a whole number from 1 to {MAX_WORKERS}")
    options = {key: _word(value) for key, value in table.items() if key not in COMMON}
    return PoolTerms(kind=kind, name=name, size=None if size is None else int(size), options=options)


def _word(value: object) -> str:
    """A list of a TOML file is a+b on the command line."""
    return "+".join(str(each) for each in cast(list[object], value)) if isinstance(value, list) else str(value)
