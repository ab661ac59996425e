"""Traces of a spot market: how many machines there were to be had, at which time.

Four published formats are read:

    *.json          of SkyPilot: {"metadata": {"gap_seconds": 300}, "data": [16, 16, 7, ...]}, one for each interval
    *.csv           of Bamboo: `480000,add,node1`: milliseconds, what happened, and the machine
    *.csv           of Parcae: `0,1`: the time as published, and how many machines there are then
    *.txt, *.jsonl  of Parcae: [ms, "add" | "remove" | other, {"nodes": [...]}], one list a line

A trace has a number of machines for each interval. An interval of a trace of events has the smallest number that there
was in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farandole.errors import UsageError

EVENTS_GAP_S = 60  # the interval of traces of events
_ZONE = re.compile(r"[a-z]{2}(-gov)?-(north|south|east|west|central)(east|west)?-\d[a-z](?![a-z0-9])")  # us-west-2a
_FORMATS = "a JSON file of SkyPilot, a CSV file of Bamboo or Parcae, or JSON lines of Parcae"


@dataclass(frozen=True, kw_only=True)
class MarketTrace:
    """How many machines there were in each interval of `gap_s` seconds; `counts` has at least one.

    `speed`: of one of these spot machines, where an on-demand machine has 1. `spot`: dollars for an hour of one, in
    each interval; None: the price of the market (`Price.spot`). `kind`: the type of the machines, as in a file of
    prices; "": it has none.
    """

    name: str
    gap_s: int
    counts: tuple[int, ...]
    speed: float = 1.0
    spot: tuple[float, ...] | None = None
    kind: str = ""

    @property
    def duration_s(self) -> int:
        return self.gap_s * len(self.counts)

    @property
    def availability(self) -> float:
        """The part of the intervals in which there was at least one machine, from 0 to 1."""
        return sum(count > 0 for count in self.counts) / len(self.counts)


@dataclass(frozen=True, kw_only=True)
class SpotMarket:
    """The zones in which a job can have spot machines: traces with the same intervals; at least one.

    Machines of another type are a zone of their own.

    Raises:
        UsageError: the intervals differ.
    """

    zones: tuple[MarketTrace, ...]

    def __post_init__(self) -> None:
        first = self.zones[0]
        for other in self.zones[1:]:
            if other.gap_s != first.gap_s:
                raise UsageError(
                    f"{first.name} has intervals of {first.gap_s} s and {other.name} of {other.gap_s} s: traces of "
                    f"one market must have equal intervals"
                )

    @property
    def name(self) -> str:
        return " + ".join(zone.name for zone in self.zones)

    @property
    def gap_s(self) -> int:
        return self.zones[0].gap_s

    @property
    def intervals(self) -> int:
        """The intervals that all zones have."""
        return min(len(zone.counts) for zone in self.zones)

    @property
    def duration_s(self) -> int:
        return self.gap_s * self.intervals

    @property
    def counts(self) -> list[tuple[int, ...]]:
        """How many machines there were in each interval, by zone."""
        return [*zip(*(zone.counts for zone in self.zones), strict=False)]

    def window(self, first: int, intervals: int) -> SpotMarket:
        """Return the market of `intervals` intervals from interval `first` on."""
        part = slice(first, first + intervals)
        zones = (replace(zone, counts=zone.counts[part], spot=zone.spot and zone.spot[part]) for zone in self.zones)
        return SpotMarket(zones=tuple(zones))


def zone_of(name: str) -> str:
    """Return the zone in the name of a trace, as AWS names it; "" if there is none."""
    found = _ZONE.search(name)
    return found[0] if found else ""


def read_zone(words: str) -> MarketTrace:
    """Return the trace of `FILE[,speed=NUMBER][,spot=DOLLARS][,type=NAME]`: with the speed, the price and the type of
    its machines.

    Raises:
        UsageError: an option is unknown or its value is not a number above 0, and see `read`.
    """
    if "," not in words or Path(words).exists():
        return read(Path(words))
    path, *options = words.split(",")
    values, kind = dict[str, float](), ""
    for option in options:
        name, _, text = option.partition("=")
        if name == "type" and text and not kind:
            kind = text
            continue
        if name not in ("speed", "spot") or name in values:
            raise UsageError(
                f"{words}: {option!r}; the options of a trace are speed=NUMBER, spot=DOLLARS and type=NAME, once each"
            )
        values[name] = positive(text)
        if not values[name]:
            unit = "dollars an hour" if name == "spot" else "how many times as fast as an on-demand machine"
            raise UsageError(f"{words}: {option!r}; {unit}, above 0")
    trace = read(Path(path))
    spot = (values["spot"],) * len(trace.counts) if "spot" in values else None
    return replace(trace, speed=values.get("speed", 1.0), spot=spot, kind=kind)


def positive(text: str) -> float:
    """Return the number, 0.0 if it is none that a speed or a price can be."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < 1e6 else 0.0


