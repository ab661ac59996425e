"""The findings of `farandole check` as lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farandole.check.findings import Cause, Finding, FirstDifference, ScriptSuspect
from farandole.check.records import DATASET

CAUSES: dict[Cause, str] = {
    "generator": "a random generator of the script's own",
    "not replicated": "an object that run.replicate has not received",
    "script state": "state of the script that is not replicated",
    "first state": "the script begins with other weights in each process",
    "samples": "the dataset makes other samples in each process",
    "update": "the update uses something that is not replicated",
    "unknown": "not known: the loss uses something that is neither replicated nor found in the script",
    "own part": "a sum over the inner loop has the samples of one worker",
    "sum": "the loss is a sum",
    "weights": "the loss is a mean over tokens, pixels or boxes, whose number differs between micro-batches",
    "batch norm": "batch normalization takes its statistics from the micro-batch",
    "batch": "the loss is not a sum over samples, such as a contrastive loss",
    "random numbers": "the micro-batches draw random numbers, so two sizes can't be compared",
}
REMEDIES: dict[Cause, str] = {
    "generator": "draw from torch, numpy.random or random, which are seeded for each sample and micro-batch; or from "
    "step.generators",
    "first state": "create the model after farandole.join(), with torch's global random numbers",
    "samples": "make a sample from its index and torch's global random numbers alone",
    "update": "run.replicate(...) with all optimizers, schedules and averages",
    "own part": "step.sum(name=...) or step.mean(name=...) in the inner loop, then step.sums or step.means after it",
    "sum": "reduction='mean'; or step.backward(loss / n, weight=n) with the number n of samples or tokens",
    "weights": "step.backward(loss, weight=n) with the number n of tokens in the micro-batch",
    "batch norm": "nothing, if micro= is the batch that you mean (--no-micro leaves this out); else "
    "nn.GroupNorm, or another micro=",
    "batch": "step.gather(...), and the loss in step.again(recompute=True) (docs/running.md)",
}
INDENT = " " * 20


def lines_of(findings: Sequence[Finding], workers: int) -> Iterator[str]:
    """Yield the lines of a report. `workers`: those that have begun step 0."""
    titles = {
        "workers": f"{workers} workers", "join": "a worker joins", "loss": "a worker is killed",
        "values": "the script's values", "resume": "resumed", "micro": "micro-batches",
    }  # fmt: skip
    for each in findings:
        yield f"{titles[each.comparison]:<20}{_outcome(each)}"
        if each.cause:
            about = ", ".join(suspect.name for suspect in each.suspects) or ", ".join(each.names)
            yield f"{INDENT}likely cause: {CAUSES[each.cause]}{f': {about}' if about else ''}"
        if remedy := _remedy(each):
            yield f"{INDENT}write: {remedy}"


def _outcome(finding: Finding) -> str:
    if finding.comparison == "values":
        return "each worker has its own" if finding.cause else "the same on the workers that began"
    if finding.outcome == "agrees":
        return "the same gradient, up to rounding" if finding.comparison == "micro" else "the same bits"
    if finding.outcome == "differs":
        return f"DIFFERS: {_where(finding.first)}" if finding.first else "DIFFERS: the gradient depends on micro="
    if finding.comparison == "micro":
        return "not compared" + (f": {finding.names[0]}" if finding.names and not finding.cause else "")
    return "not compared, since the steps before already differ"


def _where(first: FirstDifference) -> str:
    of = "at the beginning of" if first.shard is None else f"of micro-batch {first.shard} in"
    return f"{first.name}, {of} step {first.step}{'' if first.worker == 'alone' else f' on {first.worker}'}"


def _remedy(finding: Finding) -> str:
    if not finding.suspects or finding.cause in ("generator", "own part"):
        return REMEDIES.get(finding.cause, "")
    suspect = finding.suspects[0]
    owner, _, name = suspect.name.rpartition(".")
    if finding.cause == "not replicated":
        return f"run.replicate(..., {name}={suspect.name})"
    return _of_state(suspect, owner, name)


def _of_state(suspect: ScriptSuspect, owner: str, name: str) -> str:
    if suspect.kind == "tensor" and owner:
        return f"self.register_buffer({name!r}, ...) in the module {owner}, so that it is replicated"
    if owner.partition(".")[0] == DATASET:
        return "make a sample from its index alone"
    if owner:
        return f"self.register_buffer({name!r}, torch.tensor(...)) in the module {owner}; or derive it from step.number"
    return f"run.replicate(..., {name}={name}), then run.state.{name}; or derive it from step.number and step.epoch"
