"""What TensorBoard makes of a folder of event files: by the code with which its own server reads them."""

from __future__ import annotations

from pathlib import Path


def read(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[tuple[int, str]]]]:
    """Numbers and texts, each as (step, value) by their tag, in the order in which they count."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(folder), tensor_size_guidance={}, size_guidance={"tensors": 0})
    accumulator.Reload()
    numbers: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, list[tuple[int, str]]] = {}
    for tag in accumulator.Tags()["tensors"]:
        for event in accumulator.Tensors(tag):
            value = make_ndarray(event.tensor_proto)
            if value.dtype == object:
                texts.setdefault(tag, []).append((event.step, value.ravel()[0].decode()))
            else:
                numbers.setdefault(tag, []).append((event.step, float(value)))
    return numbers, texts
