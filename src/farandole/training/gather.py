"""The rows of `step.gather`: one row for each sample of the global batch, on every worker, without a gradient.

They are exchanged in a round of their own after the pass in which the micro-batches give them, with a shard for each
micro-batch. A worker keeps the rows that it has computed. If it is lost, the script computes them again elsewhere: the
inner loop goes on with its micro-batches.

Rows travel as bytes, so all bits arrive, those of -0.0 and of NaN too. A lane holds six bytes as one integer, and a
worker adds nothing to the bytes of others: so sums of lanes are exact. What the rows look like travels in the lanes of
the pass, since a worker without a micro-batch does not know it: a text such as "z float32 128" for each tensor. The
sums must be a multiple of the number of shards, which shows that all micro-batches have the same form.

A micro-batch that is computed again for its rows has the buffers and the random state of its pass. Its backward pass
and its values are ignored, since they are in the sums of the pass already.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from farandole.collective.buckets import Layout, Partials
from farandole.errors import UsageError
from farandole.platform.output import is_name

MOST_TENSORS = 4  # names in one pass
MOST_BYTES = 256 << 20  # of all rows of the global batch
TEXT_BYTES = 80  # of one tensor's name and form
LANE_BYTES = 6  # bytes that a float64 holds exactly
_BYTES = 4  # of a text in one lane: its sum over two million micro-batches is still exact
_TEXT_LANES = TEXT_BYTES // _BYTES
LANES = MOST_TENSORS * _TEXT_LANES  # of a pass, for the texts
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """The form of one tensor's rows. `shape`: of one row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @functools.cached_property
    def row_bytes(self) -> int:
        return functools.reduce(operator.mul, self.shape, _DTYPES[self.dtype].itemsize)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {','.join(map(str, self.shape))}"

    @staticmethod
    def parse(text: str) -> Form:
        name, dtype, shape = text.split(" ")
        return Form(name, dtype, tuple(int(size) for size in shape.split(",") if size))


