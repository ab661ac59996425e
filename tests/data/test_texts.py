"""Texts in pieces: each document once and in order, wherever a file is cut."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.prepare.tokens import NoText, TextFormat, documents, listing


def read(path: Path, reading: TextFormat, piece_bytes: int = 1 << 20) -> list[tuple[int, str]]:
    listed = listing(path, reading, piece_bytes)
    found = [each for piece in listed.pieces for each in documents(listed.folder, piece, reading)]
    return [(place, str(text) if isinstance(text, NoText) else text) for place, text in found]


LINES = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=9), min_size=1)


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.integers(1, 40))
def test_a_file_of_lines_is_cut_anywhere_and_each_is_there_once(
    lines: list[str], newline: str, ended: bool, piece_bytes: int
) -> None:
    content = (newline.join(lines) + newline * ended).encode()
    if not content:
        return
    expected, place = [], 0
    for line in lines:
        if line:
            expected.append((place, line))
        place += len((line + newline).encode())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines.txt")
        path.write_bytes(content)
        assert read(path, TextFormat(lines=True), piece_bytes) == expected


def test_what_is_one_document_or_packed_is_one_piece(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"two\r\nlines\n")
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"a\n\nb\n"))
    assert read(tmp_path / "one.txt", TextFormat(), 1) == [(0, "two\r\nlines\n")]
    assert read(tmp_path / "packed.txt.gz", TextFormat(lines=True), 1) == [(0, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[1]", "Expected `object`"),
        (b"{", "truncated"),
        (b"[" * 100_000, "recursion|nested|truncated|Expected"),
        (b'{"text": 1, "b": 2}', r"'text'.*\bb, text\b"),
        (b"{}", r"'text'"),
        (rb'{"text": "\udc00"}', "surrogate"),
        (b'{"text": "\xff"}', "utf-8|UTF-8"),
    ],
)
def test_a_line_without_its_text_says_so(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' + line + b'\n{"text": "y"}')
    first, bad, last = read(tmp_path / "a.jsonl", TextFormat())
    assert (first, last) == ((0, "x"), (15 + len(line), "y"))
    assert bad[0] == 14
    with pytest.raises(NoText, match=said):
        raise NoText(bad[1])
