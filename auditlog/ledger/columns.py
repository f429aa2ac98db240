"""Record arrays to Arrow tables and back, and what each table of the ledger consists of.

Values cross unchanged, bit for bit. Coming back, a cell that has no place in the format (NULL, a digest of
the wrong length, a number out of range) is replaced by zeros and *reported*; nothing is silently repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from auditlog.format.records import RECORD

DIGEST_BYTES = 32

_SQL_TYPES = {"u2": "USMALLINT", "u4": "UINTEGER", "u8": "UBIGINT", "i8": "BIGINT", "f4": "FLOAT", "V32": "BLOB"}


def _sql_type(name: str) -> str:
    return _SQL_TYPES[RECORD[name].str.lstrip("<|")]


RECORD_FIELDS: tuple[str, ...] = tuple(RECORD.names or ())

TABLES: dict[str, dict[str, str]] = {
    "records": {name: _sql_type(name) for name in RECORD_FIELDS} | {"leaf": "BLOB"},
    "events": {
        "fmt": "USMALLINT",
        "seq": "UBIGINT",
        "kind": "USMALLINT",
        "ts_us": "BIGINT",
        "body": "BLOB",
        "leaf": "BLOB",
    },
    "batches": {"batch": "UBIGINT", "first_seq": "UBIGINT", "entries": "UBIGINT", "chain": "BLOB"},
    "checkpoints": {"size": "UBIGINT", "note": "BLOB"},
}

_ARROW_TYPES = {
    "USMALLINT": pa.uint16(),
    "UINTEGER": pa.uint32(),
    "UBIGINT": pa.uint64(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "BLOB": pa.binary(),
}

Report = Callable[[str, int, str], None]
"""Called with a column, the entry's ``seq`` (where a table has none: the row's position), and what is wrong."""


def records_to_arrow(rows: NDArray[np.void], leaves: list[bytes]) -> pa.Table:
    """Return the ``records`` table for packed rows ``(n,)`` and their ``n`` leaf hashes."""
    columns: dict[str, Any] = number_columns(rows)
    for name in RECORD_FIELDS:
        if name not in columns:
            data = pa.py_buffer(np.ascontiguousarray(rows[name]).tobytes())
            columns[name] = pa.FixedSizeBinaryArray.from_buffers(pa.binary(DIGEST_BYTES), len(rows), [None, data])
    columns["leaf"] = pa.array(leaves, pa.binary())
    return pa.table(columns)


def number_columns(rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    """Return the fields of packed records ``(n,)`` that are numbers, each as a column of its own."""
    return {name: np.ascontiguousarray(rows[name]) for name in RECORD_FIELDS if RECORD[name].kind != "V"}


def rows_to_arrow(table: str, rows: list[tuple[Any, ...]]) -> pa.Table:
    """Return Arrow columns of one of the small tables from tuples in column order."""
    names = TABLES[table]
    values = zip(*rows, strict=True) if rows else ([] for _ in names)
    arrays = [pa.array(list(column), _ARROW_TYPES[names[name]]) for name, column in zip(names, values, strict=True)]
    return pa.table(arrays, names=list(names))


def records_from_arrow(batch: pa.RecordBatch, report: Report) -> tuple[NDArray[np.void], list[bytes]]:
    """Return packed rows ``(n,)`` and stored leaf hashes of one chunk of the ``records`` table."""
    rows = np.zeros(batch.num_rows, RECORD)
    report = _by_seq(batch, report)
    for name in RECORD_FIELDS:
        column = batch.column(name)
        if RECORD[name].kind == "V":
            digests = _digests(name, column, report)
            rows[name] = np.frombuffer(b"".join(digests), f"V{DIGEST_BYTES}")
        else:
            rows[name] = _numbers(name, column, report)
    return rows, _digests("leaf", batch.column("leaf"), report)


def rows_from_arrow(table: str, batch: pa.RecordBatch, report: Report) -> Iterator[tuple[Any, ...]]:
    """Yield tuples of Python integers and bytes in column order."""
    columns: list[list[Any]] = []
    report = _by_seq(batch, report)
    for name, sql_type in TABLES[table].items():
        column = batch.column(name)
        if sql_type != "BLOB":
            columns.append(_numbers(name, column, report, sql_type).tolist())
        elif name in ("leaf", "chain"):
            columns.append(_digests(name, column, report))
        else:
            columns.append(_blobs(name, column, report))
    yield from zip(*columns, strict=True)


def _by_seq(batch: pa.RecordBatch, report: Report) -> Report:
    """Let ``report`` name entries by their ``seq`` where the table has one."""
    if "seq" not in batch.schema.names:
        return report
    seqs = batch.column("seq").to_pylist()
    return lambda column, row, what: report(column, seqs[row] if isinstance(seqs[row], int) else row, what)


def _numbers(name: str, column: pa.Array, report: Report, sql_type: str | None = None) -> NDArray[Any]:
    """Return one numeric column; cells of a foreign type are converted one by one where they fit."""
    wanted = _ARROW_TYPES[sql_type or _sql_type(name)]
    if column.type == wanted and not column.null_count:
        numbers: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return numbers
    values = np.zeros(len(column), wanted.to_pandas_dtype())
    for i, cell in enumerate(column):
        if not cell.is_valid:  # must not become a NaN, which a float column may hold legally
            report(name, i, "is NULL")
            continue
        try:
            values[i] = cell.cast(wanted).as_py()
        except (TypeError, ValueError, OverflowError, pa.ArrowException):
            report(name, i, f"is not a {(sql_type or _sql_type(name)).lower()}")
    return values


def _blobs(name: str, column: pa.Array, report: Report) -> list[bytes]:
    blobs = column.to_pylist()
    for i, blob in enumerate(blobs):
        if not isinstance(blob, bytes):
            report(name, i, "is NULL" if blob is None else "is not a blob")
            blobs[i] = b""
    return blobs  # type: ignore[no-any-return]


def _digests(name: str, column: pa.Array, report: Report) -> list[bytes]:
    digests = _blobs(name, column, report)
    for i, digest in enumerate(digests):
        if len(digest) != DIGEST_BYTES:
            if column[i].is_valid:  # NULL has been reported already
                report(name, i, f"has {len(digest)} bytes, expected {DIGEST_BYTES}")
            digests[i] = digest[:DIGEST_BYTES].ljust(DIGEST_BYTES, b"\0")
    return digests
