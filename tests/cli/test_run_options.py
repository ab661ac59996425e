"""Each option of a run is declared once: the command line, the run's terms and the environment use the declaration."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from farandole.cli.run import run
from farandole.cli.supervisor import check
from farandole.errors import UsageError
from farandole.protocol.cost import Prices
from farandole.protocol.messages import Checkpoints, RunTerms
from farandole.protocol.settings import PoolTerms
from farandole.run_options import RUN_OPTIONS
from farandole.settings import Settings

BOUNDED = [
    (name, value)
    for name, option in RUN_OPTIONS.items()
    for value in ((option.least - 1, option.most + 1) if type(option.default) in (int, float, type(None)) else ())
]


@pytest.mark.parametrize("name", RUN_OPTIONS)
def test_an_option_has_one_name_and_one_default(name: str) -> None:
    option = RUN_OPTIONS[name]
    value = inspect.signature(run).parameters[name].default
    assert value.default == (None if option.is_kept else option.default)
    assert value.param_decls == (option.flag,)
    if name == "wanted":  # without a command line, one worker
        return
    owner = Checkpoints() if name in ("every", "keep") else Prices() if name == "traffic_price" else RunTerms()
    assert getattr(owner, name) == option.default


@pytest.mark.parametrize(("name", "value"), BOUNDED)
def test_a_number_beyond_its_limits_is_refused_with_its_option(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=RUN_OPTIONS[name].flag):
        RUN_OPTIONS[name].check(value)


ENVIRONMENT: list[tuple[str, str, Any]] = [
    ("seed", "-7", -7), ("threads", "3", 3), ("bits", "portable", "portable"), ("ledger", "1", True),
    ("ledger", "0", False), ("every", "5m", "5m"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), ENVIRONMENT)
def test_a_process_without_a_coordinator_reads_it_from_the_environment(name: str, text: str, value: Any) -> None:
    field = {"every": "checkpoint_every"}.get(name, name)
    assert getattr(Settings.read({RUN_OPTIONS[name].variable: text}), field) == value
    assert getattr(Settings.read({}), field) == RUN_OPTIONS[name].default


@pytest.mark.parametrize(("name", "text"), [("seed", str(2**63)), ("threads", "0"), ("bits", "some"), ("threads", "x")])
def test_an_invalid_value_names_the_variable(name: str, text: str) -> None:
    variable = RUN_OPTIONS[name].variable
    with pytest.raises(UsageError, match=variable):
        Settings.read({variable: text})


@pytest.mark.parametrize("kinds", [(), ("local",), ("ssh", "local")])
def test_a_limit_of_the_cost_needs_a_pool_with_prices(kinds: tuple[str, ...]) -> None:
    pools = [PoolTerms(kind=kind, name=kind) for kind in kinds]
    with pytest.raises(UsageError, match=r"--max-cost.*\bec2\b"):
        check(pools, "127.0.0.1", print, priced=True)
