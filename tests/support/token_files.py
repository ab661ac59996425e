"""Token shards by hand, as any program may write them, and texts to make some of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

VOCABULARY = 60_000
# A module tiktoken_ext.NAME, which gives tiktoken an encoding called small.
ENCODING = """
import tiktoken

def small():
    ranks = {bytes([each]): each for each in range(256)} | {b"ab": 256}
    ends = {"<|endoftext|>": 70_000}
    return {"name": "small", "pat_str": r"\\w+|\\W+", "mergeable_ranks": ranks, "special_tokens": ends}

ENCODING_CONSTRUCTORS = {"small": small}
"""


def some_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def token_shards(folder: Path, shards: Sequence[Sequence[int]], width: int = 2, **said: Any) -> Path:
    """One file each, and their index. `said`: what it, or its first shard's entry, says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for number, ids in enumerate(shards):
        content = b"".join(int(each).to_bytes(width, "little") for each in ids)
        (folder / f"{number}.bin").write_bytes(content)
        digest = hashlib.md5(content).hexdigest()
        entries.append({"url": f"{number}.bin", "nsamples": len(ids), "filesize": len(content), "md5sum": digest})
    if entries:
        entries[0] |= {name: value for name, value in said.items() if name in entries[0]}
    index = {
        "__kind__": "farandole-tokens-v1", "dtype": f"uint{8 * width}", "vocabulary": VOCABULARY, "end_of_document": 0,
        "tokenizer": "by hand", "tokenizer_hash": "", "documents": 1, "shardlist": entries,
    }  # fmt: skip
    index |= {name: value for name, value in said.items() if name in index}
    (folder / "index.json").write_bytes(msgspec.json.encode(index))
    return folder


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    """A .jsonl file with a text a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)))
    return path
