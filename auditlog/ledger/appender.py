"""Entries into one log, batch by batch: database transaction, then signature, then note file, then hand-over.

Each act comes only after the one before it is durable, so a crash between any two leaves a log that says less
than it could, never more. The run's ledger and the custody log both write through this class. It keeps what
could not be stored and tries again at the next flush: nothing that was appended is dropped.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import StoreError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.chain import LogState
from auditlog.format.notes import LogCheckpoint, Note, NoteSigner, sign_note
from auditlog.format.records import RECORD, Event, EventKind, record_leaves
from auditlog.ledger.files import write_once
from auditlog.ledger.heads import FOLDER, OnHead, deliver, note_name, place_beside, second_note_name
from auditlog.ledger.store import DATABASE, Store, StoredLog
from auditlog.ledger.view import refuse
from auditlog.trust.logview import StoredBatch, StoredEvent


@dataclass(frozen=True, slots=True)
class _Batch:
    """What goes into the database in one transaction. Fixed at the first attempt, so that a retry repeats it."""

    rows: NDArray[np.void]
    leaves: list[bytes]
    events: list[StoredEvent]
    header: StoredBatch

    @property
    def end(self) -> int:
        return self.header.first_seq + self.header.entries


class Appender:
    """Appends to one log.

    Args:
        folder: The log's folder: the run, or its ``custody/``.
        origin: The log's name in its checkpoints.
        store: Its database.
        state: Chain and tree over what the database holds.
        batches: How many batches it holds.
        on_head: Where heads are handed to.
        lost_sizes: Sizes of heads that were handed over for entries which are lost. A new head of such a size is
            handed over under a name of its own.

    Attributes:
        note: The latest signed checkpoint, or ``None``.
    """

    def __init__(
        self,
        folder: Path,
        origin: str,
        store: Store,
        state: LogState,
        *,
        batches: int = 0,
        on_head: OnHead | None = None,
        lost_sizes: Collection[int] = (),
    ) -> None:
        self.note: Note | None = None
        self._folder = folder
        self._origin = origin
        self._store = store
        self._state = state
        self._batches = batches
        self._on_head = on_head
        self._lost_sizes = lost_sizes
        self._stored = state.size  # entries that are certainly in the database
        self._signed = 0
        self._batch: _Batch | None = None  # its transaction has not succeeded yet
        self._records: list[NDArray[np.void]] = []
        self._leaves: list[bytes] = []
        self._events: list[StoredEvent] = []
        self._unwritten: list[Note] = []
        self._undelivered: list[Note] = []
        self._beside: list[tuple[str, bytes]] = []
        self._doubtful = False  # the last transaction failed in a way that may have landed all the same

    @classmethod
    def create(cls, folder: Path, origin: str, genesis_document: bytes, *, on_head: OnHead | None = None) -> Appender:
        """Start an empty log in ``folder``."""
        return cls(folder, origin, Store.create(folder / DATABASE), LogState(genesis_document), on_head=on_head)

    @classmethod
    def resume(
        cls,
        folder: Path,
        origin: str,
        genesis_document: bytes,
        *,
        on_head: OnHead | None = None,
        lost_sizes: Collection[int] = (),
    ) -> Appender:
        """Go on with an existing log, after recomputing its chain and tree from the stored entries.

        Raises:
            StoreError: If an entry is missing, or the entries do not give the root that was signed over them.
        """
        state, batches = _recompute(folder, genesis_document)
        store = Store(folder / DATABASE)
        appender = cls(folder, origin, store, state, batches=batches, on_head=on_head, lost_sizes=lost_sizes)
        notes = appender._store.notes()
        appender._signed = max((size for size, _ in notes), default=0)
        # A crash between the database and heads/ leaves the last note without its file.
        appender._unwritten = [Note.parse(note) for _, note in notes]
        return appender

    @property
    def size(self) -> int:
        """Entries appended so far, stored or waiting: the ``seq`` of the next one."""
        return self._state.size

    @property
    def stored(self) -> int:
        """Entries that are in the database."""
        return self._stored

    @property
    def waiting(self) -> int:
        """Entries that wait for the next flush."""
        return self._state.size - self._stored

    @property
    def root(self) -> bytes:
        """Tree root over all entries appended so far."""
        return self._state.root()

    def add_records(self, rows: NDArray[np.void]) -> None:
        """Append packed records ``(n,)``, whose ``seq`` must run on from ``size``."""
        leaves = record_leaves(rows)
        self._state.extend(leaves)
        self._records.append(rows)
        self._leaves += leaves

    def add_event(self, kind: EventKind, body: dict[str, Any] | bytes) -> Event:
        """Append an event, stamped with the present time; a body of bytes is stored as it is."""
        content = body if isinstance(body, bytes) else canonical_bytes(body)
        event = Event(seq=self._state.size, kind=int(kind), ts_us=now_us(), body=content)
        leaf = event.leaf()
        self._state.append(leaf)
        self._events.append(StoredEvent(event, leaf))
        return event

    def hand_over(self, name: str, content: bytes) -> None:
        """Have a file put beside the heads that a folder receives, at the next flush."""
        self._beside.append((name, content))

    def flush(self, *signers: NoteSigner) -> None:
        """Store what waits, sign a checkpoint over it, write it to ``heads/`` and hand it over.

        Raises:
            StoreError: If one of these fails. What had not happened yet is kept for the next flush.
        """
        self._settle()
        while self.waiting:
            self._batch = self._batch or self._freeze()
            self._commit(self._batch)
        if self._state.size > self._signed:
            self._sign(*signers)
        while self._unwritten:
            note = self._unwritten[0]
            write_once(self._folder / FOLDER / note_name(note.checkpoint().size), note.to_bytes())
            self._undelivered.append(self._unwritten.pop(0))
        while self._undelivered:
            note = self._undelivered[0]
            deliver(self._on_head, self._folder, self._name_elsewhere(note), note.to_bytes())
            self._undelivered.pop(0)
        while self._beside:
            place_beside(self._on_head, self._folder, *self._beside[0])
            self._beside.pop(0)

    def close(self) -> None:
        """Close the database; entries that were never flushed are not in it."""
        self._store.close()

    def _freeze(self) -> _Batch:
        """Make a batch of everything that waits."""
        # Joined as bytes: concatenate would compare all fields of the record type once for each step.
        rows = np.frombuffer(b"".join(rows.tobytes() for rows in self._records), RECORD)
        header = StoredBatch(self._batches, self._stored, self.waiting, self._state.chain)
        batch = _Batch(rows, self._leaves, self._events, header)
        self._records, self._leaves, self._events = [], [], []
        return batch

    def _commit(self, batch: _Batch) -> None:
        self._doubtful = True
        self._store.append_batch(batch.rows, batch.leaves, batch.events, batch.header)
        self._doubtful = False
        self._committed(batch)

    def _committed(self, batch: _Batch) -> None:
        self._stored = batch.end
        self._batches += 1
        self._batch = None

    def _sign(self, *signers: NoteSigner) -> None:
        size = self._state.size
        note = sign_note(LogCheckpoint(self._origin, size, self._state.root()).text(), *signers)
        self._doubtful = True
        self._store.append_note(size, note.to_bytes())
        self._doubtful = False
        self._noted(size, note)

    def _noted(self, size: int, note: Note) -> None:
        self._signed, self.note = size, note
        self._unwritten.append(note)

    def _name_elsewhere(self, note: Note) -> str:
        statement = note.checkpoint()
        return second_note_name(statement) if statement.size in self._lost_sizes else note_name(statement.size)

    def _settle(self) -> None:
        """After a failed transaction, find out from the database whether it landed."""
        if not self._doubtful:
            return
        self._store.reopen()
        stored = self._store.size()
        if self._batch is not None and stored == self._batch.end:
            self._committed(self._batch)
        elif stored != self._stored:
            raise StoreError(
                f"{self._folder / DATABASE} holds {stored} entries, this process stored {self._stored}",
                "Another process has written to this run. Keep all files and run: gradtrail verify RUN",
            )
        notes = self._store.notes()
        if notes and notes[-1][0] > self._signed:
            self._noted(notes[-1][0], Note.parse(notes[-1][1]))
        self._doubtful = False


def now_us() -> int:
    """Return the operator's clock in microseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1000


