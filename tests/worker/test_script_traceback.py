"""What a user sees of an exception of the script: its own frames, and a hint where we know one."""

from __future__ import annotations

import re
from pathlib import Path

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


@pytest.mark.failure(
    "The training loop",
    "the script calls `torch.distributed` itself (`all_reduce`, `get_rank`)",
    seen="torch's error that there is no process group, with a hint before the traceback",
    outcome="the script fails, exit code 1; `step.mean` and `run.evaluate` replace most such calls",
)
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


# --- frames of packages ----------------------------------------------------------------------------------------------

MODULE = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        {}
Net()(torch.ones(2, 3))
"""


def frames_of(source: str) -> list[tuple[str, str]]:
    """(file, function) of each frame that is shown, the script's as SCRIPT and others by their package."""
    frames = re.findall(r'  File "(.*)", line \d+, in (\S+)', told(source))
    return [(file if file == SCRIPT else Path(file).parent.name, function) for file, function in frames]


def test_frames_of_torch_that_lead_to_the_scripts_own_are_left_out() -> None:
    assert frames_of(MODULE.format("raise ValueError")) == [(SCRIPT, "<module>"), (SCRIPT, "forward")]


def test_the_frames_that_raise_it_are_shown() -> None:
    shown = frames_of(MODULE.format("return torch.nn.Linear(4, 1)(x)"))
    assert shown[:2] == [(SCRIPT, "<module>"), (SCRIPT, "forward")]
    assert shown[-1] == ("modules", "forward"), "that of torch.nn.Linear"


def test_frames_of_other_packages_stay() -> None:
    assert frames_of("import json\njson.loads('{')")[1:] == [
        ("json", "loads"), ("json", "decode"), ("json", "raw_decode"),
    ]  # fmt: skip


def test_an_exception_and_its_cause_are_both_cut() -> None:
    raised = MODULE.format("raise ValueError").strip().rpartition("\n")
    source = f"{raised[0]}\ntry:\n    {raised[2]}\nexcept ValueError as error:\n    raise KeyError('x') from error"
    assert frames_of(source) == [(SCRIPT, "<module>"), (SCRIPT, "forward"), (SCRIPT, "<module>")]


def test_a_module_that_does_not_compile_shows_the_import_and_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("x = (\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert frames_of("import broken_module") == [(SCRIPT, "<module>")]
    assert mentions(told("import broken_module"), str(tmp_path / "broken_module.py"), 1)


def test_an_error_of_a_package_alone_is_shown_whole() -> None:
    with pytest.raises(AttributeError) as raised:
        torch.nn.Linear(1, 1).nothing  # noqa: B018
    text = script_module.traceback_of(raised.value, SCRIPT)
    assert mentions(text, __file__)
    assert mentions(text, torch.nn.modules.module.__file__)
