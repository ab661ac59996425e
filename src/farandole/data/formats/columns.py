"""The Python types of Arrow columns in samples and in micro-batches.

| type | in a sample | in a micro-batch |
| --- | --- | --- |
| integer, boolean, float | int, bool, float | tensor of int64, bool, float64; shape `(samples,)` |
| text, bytes | str, bytes | list, as from `default_collate` |
| list of numbers, none of them missing | NumPy array of that type | tensor of that type; shape `(samples, length)` |
| tensor of a fixed shape | NumPy array | as from `default_collate` |
| image, by Hugging Face's note in the schema | PIL image in RGB | needs the script's `transform` |
| any other type, or a missing value | Python's type: datetime, list, dict, None | as from `default_collate` |

The right column is what torch's `default_collate` makes of the middle one, bit for bit. For numbers and lists of
numbers `flat` returns whole groups, from which a micro-batch is taken at once; it returns None if it can't.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from farandole.data.formats import fields

Reader = Callable[[Any, int], Any]  # (array, row) -> value
_NOTE = b"huggingface"  # the key that Hugging Face's `datasets` writes into the schema
_IMAGE = "Image"


def feature_of(schema: Any, column: str) -> Mapping[str, Any]:
    """Returns the note of `datasets` about `column`, like `{"_type": "ClassLabel", "names": [...]}`; empty if none."""
    try:
        note: Any = msgspec.json.decode((schema.metadata or {}).get(_NOTE, b"{}"))
        feature = note["info"]["features"][column]
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError):
        return {}
    return feature if isinstance(feature, dict) else {}


def reader_of(schema: Any, column: str) -> Reader:
    """Returns the function that reads one value of `column`."""
    import pyarrow as pa

    kind = schema.field(column).type
    if feature_of(schema, column).get("_type") == _IMAGE and pa.types.is_struct(kind):
        return _image
    if _is_list(kind) and _is_number(kind.value_type):
        return _numbers
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensor
    return _value


def stackable(schema: Any, column: str) -> bool:
    """Returns True if `flat` supports this column's type: numbers, and lists of them."""
    import pyarrow as pa

    kind = schema.field(column).type
    if reader_of(schema, column) is _numbers:
        return True
    whole = pa.types.is_integer(kind) and not pa.types.is_uint64(kind)  # torch raises an error for values beyond int64
    return whole or pa.types.is_boolean(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)


def flat(array: Any) -> npt.NDArray[Any] | None:
    """Returns a group's `stackable` column as a NumPy array: shape `(rows,)`, or `(rows, length)` for lists.

    It is mostly a view of Arrow's memory. Returns None if values are missing, or lists differ in length.
    """
    import pyarrow as pa

    if array.null_count or not len(array):
        return None
    if not _is_list(array.type):
        return array.to_numpy(zero_copy_only=False)
    values = array.flatten()
    length, remainder = divmod(len(values), len(array))
    if values.null_count or remainder:
        return None
    if not pa.types.is_fixed_size_list(array.type):
        offsets = array.offsets.to_numpy()
        if not (offsets[1:] - offsets[:-1] == length).all():
            return None
    return values.to_numpy(zero_copy_only=False).reshape(len(array), length)


def empty(like: npt.NDArray[Any], samples: int) -> npt.NDArray[Any]:
    """Returns an empty array for a micro-batch of a column, in the type that `default_collate` gives Python numbers."""
    kinds = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
    return np.empty((samples, *like.shape[1:]), like.dtype if like.ndim > 1 else kinds[like.dtype.kind])


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    """Returns True for the number types that torch has, too."""
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _value(array: Any, row: int) -> Any:
    return array[row].as_py()


def _numbers(array: Any, row: int) -> Any:
    values = array[row].values
    if values is None:
        return None
    if values.null_count:
        return values.to_pylist()
    return np.array(values.to_numpy(zero_copy_only=False))  # a copy: Arrow's memory is read-only


def _tensor(array: Any, row: int) -> Any:
    scalar = array[row]
    return np.array(scalar.to_numpy()) if scalar.is_valid else None


def _image(array: Any, row: int) -> Any:
    value = array[row].as_py()
    if value is None:
        return None
    data = value.get("bytes")
    if data is None:
        raise ValueError(
            f"an image that is stored outside the table, at {value.get('path')!r}: only images in the table are read"
        )
    return fields.image(data)
