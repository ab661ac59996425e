"""Evaluations through the public API: each sample once, whatever the metric, the batches and the workers' fate.

In a world of one the references are the same sums by hand; the runs of several workers, some killed and some released
in the middle, are compared with it bit by bit.
"""

from __future__ import annotations

import gc
import math
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import farandole
from farandole.collective.buckets import Layout
from farandole.data.loader import Loader
from tests.jobs.evaluating import MICRO, SAMPLES, STEPS
from tests.support.harness import Elastic, alone, read_lines
from tests.support.measures import tm
from tests.support.steps import assert_grads, begun, data, grads, mlp, per_sample

JOB = Path(__file__).parents[1] / "jobs" / "evaluating.py"

# --- one worker -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [256, 5, 1])
def test_an_evaluation_counts_every_sample_once(run: farandole.Run, micro: int) -> None:
    model = mlp()
    begun(run, model)
    test_set = data(23)
    x, y = test_set.tensors
    with torch.no_grad():
        accuracy = per_sample(model(x), y).double().mean().item()
        loss = F.cross_entropy(model(x), y).item()
    assert run.evaluate(model, test_set, per_sample, micro=micro) == pytest.approx(accuracy, rel=1e-12)
    assert run.evaluate(model, test_set, F.cross_entropy, micro=micro) == pytest.approx(loss, rel=1e-5)


def test_an_evaluation_leaves_modes_buffers_and_gradients_as_they_were(run: farandole.Run) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
    begun(run, model)
    model[2].eval()  # a frozen normalisation layer, as in fine-tuning
    buffers, gradients = [b.clone() for b in model.buffers()], grads(model)
    inside: list[bool] = []

    def metric(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inside.append(model.training or torch.is_grad_enabled())
        return per_sample(logits, y)

    run.evaluate(model, data(23), metric)
    assert inside == [False]
    assert [m.training for m in model] == [True, True, False, True]
    assert all(map(torch.equal, model.buffers(), buffers))
    assert_grads(grads(model), gradients, exact=True)


def test_evaluations_do_not_gather_memory(run: farandole.Run) -> None:
    """One a step for a long run: nothing may be kept for each."""
    model = mlp()
    begun(run, model)
    test_set = data(8)
    for _ in range(3):
        run.evaluate(model, test_set, per_sample)
    before = alive(Layout)
    for _ in range(5):
        run.evaluate(model, test_set, per_sample)
    assert alive(Layout) <= before, "less, where those of an earlier test have gone meanwhile"


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())


def test_loaders_are_kept_for_a_few_datasets_only(run: farandole.Run) -> None:
    """Each may have processes."""
    model = mlp()
    begun(run, model)
    before = alive(Loader)
    for first in range(12):
        run.evaluate(model, torch.utils.data.Subset(data(20), range(first, 20)), per_sample)
    assert alive(Loader) - before <= 4


def test_another_micro_batch_is_another_evaluation(run: farandole.Run) -> None:
    model = mlp()
    begun(run, model)
    test_set, sizes = data(10), []

    def metric(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sizes.append(len(y))
        return per_sample(logits, y)

    for micro in (4, 10, 4):
        run.evaluate(model, test_set, metric, micro=micro)
    assert sizes == [4, 3, 3, 10, 4, 3, 3]


def test_metrics_by_name_come_from_one_pass(run: farandole.Run) -> None:
    model = mlp()
    begun(run, model)
    test_set = data(23)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    both = {"accuracy": per_sample, "loss": F.cross_entropy, "matrix": tm.ConfusionMatrix("multiclass", num_classes=3)}
    result = run.evaluate(model, test_set, both, micro=5)
    assert len(passes) == 5
    assert list(result) == list(both)
    assert result["accuracy"] == run.evaluate(model, test_set, per_sample, micro=5)
    assert result["loss"] == run.evaluate(model, test_set, F.cross_entropy, micro=5)
    assert result["matrix"].sum() == 23
    assert result["matrix"].trace() / 23 == pytest.approx(result["accuracy"])


def test_a_language_model(run: farandole.Run) -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    begun(run, mlp())
    tokens = torch.randint(0, 11, (19, 9), generator=torch.Generator().manual_seed(3))
    loss, perplexity = run.evaluate(
        model,
        tokens,  # any map-style dataset: here, rows of a tensor
        {"loss": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y), "perplexity": tm.text.Perplexity()},
        predict=lambda model, tokens: (model(tokens[:, :-1]), tokens[:, 1:]),
        micro=4,
    ).values()
    with torch.no_grad():
        wanted = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-5)


