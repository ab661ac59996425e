"""What `farandole run` says last: what came of the run, what it took and cost, and where the model is. Pure.

What is not known is "unknown", or not there; never 0, and never a guess. Names and reasons come from others: whoever
shows this filters it, as the display does.
"""

from __future__ import annotations

from collections.abc import Iterator

from farandole.membership import events
from farandole.membership.account import Account
from farandole.observe.account_table import UNKNOWN, dollars, priced
from farandole.observe.course import Course
from farandole.observe.gauges import in_words, rate_words
from farandole.observe.pauses import Pause
from farandole.observe.words import number
from farandole.platform.output import one_line

PAUSES = 12  # shown, the longest
LOGGED = 12  # names
SHOWN_S = 0.001  # of time, at least
APART = "evaluation, run.once and pauses"


def summary(
    course: Course, account: Account | None, over: events.Over | None = None, incomplete: str = ""
) -> list[str]:
    """Lines of text. `over`: as the coordinator has told it, whatever has been written down. `incomplete`: a word on
    checkpoints that were not written to their end.
    """
    rows = [*_rows(course, account, over), *([("incomplete", incomplete)] if incomplete else [])]
    return ["", *(f"{name:<14}{one_line(text)}".rstrip() for name, text in rows)]


def _rows(course: Course, account: Account | None, over: events.Over | None) -> Iterator[tuple[str, str]]:
    past = course.past
    if past.code is None and over is not None:  # the folder is gone, or its disk is full
        yield "outcome", f"{over.reason} (exit code {over.code})"
        yield "figures", _until(course)
    else:
        code = "" if past.code is None else f", exit code {past.code}"
        yield "outcome", f"{past.outcome} ({past.reason}{code})"
    if course.began is None or course.ended is None or account is None:
        return
    if course.logged:
        shown = [f"{name} {number(value)}" for name, value in course.logged.items()]
        yield "logged", ", ".join(shown[:LOGGED]) + (f" and {len(shown) - LOGGED} more" if shown[LOGGED:] else "")
    since_s = max(0.0, course.ended - course.began)
    breaks = f"; {in_words(since_s)} since it first began" if course.resumed else ""
    yield "time", f"{in_words(max(0.0, since_s - course.away_s))}{breaks}"
    total = "" if past.total is None else f" of {past.total:,}"
    missing = f" in the first {past.steps:,}" if course.steps > past.steps else ""  # the newest lines did not come
    samples = "" if course.samples is None else f", {course.samples:,} samples{missing}"
    yield "steps", f"{course.steps:,}{total}{samples}"
    yield from _took(course)
    yield "worker-hours", UNKNOWN if account.worker_hours is None else f"{account.worker_hours:.4g}"
    yield "goodput", UNKNOWN if account.goodput is None else f"{100 * account.goodput:.1f} %"
    if priced(account.cost):
        yield "dollars", dollars(account.cost)
    yield from _lost(course)
    yield from _changes(course.pauses.found())
    yield "model", _model(course)
    if course.lines_lost:
        yield "lines lost", f"{course.lines_lost:,} of metrics.jsonl, at least; its events say which"
    if course.damaged:
        yield "damaged", f"{course.damaged:,} lines of metrics.jsonl are passed over"


def _took(course: Course) -> Iterator[tuple[str, str]]:
    """The time of the steps that count, what of it was not training, and what followed them; and their throughput."""
    took, after = course.took, course.after
    apart_s = took.evaluation_s + took.once_s + took.pause_s
    every, training = course.throughput(took.seconds), course.throughput(took.seconds - apart_s)
    if every is None:
        return
    apart = _times(("evaluation", took.evaluation_s), ("run.once", took.once_s), ("pauses", took.pause_s))
    saved_s = course.save.seconds if isinstance(course.save, events.Saved | events.SavedElsewhere) else 0.0
    rest = _times(("after the last one", after.seconds if after else 0.0), ("saving", saved_s))
    yield "steps took", ", ".join(filter(None, (_spent(took.seconds) + (f" ({apart})" if apart else ""), rest)))
    without = f", {rate_words(training)} without {APART}" if apart and training is not None else ""
    yield "throughput", f"{rate_words(every)} samples/s{without}"


def _times(*times: tuple[str, float]) -> str:
    return ", ".join(f"{name} {_spent(seconds)}" for name, seconds in times if seconds >= SHOWN_S)


def _spent(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else in_words(seconds)


def _until(course: Course) -> str:
    if course.began is None:
        return f"{UNKNOWN}: metrics.jsonl can't be read"
    return "metrics.jsonl ends before the run did; these are those up to there"


def _lost(course: Course) -> Iterator[tuple[str, str]]:
    steps, samples = course.again
    if course.lost:
        yield "lost", "the state that the workers held; what came after the newest checkpoint is to be taken again"
    elif steps:
        what = "1 step" if steps == 1 else f"{steps:,} steps"
        yield "taken again", f"{what} with {samples:,} samples: the run went on from before them"
    elif course.samples is not None and _kept(course):
        yield "samples lost", "0"


def _kept(course: Course) -> bool:
    """All that was trained is in what the run has come to."""
    whole = isinstance(course.save, events.Saved | events.SavedElsewhere) and course.save.whole
    return course.past.outcome == "finished" or whole


def _changes(found: list[Pause]) -> Iterator[tuple[str, str]]:
    """The longest, in the order in which they were."""
    if not found:
        return
    yield "view changes", f"{len(found)}, for which the training stood:"
    longest = sorted(sorted(found, key=lambda pause: -pause.pause_ms)[:PAUSES], key=found.index)
    for pause in longest:
        yield "", f"{pause.pause_ms:8.1f} ms  {pause.words}"
    if len(found) > PAUSES:
        rest_ms = sum(pause.pause_ms for pause in found) - sum(pause.pause_ms for pause in longest)
        yield "", f"{rest_ms:8.1f} ms  for {len(found) - PAUSES:,} shorter ones"


def _model(course: Course) -> str:
    path, save = course.past.checkpoint, course.save
    newest = "" if course.past.finite else " (a state that is NOT FINITE)"
    newest = path and f"{path}{newest}"
    match save:
        case events.SavedElsewhere(host=host, path=there):
            return f"not in the run's store, but on {host}: {there}"
        case events.Saved(path=there, whole=False):
            older = f"; the newest of those is {newest}" if newest else ""
            return f"{there}, which is no checkpoint to go on from{older}"
        case events.NotSaved(reason=reason):
            return f"{newest}; what came after it is not saved: {reason}" if newest else f"not saved: {reason}"
        case _:
            pass
    if not newest:
        return "not saved"
    after = course.steps - course.saved_step if course.saved_step is not None else 0
    return newest + (f"; {after:,} step{'' if after == 1 else 's'} after it are not saved" if after > 0 else "")
