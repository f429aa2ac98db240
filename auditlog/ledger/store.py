"""The ledger's tables in DuckDB: append whole batches, read everything back in order.

The only file that imports duckdb. No keys, indexes, views or macros, tables made once; rows enter as Arrow
batches in one transaction each. Nothing is computed in SQL when reading for a verdict, because a macro saved
in the file can shadow a built-in function: readers look at the catalogue first and then fetch plain columns
of base tables. This module judges no content; it says when the engine cannot read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from auditlog.errors import FormatError, ReadError, StoreError
from auditlog.format.records import Event
from auditlog.ledger.columns import (
    TABLES,
    Report,
    records_from_arrow,
    records_to_arrow,
    rows_from_arrow,
    rows_to_arrow,
)
from auditlog.trust.logview import StoredBatch, StoredEvent, StoredRecords
from auditlog.trust.verdict import Finding

MANIFEST = "manifest.json"
DATABASE = "ledger.duckdb"
READ_ROWS = 65_536

# Readable by DuckDB 1.5 as well; kept on every later open.
_STORAGE = {"storage_compatibility_version": "v1.5.0"}
_LIMITS = {"memory_limit": "512MB", "threads": "1"}
_HARDENED = {
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
}

# A macro in the file can be called duckdb_tables; only the qualified name is certainly the engine's own.
_CATALOGUE = "system.main."


class Store:
    """The database of one log, opened for appending. One process at a time.

    Attributes:
        path: The database file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: duckdb.DuckDBPyConnection | None = _connect(path, _LIMITS)

    @classmethod
    def create(cls, path: Path) -> Store:
        """Make the four tables in a new file.

        The file is closed and opened again before the first row, so that no table definition is ever left to
        the replay of a write-ahead log.

        Raises:
            StoreError: If the file exists or cannot be written.
        """
        if path.exists():
            raise StoreError(f"{path} exists already")
        connection = _connect(path, _LIMITS | _STORAGE)
        try:
            for table, columns in TABLES.items():
                definition = ", ".join(f"{name} {sql_type}" for name, sql_type in columns.items())
                connection.execute(f"CREATE TABLE {table} ({definition})")
            connection.execute("CHECKPOINT")
        except duckdb.Error as error:
            raise _translated(error, path) from error
        finally:
            connection.close()
        return cls(path)

    def size(self) -> int:
        """Return how many entries are stored, records and events together."""
        try:
            (entries,) = self._con.execute(
                "SELECT (SELECT count(*) FROM records) + (SELECT count(*) FROM events)"
            ).fetchall()[0]
        except duckdb.Error as error:
            raise _translated(error, self.path) from error
        return int(entries)

    def append_batch(
        self, records: NDArray[np.void], leaves: list[bytes], events: list[StoredEvent], batch: StoredBatch
    ) -> None:
        """Store one batch in one transaction: all of it is there afterwards, or nothing.

        Args:
            records: ``(n,)`` packed records.
            leaves: Leaf hashes of the records.
            events: The batch's events.
            batch: Its row in ``batches``.

        Raises:
            StoreError: If the engine refuses. The batch may nevertheless have landed when the error came from
                the commit itself: ``reopen`` and compare ``size`` before trying again.
        """
        stored = [(e.event.fmt, e.event.seq, e.event.kind, e.event.ts_us, e.event.body, e.leaf) for e in events]
        header = (batch.batch, batch.first_seq, batch.entries, batch.chain)
        self._insert(
            records=records_to_arrow(records, leaves) if len(records) else None,
            events=rows_to_arrow("events", stored) if stored else None,
            batches=rows_to_arrow("batches", [header]),
        )

    def append_note(self, size: int, note: bytes) -> None:
        """Store one signed log checkpoint."""
        self._insert(checkpoints=rows_to_arrow("checkpoints", [(size, note)]))

    def notes(self) -> list[tuple[int, bytes]]:
        """Return ``(size, note)`` of every stored log checkpoint, in the order they were written."""
        try:
            return self._con.execute("SELECT size, note FROM checkpoints ORDER BY rowid").fetchall()
        except duckdb.Error as error:
            raise _translated(error, self.path) from error

    def reopen(self) -> None:
        """Connect anew after an engine error that may have made the connection unusable."""
        self._disconnect()
        self._connection = _connect(self.path, _LIMITS)

    def close(self) -> None:
        """Fold the write-ahead log into the file and close it.

        Raises:
            StoreError: If the engine cannot; the write-ahead log then stays and is read at the next open.
        """
        try:
            if self._connection is not None:
                self._connection.execute("CHECKPOINT")
        except duckdb.Error as error:
            raise _translated(error, self.path) from error
        finally:
            self._disconnect()

    @property
    def _con(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            raise StoreError(f"{self.path} is closed")
        return self._connection

    def _insert(self, **tables: pa.Table | None) -> None:
        con = self._con
        try:
            con.execute("BEGIN")
            for table, rows in tables.items():
                if rows is None:
                    continue
                con.register("incoming", rows)
                con.execute(f"INSERT INTO {table} SELECT * FROM incoming")
                con.unregister("incoming")
            con.execute("COMMIT")
        except duckdb.Error as error:
            _roll_back(con)
            raise _translated(error, self.path) from error

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except duckdb.Error:  # already invalid; what was committed is in the file or its write-ahead log
                return


class StoredLog:
    """The database of one log, opened read-only with everything switched off that a file could misuse.

    Use as a context manager. ``report`` arguments receive cells that have no place in the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Sorting may spill; the run folder itself is never written to.
        self._spill = tempfile.TemporaryDirectory(prefix="gradtrail-")
        try:
            self._con = _connect(path, _LIMITS | _HARDENED | {"temp_directory": self._spill.name}, read_only=True)
        except BaseException:
            self._spill.cleanup()
            raise
        self._tables = self._base_tables()

    def __enter__(self) -> StoredLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; reading on afterwards is an error."""
        self._con.close()
        self._spill.cleanup()

    def catalogue(self) -> list[Finding]:
        """Return what differs from the four tables the format defines, as ``E_SCHEMA`` findings."""
        found = [
            Finding("E_SCHEMA", f"the database has a {kind} named {name!r}, which the format does not know", where=name)
            for kind, name in self._foreign_objects()
        ]
        for table, expected in TABLES.items():
            columns = self._tables.get(table)
            if columns is None:
                found.append(Finding("E_SCHEMA", f"table {table} is missing or is not a plain table", where=table))
                continue
            for name in expected.keys() | columns.keys():
                if expected.get(name) != columns.get(name):
                    found.append(
                        Finding(
                            "E_SCHEMA",
                            f"column {table}.{name} is {columns.get(name, 'missing')}, "
                            f"expected {expected.get(name, 'no such column')}",
                            where=f"{table}.{name}",
                        )
                    )
        return found

    def records(self, report: Report) -> Iterator[StoredRecords]:
        """Yield all records in ``seq`` order, at most ``READ_ROWS`` at a time."""
        for batch in self._scan("records", "seq, rowid"):
            rows, leaves = records_from_arrow(batch, report)
            yield StoredRecords(rows, leaves)

    def events(self, report: Report) -> Iterator[StoredEvent]:
        """Yield all events in ``seq`` order."""
        for batch in self._scan("events", "seq, rowid"):
            for fmt, seq, kind, ts_us, body, leaf in rows_from_arrow("events", batch, report):
                yield StoredEvent(Event(seq=seq, kind=kind, ts_us=ts_us, body=body, fmt=fmt), leaf)

    def batches(self, report: Report) -> list[StoredBatch]:
        """Return the batch headers in the order they were written."""
        return [
            StoredBatch(*row)
            for batch in self._scan("batches", "rowid")
            for row in rows_from_arrow("batches", batch, report)
        ]

    def notes(self, report: Report) -> list[tuple[int, bytes]]:
        """Return ``(size, note)`` of the log checkpoints in the order they were written."""
        return [
            (size, note)
            for batch in self._scan("checkpoints", "rowid")
            for size, note in rows_from_arrow("checkpoints", batch, report)
        ]

    def _base_tables(self) -> dict[str, dict[str, str]]:
        """Return column types by name for every plain table of the main schema."""
        tables: dict[str, dict[str, str]] = {
            name: {} for schema, name in self._listing("tables", "schema_name", "table_name") if schema == "main"
        }
        for schema, table, column, sql_type in self._listing(
            "columns", "schema_name", "table_name", "column_name", "data_type"
        ):
            if schema == "main" and table in tables:
                tables[table][column] = sql_type
        return tables

    def _foreign_objects(self) -> list[tuple[str, str]]:
        """Return ``(kind, name)`` of everything in the file that is not one of the four tables."""
        found = [("table", name) for name in sorted(self._tables.keys() - TABLES.keys())]
        found += [("schema", name) for (name,) in self._listing("schemas", "schema_name") if name != "main"]
        for kind, (listing, column) in {
            "view": ("views", "view_name"),
            "function": ("functions", "function_name"),
            "type": ("types", "type_name"),
        }.items():
            found += [(kind, str(name)) for (name,) in self._listing(listing, column)]
        for kind, (listing, column) in {
            "index": ("indexes", "index_name"),
            "sequence": ("sequences", "sequence_name"),
            "trigger": ("triggers", "trigger_name"),
            "constraint": ("constraints", "constraint_text"),
        }.items():  # the engine has none of these itself
            found += [(kind, str(n)) for (n,) in self._query(f"SELECT {column} FROM {_CATALOGUE}duckdb_{listing}()")]
        defaults = self._listing("columns", "table_name", "column_name", "column_default")
        found += [("default value", f"{table}.{column}") for table, column, default in defaults if default is not None]
        return found

    def _listing(self, listing: str, *names: str) -> list[tuple[Any, ...]]:
        """Return catalogue rows that are not the engine's own."""
        rows = self._query(f"SELECT {', '.join(names)}, internal FROM {_CATALOGUE}duckdb_{listing}()")
        return [row[:-1] for row in rows if not row[-1]]

    def _scan(self, table: str, order: str) -> Iterator[pa.RecordBatch]:
        """Yield the table's expected columns; a column that is not there reads as NULL."""
        columns = self._tables.get(table)
        if columns is None:
            return
        wanted = ", ".join(name if name in columns else f"NULL AS {name}" for name in TABLES[table])
        if "seq" not in columns:
            order = "rowid"
        try:
            cursor = self._con.cursor()
            yield from cursor.sql(f"SELECT {wanted} FROM main.{table} ORDER BY {order}").to_arrow_reader(READ_ROWS)
        except (duckdb.Error, pa.ArrowException) as error:
            raise _translated(error, self.path) from error

    def _query(self, sql: str) -> list[tuple[Any, ...]]:
        try:
            return self._con.execute(sql).fetchall()
        except duckdb.Error as error:
            raise _translated(error, self.path) from error


def _connect(path: Path, config: dict[str, str], *, read_only: bool = False) -> duckdb.DuckDBPyConnection:
    try:
        return duckdb.connect(str(path), read_only=read_only, config=dict(config))
    except duckdb.Error as error:
        raise _translated(error, path) from error


def _roll_back(connection: duckdb.DuckDBPyConnection) -> None:
    try:
        connection.execute("ROLLBACK")
    except duckdb.Error:  # the engine rolled back by itself, or the connection is gone and the file is intact
        return


def _translated(error: Exception, path: Path) -> ReadError:
    """Return our error for an engine error, sorted by what the reader should do next."""
    text = str(error).strip().split("\n")[0]
    lowered = text.lower()
    if "conflicting lock" in lowered or "different configuration" in lowered:
        return ReadError(
            f"{path} is open in another process: {text}",
            "Wait until that process has sealed or left the run, then try again.",
        )
    if "version number" in lowered:
        return FormatError(
            f"{path} was written by another version of DuckDB (installed: {duckdb.__version__}): {text}",
            "Install the DuckDB version that the message names.",
        )
    if "could not write" in lowered or "no space left" in lowered:
        return StoreError(f"cannot write {path}: {text}", "Free some space. Everything stored before this is intact.")
    return StoreError(
        f"the database engine cannot use {path}: {text}",
        "Keep all files as they are. This is what a full or faulty disk looks like; restore a copy and compare.",
    )
