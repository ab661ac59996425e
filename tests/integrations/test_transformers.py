"""The Trainer for transformers: the options that it refuses, the private names that it uses, and equal losses."""

from __future__ import annotations

import inspect
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import farandole
from farandole.errors import UsageError
from tests.support import forked
from tests.support.harness import ENVIRON, Elastic, alone
from tests.support.mentioned import mentions
from tests.support.vision_operators import declare

declare()
pytest.importorskip("accelerate", reason="the Trainer for transformers needs accelerate")
transformers = pytest.importorskip("transformers", reason="the Trainer for transformers needs transformers")

from farandole.integrations import transformers as ours  # noqa: E402
from tests.jobs import trainer_text  # noqa: E402

JOB = Path(__file__).parents[1] / "jobs" / "trainer_text.py"


@pytest.mark.parametrize("name", sorted(ours.PRIVATE))
def test_private_methods_have_the_parameters_on_which_the_trainer_depends(name: str) -> None:
    assert tuple(inspect.signature(getattr(transformers.Trainer, name)).parameters) == ours.PRIVATE[name]


@pytest.mark.parametrize("name", ours.PRIVATE_ATTRIBUTES)
def test_private_attributes_are_those_of_their_loop(name: str) -> None:
    assert f"self.{name} = " in inspect.getsource(transformers.Trainer)


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "6.0.0", "main"])
def test_another_version_is_refused_with_the_supported_ones(version: str) -> None:
    with pytest.raises(UsageError) as caught:
        ours.check_version(version)
    assert all(mentions(str(caught.value), name) for name in (version, *(f"{a}.{b}" for a, b in ours.SUPPORTED)))


def test_the_installed_version_is_supported() -> None:
    ours.check_version(transformers.__version__)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 7), ("data_seed", 7), ("resume_from_checkpoint", "there"), ("auto_find_batch_size", True),
        ("ddp_find_unused_parameters", True), ("train_sampling_strategy", "group_by_length"), ("push_to_hub", True),
        ("neftune_noise_alpha", 5.0), ("full_determinism", True), ("eval_on_start", True),
        ("metric_for_best_model", "eval_runtime"), ("enable_jit_checkpoint", True),
    ],
)  # fmt: skip
def test_an_option_that_contradicts_the_run_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    ours.check_arguments(args, seed=0)
    setattr(args, name, value)
    with pytest.raises(UsageError) as caught:
        ours.check_arguments(args, seed=0)
    assert mentions(str(caught.value), name, value)


def losses(out: Path) -> list[list[float]]:
    return json.loads((out / "losses.json").read_text())


def test_losses_of_padded_texts_in_accumulated_micro_batches(tmp_path: Path, run: farandole.Run) -> None:
    """Their mean is over all tokens of the batch, which micro-batches of padded texts have different numbers of."""
    mine, their = tmp_path / "mine", tmp_path / "theirs"
    trainer_text.main([str(their), "--epochs", "2", "--theirs"])
    trainer_text.main([str(mine), "--epochs", "2"])
    assert len(losses(mine)[0]) == 2 * trainer_text.TEXTS // (trainer_text.MICRO * trainer_text.ACCUMULATED)
    for one, other in zip(losses(mine), losses(their), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert (mine / "fingerprint").read_text() == run.fingerprint()


@pytest.mark.processes
def test_losses_are_those_of_their_trainer_and_the_bits_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    out, single, theirs, pace = (tmp_path / name for name in ("out", "single", "theirs", "pace"))
    done = forked.run([sys.executable, str(JOB), str(theirs), "--theirs"], env=ENVIRON, timeout=200)
    assert done.returncode == 0, done.stderr
    alone(tmp_path / "alone", JOB, str(single))
    for mine, their in zip(losses(single), losses(theirs), strict=True):
        assert mine == pytest.approx(their, rel=1e-5)
    pace.touch()
    with Elastic(tmp_path / "run", JOB, str(out), "--pace", str(pace), workers=1, options=[]) as run:
        run.until_step(2)
        run.command("scale", "3")
        first, second, _ = run.until_members(3)
        run.signal(first, signal.SIGKILL)
        run.until_members(3, without=(first,))
        run.command("release", second)
        run.until_members(2, without=(first, second))
        pace.unlink()
        run.finish()
    assert (out / "fingerprint").read_text() == (single / "fingerprint").read_text()
    assert losses(out) == losses(single)
