"""What stands above the pictures: the run in words and numbers, and what it has cost. Pure.

What is not known is None, or not there; never 0.
"""

from __future__ import annotations

import msgspec

from farandole.control.status import Status, left_s, samples_per_s
from farandole.membership.account import HOUR_S, Account
from farandole.membership.classes import CLASSES, MEANING
from farandole.observe.story.story import Story
from farandole.observe.words import not_promised


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """Who went last, when (Unix time), how and why."""

    worker: str
    host: str
    time: float
    how: str
    why: str


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is Status's, or finished, stopped, failed and cut off of one that is over; `word`: why.

    `samples_per_s` and `left_s` (seconds to the end) are those of the newest `RATE_STEPS` steps. `size` workers are in
    the view, of `wanted`.
    """

    run: str
    live: bool
    state: str
    word: str
    size: int
    wanted: int | None
    step: int | None
    total: int | None
    epoch: int | None
    left_s: float | None
    loss: float | None
    samples_per_s: float | None
    learning_rate: float | None
    factor: float | None
    batch: int | None
    began: float | None
    ended: float | None
    last_gone: Gone | None
    bits: str
    fingerprint: str
    checkpoint: str
    texts: dict[str, str]
    damaged: int


class Class(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    meaning: str
    seconds: float


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """The account. `static`: what would be paid for if as many workers as there ever were, `most`, had been there all
    the time that the run was on, at the price that it paid for a worker's hour.
    """

    classes: list[Class]
    goodput: float | None
    worker_hours: float | None
    dollars: float | None
    at_least: float | None
    date: str
    most: int
    static_hours: float | None
    static_dollars: float | None
    waiting: dict[str, float]  # by worker, the part of its time that it waited for data


def head(run: str, story: Story, status: Status | None, *, live: bool) -> Head:
    """`status`: what the coordinator says just now, None where it says nothing. `live`: the run is on."""
    last = story.last
    gone = story.stays.last_gone
    learning = {} if last is None else {"learning_rate": last.learning_rate, "factor": last.factor}
    return Head(
        run=run, live=live, **_state(story, status, live=live),
        size=status.view.size if status else len(story.stays.members),
        wanted=status.wanted if status and live else None,
        step=None if last is None else last.step + 1, total=None if last is None else last.total,
        epoch=None if last is None else last.epoch,
        left_s=left_s(last.total, story.recent) if live and last is not None else None,
        loss=None if last is None else last.loss,
        samples_per_s=status.samples_per_s if status else samples_per_s(story.recent),
        learning_rate=learning.get("learning_rate"), factor=learning.get("factor"),
        batch=None if last is None else last.samples, began=story.began, ended=story.ended,
        last_gone=None if gone is None or gone.gone is None else Gone(
            worker=gone.worker, host=gone.host, time=gone.gone, how=gone.how, why=gone.why),
        bits="" if story.unpromised is None else not_promised(story.unpromised.step),
        fingerprint=story.finished.fingerprint if story.finished and story.finished.equal else "",
        checkpoint=story.checkpoint[2] if story.checkpoint else "", texts=dict(story.texts), damaged=story.damaged,
    )  # fmt: skip


def bill(account: Account, story: Story) -> Bill:
    most = max((size for _, size in story.sizes), default=0)
    wall_s = None if story.began is None or story.ended is None else story.ended - story.began - story.away_s
    static = None if wall_s is None or not most or wall_s <= 0 else most * wall_s / HOUR_S
    priced = account.dollars is not None and static is not None and account.worker_hours
    seconds = account.seconds or {}
    return Bill(
        classes=[Class(name=n, meaning=MEANING[n], seconds=seconds[n]) for n in CLASSES if seconds.get(n)],
        goodput=account.goodput, worker_hours=account.worker_hours, dollars=account.dollars,
        at_least=account.cost.at_least or None, date=account.cost.date, most=most, static_hours=static,
        static_dollars=(account.dollars or 0) / (account.worker_hours or 1) * (static or 0) if priced else None,
        waiting={
            each.worker: round(each.seconds.get("data", 0.0) / each.total_s, 4)
            for each in account.workers if each.total_s and not each.ended
        },
    )  # fmt: skip


def _state(story: Story, status: Status | None, *, live: bool) -> dict[str, str]:
    if status is not None and live and status.state != "over":
        if status.stalled is not None:
            who = f", waiting for {', '.join(status.stalled.workers)}" if status.stalled.workers else ""
            return {"state": "stalled", "word": f"for {status.stalled.seconds:.0f} s{who}"}
        return {"state": status.state, "word": status.reason}
    if story.over is not None:
        failed = "failed" if story.over.code == 1 else "finished" if story.finished else "stopped"
        return {"state": failed, "word": f"{story.over.reason} (exit code {story.over.code})"}
    if live:
        return {"state": "no answer", "word": "a run trains on without its coordinator"}
    return {"state": "cut off", "word": "nothing records its end: its processes were killed"}
