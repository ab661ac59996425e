"""The tables of `farandole status`, `numerics`, `hosts check` and `doctor`. Pure: values in, rich renderables out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from farandole.control.status import Status
from farandole.observe import text
from farandole.observe.past import Past
from farandole.observe.text import not_promised, number
from farandole.platform.output import one_line
from farandole.pool.machine_check import MachineCheck
from farandole.pool.ssh_check import HostFacts, HostReport, problems
from farandole.protocol import numeric_facts
from farandole.protocol.coordinator.failures import FATAL, JOINER_TRIAL_STEPS
from farandole.protocol.coordinator.state import stragglers

# --- table ------------------------------------------------------------------------------------------------------------


def status_table(status: Status) -> Group:
    """Returns a few lines about the run, then its workers in rank order; workers without a rank come last."""
    return Group(_head(status), Text(), workers_table(status)) if status.workers else Group(_head(status))


def past_table(past: Past) -> Text:
    """Returns a few lines about a run that is over."""
    code = "" if past.code is None else f", exit code {past.code}"
    total = "" if past.total is None else f" of {past.total}"
    no_fingerprint = (
        "the workers' final states differ, or it was not recorded"
        if past.outcome == "finished"
        else "only a run that has finished has one"
    )
    checkpoint = past.checkpoint if past.finite else f"{past.checkpoint} (a state that is NOT FINITE)"
    rows = [
        ("run", past.run),
        ("state", f"over: {past.outcome} ({past.reason}{code})"),
        ("steps", f"{past.steps}{total}, epoch {past.epoch}"),
        ("loss", "" if past.loss is None else number(past.loss)),
        ("bits", past.bits),
        ("fingerprint", past.fingerprint or f"none: {no_fingerprint}"),
        ("checkpoint", "; ".join(filter(None, (checkpoint or "none", past.incomplete)))),
        ("to resume", f"{past.again} steps after the checkpoint are taken again" if past.again else ""),
        ("damaged", f"{past.damaged} lines of metrics.jsonl were skipped" if past.damaged else ""),
    ]
    return Text("\n").join(Text(f"{name:<14}", style="bold") + _text(value) for name, value in rows if value)


def numerics_table(own: Mapping[str, str], other: Mapping[str, str]) -> Table:
    """Returns a table of this machine's numeric facts; if `other` has facts, also with its values that differ."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("", "here", *(("there",) if other else ())):
        table.add_column(title)
    for name in dict.fromkeys((*own, *other)):
        value, other_value = own.get(name, "-"), other.get(name, "-")
        shown = "" if value == other_value else other_value
        table.add_row(_text(name), _text(value), *((_text(shown),) if other else ()))
    return table


def _head(status: Status) -> Table:
    bounds = f"min {status.minimum}, max {'none' if status.maximum is None else status.maximum}"
    state = f"{status.state} ({status.reason})" if status.reason else status.state
    step = str(status.step) if status.total is None else f"{status.step} of {status.total}"
    rows = [
        ("run", status.run),
        ("state", state),
        ("view", f"{status.view.number}, size {status.view.size}; target {status.wanted}, {bounds}"),
        ("step", f"{step}, epoch {status.epoch}"),
        ("bits", status.bits if status.unpromised is None else f"{status.bits}: {not_promised(status.unpromised)}"),
    ]
    if not status.workers and status.state == "starting":
        rows.append(("workers", "none yet: they load torch and the script"))
    if status.codec != "none":
        rows.append(("codec", status.codec))
    if status.stalled is not None:
        peers = f", waiting for {', '.join(status.stalled.workers)}" if status.stalled.workers else ""
        rows.append(("stalled", f"step {status.step} has made no progress for {status.stalled.seconds:.0f} s{peers}"))
    if status.loss is not None:
        rows.append(("loss", number(status.loss)))
    if status.samples_per_s is not None:
        rows.append(("samples/s", text.rate_words(status.samples_per_s)))
    if status.joiners_lost:
        end = f"`farandole scale`, or a joiner that stays for {JOINER_TRIAL_STEPS} steps, resets the count"
        row = f"{status.joiners_lost} in a row were refused or died; after {FATAL} no more are started; {end}"
        none = f"{status.joiners_lost} in a row were refused or died: no more are started until `farandole scale`"
        rows.append(("joiners", row if status.replaced else none))
    if paid := text.cost(status.account):
        rows.append(("account", paid))
    speeds = {w.id: w.speed for w in status.workers if w.speed is not None}
    workers = {w.id: w for w in status.workers}
    for name, speed in stragglers(speeds).items():
        slow = workers[name]
        rows.append(
            (
                "straggler",
                f"{name} on {slow.host}: {speed:.2f} of the fastest's speed, {slow.shards} of {slow.of} micro-batches",
            )
        )
    if status.account is not None and (sent := status.account.traffic) is not None and sent.at_least_bytes:
        rows.append(("traffic", text.traffic_words(sent)))
    rows += [("slow link", text.slow_link(each)) for each in status.slow_links]
    rows.append(("coordinator", f"{status.coordinator.address}, pid {status.coordinator.pid}"))
    head = Table.grid(padding=(0, 2))
    for name, value in rows:
        head.add_row(Text(name, style="bold"), _text(value))
    return head


