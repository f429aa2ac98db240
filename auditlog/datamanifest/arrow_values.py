"""Arrow arrays as the Python values that ``canonical_row`` takes, without pandas and without losing a nanosecond."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from auditlog.datamanifest.values import Tagged

_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_MS = 86_400_000


def python_values(array: pa.Array) -> list[Any]:
    """Return one value per element of an array of any type, nested ones included; ``None`` where it is null."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return python_values(array.storage)
    if pa.types.is_dictionary(kind):
        return python_values(array.dictionary_decode())
    if pa.types.is_struct(kind):
        return _structs(array)
    if pa.types.is_map(kind):
        pair = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        return _lists(array.cast(pa.list_(pair)))
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        return _lists(array)
    if pa.types.is_float16(kind):
        return python_values(array.cast(pa.float32()))
    if pa.types.is_temporal(kind):
        return _temporal(array)
    values: list[Any] = array.to_pylist()
    return values


def _structs(array: pa.Array) -> list[dict[str, Any] | None]:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    columns = [python_values(column) for column in array.flatten()]
    rows = zip(*columns, strict=True) if columns else ((),) * len(array)
    present = array.is_valid().to_pylist()
    return [dict(zip(names, row, strict=True)) if here else None for row, here in zip(rows, present, strict=True)]


def _lists(array: pa.Array) -> list[list[Any] | None]:
    items = iter(python_values(array.flatten()))
    lengths = pc.list_value_length(array).to_pylist()
    return [None if length is None else [next(items) for _ in range(length)] for length in lengths]


def _temporal(array: pa.Array) -> list[Tagged | None]:
    """Return dates as days and everything else as nanoseconds."""
    kind = array.type
    counts = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    if pa.types.is_date(kind):
        days = 1 if pa.types.is_date32(kind) else _DAY_MS
        return [None if n is None else Tagged("date", str(n // days)) for n in counts]
    tag = "timestamp" if pa.types.is_timestamp(kind) else "duration" if pa.types.is_duration(kind) else "time"
    zone = f" {kind.tz}" if tag == "timestamp" and kind.tz else ""
    factor = _NANOSECONDS[kind.unit]
    return [None if n is None else Tagged(tag, f"{n * factor}{zone}") for n in counts]
