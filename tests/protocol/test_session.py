"""The worker's side of a session: what is said again, for how long it is waited, and what ends it.

Each check is a test; and bugs planted in the shipped files show that some check would find them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from farandole.protocol import kept_lines
from farandole.protocol.worker import driver
from farandole.protocol.worker import session as lease
from tests.protocol import session_connections, session_deadline, session_lease
from tests.support.planted import planted

CHECKS = (*session_connections.CHECKS, *session_lease.CHECKS, *session_deadline.CHECKS)


@pytest.mark.failure(
    "Files, disks and output",
    (
        "lines of metrics are lost: over 100,000 without a coordinator, rank 0 died beside a new joiner, all workers "
        "died, the disk was full"
    ),
    seen="`AT LEAST 3 lines OF METRICS LOST` with the reason, when the next line is written; the summary counts them",
    outcome="training is not affected; all other `run.log` lines are written before the run ends",
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_session(check: Callable[[], None]) -> None:
    check()


BUGS: tuple[tuple[ModuleType, str, str], ...] = (
    (lease, "self._lease.on_welcome(self._hello_at, welcome", "self._lease.on_welcome(self._heard_at, welcome"),
    (lease, "self._lease.beat(now), *", "self._lease.beat(now + 30.0), *"),
    (lease, "self._outgoing.extend(self._repeated)", "self._outgoing.extend(self._repeated[-1:])"),
    (lease, "if attempt != self.attempt or self._phase", "if self._phase"),
    (lease, 'or self._phase == "closed":\n            return []', ":\n            return []"),
    (lease, "min(2 * self._wait_s, BACKOFF_S[1])", "2 * self._wait_s"),
    (lease, 'self._phase, self._wait_s = "open", BACKOFF_S[0]', 'self._phase = "open"'),
    (lease, "lines = self._lines.take() if self._leads() else ()", "lines = ()"),
    (lease, "lines = self._lines.take() if self._leads() else ()", "lines = self._lines.take()"),
    (lease, "self._lines.send_after(welcome.lines)", "pass"),
    (lease, "self._lines.forget(message.lines)", "pass"),
    (lease, "self.attempt += 1", "self.attempt = max(self.attempt, 1)"),
    (lease, "if self.lease_over(now) and self.instructions.exit is None:", "if self.instructions.exit is None:"),
    (lease, "if self.lease_over(now) and self.instructions.exit is None:", "if self.lease_over(now):"),
    (lease, "if self.met and welcome.run != self._run:", "if False:"),
    (lease, "if self.met and welcome.worker != self.state_machine.worker:", "if False:"),
    (
        lease,
        "        self._was_rank_0 = self._was_rank_0 or self._is_rank_0()\n        return not",
        "        return not",
    ),
    (lease, "                self._was_rank_0 = self._is_rank_0()\n", ""),
    (lease, " or self.instructions.save is not None", ""),
    (lease, "            if isinstance(message, LAST):\n", "            if False:\n"),
    (lease, "self._heartbeat(0, now, lines)", "self._heartbeat(self._lease.beat(now), now, lines)"),
    (lease, "        self._outgoing.clear()\n        worker,", "        worker,"),
    (lease, 'if self._phase == "open":\n            if', 'if self._phase != "closed":\n            if'),
    (lease, "max(self._hello_at, self._heard_at) > self.patience_s", "self._hello_at > self.patience_s"),
    (lease, '(SILENT_FRACTION if self._phase == "open" else 1.0)', "1.0"),
    (lease, "return not self.met and now > self._first_until", "return now > self._first_until"),
    (lease, "if attempt == self.attempt:\n            self._phase", "if True:\n            self._phase"),
    (lease, "not isinstance(each, m.NotFinite)]", "each != message]"),
    (lease, "if not self.state_machine.differing:", "if False:"),
    (lease, "if not self.state_machine.differing:", "if True:"),
    (lease, "self.instructions.saves and not isinstance(message, m.ViewWithdrawn)", "self.instructions.saves"),
    (lease, "self.instructions.saves and message.at_once", "message.at_once"),
    (lease, "        if self.lease_over(now):\n            return None\n", ""),
    (lease, "not self.lease_over(now) and self.state_machine.end_round", "self.state_machine.end_round"),
    (lease, "synced=synced)", "synced=False)"),
    (lease, '            case m.Goodbye() if self._phase == "greeting" and self.met:', "            case None:"),
    (kept_lines, "_drop(lines, self._heard)", "_drop(lines, newest)"),
    (kept_lines, "self._unsent.extendleft(reversed(self._sent))", "pass"),
    (kept_lines, "self._sent.extend(lines)", "pass"),
    (kept_lines, "KEPT_LINES - len(self._sent)", "KEPT_LINES"),
    (kept_lines, "more += last.missing", "pass"),
    (kept_lines, "isinstance(line.fields, Metrics)", "not self._steps_s or self._steps_s.append(0.0)"),
    (lease, "*[0] * MORE_BEATS", ""),
    (lease, "if sent is not None and sent <= self.end:", "if sent is not None:"),
    (lease, "self._ended = self._ended or now > self.end", "self._ended = now > self.end"),
    (lease, "self.end = max(self.end, sent + orphan_s)", "self.end += orphan_s"),
    (lease, "max(stall_s, STEPS * (step_s or 0.0))", "stall_s"),
    (lease, "now + seconds - left_s < self.at", "True"),
    (lease, "seconds >= SHORTEST_S and ", ""),
    (lease, "min(PART * seconds, LONGEST_S)", "PART * seconds"),
    (lease, "return self._preemption.over(now) or self._lease", "return self._lease"),
    (lease, "within_s=left_s / 2)", "within_s=None)"),
    (lease, "            case m.PreemptionDeadline():", "            case None:"),
    (driver, "(exit_.save and self.exit is None)", "exit_.save"),
    (driver, "self.exit = self.exit or exit_", "self.exit = exit_"),
)


@pytest.mark.parametrize(("module", "place", "by"), BUGS)
def test_a_planted_bug_is_found(module: ModuleType, place: str, by: str) -> None:
    with planted(module, place, by):
        assert any(fails(check) for check in CHECKS)


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except (Exception, pytest.fail.Exception):  # noqa: BLE001  a planted bug may raise whatever it likes
        return True
    return False