class Pictures(Dataset[Any]):
    """Pictures of several sizes with lists of boxes of several lengths."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 4, 4 + index), float(index)), {"boxes": torch.ones(index, 4)}


class Detector(nn.Module):
    """Finds every second box, and one that is not there."""

    def forward(self, pictures: tuple[torch.Tensor, ...]) -> list[dict[str, torch.Tensor]]:
        return [{"boxes": torch.ones(int(picture.max()) // 2 + 1, 4)} for picture in pictures]


def test_detection(run: farandole.Run) -> None:
    begun(run, mlp())

    def match(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
        pictures, truths = batch
        found = [len(one["boxes"]) for one in model(pictures)]
        return (
            torch.tensor([n - 1 for n in found]),
            torch.tensor(found),
            torch.tensor([len(t["boxes"]) for t in truths]),
        )

    counts = {"hits": lambda hits, *_: hits, "boxes": lambda *all: all[1], "truths": lambda *all: all[2]}
    mean = run.evaluate(
        Detector(), Pictures(), counts, predict=match, micro=3, collate_fn=lambda items: tuple(zip(*items, strict=True))
    )
    assert {name: round(11 * value, 9) for name, value in mean.items()} == {"hits": 25, "boxes": 36, "truths": 55}


def test_segmentation(run: farandole.Run) -> None:
    model = nn.Conv2d(1, 3, 3, padding=1)
    begun(run, mlp())
    generator = torch.Generator().manual_seed(4)
    pictures = torch.randn(10, 1, 6, 6, generator=generator)
    masks = torch.randint(0, 3, (10, 6, 6), generator=generator)
    overlap = tm.JaccardIndex("multiclass", num_classes=3)
    result = run.evaluate(model, TensorDataset(pictures, masks), {"iou": overlap, "loss": F.cross_entropy}, micro=4)
    with torch.no_grad():
        overlap.update(model(pictures), masks)
        assert result["iou"] == pytest.approx(overlap.compute().item(), rel=1e-6)
        assert result["loss"] == pytest.approx(F.cross_entropy(model(pictures), masks).item(), rel=1e-5)


# --- several workers, of which not all stay ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc")
def test_a_kill_and_a_notice_in_the_middle(tmp_path: Path) -> None:
    """Rank 0 dies in the first evaluation, and its replacement waits for the end; in the second one another is to
    leave."""
    out, single = tmp_path / "out", tmp_path / "single"
    out.mkdir()
    single.mkdir()
    for step in (0, 1):
        (out / f"hold-{step}").touch()
    options = ["--min", "3"]
    with Elastic(tmp_path / "run", JOB, str(out), workers=3, options=options, deadline_s=200.0) as run:

        def all_held(step: int) -> bool:
            held = [(out / f"held-{step}-{pid(run, worker)}").exists() for worker in run.members]
            return len(held) == 3 and all(held)

        run.until(lambda: all_held(0), "all in the middle of the first evaluation")
        dead = run.members[0]
        run.signal(dead, signal.SIGKILL)
        run.until_members(2, without=(dead,))
        run.until(lambda: len(run.events("ready")) == 4, "the replacement asks in")
        (out / "hold-0").unlink()
        run.until(lambda: all_held(1), "all in the middle of the second evaluation")
        leaving_worker = run.members[1]
        run.signal(leaving_worker, signal.SIGTERM)
        run.until(lambda: bool(run.events("notice")), "the notice")
        (out / "hold-1").unlink()
        run.finish()
        assert [event["worker"] for event in run.events("lost")] == [dead]
        assert len((out / f"done-1-{pid(run, leaving_worker)}").read_text().split()) > 1, "it stayed to the end"
        told = evaluations(run.folder)
        gone = Counter(map(int, (out / f"done-0-{pid(run, dead)}").read_text().split()))
    alone(tmp_path / "alone", JOB, str(single))
    assert told == evaluations(tmp_path / "alone")
    assert [{line[str(sample)] for sample in range(SAMPLES)} for line in told] == [{1 / SAMPLES}] * STEPS
    assert computed(single, 0) == computed(out, 1) == Counter(range(0, SAMPLES, MICRO))
    left = computed(out, 0) - gone
    assert len(gone) == 1
    assert left.keys() == computed(single, 0).keys(), "what the dead had done was done again"
    assert set(left.values()) <= {1, 2}, "and what it kept of the list for the second round, if another has that then"


def pid(run: Elastic, worker: str) -> int:
    return next(event["pid"] for event in run.events("ready") if event["worker"] == worker)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """What each evaluation gave; a float comes out of JSON with the bits that it went in with."""
    return [line for line in read_lines(folder) if line.get("event") == "log"]


def computed(out: Path, step: int) -> Counter[int]:
    """How often each micro-batch was, by its first sample."""
    return Counter(int(line) for path in out.glob(f"done-{step}-*") for line in path.read_text().split())
