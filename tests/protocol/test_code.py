"""Who executes other code than the run is not let in, or is let in and it is told; what that is, as a table."""

from __future__ import annotations

import pytest

from farandole.observe.text import describe
from farandole.protocol import messages as m
from farandole.protocol.difference import in_words, other_code
from farandole.protocol.events import CodeEditedEvent
from tests.support.mentioned import mentions
from tests.support.scene import FACTS, Scene

SCRIPT, OWN = ("script train.py", "a1"), ("farandole's code", "f1")
NET = ("module net", "b1")
CODE = (SCRIPT, OWN)
MINE = (*FACTS, SCRIPT, NET, OWN)


@pytest.mark.parametrize(
    ("theirs", "names"),
    [
        (MINE, []),
        ((*FACTS, SCRIPT, OWN), []),  # it has not imported the module
        ((*MINE, ("module more", "c1")), []),  # it has imported another one too
        ((*FACTS, ("script copied.py", "a1"), NET, OWN), []),  # the same under another name
        ((*FACTS, ("script copied.py", "a2"), NET, OWN), ["script train.py"]),
        ((*FACTS, ("script train.py", "a2"), ("module net", "b2"), OWN), ["script train.py", "module net"]),
        ((*FACTS, SCRIPT, NET, ("farandole's code", "f2")), ["farandole's code"]),
        (FACTS, []),  # a checkpoint from before there were such facts
    ],
)
def test_what_is_other_code(theirs: tuple[tuple[str, str], ...], names: list[str]) -> None:
    assert other_code(MINE, theirs) == names


def test_many_names_are_counted() -> None:
    said = in_words([f"module m{n}" for n in range(7)])
    assert mentions(said, *(f"module m{n}" for n in range(5)), 2)
    assert not mentions(said, "module m5")


def test_an_external_worker_with_another_script_is_refused_although_it_is_the_first() -> None:
    scene = Scene(code=CODE)
    scene.ready("guest", pool="", facts=(*FACTS, ("script train.py", "a2"), OWN))
    assert scene.last("guest", m.JoinRefused)
    assert mentions(scene.fields["refused"]["reason"], "script train.py", "code")
    scene.ready("a", "b", facts=MINE)
    assert "proposed" in scene.events


def test_a_module_is_compared_with_the_first_workers() -> None:
    scene = Scene(code=CODE)
    scene.ready("a", facts=MINE)
    scene.ready("b", facts=(*FACTS, SCRIPT, ("module net", "b2"), OWN))
    assert mentions(scene.fields["refused"]["reason"], "module net")


@pytest.mark.failure(
    "Other code than the run's",
    "an external worker has another script, another module of the script's folder, or another farandole than the run",
)
def test_an_external_worker_that_is_the_first_waits_and_is_compared_with_the_runs_own_worker() -> None:
    scene = Scene(code=CODE)
    scene.ready("guest", "fast", pool="", facts=MINE)
    scene.ready("other", pool="", facts=(*FACTS, SCRIPT, ("module net", "b2"), OWN))
    assert "ready" not in scene.events
    assert scene.fields["waits"]["worker"] == "other"
    scene.close("fast")
    scene.wait(6, "guest", "other")
    scene.ready("a", facts=MINE)
    assert scene.fields["refused"]["worker"] == "other"
    assert scene.coordinator.workers["guest"].state == "ready"
    assert scene.coordinator.proposed
    assert set(scene.coordinator.proposed.members) == {"a", "guest"}


def test_by_option_it_is_let_in_and_told() -> None:
    scene = Scene(code=CODE, other_code=True)
    scene.ready("guest", pool="", facts=(*FACTS, ("script train.py", "a2"), ("module net", "b2"), OWN))
    assert "other code" not in scene.events
    scene.ready("a", facts=MINE)
    assert scene.fields["other code"] == {"worker": "guest", "what": ["script train.py", "module net"]}
    scene.ready("c", facts=(("torch version", "1.0"), *MINE[1:]))
    assert scene.fields["refused"]["reason"].startswith("torch version")


def test_what_was_edited_since_the_run_was_on_before_is_told_once() -> None:
    scene = Scene(edited=("train.py", "net.py"))
    assert scene.fields["code edited"] == {"files": ["train.py", "net.py"]}
    assert mentions(describe(CodeEditedEvent(files=("train.py", "net.py"))), "train.py", "net.py")
    assert "code edited" not in Scene().events
