"""One byte string for one row of values, whatever container it was read from.

The bytes are RFC 8785 JSON of the row in which what JSON lacks is written as an object with one member, whose name
begins with ``$``:

    float               {"$float": "<the 16 hex digits of its IEEE-754 double>"}, so 1 and 1.0 differ and NaN has a form
    integer from 2^53   {"$int": "<decimal>"}
    bytes               {"$bytes": "<hex>"}
    decimal             {"$decimal": "<digits, with its scale>"}
    date                {"$date": "<days since 1970-01-01>"}
    time of day         {"$time": "<nanoseconds>"}
    duration            {"$duration": "<nanoseconds>"}
    timestamp           {"$timestamp": "<nanoseconds since 1970-01-01>"}, followed by a space and its zone if it has one

A name in the data that begins with ``$`` gets one more. A member that is null is left out: tables cannot tell a field
that a row lacks from one that is null, and loaders fill the first with the second.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_SAFE_INTEGER = 2**53  # from here on a double cannot tell neighbours apart
_NAN = "7ff8000000000000"


@dataclass(frozen=True, slots=True)
class Tagged:
    """A value that JSON lacks, in the text that stands for it."""

    tag: str
    text: str


def canonical_row(values: Mapping[str, Any]) -> bytes:
    r"""Return the bytes that the digest of a row's values is over.

    Args:
        values: Field name to value: JSON types, ``bytes``, ``Decimal``, ``Tagged``; nested as deep as need be.

    Raises:
        ValueError: If a text holds half of a surrogate pair, or a value has no form.

    Example:
        >>> canonical_row({"b": [1, 1.0], "a": "\u00e4", "c": None})
        b'{"a":"\xc3\xa4","b":[1,{"$float":"3ff0000000000000"}]}'
    """
    return json.dumps(_plain(values), ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _plain(value: Any) -> Any:
    """Return ``value`` in JSON's own types but floats, members in the order of RFC 8785."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if -_SAFE_INTEGER < value < _SAFE_INTEGER else {"$int": str(value)}
    if isinstance(value, float):
        return {"$float": _NAN if math.isnan(value) else struct.pack(">d", value).hex()}
    if isinstance(value, Mapping):
        named = ((f"${name}" if name.startswith("$") else name, member) for name, member in value.items())
        present = ((name, member) for name, member in named if member is not None)
        return {name: _plain(member) for name, member in sorted(present, key=_utf16)}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, Tagged):
        return {f"${value.tag}": value.text}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, Decimal):
        return {"$decimal": format(value, "f")}
    raise ValueError(f"a {type(value).__name__} has no canonical form")


def _utf16(item: tuple[str, Any]) -> bytes:
    """Return what RFC 8785 sorts names by: their UTF-16 code units."""
    return item[0].encode("utf-16-be")
