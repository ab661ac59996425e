"""What a worker sets on a CUDA device, in which order, and what it says; with a device that is made believe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import farandole
from farandole.errors import NotDeterministic, UsageError
from farandole.numerics import settings as cuda
from farandole.numerics.fingerprint import fingerprint
from farandole.platform import cpu
from farandole.protocol.numeric_facts import OPERATION, SETTING
from farandole.script import run_alone

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
WORKSPACE, SIZE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def relevant() -> dict[str, str]:
    """What `--bits same` needs, as it is now."""
    facts = dict(cuda.setting_facts())
    return {
        **{name: facts[SETTING + name] for name in cuda.REQUIRED_SETTINGS},
        WORKSPACE: os.environ.get(WORKSPACE, "none"),
    }


IN_FORCE = {**cuda.REQUIRED_SETTINGS, WORKSPACE: SIZE}


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(cuda, "_asked_for", False)
    mode, backend = torch.get_deterministic_debug_mode(), torch.backends.cudnn
    before = backend.benchmark, backend.deterministic
    yield
    torch.set_deterministic_debug_mode(mode)
    backend.benchmark, backend.deterministic = before
    os.environ.pop(WORKSPACE, None)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, dict[str, str]]]:
    """The devices that were made the current one, each with what was in force then."""
    found: list[tuple[torch.device, dict[str, str]]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append((device, relevant())))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("FARANDOLE_SLOT", "1")
    return found


def refuse() -> None:
    """As an operator on a GPU does; torch has one on the CPU."""
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


# --- the device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "slot", "device"),
    [
        (0, "1", CPU),
        (1, "0", torch.device("cuda", 0)),
        (4, "0", torch.device("cuda", 0)),
        (4, "3", torch.device("cuda", 3)),
        (4, "5", torch.device("cuda", 1)),  # more workers than GPUs share them
        (4, "", torch.device("cuda", 0)),  # nobody has said
    ],
)
def test_each_slot_has_a_gpu_of_its_own(
    gpus: int, slot: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("FARANDOLE_SLOT", slot)
    assert cuda.local_device() == device


@pytest.mark.usefixtures("begun")
def test_a_slot_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_SLOT", "first")
    with pytest.raises(UsageError, match=r"FARANDOLE_SLOT='first'"):
        cuda.local_device()


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(("slot", "shared"), [("0", False), ("1", False), ("2", True), ("7", True)])
def test_who_shares_a_device_says_so_once(
    slot: str, shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FARANDOLE_SLOT", slot)
    cuda.begin(cuda.local_device(), "any")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == shared
    if shared:
        assert re.search(rf"cuda:{int(slot) % 2}\b", said[0])
        assert re.search(rf"\bslot {slot}\b", said[0])
        assert re.search(r"\b2\b", said[0]), "how many can be seen"


# --- what is set -----------------------------------------------------------------------------------------------------


def test_all_that_the_same_bits_need_is_in_force_before_the_device_is_touched(
    begun: list[tuple[torch.device, dict[str, str]]],
) -> None:
    torch.backends.cudnn.benchmark = True  # as scripts do
    cuda.begin(GPU, "same")
    assert begun == [(GPU, IN_FORCE)]
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_any_bits_leave_everything_alone(begun: list[tuple[torch.device, dict[str, str]]]) -> None:
    torch.backends.cudnn.benchmark = True
    before = relevant()
    assert before != IN_FORCE
    cuda.begin(GPU, "any")
    assert begun == [(GPU, before)]


def test_a_cpu_is_left_alone(begun: list[tuple[torch.device, dict[str, str]]]) -> None:
    before = relevant()
    cuda.begin(CPU, "same")
    assert (begun, relevant()) == ([], before)


def test_the_precision_of_products_stays_as_the_script_has_it(begun: object) -> None:
    del begun
    before = [fact for fact in cuda.setting_facts() if "precision" in fact[0]]
    cuda.begin(GPU, "same")
    assert [fact for fact in cuda.setting_facts() if "precision" in fact[0]] == before


@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script uses a GPU before `farandole.join()`, started as `python train.py`",
    seen="an error at `farandole.join()` names the environment variable to set",
    outcome="nothing is trained; `farandole run` and `farandole join` set the variable in time",
)
@pytest.mark.parametrize("before", ["", ":16:8"])
def test_work_that_has_begun_without_a_workspace_is_refused(
    before: str, begun: list[tuple[torch.device, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv(WORKSPACE, before)
    with pytest.raises(UsageError, match=rf"farandole\.join\(\).*{WORKSPACE}={SIZE}"):
        cuda.begin(GPU, "same")
    assert not begun
    monkeypatch.setenv(WORKSPACE, SIZE)
    cuda.begin(GPU, "same")
    assert begun == [(GPU, IN_FORCE)]


@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script uses a GPU before `farandole.join()`, started as `python train.py`",
)
def test_a_process_of_a_run_begins_with_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.environment_of("same") == {WORKSPACE: SIZE}
    monkeypatch.setenv(WORKSPACE, ":16:8")
    cpu.set_for("any")
    assert os.environ[WORKSPACE] == ":16:8"
    cpu.set_for("same")
    assert os.environ[WORKSPACE] == SIZE


def test_a_run_begins_its_device_and_says_what_the_script_has_altered(
    begun: list[tuple[torch.device, dict[str, str]]], run: farandole.Run
) -> None:
    """Of one worker, whose tensors stay on the CPU: there is no device."""
    assert run.device == GPU
    assert [device for device, _ in begun] == [GPU]
    model = torch.nn.Linear(1, 1)
    run.replicate(model=model)
    torch.backends.cudnn.benchmark = True
    with pytest.raises(UsageError, match="cuDNN benchmark"):
        run.steps(run.loader([torch.zeros(1)], batch=farandole.GlobalBatch(1, micro=1)), epochs=1)


ALTERED: list[tuple[str, Callable[[], None]]] = [
    ("deterministic algorithms: .* off ", lambda: torch.use_deterministic_algorithms(False)),
    ("deterministic algorithms: .* warn ", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
    ("cuDNN benchmark: .* on ", lambda: setattr(torch.backends.cudnn, "benchmark", True)),
    ("cuDNN deterministic: .* off ", lambda: setattr(torch.backends.cudnn, "deterministic", False)),
]


@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "the script turns on cuDNN's benchmark, or turns off deterministic algorithms, after `farandole.join()`, on "
        "CUDA under `--bits same`"
    ),
    seen="an error at `run.steps` names the setting",
    outcome="exit code 1; nothing is trained; remove the setting, or use `--bits any`",
)
@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(("said", "alter"), ALTERED)
def test_who_alters_what_is_needed_is_refused_before_it_trains(said: str, alter: Callable[[], None]) -> None:
    cuda.begin(GPU, "same")
    cuda.refuse_altered(GPU, "same")
    alter()
    cuda.refuse_altered(GPU, "any")
    cuda.refuse_altered(CPU, "same")
    with pytest.raises(UsageError, match=f"{said}.*--bits any"):
        cuda.refuse_altered(GPU, "same")


# --- an operator without a deterministic form ------------------------------------------------------------------------


@pytest.mark.usefixtures("begun")
def test_an_operator_without_a_deterministic_form_is_named_with_its_place_and_the_remedy() -> None:
    cuda.begin(GPU, "same")
    with pytest.raises(RuntimeError) as raised:
        refuse()
    told = cuda.explained(raised.value)
    assert isinstance(told, NotDeterministic)
    assert re.search(r"\bput_.*\btest_cuda\.py\b.*\b\d+\b.*--bits any", str(told))
    assert "use_deterministic_algorithms" not in str(told), "the user has not set that"


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("library", [torch, farandole])
def test_the_place_is_the_scripts_where_a_library_uses_the_operator(library: ModuleType) -> None:
    of_theirs: dict[str, Any] = {}
    text = "import torch\ndef used(): torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))"
    exec(compile(text, str(Path(str(library.__file__)).with_name("made_up.py")), "exec"), of_theirs)
    cuda.begin(GPU, "same")
    with pytest.raises(RuntimeError) as raised:
        of_theirs["used"]()
    assert re.search(r"\bput_.*\btest_cuda\.py\b.*\b\d+\b", str(cuda.explained(raised.value)))


def test_an_error_that_is_not_of_our_making_is_left_as_it_is() -> None:
    torch.use_deterministic_algorithms(True)  # the script, for itself
    with pytest.raises(RuntimeError) as raised:
        refuse()
    assert cuda.operator(raised.value) == "put_"
    assert cuda.explained(raised.value) is raised.value


@pytest.mark.usefixtures("begun")
def test_other_errors_are_left_as_they_are() -> None:
    cuda.begin(GPU, "same")
    for error in (RuntimeError("CUDA error: out of memory"), ValueError(MESSAGE.format("put_")), SystemExit(1)):
        assert cuda.explained(error) is error


MESSAGE = "{} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'. You"


@pytest.mark.parametrize(
    ("message", "operator"),
    [
        (MESSAGE.format("adaptive_avg_pool2d_backward_cuda"), "adaptive_avg_pool2d_backward_cuda"),
        (MESSAGE.format("median CUDA with indices output"), "median CUDA with indices output"),
        ("from user code:\nRuntimeError: " + MESSAGE.format("_histc_cuda with floating point input"),
         "_histc_cuda with floating point input"),
        (MESSAGE.format("put_").replace("True)'", "True, warn_only=True)'"), "put_"),
        ("Deterministic behavior was enabled, but this operation is not deterministic", ""),
    ],
)  # fmt: skip
def test_what_torch_says_of_it(message: str, operator: str) -> None:
    assert cuda.operator(RuntimeError(message)) == operator


@pytest.mark.usefixtures("begun")
def test_a_rehearsal_says_it_too(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import torch\n\ntorch.zeros(3).put_(torch.tensor([0]), torch.ones(1))\n")
    cuda.begin(GPU, "same")
    with pytest.raises(NotDeterministic, match=r"\bput_.*\bjob\.py\b.*\b3\b"):
        run_alone(str(script), [])


def test_a_fingerprint_says_which_operations_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = dict(fingerprint(CPU))
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(F, "adaptive_avg_pool2d", lambda *_: refuse())
    found = dict(fingerprint(CPU))
    pooling = OPERATION + "pooling"
    assert re.search(r"\bput_", found.pop(pooling))
    del expected[pooling]
    assert found == expected
