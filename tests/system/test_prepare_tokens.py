"""`farandole data prepare --tokens`: each document's ids once and in order, whatever is killed meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from farandole.data.tokens import Tokens
from tests.support.harness import ENVIRON, FARANDOLE
from tests.support.leavings import group_lives
from tests.support.lines import naming
from tests.support.token_files import ENCODING, write_lines

pytestmark = pytest.mark.processes

SIZE = "65536"  # bytes a shard: the least
END = 256


def command(source: Path, target: Path | str, *options: str) -> list[str]:
    start = [*FARANDOLE, "data", "prepare", str(source), str(target), "--shard-size", SIZE]
    return [*start, *(options if "--tokens" in options else ("--tokens", "bytes", *options))]


def run(source: Path, target: Path | str, *options: str, code: int = 0, **environ: str) -> str:
    done = subprocess.run(
        command(source, target, *options), env={**ENVIRON, **environ}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".json")}


def stream(folder: Path | str) -> list[int]:
    """All ids, by way of the dataset."""
    inputs, targets = Tokens(folder, Tokens(folder, 1).tokens - 1)[0]
    return [*inputs.tolist(), int(targets[-1])]


def ids(*texts: str) -> list[int]:
    return [each for text in texts for each in (*text.encode(), END)]


def lines(count: int) -> list[str]:
    """Of lengths from 0 on, with letters of one, two and four bytes."""
    return [f"{number} née 🦆 " * (number % 7) for number in range(count)]


# --- what becomes of texts --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_kind_of_file_in_the_order_of_its_path(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_lines(source / "b.jsonl", ["in b", "", "née"])
    (source / "a").mkdir()
    (source / "a" / "one.txt").write_bytes("two\r\nlines, 🦆\n".encode())
    (source / "a" / "zip.txt.gz").write_bytes(gzip.compress(b"packed"))
    (source / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\r\n\n{"text": "y"}'))
    (source / "empty.txt").touch()
    (source / "notes.md").write_text("not taken")
    output = run(source, tmp_path / "target")
    assert "5 texts" in output
    assert "1 files" in output
    assert naming(output, "6 documents", "1 shards")
    assert stream(tmp_path / "target") == ids("in b", "née", "x", "y", "two\r\nlines, 🦆\n", "packed")
    index = json.loads((tmp_path / "target" / "index.json").read_text())
    facts = ("dtype", "vocabulary", "end_of_document", "tokenizer", "documents")
    assert [index[name] for name in facts] == ["uint16", 257, END, "bytes", 6]


@pytest.mark.long
def test_a_field_of_another_name_and_lines_of_a_text(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "source" / "a.jsonl", ["one", "two"], "content").parent
    (source / "b.txt").write_text("three\n\nfour\n")
    run(source, tmp_path / "target", "--field", "content", "--lines")
    assert stream(tmp_path / "target") == ids("one", "two", "three", "four")


# --- whatever is killed -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.failure(
    "Data and loader processes",
    "`data prepare --tokens` is killed",
    seen="nothing",
    outcome="the same command continues, and ends with the same bytes",
)
def test_kill_9_in_the_middle_and_again(tmp_path: Path) -> None:
    texts = lines(40_000)
    source = write_lines(tmp_path / "source" / "a.jsonl", texts).parent
    expected, target = tmp_path / "expected", tmp_path / "target"
    run(source, expected)
    total = len(list(expected.glob("*.bin")))
    assert total > 50

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
    before = {stem: (target / f"{stem}.bin").stat().st_ino for stem in finished}

    output = run(source, target, "--processes", "2")
    assert naming(output, f"{total - len(finished)} made", f"{len(finished)} kept")
    assert before == {stem: (target / f"{stem}.bin").stat().st_ino for stem in finished}
    assert contents(target) == contents(expected)
    assert stream(target) == ids(*(text for text in texts if text))


@pytest.mark.long
def test_only_what_changed_or_broke_is_made_again(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for number in range(6):
        (source / f"{number}.txt").write_text(f"{number}" * 50_000)
    run(source, target)
    expected = contents(target)
    damaged = bytearray(expected["shard-000002.bin"])
    damaged[7] ^= 1
    (target / "shard-000002.bin").write_bytes(damaged)
    (target / "shard-000004.bin").unlink()
    os.utime(source / "0.txt", (1, 1))
    assert naming(run(source, target), "3 made", "3 kept")
    found = contents(target)
    assert {name for name in expected if expected[name] != found[name]} == {"shard-000000.json"}
    assert naming(run(source, target, "--vocabulary", "300"), "6 made", "0 kept")
    assert Tokens(target, 10).vocabulary == 300


@pytest.mark.long
def test_parts_on_several_machines_make_what_one_makes(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "source" / "a.jsonl", lines(3000)).parent
    expected, target = tmp_path / "expected", tmp_path / "target"
    run(source, expected)
    copy = shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)  # with times of its own
    total = len(list(expected.glob("*.bin")))
    assert total >= 3
    others = len([n for n in range(total) if n % 2 == 0])
    assert f"{others} shards" in run(copy, target, "--part", "2/2")
    assert not (target / "index.json").exists()
    run(source, target, "--part", "1/2")
    found, one = contents(target), contents(expected)
    assert {name: found[name] for name in found if "shard" not in name or ".bin" in name} == {
        name: one[name] for name in one if "shard" not in name or ".bin" in name
    }


@pytest.mark.world
@pytest.mark.usefixtures("s3")
def test_to_s3_and_once_more(tmp_path: Path) -> None:
    texts = [text for text in lines(3000) if text]
    source = write_lines(tmp_path / "source" / "a.jsonl", texts).parent
    assert " 0 kept)" in run(source, "s3://bucket/some/where")
    assert "(0 made, " in run(source, "s3://bucket/some/where")
    tokens = Tokens("s3://bucket/some/where", 100, cache=tmp_path / "cache")
    assert tokens[0][0].tolist() == ids(*texts)[:100]


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_tiktoken(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    (tmp_path / "modules" / "tiktoken_ext").mkdir(parents=True)
    (tmp_path / "modules" / "tiktoken_ext" / "small.py").write_text(ENCODING)
    source = write_lines(tmp_path / "source" / "a.jsonl", ["abc", "<|endoftext|>"]).parent
    path = os.pathsep.join([str(tmp_path / "modules"), ENVIRON.get("PYTHONPATH", "")])
    output = run(source, tmp_path / "target", "--tokens", "tiktoken:small", PYTHONPATH=path)
    assert naming(output, "uint32", "70001")
    assert stream(tmp_path / "target") == [256, ord("c"), 70_000, *b"<|endoftext|>", 70_000], "no document ends itself"
    output = run(source, tmp_path / "target", "--tokens", "tiktoken:large", PYTHONPATH=path, code=2)
    assert "Unknown encoding large" in output


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "?": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    made.add_tokens(["far"])
    made.enable_truncation(2)
    made.enable_padding(length=5)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.long
def test_tokenizer_json(tokenizer_json: Path, tmp_path: Path) -> None:
    """Nothing is cut, padded or added, whatever it asks for."""
    source = write_lines(tmp_path / "source" / "a.jsonl", ["a b a b", "b </s> a", "far"]).parent
    run(source, tmp_path / "target", "--tokens", str(tokenizer_json))
    assert stream(tmp_path / "target") == [0, 1, 0, 1, 3, 1, 2, 0, 3, 4, 3]
    run(source, tmp_path / "target", "--tokens", str(tokenizer_json), "--end", "?")
    assert stream(tmp_path / "target") == [0, 1, 0, 1, 2, 1, 2, 0, 2, 4, 2]
    tokens = Tokens(tmp_path / "target", 1)
    assert (tokens.tokenizer, tokens.vocabulary) == ("tokenizer.json", 5)
    assert "--end <x>: " in run(source, tmp_path / "target", "--tokens", str(tokenizer_json), "--end", "<x>", code=2)


@pytest.mark.failure(
    "Data and loader processes",
    (
        "a text for `data prepare --tokens` is not UTF-8, lacks its field, is truncated, or has an ID beyond the "
        "vocabulary"
    ),
)
def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tokenizer_json: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "source" / "a.jsonl", ["a b", "a far", "far"]).parent
    output = run(source, tmp_path / "target", "--tokens", str(tokenizer_json), "--vocabulary", "4", code=1)
    place = len('{"id": 0, "text": "a b"}\n')
    assert "2 documents" in output
    assert naming(output, "a.jsonl", f"byte {place}", "token 1", "4")
    assert not (tmp_path / "target" / "index.json").exists()


def test_what_a_tokenizer_can_not_encode_is_named(tokenizer_json: Path, tmp_path: Path) -> None:
    tokenizer_json.write_text(tokenizer_json.read_text().replace('"unk_token": "?"', '"unk_token": "none"'))
    source = write_lines(tmp_path / "source" / "a.jsonl", ["c"]).parent
    output = run(source, tmp_path / "target", "--tokens", str(tokenizer_json), code=1)
    assert naming(output, "a.jsonl", "byte 0", "tokenizer.json", "WordLevel")


@pytest.mark.parametrize("name", ["tiktoken", "tokenizers"])
def test_a_package_that_is_missing_is_named_with_its_remedy(tmp_path: Path, name: str) -> None:
    source = write_lines(tmp_path / "source" / "a.jsonl", ["a"]).parent
    hide = tmp_path / "hidden"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name == {name!r} else find(name, *a)\n"
    )
    path = os.pathsep.join([str(hide), ENVIRON.get("PYTHONPATH", "")])
    which = "tiktoken:gpt2" if name == "tiktoken" else str(tmp_path / "x.json")
    output = run(source, tmp_path / "target", "--tokens", which, code=2, PYTHONPATH=path)
    assert naming(output, name, "pip install ", "[tokens]")


# --- what can't be ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.failure(
    "Data and loader processes",
    (
        "a text for `data prepare --tokens` is not UTF-8, lacks its field, is truncated, or has an ID beyond the "
        "vocabulary"
    ),
    seen="the number of such documents, and the positions of the first 20",
    outcome="exit code 1; no index is written; shards without such documents are kept",
)
def test_documents_that_can_not_be_used_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_lines(source / "a.jsonl", ["good"])
    (source / "b.jsonl").write_bytes(b'{"text": "x"}\n{"body": "y"}\n[1]\n{"text": 3}\n' + b"{}\n" * 30)
    (source / "c.txt").write_bytes(b"caf\xe9")
    (source / "d.txt.gz").write_bytes(gzip.compress(b"cut" * 1000)[:-9])
    output = run(source, tmp_path / "target", code=1)
    assert "35 documents" in output
    assert naming(output, f"{source}/b.jsonl", "byte 14", "'text'", "body")
    assert naming(output, f"{source}/b.jsonl", "byte 28", "`object`", "`array`")
    assert "15 more" in output
    (source / "b.jsonl").unlink()
    output = run(source, tmp_path / "target", code=1)
    assert naming(output, f"{source}/c.txt", "byte 0", "UTF-8", "byte 3")
    assert naming(output, f"{source}/d.txt.gz", "byte 0", "Compressed file")
    assert not (tmp_path / "target" / "index.json").exists()


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("source", "target", ["--tokens", "words"], "--tokens words: bytes, tiktoken:NAME"),
        ("source", "target", ["--end", "x"], "--end x: "),
        ("source", "target", ["--vocabulary", "256"], "--vocabulary 256: the end of a document is 256 in bytes"),
        ("source", "target", ["--vocabulary", "-1"], "--vocabulary -1: "),
        ("source", "target", ["--short-side", "9"], "--short-side: "),
        ("source", "target", ["--tokens", "", "--lines"], "--lines: "),
        ("source", "source/target", [], "lies in"),
        ("nowhere", "target", [], "nowhere: No such file or directory"),
        ("empty", "target", [], "hold no document that is not empty"),
        ("bare", "target", [], "holds no texts as FILE.txt or FILE.jsonl"),
    ],
)
def test_what_can_not_be_is_said(tmp_path: Path, source: str, target: str, options: list[str], message: str) -> None:
    write_lines(tmp_path / "source" / "a.jsonl", ["a"])
    write_lines(tmp_path / "empty" / "a.jsonl", [""])
    (tmp_path / "bare").mkdir()
    assert message in " ".join(run(tmp_path / source, tmp_path / target, *options, code=2).split())
