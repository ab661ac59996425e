"""Token ids in memory-mapped files, as a map-style dataset of windows, for training language models.

All shards form one stream: documents one after the other, each ended by its end-of-document id, packed without padding.
With `length` L, sample i has as inputs the tokens at [i L, i L + L) of the stream and as targets those at
[i L + 1, i L + L + 1), across borders of documents and shards. So an epoch has each token as a target exactly once,
except for the stream's first, which has no predecessor, and the last (tokens - 1) % L, which fill no window: `left_out`
of them, the same ones in every epoch.

Inputs and targets are int64, as embeddings and losses require, and two tensors, each contiguous and aligned: views of
one window of L + 1 would be neither. A micro-batch is gathered at once (`gather`, see `workers.py`): its rows are
copied from the maps as they are stored, and converted to int64 in two calls.

Invariants. Tokens have the index's MD5: all shards are compared when the dataset is made, so before training begins and
not during it. A note beside each shard records this (`cache_folder.py`), so that only one process of a machine spends
the 1.3 s a GB, and a killed one continues where it was. Each id is below the vocabulary, or it is an error that names
its place: on a GPU an embedding would end the process without an explanation.

Left out: windows with other begins in each epoch; masks between documents. Truncating a mapped file ends the process
that reads there (SIGBUS): replace shards, don't write into them. Each map holds one descriptor.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from farandole.data.cache import DEFAULT_FOLDER, Copies, local_path, torn
from farandole.data.cache_folder import Verified
from farandole.data.index import ID_BYTES, read_token_index
from farandole.errors import ShardError, UsageError

_log = logging.getLogger(__name__)


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples `(inputs, targets)`, both int64 of shape `(length,)`; `targets[k]` is the token after `inputs[k]`.

    Attributes:
        length: tokens in a sample.
        tokens: the number of tokens in all shards.
        left_out: the number of targets at the stream's end that fill no window; less than `length`.
        vocabulary: all ids are below it; an embedding needs at least as many rows.
        end_of_document: the id that ends each document.
        documents, tokenizer, tokenizer_hash: copied from the index.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        length: int = 1024,
        *,
        verify: bool = True,
        cache: str | os.PathLike[str] = DEFAULT_FOLDER,
        cache_bytes: int = 50 << 30,
    ) -> None:
        """Reads the index in the folder `url`, a path or a URL that fsspec knows, and compares the shards with it.

        `verify=False` compares only the lengths of shards on this machine. Remote shards are copied now to the folder
        `cache`, of at most `cache_bytes`, which all processes of the machine share.

        Raises:
            ShardError: there is no valid index, or a shard differs from the index.
            UsageError: the length is below 1, or there are fewer than length + 1 tokens; or the data is larger than
                the cache.
        """
        self.url = os.fspath(url).rstrip("/")
        index = read_token_index(self.url)
        self.length, self.tokens = length, index.tokens
        if not 1 <= length < self.tokens:
            raise UsageError(
                f"length={length}: {self.url} has {self.tokens} tokens, and a sample takes length + 1 of them, at "
                f"least two; give a length from 1 to {self.tokens - 1}"
            )
        size = sum(shard.filesize for shard in index.shardlist)
        if local_path(self.url) is None and size > cache_bytes:
            raise UsageError(
                f"{self.url} holds {size} bytes and its cache at most {cache_bytes}: all of it must fit; raise "
                f"cache_bytes"
            )
        self.left_out = (self.tokens - 1) % length
        self.vocabulary, self.end_of_document, self.documents = index.vocabulary, index.end_of_document, index.documents
        self.tokenizer, self.tokenizer_hash = index.tokenizer, index.tokenizer_hash
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self._any_id = index.vocabulary == 1 << 8 * ID_BYTES[index.dtype]
        self._shards = index.shardlist
        self._starts = np.array([0, *accumulate(shard.nsamples for shard in index.shardlist)])  # in the stream
        self._copies = Copies(cache, cache_bytes)
        self._verified = Verified() if verify else None
        self._maps: list[npt.NDArray[Any]] = self._mapped()

    def __len__(self) -> int:
        return (self.tokens - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a sample. Raises `IndexError` if out of range, `ShardError` for an id beyond the vocabulary."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs, targets = self.gather(np.array([index % len(self)]))
        return inputs[0], targets[0]

    def gather(self, samples: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """Returns `[inputs, targets]` of a micro-batch: int64, shape `(len(samples), length)`, contiguous.

        Raises:
            IndexError: a sample is below 0 or beyond the last.
            ShardError: an id is not below the vocabulary.
        """
        if samples.min(initial=0) < 0 or samples.max(initial=0) >= len(self):
            raise IndexError(f"samples {samples.tolist()} of {len(self)}")
        windows = self._windows(samples * self.length)
        if not self._any_id and windows.max(initial=0) >= self.vocabulary:
            raise self._no_id(samples, windows)
        inputs, targets = (torch.empty(len(samples), self.length, dtype=torch.int64) for _ in range(2))
        inputs.numpy()[:] = windows[:, :-1]
        targets.numpy()[:] = windows[:, 1:]
        return [inputs, targets]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": []}  # `_verified` goes along: shards are not compared again

    # --- the stream -------------------------------------------------------------------------------------------

    def _windows(self, starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Returns the length + 1 tokens from each of `starts` on, as stored; shape `(len(starts), length + 1)`."""
        maps = self._maps = self._maps or self._mapped()
        windows = np.empty((len(starts), self.length + 1), self._dtype)
        shards = self._starts.searchsorted(starts, side="right") - 1
        within = starts - self._starts[shards]
        for window, number, begin in zip(windows, shards.tolist(), within.tolist(), strict=True):
            chunk = maps[number][begin : begin + self.length + 1]
            window[: len(chunk)] = chunk
            filled = len(chunk)
            while filled <= self.length:  # the window continues in the next shard
                number += 1
                chunk = maps[number][: self.length + 1 - filled]
                window[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
        return windows

    def _no_id(self, samples: npt.NDArray[np.int64], windows: npt.NDArray[Any]) -> ShardError:
        row, column = np.argwhere(windows >= self.vocabulary)[0]
        place = int(samples[row]) * self.length + int(column)
        number = int(self._starts.searchsorted(place, side="right")) - 1
        return torn(
            f"{self.url}/{self._shards[number].url}",
            f"its token {place - int(self._starts[number])} is {windows[row, column]}, and ids are below the "
            f"vocabulary, {self.vocabulary}",
        )

    def _mapped(self) -> list[npt.NDArray[Any]]:
        try:
            return list(self._map())
        finally:
            self._copies.close()  # a map holds a descriptor of its own

    def _map(self) -> Iterator[npt.NDArray[Any]]:
        local = local_path(self.url)
        for shard in self._shards:
            url = f"{self.url}/{shard.url}"
            descriptor = self._copies.open(url, shard.filesize, shard.md5sum)
            if local is not None and self._verified is not None:
                _log.info("comparing %s with its MD5, unless that was done before", url)
                if not self._verified(Path(local, shard.url), descriptor, shard.filesize, shard.md5sum):
                    raise torn(url, "its MD5 is not the one in the index")
            try:
                mapped = mmap.mmap(descriptor, shard.filesize, access=mmap.ACCESS_READ)
            except OSError as error:
                raise ShardError(
                    f"shard {url} can't be mapped: {error.strerror}; each of the {len(self._shards)} shards takes a "
                    f"descriptor and its length of address space (ulimit -n, ulimit -v); make larger ones, or fewer"
                ) from None
            yield np.frombuffer(mapped, self._dtype)