def workers_table(status: Status) -> Table:
    """Returns a table of the workers in rank order; workers without a rank come last."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("worker", "rank", "state", "host", "pid", "pool", "speed", "shards"):
        table.add_column(title, no_wrap=title not in ("host", "pool"), overflow="fold")
    order = sorted(status.workers, key=lambda w: (w.rank is None, w.rank or 0))
    for w in order:
        rank, speed = "" if w.rank is None else str(w.rank), "" if w.speed is None else f"{w.speed:.2f}"
        cells = (w.id, rank, w.state, w.host, str(w.pid), w.pool, speed, f"{w.shards} of {w.of}" if w.of else "")
        table.add_row(*map(_text, cells))
    return table


def _text(value: str) -> Text:
    """Returns plain text: no markup, and no control characters for the terminal."""
    return Text(one_line(value))


# --- hosts table ------------------------------------------------------------------------------------------------------
#
# The tables of `farandole hosts check`. Pure: they take values and return rich renderables.

RUN = "this machine"


def hosts_table(reports: Sequence[HostReport], own: HostFacts) -> Table:
    """Returns a table of the facts of each host; the last line is this machine."""
    table = _table("host", "slots", "ready", "Python", "torch", "farandole", "GPUs", "cores", "bits", "clock", "free")
    for each in reports:
        name, slots, can = each.line.name, str(each.line.slots), "no" if problems(each, own) else "yes"
        if each.facts is None:
            table.add_row(*map(_cell_text, (name, slots, can)))
            continue
        clock = f"{each.clock_s:+.2f} s"
        table.add_row(*map(_cell_text, (name, slots, can, *_facts(each.facts, _bits(each.facts, own), clock))))
    table.add_row(*map(_cell_text, (RUN, "", "", *_facts(own, "", ""))))
    return table


OUTCOMES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def checks_table(checks: Sequence[MachineCheck]) -> Table:
    """Returns a table of the checks of `farandole doctor`; a remedy is below what was found."""
    table = _table("check", "", "found")
    for check in checks:
        found = _cell_text(check.found)
        if check.remedy:
            found.append("\n-> " + one_line(check.remedy), style="bold")
        table.add_row(_cell_text(check.name), Text(check.outcome, style=OUTCOMES[check.outcome]), found)
    return table


def ports_table(reports: Sequence[HostReport]) -> Table:
    """Returns a table of the data ports that each host can reach. Columns and rows have the same numbers."""
    answered = [each for each in reports if each.facts is not None]
    table = _table("", "reaches", *(str(n) for n, _ in enumerate(answered, 1)), RUN)
    for row, each in enumerate(answered, 1):
        cells = ["" if other is each else _mark(each.ports.get(other.line.name)) for other in answered]
        table.add_row(*map(_cell_text, (str(row), each.line.name, *cells, _mark(each.ports.get("")))))
    return table


def _facts(facts: HostFacts, bits: str, clock: str) -> tuple[str, ...]:
    torch = facts.numerics.get(numeric_facts.TORCH, "none")
    free = f"{facts.free_bytes / 1e9:.0f} GB"
    return facts.python, torch, facts.farandole, str(facts.gpus), str(facts.cores), bits, clock, free


def _bits(facts: HostFacts, own: HostFacts) -> str:
    if not facts.numerics or not own.numerics:
        return "unknown"
    return (
        "different" if numeric_facts.numeric_differences(own.numerics.items(), facts.numerics.items()).bits else "same"
    )


def _mark(error: str | None) -> str:
    return "?" if error is None else "no" if error else "yes"


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")  # many columns
    for title in titles:
        table.add_column(title, no_wrap=title not in ("host", "found"), overflow="fold")
    return table


def _cell_text(value: str) -> Text:
    return Text(one_line(value))
