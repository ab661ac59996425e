"""The account of a run as people read it. Pure: a value in, something that rich prints out."""

from __future__ import annotations

import time

from rich.console import Group
from rich.table import Table
from rich.text import Text

from farandole.membership.account import Account, WorkerAccount
from farandole.membership.classes import CLASSES, MEANING
from farandole.membership.cost import Cost
from farandole.platform.output import one_line

UNKNOWN = "unknown"


def account_table(account: Account, *, workers: bool = False) -> Group:
    """In two parts: the run in a few lines, then a line for each class of time; and for each of the `workers`."""
    parts = [_head(account)]
    if account.seconds is not None:
        parts += [Text(), _classes(account)]
    if workers and account.workers:
        parts += [Text(), _workers(account.workers)]
    return Group(*parts)


def _head(account: Account) -> Table:
    at = UNKNOWN if account.as_of is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(account.as_of))
    hours = UNKNOWN if account.worker_hours is None else f"{account.worker_hours:.4g}"
    rows = [
        ("run", account.run),
        ("as of", f"{at}, {'over' if account.over else 'nothing says that it is over'}"),
        ("workers", f"{len(account.workers)}"),
        ("worker-hours", hours),
        ("goodput", UNKNOWN if account.goodput is None else f"{100 * account.goodput:.1f} %"),
        ("dollars", dollars(account.cost)),
        ("silent", f"{', '.join(account.silent)}: nothing is known of their time" if account.silent else ""),
        ("damaged", f"{account.damaged} lines of metrics.jsonl are passed over" if account.damaged else ""),
        ("doubtful", f"{account.doubtful} times that can't be are passed over" if account.doubtful else ""),
    ]
    head = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value:
            head.add_row(Text(name, style="bold"), _text(value))
    return head


def priced(cost: Cost) -> bool:
    """Whether anybody has said a price: without, nothing is said of dollars where nobody has asked."""
    return cost.dollars is not None or bool(cost.date) or cost.at_least > 0


def dollars(cost: Cost) -> str:
    """Or why they are not known."""
    of = f", with prices of {cost.date}" if cost.date else ""
    if cost.dollars is not None:
        return f"{cost.dollars:.4g}{of}"
    if len(cost.unknown) == len(cost.hosts):
        return f"{UNKNOWN}: no price is known; name a file of prices with --prices"
    return f"{UNKNOWN}: at least {cost.at_least:.4g}{of}, and the price of {', '.join(cost.unknown)} is not known"


def _classes(account: Account) -> Table:
    table = _table("class", "hours", "%", "")
    total_s = account.total_s or 1.0
    for name in CLASSES:
        seconds = (account.seconds or {}).get(name, 0.0)
        table.add_row(name, f"{seconds / 3600:.4f}", f"{100 * seconds / total_s:.1f}", Text(MEANING[name], style="dim"))
    return table


def _workers(workers: tuple[WorkerAccount, ...]) -> Table:
    """In seconds."""
    there = [name for name in CLASSES if any(name in each.seconds for each in workers)]
    table = _table("worker", "host", "seconds", *there)
    for each in workers:
        spent = (f"{each.seconds[name]:.1f}" if name in each.seconds else "" for name in there)
        table.add_row(_text(each.worker), _text(each.host), f"{each.total_s:.1f}", *spent)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number == 0 or title in ("", "host") else "right")
    return table


def _text(value: str) -> Text:
    return Text(one_line(value))
