"""Tokens: which windows, each target once, the same bits however they are gathered, and bad files by their names."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import farandole
from farandole.data import cache_folder
from farandole.data.loader import Loader
from farandole.data.tokens import Tokens
from farandole.errors import ShardError, UsageError
from farandole.plan.batch import GlobalBatch
from tests.support.drawing import keys, same
from tests.support.file_server import FileServer
from tests.support.token_files import VOCABULARY, some_ids, token_shards

BATCH = GlobalBatch(size=8, micro=4)
LENGTHS = (70, 1, 2, 40, 7)  # of shards: a window of 10 + 1 may lie in four of them
STREAM = some_ids(sum(LENGTHS))


def cut(stream: list[int], lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    left = iter(stream)
    return [[next(left) for _ in range(length)] for length in lengths]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return token_shards(tmp_path / "tokens", cut(STREAM))


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 10, 59, 119])
def test_a_sample_is_its_window_of_the_stream(tmp_path: Path, width: int, length: int) -> None:
    tokens = farandole.Tokens(token_shards(tmp_path, cut(STREAM), width), length)
    assert len(tokens) == 119 // length
    for index in range(len(tokens)):
        inputs, targets = tokens[index]
        begin = index * length
        assert (inputs.tolist(), targets.tolist()) == (
            STREAM[begin : begin + length],
            STREAM[begin + 1 : begin + length + 1],
        )
        assert (inputs.dtype, inputs.shape, targets.dtype, targets.shape) == (torch.int64, (length,)) * 2
    assert torch.equal(tokens[-1][0], tokens[len(tokens) - 1][0])
    for outside in (len(tokens), -len(tokens) - 1):
        with pytest.raises(IndexError, match=f"sample {outside} of {len(tokens)}"):
            tokens[outside]


@pytest.mark.parametrize("length", [7, 10, 119])
def test_an_epoch_has_each_token_as_a_target_once_but_those_that_are_said(tmp_path: Path, length: int) -> None:
    stream = list(range(120))
    tokens = Tokens(token_shards(tmp_path, cut(stream)), length)
    loader = Loader(tokens, BATCH, seed=3)
    seen = Counter(chain.from_iterable(loader.fetch(key)[1].flatten().tolist() for key in keys(loader)))
    assert seen == Counter(stream[1 : 120 - tokens.left_out])
    assert 0 <= tokens.left_out < length


def test_it_says_what_the_index_does(folder: Path) -> None:
    tokens = Tokens(folder, 10)
    assert (tokens.tokens, tokens.vocabulary, tokens.end_of_document, tokens.documents) == (120, VOCABULARY, 0, 1)
    assert (tokens.tokenizer, tokens.left_out) == ("by hand", 9)


# --- gathered ---------------------------------------------------------------------------------------------------------


class OneByOne(Dataset[Any]):
    """The same samples, without `gather`."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getattr__(self, name: str) -> Any:  # as wrappers do
        return getattr(self.__dict__["inner"], name)


SUBSETS: dict[str, Callable[[Dataset[Any]], Dataset[Any]]] = {
    "all": lambda tokens: tokens,
    "subset": lambda tokens: Subset(tokens, [5, 2, 9, 9, 0]),
    "of a subset": lambda tokens: Subset(Subset(tokens, range(1, 9)), np.array([6, 0, 3])),  # type: ignore[arg-type]
    "negative": lambda tokens: Subset(tokens, [-1, 3]),
    "by tensor": lambda tokens: Subset(tokens, torch.tensor([4, 1])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("subset", SUBSETS.values(), ids=SUBSETS)
def test_gathering_changes_nothing(folder: Path, subset: Callable[[Any], Any]) -> None:
    """The same bits, types, strides and container as sample by sample; and aligned."""
    dataset = subset(Tokens(folder, 10))
    fast, slow = Loader(dataset, BATCH, seed=5), Loader(OneByOne(dataset), BATCH, seed=5)
    for key in keys(fast, epochs=2):
        a, b = fast.fetch(key), slow.fetch(key)
        assert type(a) is type(b) is list
        assert same(a, b)
        assert [x.dtype for x in a] == [x.dtype for x in b]
        assert all(x.data_ptr() % 64 == 0 for x in a)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_loader_processes_give_the_same(folder: Path, make: Callable[..., Loader], method: str) -> None:
    tokens = Tokens(folder, 10)
    alone, helped = make(tokens, BATCH, num_workers=0), make(tokens, BATCH, multiprocessing_context=method)
    helped.expect(keys(helped))
    for key in keys(alone):
        expected, batch = alone.fetch(key), helped.fetch(key)
        assert same(expected, batch)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in batch)


@pytest.mark.parametrize("outside", [-1, 11])
def test_samples_that_are_none_are_not_gathered(folder: Path, outside: int) -> None:
    with pytest.raises(IndexError, match=rf"samples \[3, {outside}\] of 11"):
        Tokens(folder, 10).gather(np.array([3, outside]))


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "said"), [(0, "length=0"), (120, "length=120.*120 tokens"), (-3, "length=-3")])
def test_a_length_that_does_not_fit_is_refused(folder: Path, length: int, said: str) -> None:
    with pytest.raises(UsageError, match=rf"{said}.*\b1\b.*\b119\b"):
        Tokens(folder, length)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[6] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0")


