"""What `index.json` says of a folder of token shards: files of token ids and nothing else, little-endian.

    {"__kind__": "farandole-tokens-v1", "dtype": "uint16", "vocabulary": 50257, "end_of_document": 50256,
     "tokenizer": "tiktoken:gpt2", "tokenizer_hash": "...", "documents": 1,
     "shardlist": [{"url": "shard-000000.bin", "nsamples": 338025, "filesize": 676050, "md5sum": "..."}]}

A shard's entry is that of a shard of images (`index.py`), its samples being its tokens; so it is the plain name of a
file beside the index, and a train.bin of nanoGPT's becomes a shard by an entry of its own.

Invariant: an index that was read fits itself. Each shard is as long as its tokens take, the dtype holds every id of the
vocabulary, the end of a document is one of them, and there are tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from farandole.data.index import INDEX, Shard, read_struct

KIND = "farandole-tokens-v1"
WIDTHS = {"uint16": 2, "uint32": 4}  # bytes of an id


class TokenIndex(msgspec.Struct, frozen=True, kw_only=True):
    """All shards, in the order of their tokens. `vocabulary`: ids are below it. `tokenizer_hash`: SHA-256, in hex."""

    kind: Literal["farandole-tokens-v1"] = msgspec.field(name="__kind__")
    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    end_of_document: int
    tokenizer: str
    tokenizer_hash: str
    documents: int
    shardlist: tuple[Shard, ...]

    def __post_init__(self) -> None:
        width = WIDTHS[self.dtype]
        if not 1 <= self.vocabulary <= 1 << 8 * width:
            raise ValueError(
                f"vocabulary {self.vocabulary} does not fit: ids of {self.dtype} are from 0 to 2^{8 * width} - 1"
            )
        if not 0 <= self.end_of_document < self.vocabulary:
            raise ValueError(f"end_of_document {self.end_of_document} is not below the vocabulary, {self.vocabulary}")
        seen: set[str] = set()
        for shard in self.shardlist:
            if shard.url in seen:
                raise ValueError(f"url {shard.url!r} stands in shardlist twice")
            seen.add(shard.url)
            if shard.filesize != shard.nsamples * width or not shard.nsamples:
                raise ValueError(
                    f"filesize {shard.filesize} of {shard.url} is not that of nsamples={shard.nsamples} tokens of "
                    f"{width} bytes, at least one"
                )
        if not self.shardlist:
            raise ValueError("shardlist names no tokens")

    @property
    def tokens(self) -> int:
        return sum(shard.nsamples for shard in self.shardlist)


def dtype_for(vocabulary: int) -> Literal["uint16", "uint32"]:
    """The narrowest that holds its ids."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def read_index(url: str) -> TokenIndex:
    """The index in the folder `url`.

    Raises:
        ShardError: it is not there, can't be read, or is none.
        UsageError: there is no such kind of place.
    """
    return read_struct(
        f"{url}/{INDEX}", TokenIndex, called="index of token shards",
        absent="`farandole data prepare --tokens` writes it last, so run it to its end",
    )  # fmt: skip
