"""`python -m attack`: the attacks one after the other, each on a live run, and a table of what came of them.

Attacks share a run as long as it is whole. One that an attack has harmed is ended, and the next attack gets a new one.
The exit code is 1 where an attack came to something, or a run to another end than it promised.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from attack.base import Attack, NotMade, Succeeded
from attack.live import Live, open_place
from attack.network import leave_the_others
from attack.stranger import IS_OTHER, NOBODY
from attack.table import ATTACKS
from chaos.trial import undisturbed
from chaos.verdict import Reference

HELD, BROKEN = "held", "FAILED"
SAME_USER = "strangers are processes of the same user, since this is not root; attacks through files are left out"
OWN_NETWORK = "all of it is in a network namespace of its own"
SHARED_NETWORK = "no network namespace is to be had: attacks on every port that is found are left out"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="attack", description="attacks on a live run of the digits job")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--only", metavar="NAME", default="", help="those whose names begin so")
    parser.add_argument("--short", action="store_true", help="a few that show most")
    options = parser.parse_args(arguments)
    chosen = [a for a in ATTACKS if a.name.startswith(options.only) and (a.short or not options.short)]
    if not chosen:
        parser.error(f"--only {options.only}: no attack's name begins so; see --list")
    if options.list:
        print("\n".join(f"{a.who:<24} {a.name}" for a in chosen))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    print(f"strangers are processes of user {NOBODY}" if IS_OTHER else SAME_USER, flush=True)
    alone = leave_the_others()
    print(OWN_NETWORK if alone else SHARED_NETWORK, flush=True)
    place = open_place()
    siege = Siege(place, undisturbed(place))
    with siege:
        for attack in chosen:
            if (IS_OTHER or not attack.needs_root) and (alone or not attack.own_network):
                siege.make(attack)
            else:
                print(f"not made: {attack.name}")
    print(f"{len(siege.rows)} rows, {siege.failed} failed, {time.monotonic() - began:.0f} s")
    if siege.failed:
        print(f"the runs' folders are in {place}")
    else:
        shutil.rmtree(place)
    return 1 if siege.failed else 0


class Siege:
    """The runs, one after the other, and the table's rows: who, attack, what was seen, verdict."""

    def __init__(self, place: Path, reference: Reference) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self._place, self._reference = place, reference
        self._runs = 0
        self._live: Live | None = None

    def __enter__(self) -> Siege:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._live is not None and error is None:
            self._end(self._live)
        if self._live is not None:
            self._live.__exit__(None, None, None)

    @property
    def failed(self) -> int:
        return sum(verdict == BROKEN for *_, verdict in self.rows)

    def make(self, attack: Attack) -> None:
        if self._live is not None and self._live.worn:
            self._end(self._live)
        if self._live is None:
            self._runs += 1
            self._live = Live(self._place, f"run-{self._runs}").__enter__()
        live = self._live
        coordinator = live.run.watch.coordinator()
        found: list[str] = []
        seen = ""
        try:
            seen = attack.act(live)
        except (Succeeded, TimeoutError) as error:
            found.append(str(error))
        except NotMade as error:
            found.append(f"the attack was not made: {error}")
        found += live.complaints(attack, coordinator)
        self._row(attack.who, attack.name, "; ".join(filter(None, [seen, *found])), not found)
        if found:
            self._give_up(live)

    def _end(self, live: Live) -> None:
        found = live.end(self._reference)
        seen = "; ".join(found) or f"{live.run.watch.seen['view']} views, exit code 0, the bits of a world of one"
        self._row("", f"run {self._runs}, in the end", seen, not found)
        live.__exit__(None, None, None)
        self._live = None

    def _give_up(self, live: Live) -> None:
        """It may be worth nothing any more: what it was harmed by is told."""
        with contextlib.suppress(OSError):
            said = live.run.output.read_text(errors="replace")[-1000:]
            print("\n".join(f"    {line!r}" for line in said.splitlines()[-8:]), flush=True)
        live.__exit__(None, None, None)
        self._live = None

    def _row(self, who: str, name: str, seen: str, held: bool) -> None:
        row = (who, name, seen, HELD if held else BROKEN)
        self.rows.append(row)
        print(f"{row[0]:<24} | {row[1]:<44} | {row[2]} | {row[3]}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
