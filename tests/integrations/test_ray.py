"""The call of Python for Ray, without a cluster: what it takes, what it writes, and what it returns."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from farandole.code.pack import MOST_BYTES
from farandole.errors import UsageError
from farandole.integrations import ray
from farandole.pool import ray as pool
from farandole.pool.spec import pools
from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, as_written
from tests.support.harness import gone
from tests.support.metric_lines import an, step_line

pytest.importorskip("ray")


def parsed(scaling: ray.ScalingConfig) -> tuple[pool.RayTerms, int | None, int]:
    """The pool's terms, its size, and the fewest workers, as `farandole run` reads the options."""
    text, fewest = ray._pool_options(scaling)
    [terms] = pools([text])
    return pool.parse(terms.options, "here"), terms.size, fewest


def test_a_scaling_config_becomes_the_terms_of_the_pool() -> None:
    needs = {"CPU": 4, "GPU": 2.0, "spot": 1, "disk": 0.5}
    given = ray.ScalingConfig(
        num_workers=(2, 16), resources_per_worker=needs, label_selector={"zone": "a", "kind": "b"}
    )
    terms, size, fewest = parsed(given)
    assert (size, fewest, terms.slots) == (16, 2, 1)
    assert (terms.cpus, terms.gpus, terms.resources) == (4, 2, {"spot": 1.0, "disk": 0.5})
    assert terms.labels == {"zone": "a", "kind": "b"}


def test_a_number_of_workers_is_the_most_and_a_gpu_is_one_for_each() -> None:
    terms, size, fewest = parsed(ray.ScalingConfig(num_workers=3, use_gpu=True))
    assert (size, fewest, terms.gpus, terms.slots) == (3, 1, 1, 1)


@pytest.mark.parametrize("workers", [0, -1, (0, 2), (3, 2)])
def test_a_number_of_workers_that_can_t_be_is_refused(workers: Any) -> None:
    with pytest.raises(UsageError, match="num_workers"):
        ray._pool_options(ray.ScalingConfig(num_workers=workers))


@pytest.mark.parametrize("needs", [{"CPU": 0}, {"CPU": 0.5}, {"GPU": 0.5}, {"GPU": -1}, {"spot": 0}])
def test_an_amount_that_can_t_be_is_refused(needs: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="scaling_config"):
        ray._pool_options(ray.ScalingConfig(resources_per_worker=needs))


def test_no_gpu_is_none() -> None:
    terms, _, _ = parsed(ray.ScalingConfig(resources_per_worker={"CPU": 1, "GPU": 0}))
    assert (terms.cpus, terms.gpus) == (1, 0)


@dataclasses.dataclass
class Theirs:
    """As Ray Train has it: more fields than are supported."""

    num_workers: int = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    label_selector: dict[str, str] | None = None
    placement_strategy: str = "PACK"


def test_an_object_of_ray_train_counts_while_its_other_fields_have_their_defaults() -> None:
    found = ray._supported(Theirs(num_workers=4, use_gpu=True), ray.ScalingConfig, "scaling_config")
    assert found == ray.ScalingConfig(num_workers=4, use_gpu=True)
    with pytest.raises(UsageError, match="placement_strategy='SPREAD'"):
        ray._supported(Theirs(placement_strategy="SPREAD"), ray.ScalingConfig, "scaling_config")


@pytest.mark.parametrize("given", [{"num_workers": 2}, 3, Theirs, ray.RunConfig()])
def test_another_object_is_no_configuration(given: object) -> None:
    with pytest.raises(UsageError, match="scaling_config"):
        ray._supported(given, ray.ScalingConfig, "scaling_config")


def test_a_wrong_argument_is_refused_before_anything_is_connected() -> None:
    with pytest.raises(UsageError, match="storage_path"):
        ray.run(print, run_config=ray.RunConfig(storage_path="s3://bucket/runs"))
    with pytest.raises(UsageError, match="workers"):
        ray.run(print, workers=2, scaling_config=ray.ScalingConfig())
    with pytest.raises(UsageError, match="num_workers"):
        ray.run(print, workers=0)


