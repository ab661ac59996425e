"""`farandole report`: a run, or several side by side, as one page of HTML that asks for nothing, from their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from farandole import __version__
from farandole.control.run_folder import CHECKPOINTS, METRICS, SETTINGS, Tail
from farandole.errors import UsageError
from farandole.membership.messages import Checkpoints
from farandole.membership.prices import Prices
from farandole.membership.records import RunSettings
from farandole.observe.page import html as page
from farandole.observe.story.about import About, about
from farandole.observe.story.facts import bill
from farandole.observe.story.story import Story
from farandole.observe.story.telling import Tick, first
from farandole.platform import files
from farandole.platform.files import decoded


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A run, whole."""

    tick: Tick
    about: About


def report(runs: list[Told]) -> str:
    """The page. The first one's figures stand at its top."""
    return page.frozen(msgspec.json.encode(runs).decode())


def told(folder: Path, now: float, prices: Prices | None, *, live: bool) -> Told:
    """The run in `folder` as its lines tell it at Unix time `now`; with the run's own prices where there are no others.

    Raises:
        UsageError: it has no line yet.
    """
    story = read(Tail(folder / METRICS), Story())
    if story.began is None:
        raise UsageError(f"{folder}: it has no {METRICS} yet, so there is nothing to tell of it")
    settings = settings_of(folder)
    name = folder.resolve().name
    paid = bill(story.account.account(name, prices or prices_in(settings)), story)
    return Told(tick=first(name, story, now, account=paid, live=live), about=about(settings, story, __version__))


def read(tail: Tail, story: Story) -> Story:
    """All lines that are there."""
    while lines := tail.lines():
        for line in lines:
            story.take(line)
    return story


def settings_of(folder: Path) -> dict[str, Any]:
    """What settings.json holds of what a run's settings are, each of its type; nothing, where it can't be read."""
    try:
        held = decoded(files.read(folder / SETTINGS), dict[str, Any])
    except (OSError, UsageError, msgspec.MsgspecError):
        return {}
    types = {field.name: field.type for field in msgspec.structs.fields(RunSettings)}
    return {name: value for name, value in held.items() if name in types and _fits(value, types[name])}


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (UsageError, msgspec.MsgspecError):
        return False
    return True


def checkpoints_in(folder: Path, settings: dict[str, Any]) -> str:
    """Where those of the run in `folder` are."""
    try:
        return msgspec.convert(settings.get("checkpoints", {}), Checkpoints).url or str(folder / CHECKPOINTS)
    except msgspec.MsgspecError:
        return str(folder / CHECKPOINTS)


def prices_in(settings: dict[str, Any]) -> Prices:
    """Those that the run was started with; none where they are another version's."""
    try:
        return msgspec.convert(settings.get("prices", {}), Prices)
    except (UsageError, msgspec.MsgspecError):
        return Prices()