def _recompute(folder: Path, genesis_document: bytes) -> tuple[LogState, int]:
    """Return chain and tree over the stored entries, and the number of batches.

    Raises:
        StoreError: If the sequence has a gap, or a stored checkpoint does not fit the entries.
    """
    path = folder / DATABASE
    state = LogState(genesis_document)

    with StoredLog(path) as log:
        signed = {}
        for size, data in log.notes(refuse):
            signed[size] = Note.parse(data).checkpoint().root
        for seq, leaf in _leaves(log):
            if seq != state.size:
                raise StoreError(f"{path}: entry {state.size} is missing (found {seq} in its place)")
            state.append(leaf)
            if signed.pop(state.size, None) not in (None, state.root()):
                raise StoreError(f"{path}: the first {state.size} entries do not give the root that was signed")
        batches = log.batches(refuse)
    if signed:
        raise StoreError(
            f"{path} holds {state.size} entries, but a checkpoint was signed over {max(signed)}",
            "Entries are missing. If the process was killed, look for ledger.duckdb.wal beside the database.",
        )
    covered = batches[-1].first_seq + batches[-1].entries if batches else 0
    if covered != state.size:
        raise StoreError(
            f"{path} holds {state.size} entries, its batches {covered}: no accident leaves this",
            "Keep all files as they are and look at: gradtrail verify RUN",
        )
    return state, len(batches)


def _leaves(log: StoredLog) -> Iterator[tuple[int, bytes]]:
    """Yield ``(seq, recomputed leaf)`` of records and events in one order."""
    records = (
        (int(row["seq"]), leaf)
        for chunk in log.records(refuse)
        for row, leaf in zip(chunk.rows, record_leaves(chunk.rows), strict=True)
    )
    events = ((stored.event.seq, stored.event.leaf()) for stored in log.events(refuse))
    return heapq.merge(records, events)