def test_the_program_has_the_files_of_the_working_folder_and_calls_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in another process, and the working folder is gone by then."""
    here = tmp_path / "here"
    (here / "models").mkdir(parents=True)
    (here / "models" / "helper_of_a_function.py").write_text("def add(a, b):\n    return a + b\n")
    (here / "models" / "link.py").symlink_to(here / "models" / "helper_of_a_function.py")
    (here / ".env").write_text("TOKEN=1")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here / "models")
    import helper_of_a_function  # pyright: ignore[reportMissingImports]

    program, out = tmp_path / "program", tmp_path / "out"
    program.mkdir()

    def train(config: dict[str, Any]) -> None:
        Path(config["out"]).write_text(str(helper_of_a_function.add(*config["numbers"])))

    ray._write_program(program, tmp_path / "runs" / "one", ray._stored(train, {"out": str(out), "numbers": [3, 4]}))
    assert os.readlink(program / "models" / "link.py") == "helper_of_a_function.py"
    (here / "models" / "helper_of_a_function.py").unlink()
    done = subprocess.run([sys.executable, ray.SCRIPT], cwd=program, check=False, capture_output=True, text=True)
    assert (done.returncode, out.read_text()) == (0, "7"), done.stderr


def test_a_working_folder_that_is_too_large_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, program = tmp_path / "here", tmp_path / "program"
    here.mkdir()
    program.mkdir()
    with (here / "data.bin").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    monkeypatch.chdir(here)
    with pytest.raises(UsageError, match=re.escape("data.bin")):
        ray._write_program(program, tmp_path / "run", b"")
    assert list(program.iterdir()) == []


def call(stored: bytes) -> object:
    """Call what was stored, in another process, and return what it prints as JSON."""
    code = "import sys; from ray import cloudpickle; f, a = cloudpickle.load(sys.stdin.buffer); print(f(*a))"
    return json.loads(
        subprocess.run([sys.executable, "-c", code], input=stored, capture_output=True, check=True).stdout
    )


def test_a_function_gets_its_configuration_and_none_if_it_takes_none() -> None:
    assert call(ray._stored(lambda config: json.dumps(config), {"rate": 0.1})) == {"rate": 0.1}
    assert call(ray._stored(lambda config: json.dumps(config), None)) == {}
    assert call(ray._stored(lambda config=3: json.dumps(config), None)) == 3
    assert call(ray._stored(lambda: "7", None)) == 7


def test_a_function_that_can_t_be_stored_is_an_error() -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match="lock"):
        ray._stored(lambda: lock, None)


CHECKPOINT = an(events.SavedEvent, path="checkpoints/last.pt", whole=True)
FINISHED = an(events.FinishedEvent, equal=True, fingerprint="f" * 64)


def folder_of(tmp_path: Path, *lines: Line) -> Path:
    """A run's folder with these lines."""
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(as_written, lines)))
    return tmp_path


def test_a_result_has_the_last_value_of_each_metric_and_the_newest_checkpoint(tmp_path: Path) -> None:
    lines = [
        step_line(0, loss=3.0), LogLine(step=0, fields={"accuracy": 0.1, "note": "first"}), step_line(1, loss=2.0),
        LogLine(step=1, fields={"accuracy": 0.2}), FINISHED, CHECKPOINT, an(events.OverEvent, code=0, reason="the end"),
    ]  # fmt: skip
    result = ray._result(folder_of(tmp_path, *lines), 0)
    assert result.checkpoint == ray.Checkpoint(path="checkpoints/last.pt")
    assert result.path == str(tmp_path)
    expected = {"step": 1, "loss": 2.0, "accuracy": 0.2, "note": "first"}
    assert {name: result.metrics[name] for name in expected} == expected
    pytest.importorskip("pandas")
    table = result.metrics_dataframe
    assert list(table["loss"]) == [3.0, 2.0]
    assert list(table["accuracy"]) == [0.1, 0.2]


def test_a_run_is_stopped_if_its_output_can_t_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    program = (
        f"import pathlib,signal\nsignal.signal(15,lambda *_: pathlib.Path({str(stopped)!r}).touch() or exit(0))\n"
        f"pathlib.Path({str(ready)!r}).touch()\nprint('a line',flush=True)\nimport time; time.sleep(20)"
    )
    monkeypatch.setattr(ray, "STARTER", program)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("builtins.print", fail)
    with pytest.raises(OSError, match="no space left"):
        ray._show([], str(tmp_path))
    assert ready.exists()
    assert gone(lambda: not stopped.exists(), 20.0)


def test_a_run_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    lines = [FINISHED, an(events.OverEvent, code=0, reason="the end")]
    assert ray._result(folder_of(tmp_path, *lines), 0).checkpoint is None


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (1, [an(events.OverEvent, code=1, reason="a strange reason")]),
        (0, [CHECKPOINT, an(events.OverEvent, code=0, reason="a strange reason")]),  # it was stopped
        (1, []),  # the command was refused
    ],
)
def test_a_run_that_did_not_finish_is_an_error(tmp_path: Path, code: int, lines: list[Line]) -> None:
    with pytest.raises(ray.TrainingFailed, match=re.escape(str(tmp_path))) as raised:
        ray._result(folder_of(tmp_path, *lines), code)
    assert ("a strange reason" in str(raised.value)) == bool(lines)
