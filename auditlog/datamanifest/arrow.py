"""Sources that are tables: Parquet, Arrow files as ``datasets`` keeps them, and a dataset in memory.

A table's row has no bytes of its own, so its raw bytes are the canonical JSON of its values (``values.py``), and
digests do not depend on how the table was written. This module loads pyarrow, so it is imported when needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from auditlog.datamanifest.arrow_values import python_values
from auditlog.datamanifest.rows import FileHash, Row, unreadable
from auditlog.datamanifest.values import canonical_row
from auditlog.errors import DataError
from auditlog.format.manifest import SourceFormat

_BATCH = 4096  # rows per step


class Table(Protocol):
    """Where the rows of a table come from."""

    def read_hash(self, file: FileHash) -> None:
        """Take in the bytes of the file, if there is one."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order."""

    def one(self, number: int) -> pa.Table:
        """Return the table of that one row; empty if there is none."""

    def whole(self) -> pa.Table:
        """Return all rows."""


class TableSource:
    """A table as rows.

    Attributes:
        label: How messages name it.
        format: ``parquet``, ``arrow`` or ``dataset``.
    """

    is_table = True

    def __init__(self, table: Table, label: str, format: SourceFormat) -> None:
        self._table = table
        self.label = label
        self.format = format

    def rows(self, file: FileHash) -> Iterator[Row]:
        """Yield every row. A dataset in memory has no file: its digest is over its rows' digests."""
        try:
            self._table.read_hash(file)
            for batch in self._table.batches():
                for row in self._encoded(batch):
                    if self.format == "dataset":
                        file.update(hashlib.sha256(row.raw).digest())
                    yield row
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, pa.ArrowIndexError) as error:
            raise DataError(f"{self.label}: not readable as {self.format}: {error}") from error
        except OSError as error:
            raise unreadable(self.label, error) from error

    def values(self, number: int, row: Row) -> dict[str, Any]:
        """Return the fields as they were encoded."""
        return row.values or {}

    def at(self, number: int, start: int, end: int) -> Row:
        """Read one row."""
        try:
            batches = self._table.one(number).to_batches()
            rows = [row for batch in batches for row in self._encoded(batch)]
        except OSError as error:
            raise unreadable(self.label, error) from error
        except pa.ArrowException as error:
            raise DataError(f"{self.label}: row {number}: not readable as {self.format}: {error}") from error
        if not rows:
            raise DataError(f"{self.label}: row {number}: the table ends before it")
        return rows[0]

    def python(self, number: int, row: Row) -> dict[str, Any]:
        """Return the fields as pyarrow converts them: dates as ``date``, decimals as ``Decimal``."""
        fields: dict[str, Any] = self._table.one(number).to_pylist()[0]
        return fields

    def table(self) -> pa.Table:
        """Return all rows."""
        return self._table.whole()

    def _encoded(self, batch: pa.RecordBatch) -> Iterator[Row]:
        names = batch.schema.names
        if len(set(names)) < len(names):
            raise DataError(f"{self.label}: two columns have one name; the columns are {names}")
        for values in python_values(pa.StructArray.from_arrays(batch.columns, names=names)):
            try:
                yield Row(canonical_row(values), values=values)
            except ValueError as error:
                raise DataError(f"{self.label}: {error}; its columns are {batch.schema.to_string()}") from error


class ParquetTable:
    """A Parquet file, read row group by row group; the last one used for a single row is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._group: tuple[int, int, pa.Table] | None = None  # first row, row after the last, rows

    def read_hash(self, file: FileHash) -> None:
        """Hash the file's bytes."""
        _hash_file(self._path, file)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in pieces of at most 4,096."""
        with pq.ParquetFile(self._path) as file:
            yield from file.iter_batches(batch_size=_BATCH)

    def one(self, number: int) -> pa.Table:
        """Return one row."""
        if self._group is None or not self._group[0] <= number < self._group[1]:
            self._group = self._load(number)
        first, _, rows = self._group
        return rows.slice(number - first, 1)

    def whole(self) -> pa.Table:
        """Return all rows."""
        with pq.ParquetFile(self._path) as file:
            return file.read()

    def _load(self, number: int) -> tuple[int, int, pa.Table]:
        with pq.ParquetFile(self._path) as file:
            first = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number < first + rows:
                    return first, first + rows, file.read_row_group(group)
                first += rows
            return first, first, file.schema_arrow.empty_table()


class ArrowTable:
    """An Arrow IPC file or stream, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_hash(self, file: FileHash) -> None:
        """Hash the file's bytes."""
        _hash_file(self._path, file)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in pieces of at most 4,096."""
        yield from self.whole().to_batches(max_chunksize=_BATCH)

    def one(self, number: int) -> pa.Table:
        """Return one row."""
        return self.whole().slice(number, 1)

    def whole(self) -> pa.Table:
        """Return all rows, which stay in the file."""
        mapped = pa.memory_map(str(self._path))
        if mapped.read(6) == b"ARROW1":
            return pa.ipc.open_file(mapped).read_all()
        mapped.seek(0)
        return pa.ipc.open_stream(mapped).read_all()


class MemoryTable:
    """A ``datasets.Dataset``, used through ``with_format("arrow")``, slices and ``len`` alone."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._arrow = dataset.with_format("arrow")

    def read_hash(self, file: FileHash) -> None:
        """Do nothing: there is no file."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows in pieces of at most 4,096."""
        for first in range(0, len(self.dataset), _BATCH):
            yield from self._arrow[first : first + _BATCH].to_batches()

    def one(self, number: int) -> pa.Table:
        """Return one row."""
        return self._arrow[number : number + 1]

    def whole(self) -> pa.Table:
        """Return all rows."""
        return self._arrow[:]


def _hash_file(path: Path, file: FileHash) -> None:
    with path.open("rb") as opened:
        while piece := opened.read(1 << 20):
            file.update(piece)
