"""The tables of `farandole hosts check`. Pure: values in, something that rich prints out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from farandole.membership import likeness
from farandole.platform.output import one_line
from farandole.pool.ssh.examined import Facts
from farandole.pool.ssh.survey import Found, problems

RUN = "this machine"


def hosts_table(found: Sequence[Found], here: Facts) -> Table:
    """What each host is; `here` is the last line."""
    table = _table("host", "slots", "ready", "Python", "farandole", "torch", "GPUs", "cores", "bits", "clock", "free")
    for each in found:
        name, slots, can = each.line.name, str(each.line.slots), "no" if problems(each, here) else "yes"
        if each.facts is None:
            table.add_row(*map(_text, (name, slots, can)))
            continue
        clock = f"{each.clock_s:+.2f} s"
        table.add_row(*map(_text, (name, slots, can, *_facts(each.facts, _bits(each.facts, here), clock))))
    table.add_row(*map(_text, (RUN, "", "", *_facts(here, "", ""))))
    return table


def ports_table(found: Sequence[Found]) -> Table:
    """Whose data ports each host reaches; the columns are numbered as the rows are."""
    asked = [each for each in found if each.facts is not None]
    table = _table("", "reaches", *(str(n) for n, _ in enumerate(asked, 1)), RUN)
    for number, each in enumerate(asked, 1):
        cells = ["" if other is each else _mark(each.ports.get(other.line.name)) for other in asked]
        table.add_row(*map(_text, (str(number), each.line.name, *cells, _mark(each.ports.get("")))))
    return table


def _facts(facts: Facts, bits: str, clock: str) -> tuple[str, ...]:
    torch = facts.numerics.get(likeness.TORCH, "none")
    free = f"{facts.free_bytes / 1e9:.0f} GB"
    return facts.python, facts.farandole, torch, str(facts.gpus), str(facts.cores), bits, clock, free


def _bits(facts: Facts, here: Facts) -> str:
    if not facts.numerics or not here.numerics:
        return "unknown"
    return "others" if likeness.unlike(here.numerics.items(), facts.numerics.items()).bits else "same"


def _mark(error: str | None) -> str:
    return "?" if error is None else "no" if error else "yes"


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title)
    return table


def _text(value: str) -> Text:
    return Text(one_line(value))
