"""A log folder as ``verify`` sees it: the ``LogView`` of a run or of its custody log.

Everything is handed over as it stands on disk. Cells that the format has no place for become findings here,
because only here is it known that they were not zeros.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from auditlog.errors import FormatError
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import Note
from auditlog.format.records import Event, EventKind
from auditlog.ledger import heads
from auditlog.ledger.columns import Report
from auditlog.ledger.salts import Salts, StepSalts
from auditlog.ledger.shards import SHARD_ROWS, ShardReader
from auditlog.ledger.store import StoredLog
from auditlog.trust.logview import StoredBatch, StoredEvent, StoredRecords
from auditlog.trust.verdict import Finding


class FolderView:
    """A log folder as ``auditlog.trust`` sees it (a ``LogView``). Cells outside the format become findings."""

    def __init__(
        self,
        folder: Path,
        log: StoredLog,
        genesis_document: bytes,
        manifest: RunManifest | None,
        shards: ShardReader | None = None,
        dim: int = 0,
    ) -> None:
        self._folder = folder
        self._log = log
        self._genesis = genesis_document
        self._manifest = manifest
        self._shards = shards
        self._dim = dim
        self._salts, self._step_salts = Salts(folder), StepSalts(folder)
        self._cells, self._looked_at = _Cells(), set[str]()
        self._tables: dict[str, Callable[[], Iterable[Any]]] = {
            "records": self.records,
            "events": self.events,
            "batches": self.batches,
            "checkpoints": self.checkpoints,
        }

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    def genesis_document(self) -> bytes:
        """Return what the chain starts from."""
        return self._genesis

    def manifest(self) -> RunManifest | None:
        """Return the manifest; ``None`` for a custody log."""
        return self._manifest

    def findings(self) -> Sequence[Finding]:
        """Return schema and encoding findings."""
        for table, read in self._tables.items():
            if table not in self._looked_at:
                for _ in read():
                    pass
        return [*self._log.catalogue(), *self._cells.findings()]

    def records(self) -> Iterator[StoredRecords]:
        """Yield the records in ``seq`` order."""
        return self._log.records(self._look_at("records", "entry"))

    def events(self) -> Iterator[StoredEvent]:
        """Yield the events in ``seq`` order."""
        return self._log.events(self._look_at("events", "entry"))

    def batches(self) -> Sequence[StoredBatch]:
        """Return the batch headers in table order."""
        return self._log.batches(self._look_at("batches", "row"))

    def checkpoints(self) -> Sequence[tuple[int, bytes]]:
        """Return ``(size, note)`` in table order."""
        return self._log.notes(self._look_at("checkpoints", "row"))

    def heads(self) -> Mapping[str, bytes]:
        """Return the files in ``heads/``."""
        return heads.read_heads(self._folder)

    def salt(self, index: int) -> bytes | None:
        """Return a sample's salt."""
        return self._salts.salt(index)

    def sketch(self, shard: int, shard_row: int) -> tuple[bytes, bytes] | None:
        """Return a stored row as raw and whitened bytes."""
        row = None if self._shards is None else self._shards.row(shard, shard_row)
        return None if row is None else (row[: self._dim].tobytes(), row[self._dim :].tobytes())

    def step_salt(self, shard: int, row: int) -> bytes | None:
        """Return a stored gradient's salt."""
        return self._step_salts.salt(shard * SHARD_ROWS + row)

    def file_digests(self) -> Mapping[str, str | None]:
        """Return the present SHA-256 of each snapshot file that an event names."""
        digests: dict[str, str | None] = {}
        for stored in self.events():
            if stored.event.kind != EventKind.MODEL_CHECKPOINT:
                continue
            for name in _snapshot_names(stored.event):
                digests.setdefault(name, _digest_inside(self._folder, name))
        return digests

    def _look_at(self, table: str, unit: str) -> Report:
        """Return what takes a table's odd cells: they are gathered when it is read for the first time."""
        if table in self._looked_at:
            return _ignore
        self._looked_at.add(table)
        return self._cells.reporter(table, unit)


class _Cells:
    """Gathers odd cells into one finding per column, so that an emptied column does not flood the verdict."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[int, str, str]] = {}
        self._more: Counter[tuple[str, str]] = Counter()

    def reporter(self, table: str, unit: str) -> Report:
        def report(column: str, number: int, what: str) -> None:
            if (table, column) in self._first:
                self._more[table, column] += 1
            self._first.setdefault((table, column), (number, what, unit))

        return report

    def findings(self) -> list[Finding]:
        found = []
        for (table, column), (number, what, unit) in self._first.items():
            more = f", and {self._more[table, column]} more" if self._more[table, column] else ""
            message = f"{table}.{column} {what} ({unit} {number}{more})"
            seq = number if unit == "entry" else None
            found.append(Finding("E_ENCODING", message, where=f"{table}.{column}", seq=seq))
        return found


def final_note(log: StoredLog) -> Note | None:
    """Return the checkpoint over a whole log whose last entry is a seal, else ``None``."""
    seals = [stored.event.seq for stored in log.events(refuse) if stored.event.kind == EventKind.SEAL]
    if not seals:
        return None
    notes = (Note.parse(note) for size, note in log.notes(refuse) if size == seals[-1] + 1)
    return next(notes, None)


def refuse(column: str, number: int, what: str) -> None:
    """Raise ``FormatError`` for a cell that has no place in the format: for readers that are not verifying."""
    raise FormatError(f"{column} {what} (entry or row {number})", "Run gradtrail verify for the whole picture.")


def _ignore(column: str, number: int, what: str) -> None:
    """A table that is read again has the odd cells it had."""


def _snapshot_names(event: Event) -> list[str]:
    """Return ``<path>/<name>`` of each file that a MODEL_CHECKPOINT event names; nothing if it is malformed."""
    try:
        body = event.json()
        return [f"{body['path']}/{file['name']}" for file in body["files"]]
    except (ValueError, KeyError, TypeError):
        return []


def _digest_inside(folder: Path, name: str) -> str | None:
    """Hash a file of the run folder; a name that leads out of it counts as missing."""
    relative = PurePosixPath(name)
    path = folder / relative
    if relative.is_absolute() or ".." in relative.parts or not path.resolve().is_relative_to(folder.resolve()):
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
