"""In words, how a source differs from what was recorded: its container, its rows' bytes, or its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.datamanifest.scan import Scan
from auditlog.datamanifest.values import Tagged, canonical_row

NAMED = 5  # differing rows that a message names


def difference(recorded: Scan, now: Scan) -> str:
    """Return how two scans of a source differ, most telling fact first."""
    before, after = len(recorded.values_sha256), len(now.values_sha256)
    common = min(before, after)
    values = rows_that_differ(recorded.values_sha256[:common], now.values_sha256[:common])
    if before == after and not values.size:
        return _same_values(rows_that_differ(recorded.row_sha256, now.row_sha256))
    said = [_named(values)] if values.size else []
    if after > before:
        said.append(f"{after - before} rows added at the end, from row {before}")
    elif after < before:
        said.append(f"{before - after} rows removed at the end, from row {after}")
    return "; ".join(said)


def fields_that_differ(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Return one phrase per field whose values differ: their types where those do, never the values."""
    said = []
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name), right.get(name)
        if canonical_row({name: one}) != canonical_row({name: other}):
            kinds = _kind(one), _kind(other)
            said.append(f"{name!r} differs" if kinds[0] == kinds[1] else f"{name!r}: {kinds[0]} here, {kinds[1]} there")
    return said


def _kind(value: Any) -> str:
    if isinstance(value, Tagged):
        return value.tag
    return "nothing" if value is None else type(value).__name__


def _same_values(written_otherwise: NDArray[np.int64]) -> str:
    if not written_otherwise.size:
        return "container changed, all rows equal"
    return (
        f"container changed, all rows' values equal; row {int(written_otherwise[0])} is the first written differently"
    )


def _named(rows: NDArray[np.int64]) -> str:
    names = ", ".join(str(int(row)) for row in rows[:NAMED])
    if rows.size == 1:
        return f"row {names} differs"
    return f"{rows.size} rows differ: {names}{', …' if rows.size > NAMED else ''}"


def rows_that_differ(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the numbers of the rows whose digests, ``(rows, 32)`` each, differ."""
    return np.flatnonzero((left != right).any(axis=1))
