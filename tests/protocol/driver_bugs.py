"""Bugs for the driver and the way of entering: a place in the shipped file, what is put there, for which schedules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from farandole.protocol.worker import driver

IDLE = """            while not (yield from self.wait_for_round_end()):
                pass
            yield Change(IDLE_S)"""
OPENED = "            yield from self._open(view)\n            yield from self._start"
LOAD = "    yield from do(entrance.load, arriving.state)\n"
DIGEST = "    yield from driver.take_digest()\n"
ASK = "    synced = machine.become_synced()\n"
RELEASE = "    if not driver.checking.checks_left():\n        exchange.release()\n"
GIVE = "    if synced is None:\n        return False\n    driver.tell(synced)\n" + RELEASE

DRIVER: tuple[tuple[ModuleType, str, str, dict[str, Any]], ...] = (
    # a round
    (driver, "if not synced:\n            self.exchange.withhold()", "if not synced:\n            pass", {}),
    (driver, "yield from do(port.send_state, view, self.number, task.position)", "pass", {}),
    (driver, "may_switch=task.is_step", "may_switch=True", {}),
    (
        driver,
        "self._in_idle_round = task.is_step and len(lineage.sets[0])",
        "self._in_idle_round = task.is_step and view.size",
        {"focus": ("stale",)},
    ),
    (driver, "self.shards, self.computed_shards = 0, set()", "self.shards = 0", {}),
    (driver, "if first is not None:", "if first is None:", {}),
    (driver, 'if machine.phase == "member":\n                    break', "if True:\n                    break", {}),
    (driver, "raise JoinAborted\n", "yield Change()\n                continue\n", {"focus": ("reset",)}),
    (driver, IDLE, IDLE[IDLE.index("            yield") :], {}),
    # what becomes of it
    (driver, "not exchange.ended and machine.round <= self.number", "not exchange.ended", {}),
    (driver, "not exchange.ended and machine.round <= self.number", "machine.round < self.number", {}),
    (driver, "and machine.view.number != exchange.view.number:", "and False:", {}),
    (driver, "yield from do(old.release_peers)", "pass", {"focus": ("freeze", "break")}),
    (driver, OPENED + "(lineage)", OPENED + "(self.lineage)", {}),
    (driver, "yield from do(self.port.submit_all)", "pass", {}),
    # what the coordinator asks for
    (
        driver,
        "bool(self.state_machine.differing)",
        "False",
        {"drift": True, "focus": ("resets", "dumb", "coordinator")},
    ),
    (driver, "port.answer(request)", "pass", {"focus": ("stop",)}),
    (driver, "            port.leave(instructions.exit)", "            pass", {}),
    # entering
    (driver, LOAD + DIGEST + ASK, DIGEST + LOAD + ASK, {}),
    (driver, LOAD + DIGEST + ASK + GIVE, ASK + GIVE + LOAD + DIGEST, {}),
    (driver, LOAD, "    exchange.release()\n" + LOAD, {}),
    (driver, RELEASE, "", {}),
    (driver, "    if synced is None:\n        return False\n", "", {"focus": ("break", "resets")}),
    (driver, "        driver.calls.enter()\n", "", {"focus": ("resets", "break")}),
    (
        driver,
        "if view not in (self.state_machine.view, self.state_machine.pending):",
        "if False:",
        {"focus": ("resets", "break")},
    ),
    (driver, "_enter_view(driver, round_, position, view)", "_enter_view(driver, 0, position, view)", {}),
    (driver, 'if self.state_machine.phase != "stopped" and condition():', "if True:", {}),
)
