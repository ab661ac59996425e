"""Runs of real processes whose loss becomes NaN: it is told at once, the last finite checkpoint stays, and with
`--stop-on-nan` the run ends before the update that would have made the weights useless.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.checkpoint.store import Store
from tests.jobs import ending
from tests.support.endings import SCRIPT, by_itself, ended, fingerprint_of, status
from tests.support.harness import Elastic
from tests.support.lines import naming

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]

NAN_AT = 5
STEPS = ending.EPOCHS * ending.STEPS_AN_EPOCH


def started(folder: Path, *arguments: str, options: list[str]) -> Elastic:
    pace = folder.with_name("pace")
    pace.touch()  # one checkpoint is written before the next one is due
    return Elastic(
        folder, SCRIPT, str(folder.with_name("out")), "--pace", str(pace), *arguments, workers=2,
        options=["--min", "2", *options],
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.failure(
    "The training loop",
    "the loss becomes NaN or infinite",
    seen="`THE LOSS OF STEP N IS NAN` at the end of the step, once for each change from finite",
    outcome=(
        "training continues; the newest finite checkpoint is kept; events and `farandole status` mark later states as "
        "not finite"
    ),
)
@pytest.mark.failure(
    "The training loop",
    "a run resumes from a checkpoint that is not finite",
    seen="`ITS STATE IS NOT FINITE` at the resume, with the path of the last finite checkpoint",
    outcome="training continues; `--resume` of that path in another folder starts before the problem",
)
def test_it_is_told_at_once_and_the_last_finite_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, "--nan-at", str(NAN_AT), options=["--checkpoint-every", "2steps", "--keep", "2"]) as run:
        run.finish()
        (event,) = run.events("not finite")
        assert (event["step"], event["loss"]) == (NAN_AT, "nan")
        assert naming(run.output.read_text(), f"STEP {NAN_AT}", "NAN")
        assert naming(run.output.read_text(), run.events("saved")[0]["path"], "FINITE")
        assert not run.events("saved")[0]["finite"]
        written = [event["step"] for event in run.events("checkpoint") if event.get("finite", True)]
    store = Store(str(folder / "checkpoints"))
    *bad, good = store.entries()
    assert [store.manifest(entry.stem).finite for entry in bad] == [False, False]
    assert good.step == max(written) <= NAN_AT
    assert store.manifest(good.stem).finite
    assert "FINITE" in status(folder)
    with started(folder, "--epochs", "3", options=[]) as run:
        run.finish()
        (resumed,) = run.events("resumed")
        assert (resumed["finite"], resumed["last_finite"]) == (False, store.place(good.stem))
        assert naming(run.output.read_text(), resumed["path"], resumed["last_finite"])
        assert run.events("not finite") == [], "it was before"
    with started(tmp_path / "again", options=["--resume", resumed["last_finite"]]) as run:
        run.finish()
        assert run.events("finished")[0]["fingerprint"] == by_itself(tmp_path / "one")
        assert "finite" not in run.events("saved")[0]


@pytest.mark.long
@pytest.mark.failure(
    "The training loop",
    "the loss becomes NaN or infinite, with `--stop-on-nan`",
    seen="`THE LOSS OF STEP N IS NAN` at the end of the step",
    outcome="all workers stop before the update; the state of that step is the last checkpoint; exit code 1",
)
def test_stop_on_nan_ends_the_run_on_everyone_with_the_state_before_that_step(tmp_path: Path) -> None:
    with started(
        tmp_path / "run", "--nan-at", str(NAN_AT), options=["--stop-on-nan", "--checkpoint-every", "never"]
    ) as run:
        assert ended(run) == 1, run.report()
        output = run.output.read_text()
        assert naming(output, "error: ", f"step {NAN_AT}", "nan")
        assert "Traceback" not in run.report()
        assert run.step == NAN_AT - 1
        assert not list(tmp_path.glob("out*")), "no worker got beyond its loop"
        (saved,) = run.events("saved")
        assert saved["whole"]
        assert fingerprint_of(saved["path"]) == by_itself(tmp_path / "early", "--break-at", str(NAN_AT - 1))
        assert Store(str(tmp_path / "run" / "checkpoints")).entries()[0].step == NAN_AT
