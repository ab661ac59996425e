"""Each number of each verb's command line is held to its bounds before anything is started, or made."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

from farandole.cli.commands import app
from farandole.cli.options import _option, check_words
from farandole.errors import UsageError
from farandole.platform.bounds import MAX_SEED
from farandole.pool.spec import pools
from farandole.protocol.messages import RunTerms
from farandole.settings import Settings


def verbs(of: typer.Typer, before: str = "") -> list[tuple[str, Any]]:
    own = [(f"{before}{verb.name}", verb.callback) for verb in of.registered_commands if not verb.hidden]
    inner = [verbs(g.typer_instance, f"{g.name} ") for g in of.registered_groups if g.typer_instance]
    return own + [verb for some in inner for verb in some]


NUMBERS = [
    (verb, callback, name, float if float in kinds else int)
    for verb, callback in verbs(app)
    for name, hint in get_type_hints(callback).items()
    if (kinds := {hint, *get_args(hint)}) & {int, float} and name != "verbose"
]


@pytest.mark.failure(
    "Command line",
    (
        "a number is invalid: `--stall nan`, `--orphan-limit inf`, `--threads 100000`; in TOML, a `FARANDOLE_` "
        "variable or the script too"
    ),
    seen="an error names the option, the value and its limits",
    outcome="exit code 2; nothing is started, no folder is created; in the script, exit code 1",
)
@pytest.mark.parametrize(("verb", "callback", "name", "kind"), NUMBERS, ids=[f"{n[0]} {n[2]}" for n in NUMBERS])
def test_a_number_that_means_nothing_ends_the_verb_at_once(
    verb: str, callback: Any, name: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = [p for p in inspect.signature(callback).parameters.values() if p.default is p.empty]
    given: dict[str, Any] = {p.name: "x" for p in needed}
    for value in (math.nan, math.inf, -1.0, 1e300) if kind is float else (2**70, -(2**70)):
        with pytest.raises(UsageError) as error:
            callback(**{**given, name: value})
        assert str(error.value).startswith(_option(inspect.unwrap(callback), name)), verb
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_called_as_they_are_given() -> None:
    callbacks = dict(verbs(app))
    assert _option(inspect.unwrap(callbacks["run"]), "orphan_s") == "--orphan-limit"
    assert _option(inspect.unwrap(callbacks["scale"]), "workers") == "WORKERS"


@pytest.mark.failure(
    "Command line",
    (
        "a number is invalid: `--stall nan`, `--orphan-limit inf`, `--threads 100000`; in TOML, a `FARANDOLE_` "
        "variable or the script too"
    ),
)
@pytest.mark.parametrize("field", [f for f in RunTerms.__struct_fields__ if f.endswith("_s")])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_no_time_of_a_runs_terms_is_none(field: str, value: float) -> None:
    with pytest.raises(UsageError):
        RunTerms(**{field: value})


@pytest.mark.parametrize(
    "terms", [{"threads": 100_000}, {"seed": 2**70}, {"seed": -(2**70)}, {"wanted": 10**6}, {"minimum": 2**70},
              {"maximum": 2**70}, {"audit": math.nan}],
)  # fmt: skip
def test_no_number_of_a_runs_terms_is_beyond_its_bounds(terms: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RunTerms(**terms)


@pytest.mark.failure(
    "Command line",
    (
        "a number is invalid: `--stall nan`, `--orphan-limit inf`, `--threads 100000`; in TOML, a `FARANDOLE_` "
        "variable or the script too"
    ),
)
@pytest.mark.parametrize(
    ("name", "value"),
    [("SEED", str(2**70)), ("SEED", "nan"), ("THREADS", "0"), ("THREADS", "100000"), ("THREADS", "1.5"),
     ("RETURNS", "-1"), ("FOLDER", "runs/\udcff")],
)  # fmt: skip
def test_a_variable_that_means_nothing_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"FARANDOLE_{name}"):
        Settings.read({f"FARANDOLE_{name}": value})


def test_a_negative_seed_is_one() -> None:
    assert Settings.read({"FARANDOLE_SEED": str(-MAX_SEED)}).seed == RunTerms(seed=-MAX_SEED).seed == -MAX_SEED


@pytest.mark.parametrize("size", ["0", "-1", "nan", "1e3", "9" * 30, "9" * 5000])
def test_a_pools_size_is_a_number_of_workers(size: str) -> None:
    with pytest.raises(UsageError, match="size="):
        pools([f"local,size={size}"])


@pytest.mark.failure(
    "Command line",
    "an argument of the command line is not UTF-8",
    seen="an error shows it",
    outcome="exit code 2; nothing is started",
)
def test_a_word_that_is_not_utf_8_is_refused() -> None:
    check_words(["--folder", "Läufe/\U0001f600"])
    with pytest.raises(UsageError, match="UTF-8"):
        check_words(["--folder", b"runs/\xff".decode(errors="surrogateescape")])