def read(path: Path) -> MarketTrace:
    """Return the trace in a file.

    Raises:
        UsageError: the file can't be read, or is none of the formats; it names the line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a trace: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path}: the trace is empty; it must be {_FORMATS}")
    if path.suffix == ".json":
        return _skypilot(path, text)
    if lines[0][1].lstrip().startswith("["):
        return _of_events(path, _parcae(path, lines))
    if len(lines[0][1].split(",")) == 2:
        return _of_counts(path, _counts(path, lines))
    return _of_events(path, _bamboo(path, lines))


def read_json(text: str, name: str) -> Any:
    """Return what a file of this name says.

    Raises:
        UsageError: it is not JSON; it names the line.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}, line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or as many brackets
        raise UsageError(f"{name}: not JSON that can be read: {error}") from None


def _skypilot(path: Path, text: str) -> MarketTrace:
    found = read_json(text, str(path))
    metadata = found.get("metadata") if isinstance(found, dict) else None
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not isinstance(gap_s, int | float) or isinstance(gap_s, bool) or gap_s < 1 or gap_s != int(gap_s):
        raise UsageError(f"{path}: metadata.gap_seconds is {gap_s!r}; it must be a whole number of seconds")
    counts = found.get("data")
    if not isinstance(counts, list) or not counts:
        raise UsageError(f"{path}: data is {counts!r}; it must be a list of numbers of machines")
    for place, count in enumerate(counts):
        if not _is_count(count):
            raise UsageError(f"{path}: data[{place}] is {count!r}; it must be a number of machines")
    return MarketTrace(name=path.stem, gap_s=int(gap_s), counts=tuple(counts))


Change = tuple[float, int]  # the time in seconds, and how many machines there are from then on


def _of_events(path: Path, changes: Iterable[tuple[int, float, str, Sequence[str]]]) -> MarketTrace:
    """Return the trace of (line, seconds, what happened, machines)."""
    there, counts = set[str](), list[Change]()
    for line, time_s, happened, nodes in changes:
        if counts and time_s < counts[-1][0]:
            raise UsageError(f"{path}, line {line}: {time_s:g} s comes after {counts[-1][0]:g} s")
        if happened == "add":
            there.update(nodes)
        elif happened == "remove":
            if unknown := sorted(set(nodes) - there):
                raise UsageError(f"{path}, line {line}: {unknown[0]} is removed, and was not there")
            there.difference_update(nodes)
        counts.append((time_s, len(there)))
    return _of_counts(path, counts)


def _of_counts(path: Path, changes: Sequence[Change]) -> MarketTrace:
    gap_s, end_s = EVENTS_GAP_S, changes[-1][0]
    counts, place, now = list[int](), 0, 0
    for start_s in range(0, int(end_s) + 1, gap_s):
        while place < len(changes) and changes[place][0] <= start_s:
            now, place = changes[place][1], place + 1
        least = now
        while place < len(changes) and changes[place][0] < start_s + gap_s:
            now, place = changes[place][1], place + 1
            least = min(least, now)
        counts.append(least)
    return MarketTrace(name=path.stem, gap_s=gap_s, counts=tuple(counts))


def _bamboo(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, float, str, Sequence[str]]]:
    for number, line in lines:
        time, *words = (word.strip() for word in line.split(","))
        if len(words) != 2 or words[0] not in ("add", "remove"):
            raise UsageError(f"{path}, line {number}: {line!r}; it must be milliseconds,add|remove,machine")
        yield number, _seconds(path, number, time), words[0], (words[1],)


def _parcae(path: Path, lines: Sequence[tuple[int, str]]) -> Iterator[tuple[int, float, str, Sequence[str]]]:
    for number, line in lines:
        try:
            time, happened, details = json.loads(line)
            nodes = [str(node) for node in details["nodes"]]
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                f'{path}, line {number}: {line[:80]!r}; it must be [ms, "add" or "remove", {{"nodes": [...]}}]'
            ) from None
        yield number, _seconds(path, number, time), str(happened), nodes


def _counts(path: Path, lines: Sequence[tuple[int, str]]) -> list[Change]:
    found = list[Change]()
    for number, line in lines:
        time, *count = (word.strip() for word in line.split(","))
        if len(count) != 1 or not count[0].isdigit():
            raise UsageError(f"{path}, line {number}: {line!r}; it must be milliseconds,number of machines")
        found.append((_seconds(path, number, time), int(count[0])))
        if len(found) > 1 and found[-1][0] < found[-2][0]:
            raise UsageError(f"{path}, line {number}: {found[-1][0]:g} s comes after {found[-2][0]:g} s")
    return found


def _seconds(path: Path, number: int, milliseconds: Any) -> float:
    try:
        seconds = float(milliseconds) / 1000
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise UsageError(f"{path}, line {number}: {milliseconds!r} is no time in milliseconds")
    return seconds


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