class GatheredRows:
    """The rows of one pass.

    `lanes`: this worker's lanes of the open micro-batch for the texts, shape (LANES,), float64.
    """

    def __init__(self, lanes: torch.Tensor, step: int) -> None:
        self._lanes = lanes
        self._step = step
        self._open: dict[str, tuple[Form, torch.Tensor]] = {}
        self._kept: dict[int, dict[str, torch.Tensor]] = {}  # by micro-batch: the bytes of its rows
        self._forms: list[Form] | None = None  # of the newest micro-batch here

    def open(self) -> None:
        """Begin a micro-batch, which has given nothing yet."""
        self._lanes.zero_()
        self._open.clear()

    @property
    def given(self) -> bool:
        """True if the open micro-batch has given a tensor."""
        return bool(self._open)

    def add(self, tensors: Mapping[str, Any], samples: int) -> None:
        """Take tensors of the open micro-batch of `samples` samples, each of shape (samples, ...).

        Raises:
            UsageError: a name, a tensor or its number is not possible, or the micro-batch has given it before.
        """
        for name, tensor in tensors.items():
            call = f"step {self._step}: step.gather({name}=...)"
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                form = f"layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise UsageError(f"{call}: got {form}; pass a dense tensor with a row for each sample")
            if not tensor.dim() or len(tensor) != samples:
                raise UsageError(
                    f"{call} has shape {tuple(tensor.shape)}: pass a row for each of the {samples} samples of the "
                    f"micro-batch, shape ({samples}, ...)"
                )
            form = Form(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
            if form.dtype not in _DTYPES:
                raise UsageError(f"{call} has dtype {form.dtype}: pass one of {', '.join(_DTYPES)}")
            if not is_name(name) or " " in name or len(str(form).encode()) > TEXT_BYTES:
                raise UsageError(
                    f"{call}: name, dtype and shape of a row have at most {TEXT_BYTES} bytes, and a name has no space; "
                    f"got {str(form)!r}"
                )
            if name in self._open:
                raise UsageError(f"{call}: this micro-batch has given {name!r} before; use another name")
            if len(self._open) == MOST_TENSORS:
                raise UsageError(f"{call}: a pass gathers at most {MOST_TENSORS} tensors")
            padded = str(form).encode().ljust(TEXT_BYTES, b"\0")
            first = len(self._open) * _TEXT_LANES
            for lane in range(_TEXT_LANES):
                self._lanes[first + lane] = int.from_bytes(padded[lane * _BYTES : (lane + 1) * _BYTES], "little")
            self._open[name] = form, tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()

    def close(self, shard: int) -> None:
        """Keep the rows of the open micro-batch, which is number `shard`.

        Raises:
            UsageError: they have another form than those of another micro-batch here.
        """
        forms = [form for form, _ in self._open.values()]
        if self._forms is not None and forms != self._forms:
            raise self._differ(f"{_words(forms)} in micro-batch {shard}, {_words(self._forms)} in another one")
        self._forms = forms
        self._kept[shard] = {form.name: content for form, content in self._open.values()}

    def kept(self, shard: int) -> bool:
        """Return True if this worker has the rows of micro-batch `shard`."""
        return shard in self._kept

    def forms(self, sums: torch.Tensor, shards: int, samples: int) -> list[Form]:
        """Return the forms of the gathered tensors, from the `sums` of the lanes over the `shards` micro-batches.

        Raises:
            UsageError: the micro-batches have given different tensors, or all rows of the `samples` are too large.
        """
        lanes = sums.tolist()
        texts = [lanes[at : at + _TEXT_LANES] for at in range(0, len(lanes), _TEXT_LANES)]
        given = [text for text in texts if any(text)]
        try:
            forms = [Form.parse(_decoded(text, shards)) for text in given]
        except ValueError:
            forms = None
        if forms is None or (self._forms is not None and forms != self._forms):
            raise self._differ(f"{_words(self._forms or [])} here, something else in other micro-batches")
        size = samples * sum(form.row_bytes for form in forms)
        if size > MOST_BYTES:
            raise UsageError(
                f"step {self._step}: step.gather: {_words(forms)} for each of {samples:,} samples are {size:,} bytes; "
                f"at most {MOST_BYTES:,} bytes can be gathered: use a smaller dtype, or gather less for each sample"
            )
        return forms

    def write(self, shard: int, first: int, forms: Sequence[Form], samples: int, lanes: torch.Tensor) -> None:
        """Write the rows of micro-batch `shard`, whose first sample is row `first`, to the zeroed `lanes`."""
        at = 0
        for form in forms:
            content = self._kept[shard][form.name].numpy()
            start = first * form.row_bytes
            lane, shift = divmod(start, LANE_BYTES)
            count = -(-(shift + len(content)) // LANE_BYTES)
            padded = np.zeros(count * LANE_BYTES, dtype=np.uint8)
            padded[shift : shift + len(content)] = content
            words = np.zeros((count, 8), dtype=np.uint8)
            words[:, :LANE_BYTES] = padded.reshape(count, LANE_BYTES)
            lanes[at + lane : at + lane + count] = torch.from_numpy(words.view("<i8")[:, 0].astype(np.float64))
            at += _lanes_of(form, samples)

    def read(self, forms: Sequence[Form], samples: int, lanes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gathered tensors by name, each of shape (samples, ...), from the sums of the lanes."""
        gathered: dict[str, torch.Tensor] = {}
        at = 0
        for form in forms:
            count = _lanes_of(form, samples)
            words = lanes[at : at + count].numpy().astype("<i8").reshape(count, 1).view(np.uint8)[:, :LANE_BYTES]
            content = torch.from_numpy(words.reshape(-1)[: samples * form.row_bytes].copy())
            gathered[form.name] = content.view(_DTYPES[form.dtype]).reshape(samples, *form.shape)
            at += count
        return gathered

    def _differ(self, what: str) -> UsageError:
        return UsageError(
            f"step {self._step}: its micro-batches gather different tensors: {what}; call step.gather with the same "
            f"names in the same order in each micro-batch, with rows of one shape and dtype"
        )


def partials_of(forms: Sequence[Form], samples: int) -> Partials:
    """Return the partial sums of a round that gathers tensors of these forms."""
    return Partials(Layout([], lanes=sum(_lanes_of(form, samples) for form in forms)))


class Gathered(Mapping[str, torch.Tensor]):
    """Gathered tensors by name; a name that is not there is an error that tells which are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        self._tensors, self._step = tensors, step

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            there = ", ".join(self._tensors) or "none"
            raise KeyError(f"step {self._step} has no rows {name!r} of step.gather(...); it has: {there}")
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


def _lanes_of(form: Form, samples: int) -> int:
    return -(-samples * form.row_bytes // LANE_BYTES)


def _words(forms: Sequence[Form]) -> str:
    return ", ".join(f"{form.name} ({form.dtype}, shape {form.shape})" for form in forms) or "none"


def _decoded(text: Sequence[float], shards: int) -> str:
    """Return the text of which each of `shards` micro-batches has added the lanes. Raises ValueError if they differ."""
    code = b""
    for lane in text:
        if not lane.is_integer() or int(lane) % shards or not 0 <= int(lane) // shards < 256**_BYTES:
            raise ValueError(text)
        code += (int(lane) // shards).to_bytes(_BYTES, "little")
    return code.rstrip(b"\0").decode()
