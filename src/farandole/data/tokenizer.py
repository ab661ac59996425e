"""Tokenizers by name: how a text becomes ids, and which ids there are.

    bytes             the bytes of UTF-8, 256 ids and the end of a document: needs nothing
    tiktoken:NAME     an encoding of OpenAI's tiktoken, such as tiktoken:gpt2
    PATH.json         a tokenizer.json of Hugging Face's tokenizers

A text is never read as a special token: what looks like one in it is letters, so no document ends itself. Nothing is
added to a text, cut or padded, whatever a tokenizer.json asks for.

Invariant: `digest` is that of all on which ids depend, but the tokenizer package's version.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.errors import UsageError
from farandole.platform.extras import how_to_install

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")  # as the field calls it


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """`encode`: the ids of a text. `vocabulary`: ids are below it. `end`: of a document. `digest`: SHA-256 in hex."""

    name: str
    encode: Callable[[str], Sequence[int] | npt.NDArray[Any]]
    vocabulary: int
    end: int
    digest: str


@functools.lru_cache(maxsize=1)
def tokenizer(name: str, end: str = "") -> Tokenizer:
    """The tokenizer of that name. `end`: the token that ends a document, where it isn't the usual one.

    Raises:
        UsageError: there is none, or its package is not installed, or no such token.
    """
    if name == "bytes":
        if end:
            raise UsageError(f"--end {end}: bytes have an id of their own for it, 256; leave it out")
        return Tokenizer(name=name, encode=_bytes, vocabulary=257, end=256, digest=_digest(b"bytes"))
    if name.startswith("tiktoken:"):
        return _tiktoken(name, end)
    if name.endswith(".json"):
        return _tokenizer_json(name, end)
    raise UsageError(f"--tokens {name}: bytes, tiktoken:NAME such as tiktoken:gpt2, or the path of a tokenizer.json")


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def _tiktoken(name: str, end: str) -> Tokenizer:
    _require("tiktoken", name)
    import tiktoken

    try:
        encoding: Any = tiktoken.get_encoding(name.partition(":")[2])
    except Exception as error:
        raise UsageError(f"--tokens {name}: {error}") from error
    ends: dict[str, int] = encoding._special_tokens
    digest = _digest(
        encoding._pat_str.encode(),
        json.dumps(sorted(ends.items())).encode(),
        *(token for ranked in sorted(encoding._mergeable_ranks.items(), key=_rank) for token in (ranked[0], b"\n")),
    )
    return Tokenizer(
        name=name,
        encode=encoding.encode_ordinary,
        vocabulary=encoding.n_vocab,
        end=_end(name, end, ends),
        digest=digest,
    )


def _rank(ranked: tuple[bytes, int]) -> int:
    return ranked[1]


def _tokenizer_json(name: str, end: str) -> Tokenizer:
    _require("tokenizers", name)
    import tokenizers

    try:
        content = Path(name).read_bytes()
        found: Any = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        raise UsageError(f"--tokens {name}: {error.strerror}") from None
    except Exception as error:  # what the package raises is an Exception itself
        raise UsageError(f"--tokens {name} is no tokenizer.json: {error}") from error
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = True  # their letters, that is

    def encode(text: str) -> Sequence[int]:
        return found.encode(text, add_special_tokens=False).ids

    ids: dict[str, int] = found.get_vocab(with_added_tokens=True)
    return Tokenizer(
        name=Path(name).name,
        encode=encode,
        vocabulary=max(ids.values()) + 1,
        end=_end(name, end, ids),
        digest=_digest(content),
    )


def _end(name: str, asked: str, ids: dict[str, int]) -> int:
    for token in [asked] if asked else _ENDS:
        if token in ids:
            return ids[token]
    what = f"--end {asked}: no such token in {name}" if asked else f"{name} has none of {', '.join(_ENDS)}"
    raise UsageError(f"{what}; give the token that ends a document by --end")


def _require(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise UsageError(f"--tokens {name} takes {package}, which is not installed: {how_to_install('tokens')}")


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
