"""The records of TensorBoard's event files, as bytes: what the `tensorboard` package's own messages give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, BinaryIO

from farandole.errors import UsageError
from farandole.platform.extras import how_to_install


def require_tensorboard() -> None:
    """Raises `UsageError` where tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise UsageError(
            f"--tensorboard: its event files are written with the package tensorboard, which is not installed: "
            f"{how_to_install('tensorboard')}"
        )


def writer(file: BinaryIO) -> Any:
    """Whose `write` puts one record into `file`. Raises OSError there."""
    return import_module("tensorboard.summary.writer.record_writer").RecordWriter(file)


def version(time: float) -> bytes:
    """A file's first record."""
    return _proto().Event(wall_time=time, file_version="brain.Event:2").SerializeToString()


def session_begins(step: int, time: float) -> bytes:
    """Who reads it forgets what it has of this step and later ones."""
    proto = _proto()
    start = proto.SessionLog(status=proto.SessionLog.START)
    return proto.Event(wall_time=time, step=step, session_log=start).SerializeToString()


def values(step: int, time: float, numbers: Mapping[str, float], texts: Mapping[str, str]) -> bytes:
    """All of a step in one record."""
    proto = _proto()
    found = [proto.Summary.Value(tag=_valid(name), simple_value=_single(value)) for name, value in numbers.items()]
    found += [_text(_valid(name), text) for name, text in texts.items()]
    return proto.Event(wall_time=time, step=step, summary=proto.Summary(value=found)).SerializeToString()


def _text(name: str, text: str) -> Any:
    """Indented: TensorBoard takes texts for Markdown, in which that means "as it is"."""
    proto = _proto()
    as_it_is = "\n".join(f"    {line}" for line in text.splitlines() or [""])
    shape = proto.TensorShapeProto(dim=[proto.TensorShapeProto.Dim(size=1)])
    tensor = proto.TensorProto(
        dtype=proto.DT_STRING, string_val=[as_it_is.encode(errors="replace")], tensor_shape=shape
    )
    plugin = proto.SummaryMetadata.PluginData(plugin_name="text")
    metadata = proto.SummaryMetadata(plugin_data=plugin, data_class=proto.DATA_CLASS_TENSOR)
    return proto.Summary.Value(tag=name, metadata=metadata, tensor=tensor)


def _single(value: float) -> float:
    """In single precision, which has no larger ones."""
    return value if abs(value) < 3.4e38 or not math.isfinite(value) else math.copysign(math.inf, value)


def _valid(name: str) -> str:
    return name.encode(errors="replace").decode()


@cache
def _proto() -> SimpleNamespace:
    """The messages, from where the package has them."""
    event = import_module("tensorboard.compat.proto.event_pb2")
    summary = import_module("tensorboard.compat.proto.summary_pb2")
    return SimpleNamespace(
        Event=event.Event,
        SessionLog=event.SessionLog,
        Summary=summary.Summary,
        SummaryMetadata=summary.SummaryMetadata,
        DATA_CLASS_TENSOR=summary.DATA_CLASS_TENSOR,
        TensorProto=import_module("tensorboard.compat.proto.tensor_pb2").TensorProto,
        TensorShapeProto=import_module("tensorboard.compat.proto.tensor_shape_pb2").TensorShapeProto,
        DT_STRING=import_module("tensorboard.compat.proto.types_pb2").DT_STRING,
    )