@pytest.mark.failure(
    "Data and loader processes",
    (
        "a token shard is missing, has another length or other bytes, or holds an ID beyond the vocabulary; an index "
        "contradicts itself"
    ),
    seen=(
        "`ShardError` with the shard when `farandole.Tokens` is created; for an ID with its position, when the sample "
        "is read"
    ),
    outcome="the script fails, exit code 1",
)
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("do", "said"), [(Path.unlink, ""), (lengthen, "bytes"), (flip, "MD5")])
def test_a_shard_that_is_not_what_it_should_be_is_named_before_training(
    folder: Path, tmp_path: Path, do: Any, said: str, remote: bool
) -> None:
    do(folder / "3.bin")
    with FileServer(folder) as server:
        url = server.url if remote else str(folder)
        if remote and do is lengthen:  # no more of it is taken than the index says, and that is what it should be
            assert len(Tokens(url, 10, cache=tmp_path / "cache")) == len(Tokens(url, 10, cache=tmp_path / "cache"))
            return
        with pytest.raises(ShardError, match=rf"{url}/3\.bin\b.*{said}"):
            Tokens(url, 10, cache=tmp_path / "cache")


def test_more_shards_than_descriptors_is_said(tmp_path: Path) -> None:
    folder = token_shards(tmp_path, [[1]] * 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))
    try:
        with pytest.raises(ShardError, match=rf"\.bin\b.*{os.strerror(errno.EMFILE)}"):
            Tokens(folder, 10, verify=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_verifying_lengths_alone_are_compared(folder: Path) -> None:
    flip(folder / "3.bin")
    assert len(Tokens(folder, 10, verify=False)) == 11
    lengthen(folder / "3.bin")
    with pytest.raises(ShardError, match=r"\b3\.bin\b.*\b82 bytes.*\b80\b"):
        Tokens(folder, 10, verify=False)


def test_what_was_compared_is_not_compared_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the next process, which finds a note; nor by one that it was sent to, where no note can be."""
    tokens = Tokens(folder, 10)
    expected = tokens[3]
    reads: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *of: (reads.append(of[1]), pread(*of))[1])
    Tokens(folder, 10)
    forget(folder)
    again = pickle.loads(pickle.dumps(tokens))
    assert same(again[3], expected)
    assert reads == []
    forget(folder)
    Tokens(folder, 10)
    assert reads


def forget(folder: Path) -> None:
    for note in folder.glob(f"*{cache_folder.NOTE}"):
        note.unlink()


@pytest.mark.failure(
    "Data and loader processes",
    (
        "a token shard is missing, has another length or other bytes, or holds an ID beyond the vocabulary; an index "
        "contradicts itself"
    ),
)
def test_an_id_that_is_none_is_named_with_its_place(tmp_path: Path) -> None:
    """The index vouches for the bytes, and says less of the vocabulary than there is."""
    ids = [5] * 30
    ids[16] = 9
    folder = token_shards(tmp_path, [ids[:10], ids[10:]], vocabulary=9)
    tokens = Tokens(folder, 4)
    tokens.gather(np.array([0, 1, 2, 5]))
    for sample in (3, 4):  # of which it is the last target, and the first input
        with pytest.raises(ShardError, match=r"\b1\.bin\b.*\b6\b.*\b9\b.*\bvocabulary\b.*\b9\b"):
            tokens.gather(np.array([0, sample]))
    loader = Loader(tokens, BATCH, seed=0, shuffle=False, on_bad_sample="skip")
    with pytest.raises(ShardError, match=r"\b1\.bin\b.*\b6\b.*\b9\b"):
        loader.fetch(keys(loader)[0])


@pytest.mark.failure(
    "Data and loader processes",
    (
        "a token shard is missing, has another length or other bytes, or holds an ID beyond the vocabulary; an index "
        "contradicts itself"
    ),
)
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"vocabulary": 65537}, r"vocabulary 65537 .*\buint16\b.*2\^16"),
        ({"vocabulary": 0}, "vocabulary 0 "),
        ({"end_of_document": VOCABULARY}, f"end_of_document {VOCABULARY} .* {VOCABULARY}"),
        ({"end_of_document": -1}, "end_of_document -1 "),
        ({"dtype": "float32"}, r"'float32'.*`\$\.dtype`"),
        ({"dtype": "uint32"}, "filesize 140 .*0.bin .*nsamples=70 .*4 bytes"),
        ({"nsamples": 71}, "filesize 140 .*0.bin .*nsamples=71 "),
        ({"nsamples": 0, "filesize": 0}, "filesize 0 .*0.bin "),
        ({"url": "1.bin"}, "'1.bin' .*shardlist"),
        ({"url": "../1.bin"}, "'../1.bin' "),
        ({"shardlist": []}, "shardlist"),
        ({"__kind__": "wids-shard-index-v1"}, r"'wids-shard-index-v1'.*`\$\.__kind__`"),
    ],
)
def test_an_index_that_claims_what_can_not_be_is_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    folder = token_shards(tmp_path, cut(STREAM), **said)
    with pytest.raises(ShardError, match=rf"{folder}/index\.json\b.*{message}"):
        Tokens(folder, 10)


@pytest.mark.parametrize("content", [None, b"{", b"[" * 100_000, b"\xff\xfe", b'{"shardlist": []}'])
def test_an_index_that_is_none_is_said_to_be_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ShardError, match=rf"{tmp_path}/index\.json\b"):
        Tokens(tmp_path, 10)


# --- elsewhere --------------------------------------------------------------------------------------------------------


def test_shards_of_elsewhere_are_copied_here_whole(folder: Path, tmp_path: Path) -> None:
    expected = Tokens(folder, 10)
    with FileServer(folder) as server:
        with pytest.raises(UsageError, match=r"\b240 bytes.*\b239\b"):
            Tokens(server.url, 10, cache=tmp_path / "cache", cache_bytes=239)
        tokens = Tokens(server.url, 10, cache=tmp_path / "cache")
    everything = np.arange(11)
    assert same(tokens.gather(everything), expected.gather(everything))
    assert same(pickle.loads(pickle.dumps(tokens)).gather(everything), expected.gather(everything))
