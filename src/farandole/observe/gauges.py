"""The lines of figures that `farandole top` and the live display of `farandole run` share: values in, words or
something that rich prints out. What is not known is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farandole.control.status import AccountStatus, left_s
from farandole.membership.account import Account
from farandole.membership.metrics import StepLine
from farandole.observe.words import number
from farandole.platform.output import one_line

BAR = 40  # characters
NAMED = 4  # workers


def progress(step: int, total: int | None, epoch: int, steps: Sequence[StepLine]) -> Table:
    """A bar, where the end is known, and how far it is; `steps` are the newest."""
    row = Table.grid(padding=(0, 2))
    left = left_s(total, steps)
    words = f"step {step_words(step, total)}, epoch {epoch}{'' if left is None else f', {in_words(left)} left'}"
    bar = [ProgressBar(total=total, completed=step, width=BAR)] if total else []
    row.add_row(*bar, Text(words))
    return row


def training(last: StepLine | None, loss: float | None, samples_per_s: float | None) -> str:
    """`loss`: where there is no `last` step's line."""
    loss = last.loss if last else loss
    rate = last.learning_rate if last else None
    parts = [
        "" if loss is None else f"loss {number(loss)}",
        "" if rate is None else f"learning rate {number(rate)}{factor_words(last)}",
        "" if last is None else f"batch {last.samples}",
        "" if samples_per_s is None else f"{rate_words(samples_per_s)} samples/s",
    ]
    return "  ".join(part for part in parts if part)


def rate_words(samples_per_s: float) -> str:
    """Whole samples a second, and three digits where that would be less."""
    return f"{samples_per_s:.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def factor_words(last: StepLine | None) -> str:
    """The rule's, where it changes something."""
    return f" x {number(last.factor)}" if last and last.factor not in (None, 1.0) else ""


def workers(size: int, wanted: int | None, coming: Sequence[str], going: Sequence[str]) -> str:
    parts = [
        f"{size} of {wanted} workers" if wanted else f"{size} workers",
        f"{_named(coming)} coming" if coming else "",
        f"{_named(going)} going" if going else "",
    ]
    return one_line(", ".join(part for part in parts if part))


def cost(account: Account | AccountStatus | None) -> str:
    if account is None or account.goodput is None or account.worker_hours is None:
        return ""
    dollars = "" if account.dollars is None else f"  {account.dollars:.4g} dollars"
    return f"goodput {100 * account.goodput:.1f} %  {account.worker_hours:.4g} worker-hours{dollars}"


def in_words(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 3 h 20 min, 2 d 5 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def step_words(step: int, total: int | None) -> str:
    return str(step) if total is None else f"{step} of {total}"


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return f"{', '.join(names[:NAMED])} and {more} more" if more > 0 else ", ".join(names)
