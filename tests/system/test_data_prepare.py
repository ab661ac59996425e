"""`farandole data prepare`: the image folder's samples, each once, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from farandole.data.images import ShardedImages
from farandole.data.prepare.images import ImageFile
from farandole.data.prepare.shards import cut
from tests.support.harness import ENVIRON, FARANDOLE
from tests.support.image_files import CLASSES, in_order, make_folder
from tests.support.leavings import group_lives
from tests.support.lines import naming

pytestmark = pytest.mark.processes

SIZE = "65536"  # bytes a shard: the least
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from farandole.cli import main; main()"


def command(source: Path, target: Path | str, *options: str) -> list[str]:
    size = [] if "--shard-size" in options else ["--shard-size", SIZE]
    return [*FARANDOLE, "data", "prepare", str(source), str(target), *size, *options]


def run(source: Path, target: Path | str, *options: str, code: int = 0) -> str:
    done = subprocess.run(
        command(source, target, *options), env=ENVIRON, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tar", ".json")}


def stored(folder: Path | str) -> list[tuple[bytes, int]]:
    images = ShardedImages(folder)
    return [images.read(index) for index in range(len(images))]


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.tar")}


@pytest.mark.long
def test_kill_9_in_the_middle_and_again(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=40, size=(200, 150), suffix=".png")
    expected, target = tmp_path / "expected", tmp_path / "target"
    run(source, expected)
    total = len(list(expected.glob("*.tar")))
    assert total > 100

    process = subprocess.Popen(command(source, target, "--processes", "2"), env=ENVIRON, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(target.glob("shard-*.json"))) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while group_lives(process.pid):  # the kernel ends its processes with it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (target / "index.json").exists()
    finished = {path.stem for path in target.glob("shard-*.json")}
    assert 5 <= len(finished) < total
    before = identities(target)

    output = run(source, target, "--processes", "2")
    assert f"({total - len(finished)} made, {len(finished)} kept)" in output
    after = identities(target)
    assert {name for name in before if after[name] == before[name]} >= {f"{stem}.tar" for stem in finished}
    assert contents(target) == contents(expected)
    assert Counter(stored(target)) == Counter(in_order(source))
    assert set(Counter(stored(target)).values()) == {1}


@pytest.mark.long
def test_only_what_changed_or_broke_is_made_again(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=30, size=(60, 40), suffix=".png")
    target = tmp_path / "target"
    run(source, target)
    expected, before = contents(target), identities(target)
    assert len(before) > 5
    damaged = target / "shard-000002.tar"
    data = bytearray(damaged.read_bytes())
    data[700] ^= 1
    damaged.write_bytes(data)
    (target / "shard-000004.tar").unlink()
    changed = source / "ant" / "000.png"
    os.utime(changed, (1, 1))
    assert f"(3 made, {len(before) - 3} kept)" in run(source, target)
    after = identities(target)
    same = {name for name in before if before[name] == after[name]}
    assert set(before) - same == {"shard-000000.tar", "shard-000002.tar", "shard-000004.tar"}
    found = contents(target)
    assert {n: d for n, d in found.items() if n != "shard-000000.json"} == {
        n: d for n, d in expected.items() if n != "shard-000000.json"
    }


@pytest.mark.long
def test_bad_files_are_all_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=30, size=(60, 40), suffix=".png")
    (source / "ant" / "notes.txt").write_text("no image by its name")
    torn = source / "bee" / "003.png"
    torn.write_bytes(torn.read_bytes()[:400])
    (source / "cat" / "empty.jpg").touch()
    target = tmp_path / "target"
    output = run(source, target, code=1)
    assert "90 images" not in output
    assert naming(output, "91 images", "3 classes", "1 files")
    assert naming(output, "2 of 91 images")
    assert str(torn) in output
    assert str(source / "cat" / "empty.jpg") in output
    assert not (target / "index.json").exists()
    before = identities(target)
    assert len(before) > 0
    torn.unlink()
    (source / "cat" / "empty.jpg").unlink()
    run(source, target)
    assert identities(target)["shard-000000.tar"] == before["shard-000000.tar"]
    assert stored(target) == [sample for sample in in_order(source) if not sample[0].startswith(b"no image")]


def test_the_short_side_is_made_smaller_and_what_is_small_is_left(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=2, size=(40, 30))
    make_folder(tmp_path / "large", each=1, size=(90, 60))
    (tmp_path / "large" / "ant" / "000.jpg").rename(source / "ant" / "large.jpg")
    run(source, tmp_path / "target", "--short-side", "30")
    images = ShardedImages(tmp_path / "target")
    assert Counter(images[index][0].size for index in range(len(images))) == {(40, 30): 6, (45, 30): 1}
    small = [sample for sample in stored(tmp_path / "target") if sample in in_order(source)]
    assert len(small) == 6


def test_torch_takes_seconds_to_start_and_is_left_out(tmp_path: Path) -> None:
    source, target = make_folder(tmp_path / "source", each=2), tmp_path / "target"
    options = ["data", "prepare", str(source), str(target), "--processes", "1"]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *options], env=ENVIRON, check=True, timeout=120)
    assert stored(target) == in_order(source)


@pytest.mark.world
@pytest.mark.usefixtures("s3")
def test_to_s3_and_once_more(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=30, size=(60, 40), suffix=".png")
    assert " 0 kept)" in run(source, "s3://bucket/some/where")
    assert "(0 made, " in run(source, "s3://bucket/some/where")
    images = ShardedImages("s3://bucket/some/where", cache=tmp_path / "cache")
    assert [images.read(index) for index in range(len(images))] == in_order(source)
    assert images.classes == CLASSES


@pytest.mark.long
def test_parts_on_several_machines_make_what_one_makes(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", each=30, size=(60, 40), suffix=".png")
    expected, target = tmp_path / "expected", tmp_path / "target"
    run(source, expected)
    copy = shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)  # with times of its own
    total = len(list(expected.glob("*.tar")))
    assert total > 5

    output = run(copy, target, "--part", "3/3")
    assert f"{len([n for n in range(total) if n % 3 != 2])} shards" in output
    assert not (target / "index.json").exists()
    assert sorted(path.name for path in target.glob("*.tar")) == [f"shard-{n:06d}.tar" for n in range(2, total, 3)]
    at_once = [subprocess.Popen(command(source, target, "--part", f"{k}/3"), env=ENVIRON) for k in (1, 2)]
    assert [process.wait(120) for process in at_once] == [0, 0]
    assert stored(target) == in_order(source)
    tars = [f"shard-{n:06d}.tar" for n in range(total)]
    found, one = contents(target), contents(expected)
    assert {name: found[name] for name in ("index.json", *tars)} == {name: one[name] for name in ("index.json", *tars)}

    (copy / "ant" / "000.png").unlink()
    run(copy, target, "--part", "1/3")
    assert not (target / "index.json").exists(), "those of another listing don't count"


@pytest.mark.long
def test_two_at_once_into_one_folder_are_refused(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    hold = (
        "import sys, filelock\n"
        "with filelock.FileLock(sys.argv[1]):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(target / "prepare.1-1.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert "`farandole data prepare`" in run(source, target, code=2)
        assert holder.stdin is not None
        holder.stdin.close()
    run(source, target)


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("source", "target", ["--shard-size", "many"], "--shard-size many: "),
        ("source", "target", ["--shard-size", "1k"], "--shard-size 1k: at least 65536 bytes"),
        ("source", "target", ["--processes", "0"], "--processes 0"),
        ("source", "target", ["--part", "5/4"], "--part 5/4: "),
        ("source", "target", ["--part", "0/4"], "--part 0/4: "),
        ("source", "target", ["--part", "half"], "--part half: "),
        ("source", "source/ant/target", [], "lies in"),
        ("source/ant", "target", [], "holds no images as CLASS/FILE.jpg"),
        ("nowhere", "target", [], "nowhere: No such file or directory"),
        ("source", "nonsense://x", [], "name a folder or a URL that fsspec knows"),
    ],
)
def test_what_can_not_be_is_said(tmp_path: Path, source: str, target: str, options: list[str], message: str) -> None:
    make_folder(tmp_path / "source", each=2)
    url = target if "://" in target else str(tmp_path / target)
    assert message in " ".join(run(tmp_path / source, url, *options, code=2).split())


def test_shards_are_cut_by_length_and_none_is_empty() -> None:
    files = [ImageFile(f"{n}", 0, size, 0) for n, size in enumerate([5, 5, 5, 30, 1, 9, 10, 1])]
    found = [(first, [file.size for file in chosen]) for first, chosen in cut(files, 10)]
    assert found == [(0, [5, 5]), (2, [5]), (3, [30]), (4, [1, 9]), (6, [10]), (7, [1])]


def test_the_index_is_the_format_s(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source")
    run(source, tmp_path / "target")
    index = json.loads((tmp_path / "target" / "index.json").read_text())
    assert index["__kind__"] == "wids-shard-index-v1"
    assert index["wids_version"] == 1
    assert sum(shard["nsamples"] for shard in index["shardlist"]) == 24
