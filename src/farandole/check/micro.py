"""How the gradient of a micro-batch follows from the gradients of its parts: does the size of micro-batches matter?

Let G be the gradient of a micro-batch's loss, and g_1 ... g_k those of its parts, which have n_1 ... n_k samples, or
units of weight. What holds up to rounding, in this order, is the result:

    G = sum of n_i / n * g_i     the loss is a mean over samples or units: the size does not matter
    G = sum of g_i               it is a sum
    G = sum of a_i * g_i         it is another mean, as over tokens; the factors a_i are found by least squares
    none                         batch normalization, or a loss over the whole batch
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farandole.check import records
from farandole.check.findings import Cause, Finding
from farandole.check.legs import Legs
from farandole.check.records import Leg, MicroBatchRecord, ModelFacts, Record
from farandole.errors import UsageError

Vector = np.ndarray[Any, np.dtype[np.floating[Any]]]
TOLERANCE = 0.02  # of the norm of G; the rounding of 16-bit arithmetic is below it


def finding_of_micro(legs: Legs) -> Finding:
    """Run the legs `whole` and `parts`, and compare their gradients."""
    try:
        legs.alone("whole", "parts")
    except UsageError as error:
        return Finding(comparison="micro", outcome="not compared", names=(str(error),))
    return compare(legs.folder, legs.records("whole"), legs.records("parts"))


def compare(folder: Path, whole: Sequence[Record], parts: Sequence[Record]) -> Finding:
    """Compare by the records of the two legs and the gradients in `folder`."""
    big, small = _parts(whole), _parts(parts)
    if len(big) != 1 or not small:
        return Finding(comparison="micro", outcome="not compared", names=("its micro-batches have no gradient",))
    vectors = _vectors(folder, [("whole", big[0].shard), *(("parts", each.shard) for each in small)])
    units = [each.samples if each.weight is None else each.weight for each in small]
    cause = cause_of(vectors[0], vectors[1:], units)
    if cause == "batch":
        names = next((each.batch_norms for each in whole if isinstance(each, ModelFacts)), ())
        draws = any(each.draws for each in (*big, *small))
        cause = "random numbers" if draws else "batch norm" if names else cause
        if cause == "random numbers":
            return Finding(comparison="micro", outcome="not compared", cause=cause)
        return Finding(comparison="micro", outcome="differs", cause=cause, names=names)
    return Finding(comparison="micro", outcome="differs" if cause else "agrees", cause=cause)


def cause_of(whole: Vector, parts: Sequence[Vector], units: Sequence[float]) -> Cause:
    """Return why `whole` is not the mean of its `parts` with weights `units`: sum, weights or batch; "" if it is.

    `whole` and each part have shape (elements,).
    """
    matrix = np.stack(parts, axis=1)
    norm = max(float(np.linalg.norm(whole)), 1e-30)

    def fits(factors: Vector) -> bool:
        return float(np.linalg.norm(whole - matrix @ factors)) <= TOLERANCE * norm

    if fits(np.asarray(units, dtype=np.float64) / sum(units)):
        return ""
    if fits(np.ones(len(parts))):
        return "sum"
    if fits(np.linalg.lstsq(matrix, whole, rcond=None)[0]):
        return "weights"
    return "batch"


def _parts(of: Sequence[Record]) -> list[MicroBatchRecord]:
    return sorted((each for each in of if isinstance(each, MicroBatchRecord)), key=lambda part: part.shard)


def _vectors(folder: Path, places: Sequence[tuple[Leg, int]]) -> list[Vector]:
    """Return the gradients as vectors of one length; a parameter without a gradient has zeros."""
    gradients: list[dict[str, Vector]] = []
    for leg, shard in places:
        with np.load(records.gradient_path(folder, leg, shard)) as file:
            gradients.append({name: file[name] for name in file.files})
    sizes = {name: each.size for gradient in gradients for name, each in gradient.items()}
    return [
        np.concatenate([gradient.get(name, np.zeros(size)) for name, size in sizes.items()]) for gradient in gradients
    ]
