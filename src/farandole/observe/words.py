"""An event line in plain words, one line of text. Pure; unknown events are shown as they are, so none is lost."""

from __future__ import annotations

import time
from typing import Any, cast

from farandole.platform.plain import one_line

HIDDEN = ("event", "time")
NAMED = 4  # workers
SHOWN = 160  # characters of a reason; all of it is in metrics.jsonl and the journal


def describe(line: dict[str, Any]) -> str:
    """What happened, without the time. `line` is an event line of metrics.jsonl; long reasons are shortened.

    Names and reasons come from others: what is not to be seen is not shown.
    """
    return one_line(_describe(line))


def _describe(line: dict[str, Any]) -> str:
    line = {**line, **{name: _short(line[name]) for name in ("cause", "reason") if name in line}}
    match line:
        case {"event": "view", "view": view, "members": members, "cause": cause, "step": step}:
            outcome = f", that step's exchange: {line['outcome']}" if "outcome" in line else ""
            if not members:
                return f"{cause} -> everyone leaves after step {step}"
            return f"{cause} -> view {view} of {_count(len(members), 'worker')} at step {step}{outcome}"
        case {"event": "shares", "shares": dict(shares), "reason": reason}:
            dealt = cast("dict[str, int]", shares)
            least = sorted(dealt, key=dealt.__getitem__)[:NAMED]
            parts = ", ".join(f"{100 * dealt[worker] / sum(dealt.values()):.0f} % to {worker}" for worker in least)
            return f"{reason}: shards are dealt anew, {parts}{' ...' if len(dealt) > NAMED else ''}"
        case {"event": "proposed", "view": view, "members": members, "cause": cause}:
            return f"{cause}: preparing view {view} of {_count(len(members), 'worker')}"
        case {"event": "starting", "worker": worker, "host": host}:
            return f"{worker} on {host} is starting"
        case {"event": "ready", "worker": worker, "host": host}:
            reach = f", but can't write checkpoints: {_short(line['unreached'])}" if "unreached" in line else ""
            return f"{worker} on {host} is ready{reach}"
        case {"event": "waits", "worker": worker, "host": host}:
            return f"{worker} on {host} is there, and waits to be compared with the first of the run's own workers"
        case {"event": "lost", "worker": worker, "reason": reason}:
            return f"{worker} is lost: {reason}"
        case {"event": "died", "worker": worker, "reason": reason}:
            return f"{worker} was {reason}" if reason.startswith("killed") else f"{worker} {reason}"
        case {"event": "expelled", "worker": worker, "reason": reason}:
            return f"{worker} has to go: {reason}"
        case {"event": "left", "worker": worker, "reason": reason}:
            return f"{worker}: {reason}"
        case {"event": "notice", "worker": worker, "reason": reason}:
            return f"{worker} has notice: {reason}"
        case {"event": "other code", "worker": worker, "what": what}:
            return f"{worker} HAS OTHER CODE than the run and is let in, THE BITS MAY DIFFER: {_short(', '.join(what))}"
        case {"event": "code edited", "files": files}:
            return f"the code is not what it was when the run was on before: {_short(', '.join(files))}"
        case {"event": "refused", "worker": worker, "reason": reason}:
            return f"{worker} is refused: {reason}"
        case {"event": "exited", "worker": worker, "reason": reason}:
            return f"{worker} {reason} before it had asked in; see its log"
        case {"event": "start failed", "worker": worker, "host": host, "reason": reason}:
            return f"{worker} could not be started on {host}: {reason}; it is tried again"
        case {"event": "no capacity", "pool": pool, "reason": reason}:
            return f"pool {pool} has no capacity: {reason}; it is asked again"
        case {"event": "advice", "pool": pool, "host": host, "reason": reason}:
            return f"{host} of pool {pool} may go: {reason}; another host is asked for"
        case {"event": "malformed", "source": source, "reason": reason}:
            return f"{source} broke the protocol and was closed: {reason}"
        case {"event": "out of reach", "workers": workers, "reason": reason}:
            return f"no contact with {', '.join(workers) or 'anybody'}; {reason}"
        case {"event": "coordinator back", "workers": workers}:
            return f"the coordinator is back and waits for {_count(len(workers), 'worker')}"
        case {"event": "stranger", "source": source, "reason": reason}:
            return f"a stranger at {source}: {reason}"
        case {"event": "stranger in group", "worker": worker, "peer": peer, "address": address, "again_s": again_s}:
            who = "STRANGERS CAME BEFORE ALL OTHERS" if worker == peer else f"A STRANGER CAME IN PLACE OF {peer}"
            return f"{who} to {worker}, at {address}: new connections are made in {number(again_s)} s"
        case {"event": "strangers", "reason": reason, "more": more}:
            return f"{more} more of: {reason}"
        case {"event": "metrics damaged", "lines": lines}:
            return f"metrics.jsonl is damaged: {_count(lines, 'line')} passed over"
        case {"event": "lines lost", "worker": worker, "reason": reason}:
            return f"metrics of {worker} are lost: {reason}"
        case {"event": "not told", "reason": reason}:
            return f"NOT TOLD: {reason}; its output has the traceback"
        case {"event": "ticket issued", "ticket": ticket}:
            return f"ticket {ticket} is issued"
        case {"event": "ticket revoked", "ticket": ticket}:
            return f"ticket {ticket} is revoked"
        case {"event": "tickets damaged", "reason": reason}:
            return f"THE ISSUED TICKETS ARE DAMAGED: {reason}"
        case {"event": "journal damaged", "reason": reason}:
            return f"THE JOURNAL IS DAMAGED: {reason}"
        case {"event": "not recorded", "reason": reason}:
            return f"NOT RECORDED: the run's folder can't be written ({reason}); the training goes on"
        case {"event": "recorded again", "missing": missing}:
            return f"the run's folder can be written again; its journal lacks {_count(missing, 'event')}"
        case {"event": "ledger incomplete", "worker": worker, "reason": reason}:
            return f"THE LEDGER OF {worker} IS INCOMPLETE: {reason}; the training goes on"
        case {"event": "scale", "wanted": wanted, "before": before}:
            return f"{_count(wanted, 'worker')} wanted, {before} before"
        case {"event": "no replacements", "wanted": wanted, "reason": reason}:
            return f"{reason}; {_count(wanted, 'worker')} wanted from now on"
        case {"event": "stalled", "workers": workers, "reason": reason}:
            return f"STALLED: {reason}, {_hung(workers)}"
        case {"event": "cut short", "workers": workers, "reason": reason}:
            return f"the stop no longer waits: {reason}, {_hung(workers)}"
        case {"event": "stopping", "reason": reason}:
            return f"stopping: {reason}"
        case {"event": "replicas differ", "reason": reason}:
            return f"THE REPLICAS DIFFER: {reason}"
        case {"event": "failed", "worker": worker, "traceback": str(text)} if told_by_us(line):
            return f"{worker} can't go on: {_short(text)}"
        case {"event": "failed", "worker": worker}:
            return f"the script failed on {worker}: {_last_line(line.get('traceback', ''))}"
        case {"event": "calls differ", "reason": reason}:
            return f"THE SCRIPTS GO DIFFERENT WAYS: {reason}"
        case {"event": "not finite", "step": step, "loss": loss}:
            return f"THE LOSS OF STEP {step} IS {loss.upper()}; of the checkpoints, the newest finite one is kept"
        case {"event": "saved", "path": path, "finite": False}:
            return f"checkpoint saved, of a state that is NOT FINITE: {path}"
        case {"event": "saved", "path": path, "whole": False}:
            return f"saved, but as no checkpoint to go on from: {path}"
        case {"event": "saved", "path": path}:
            return f"checkpoint saved: {path}"
        case {"event": "saved elsewhere", "host": host, "path": path}:
            return f"THE LAST CHECKPOINT IS NOT IN THE RUN'S STORE, but on {host}: {path}"
        case {"event": "saver", "worker": worker, "before": before, "at_once": at_once}:
            return (
                f"{worker} writes the checkpoints in place of {before}, {'at once' if at_once else 'when one is due'}"
            )
        case {"event": "no saver", "reason": reason}:
            return f"NO CHECKPOINTS ARE WRITTEN: {reason}"
        case {"event": "no leader", "reason": reason}:
            return f"the run can't begin: {reason}"
        case {"event": "short", "worker": worker, "reason": reason}:
            return f"{worker} can't begin the run: {reason}"
        case {"event": "not saved", "reason": reason}:
            return f"no checkpoint: {reason}"
        case {"event": "checkpoint", "step": step, "path": path, "finite": False}:
            return f"checkpoint of step {step}, of a state that is NOT FINITE: {path}"
        case {"event": "checkpoint", "step": step, "path": path, "copy_ms": copy, "seconds": seconds}:
            return f"checkpoint of step {step}: {path} ({number(copy)} ms of training, {number(seconds)} s behind it)"
        case {"event": "checkpoint failed", "step": step, "reason": reason}:
            return f"NO CHECKPOINT of step {step}: {reason}; training goes on"
        case {"event": "checkpoint damaged", "reason": reason}:
            return f"CHECKPOINT PASSED OVER: {reason}"
        case {"event": "resumed", "path": ""}:
            return "no checkpoint is whole: training starts at its beginning"
        case {"event": "resumed", "step": step, "path": path, "differences": differences}:
            others = f"; THE BITS MAY DIFFER: {', '.join(differences)}" if differences else ""
            if not line.get("finite", True):
                last = line.get("last_finite") or "none"
                others += f"; ITS STATE IS NOT FINITE: the last that is, for --resume and another --folder, is {last}"
            return f"resumed at step {step} from {path}{others}"
        case {"event": "nothing left", "step": step, "path": path}:
            return f"nothing is left to train after {step} steps: {path} is at the end of what the script asks for"
        case {"event": "hung", "worker": worker, "reason": reason}:
            return f"{worker} HANGS: {reason}"
        case {"event": "loader replaced", "worker": worker, "reason": reason}:
            return f"{worker}: {reason}; others were started in its place"
        case {"event": "state lost", "reason": reason}:
            return f"state lost: {reason}"
        case {"event": "finished", "equal": equal}:
            return "finished: all workers hold the same state" if equal else "finished: THE WORKERS' STATES DIFFER"
        case {"event": "over", "code": code, "reason": reason}:
            return f"over: {reason} (exit code {code})"
        case {"event": "log", "step": step}:
            return f"step {step}: {_fields(line, 'step')}"
        case _:
            return f"{line.get('event', 'step')}: {_fields(line)}"


def told_by_us(failed: dict[str, Any]) -> bool:
    """Whether what a worker failed by is an error of farandole's own, which comes without a traceback."""
    return "Traceback" not in failed["traceback"]


def clock(line: dict[str, Any]) -> str:
    """The line's local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(line.get("time")))


def number(value: Any) -> str:
    """A metric, short."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _fields(line: dict[str, Any], *hidden: str) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in line.items() if name not in (*HIDDEN, *hidden))


def _hung(workers: list[str]) -> str:
    if not workers:
        return "and everyone waits for others"
    return f"waiting for {', '.join(workers)}, whose stacks are in logs/{workers[0]}.log{' ...' * (len(workers) > 1)}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _short(text: Any) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
