"""Real runs whose script is edited meanwhile: all execute what the run began with, or are refused, or it is told."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone
from tests.support.lines import naming

JOBS = Path(__file__).parents[1] / "jobs"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]


class Project:
    """A script and its module in a folder of their own, to be edited."""

    def __init__(self, place: Path) -> None:
        self.folder, self.out, self.pace = place / "project", place / "out", place / "pace"
        self.script, self.module = self.folder / "split.py", self.folder / "split_net.py"
        for folder in (self.folder, self.out):
            folder.mkdir()
        for file in (self.script, self.module):
            shutil.copy(JOBS / file.name, file)
        self.pace.write_text("0.5")

    @property
    def job(self) -> tuple[str, ...]:
        return str(self.out), "--pace", str(self.pace)

    def edit(self, file: Path, old: str, new: str) -> None:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def prints(self) -> set[str]:
        return {path.read_text() for path in self.out.glob("end-*")}

    def external_worker(self, run: Elastic) -> subprocess.Popen[str]:
        command = [*FARANDOLE, "join", str(run.folder / "ticket"), str(self.script), *self.job]
        return subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def undisturbed(project: Project, place: Path, *arguments: str) -> str:
    place.mkdir()
    alone(place / "folder", project.script, str(place), *arguments)
    [end] = place.glob("end-*")
    return end.read_text()


@pytest.mark.long
@pytest.mark.failure(
    "Other code than the run's",
    "the script or a module of its folder is edited, renamed or deleted while a run trains, and a worker is replaced",
    seen="nothing: workers execute copies in the folder of the run, under `code/`",
    outcome=(
        "the same bits as without the edit; `__file__`, the working folder and tracebacks are those of the originals"
    ),
)
@pytest.mark.failure(
    "Other code than the run's",
    "an external worker has another script, another module of the script's folder, or another farandole than the run",
    seen="an event `refused`, on both sides, with the names of the differences",
    outcome="the exit code of `farandole join` is 1; the run continues without the worker",
)
@pytest.mark.failure(
    "Other code than the run's",
    "a run is replayed after its script was edited",
    seen="nothing: `farandole replay` executes the copies of the run; a warning if you name another script",
    outcome="the bits of the run; with another script other bits, exit code 1",
)
def test_a_replacement_executes_what_the_run_began_with_and_an_external_worker_of_other_code_is_refused(
    project: Project, tmp_path: Path
) -> None:
    expected = undisturbed(project, tmp_path / "alone")
    with Elastic(tmp_path / "run", project.script, *project.job, workers=2, options=[]) as run:
        run.until_members(2)
        run.until_step(2)
        project.edit(project.script, "RATE = 0.01", "RATE = 0.03")
        project.edit(project.module, "DROPOUT = 0.2", "DROPOUT = 0.5")
        victim = run.members[1]
        run.signal(victim, signal.SIGKILL)
        run.until_members(2, without=(victim,))
        with project.external_worker(run) as external_worker:
            run.until(lambda: external_worker.poll() is not None, "the guest's end")
            assert external_worker.stdout
            said = external_worker.stdout.read()
        assert external_worker.returncode == 1
        [refused] = run.events("refused")
        assert all(value in refused["reason"] for value in ("script split.py", "module split_net", "code/"))
        assert refused["reason"] in said
        project.pace.unlink()
        run.finish()
        assert [(event["equal"], event["fingerprint"]) for event in run.events("finished")] == [(True, expected)]
    assert project.prints() == {expected}
    seen = [json.loads(path.read_text()) for path in project.out.glob("seen-*")]
    script, folder = str(project.script), str(project.folder)
    assert seen == 4 * [[script, script, folder, str(Path.cwd()), str(project.module)]]
    assert expected in replayed(run.folder, 0)
    told = replayed(run.folder, 1, script, *project.job)
    assert naming(told, "warning: ", script, run.folder / "code")
    assert expected in (fingerprints := {*re.findall(r"\b[0-9a-f]{64}\b", told)})
    assert len(fingerprints) == 2


def replayed(folder: Path, code: int, *named: str) -> str:
    command = [*FARANDOLE, "replay", str(folder), *named]
    done = forked.run(command, env=ENVIRON, timeout=90)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.failure(
    "Other code than the run's",
    "an external worker has other code, in a run with `--other-code`",
    seen="`ITS CODE DIFFERS`, with the worker and the differences",
    outcome="it is admitted; the bits may differ",
)
@pytest.mark.failure(
    "Other code than the run's",
    "a run resumes with an edited script",
    seen="an event names the changed files, and says that the bits may differ",
    outcome="the edited script is executed",
)
def test_by_option_other_code_is_let_in_and_on_resuming_the_edited_file_counts(
    project: Project, tmp_path: Path
) -> None:
    with Elastic(tmp_path / "run", project.script, *project.job, workers=1, options=["--other-code"]) as run:
        run.until_step(1)
        project.edit(project.script, "RATE = 0.01", "RATE = 0.01  # edited")
        with project.external_worker(run) as external_worker:
            run.until_members(2)
            run.command("stop")
            run.until(lambda: run.process.poll() is not None, "the end")
            assert external_worker.wait(200) == run.process.returncode == 0
        assert [(event["worker"], event["what"]) for event in run.events("other code")] == [
            ("guest-1", ["script split.py"])
        ]
    project.pace.unlink()
    with Elastic(tmp_path / "run", project.script, *project.job, workers=1, options=[]) as run:
        run.finish()
        assert [event["files"] for event in run.events("code edited")] == [["split.py"]]
        [resumed] = run.events("resumed")
        [difference] = resumed["differences"]
        assert "script split.py" in difference
        assert naming(run.output.read_text(), "split.py")
    assert "# edited" in (tmp_path / "run" / "code" / "split.py").read_text()


@pytest.mark.failure(
    "Other code than the run's",
    "the script is edited while a run trains with loader processes that are spawned",
    seen="nothing: loader processes execute the copies too",
    outcome="the same bits as without the edit",
)
@pytest.mark.long
def test_a_spawned_loader_process_executes_the_copy_too(project: Project, tmp_path: Path) -> None:
    """Its worker and the copy are all that is left: the folder of the script is gone."""
    expected = undisturbed(project, tmp_path / "alone", "--spawn")
    with Elastic(tmp_path / "run", project.script, *project.job, "--spawn", workers=1, options=[]) as run:
        run.until_step(1)
        shutil.rmtree(project.folder)
        run.signal("w1", signal.SIGKILL)
        run.until(lambda: "w2" in run.members, "a replacement")
        project.pace.unlink()
        run.finish()
    assert project.prints() == {expected}
