"""What a user sees of an exception of the script: its own frames, and a hint where we know one."""

from __future__ import annotations

import pytest
import torch.distributed

from farandole import script as script_module
from tests.support.mentioned import mentions

SCRIPT = "/somewhere/train.py"


def told(source: str) -> str:
    """What is reported of the script `source`, which raises."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011  whatever a script raises
        exec(compile(source, SCRIPT, "exec"), {"torch": torch})
    return script_module.traceback_of(raised.value, SCRIPT)


@pytest.mark.parametrize("source", ["int('x')", "def f():\n    raise SystemExit(3)\nf()"])
def test_a_traceback_begins_in_the_script(source: str) -> None:
    files = [line for line in told(source).splitlines() if line.startswith("  File ")]
    assert mentions(files[0], SCRIPT, 1 if "int" in source else 3)
    assert not any(mentions(line, __file__) for line in files)


def test_a_script_that_does_not_compile() -> None:
    assert mentions(told("for"), "SyntaxError")


def test_a_collective_of_the_scripts_own_gets_a_hint() -> None:
    assert mentions(told("torch.distributed.get_rank()"), "torch.distributed", "step.mean(...)")
    assert not mentions(told("raise ValueError('no group')"), "step.mean(...)")
    group = "import os\nos.environ.pop('RANK', None)\ntorch.distributed.init_process_group('gloo')"
    assert mentions(told(group), "torch.distributed", "step.mean(...)")


@pytest.mark.parametrize("name", ["LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_a_variable_of_torchrun_gets_a_hint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert mentions(told(f"import os\nint(os.environ[{name!r}])"), name, "run.device", "run.is_leader")
    assert not mentions(told("{}['rank']"), "run.device")
