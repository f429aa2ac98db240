"""A run folder, opened for reading: records, events, heads, sketches, and the view that ``verify`` judges.

Never creates or changes a file, so a missing path is an error and nothing else. What it reads here is *stored*,
not verified: ``verify_run`` says what it is worth.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import ReadError
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import Note
from auditlog.format.records import RECORD, Event, EventKind
from auditlog.ledger.ranks import rank_folder
from auditlog.ledger.shards import ShardReader
from auditlog.ledger.sketch_reader import LogSketches, SketchReader
from auditlog.ledger.store import DATABASE, MANIFEST, StoredLog
from auditlog.ledger.view import FolderView, final_note, refuse
from auditlog.trust.attempts import Attempt, is_live, read_attempts

_ADVICE = "Name the folder that holds manifest.json and ledger.duckdb; a run folder is what audit mode wrote."


class RunReader:
    """One run folder. Make it with ``open`` and use it as a context manager.

    Attributes:
        path: The run folder.
        manifest_bytes: ``manifest.json`` as it stands.
        manifest: The same, parsed.
    """

    def __init__(self, path: Path, manifest_bytes: bytes, log: StoredLog) -> None:
        self.path = path
        self.manifest_bytes = manifest_bytes
        self.manifest = RunManifest.from_bytes(manifest_bytes)
        self._log = log
        width = self.manifest.sketch.dim * len(self.manifest.sketch.forms)
        self._shards = ShardReader(path, width)
        self._others = ExitStack()

    @classmethod
    def open(cls, run: Path) -> RunReader:
        """Open a run folder read-only.

        Raises:
            ReadError: If the folder or one of its files is missing, or the database is open in another process.
            FormatError: If the manifest does not parse.
            StoreError: If the database engine reports damage.
        """
        run = Path(run)
        manifest_bytes = _read_manifest(run)
        database = run / DATABASE
        if not database.is_file() or database.stat().st_size == 0:
            state = "is empty" if database.is_file() else "is missing"
            raise ReadError(f"{database} {state}: not a run folder, or only a part of one", _ADVICE)
        log = StoredLog(database)
        try:
            return cls(run, manifest_bytes, log)
        except BaseException:
            log.close()
            raise

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the database, and those of the other ranks if they were opened."""
        self._others.close()
        self._log.close()

    @cached_property
    def ranks(self) -> list[RunReader]:
        """The logs of all ranks, this one first, opened when first asked for; just this one in an ordinary run.

        Raises:
            ReadError: If the log of a rank cannot be read.
        """
        others = range(1, self.manifest.world_size) if self.manifest.rank == 0 else ()
        opened = (self._others.enter_context(RunReader.open(rank_folder(self.path, rank))) for rank in others)
        return [self, *opened]

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The run's attempts, and the step that each goes on from."""
        return read_attempts(self.events())

    def live(self, records: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return which records ``(n,)`` led to the weights as they are now: no later attempt went back behind them."""
        return is_live(self.attempts, records["attempt"], records["step"])

    def live_records(self) -> NDArray[np.void]:
        """Return the live records of all ranks ``(n,)``, rank by rank in ``seq`` order."""
        return np.concatenate([own[reader.live(own)] for reader in self.ranks for own in [reader.records()]])

    def live_sketches(self) -> SketchReader:
        """Return a reader of the sketches of the live records of all ranks."""
        logs = ((reader.records(), reader) for reader in self.ranks)
        return SketchReader(self.manifest, [LogSketches(own[rank.live(own)], rank._shards) for own, rank in logs])

    def live_steps(self) -> list[Event]:
        """Return the STEP events that led to the weights as they are now, in order: one for each optimizer step."""
        steps = self.events(EventKind.STEP)
        bodies = [event.json() for event in steps]
        live = is_live(self.attempts, [body["attempt"] for body in bodies], [body["step"] for body in bodies])
        return [event for event, counts in zip(steps, live, strict=True) if counts]

    def records(self) -> NDArray[np.void]:
        """Return all records ``(n,)`` of dtype ``RECORD`` in ``seq`` order, those of superseded steps included."""
        chunks = [chunk.rows for chunk in self._log.records(refuse)]
        return np.concatenate(chunks) if chunks else np.empty(0, RECORD)

    def events(self, kind: EventKind | None = None) -> list[Event]:
        """Return the events in ``seq`` order, all or those of one kind."""
        stored = (entry.event for entry in self._log.events(refuse))
        return [event for event in stored if kind is None or event.kind == kind]

    def heads(self) -> dict[int, Note]:
        """Return the stored log checkpoints by size."""
        notes = (Note.parse(note) for _, note in self._log.notes(refuse))
        return {note.checkpoint().size: note for note in notes}

    @property
    def final_note(self) -> Note | None:
        """The checkpoint over the whole log if its last entry is a seal, else ``None``."""
        return final_note(self._log)

    def sketches(self) -> SketchReader:
        """Return a reader of the sketches of all records of this log, those of superseded steps included."""
        return SketchReader(self.manifest, [LogSketches(self.records(), self._shards)])

    def sketch_rows(self, shard: NDArray[np.uint32], row: NDArray[np.uint32]) -> NDArray[np.int8]:
        """Return stored rows ``(n, width)`` int8 by their places.

        Raises:
            StoreError: If a shard is missing or too short.
        """
        return self._shards.rows(shard, row)

    def sample_index(self, records: NDArray[np.void]) -> NDArray[np.int64]:
        """Return the sample index ``(n,)`` behind each record, from its source file and row."""
        first = np.array([source.first_index for source in self.manifest.data.sources], np.int64)
        index: NDArray[np.int64] = first[records["source_id"]] + records["row"].astype(np.int64)
        return index

    def view(self) -> FolderView:
        """Return what ``verify`` reads."""
        dim = self.manifest.sketch.dim
        return FolderView(self.path, self._log, self.manifest_bytes, self.manifest, self._shards, dim)


def open_sketches(run: Path) -> SketchReader:
    """Return a reader of the sketches that led to a run's final weights; its database is closed again.

    Raises:
        ReadError: As for ``RunReader.open``.
    """
    with RunReader.open(run) as reader:
        return reader.live_sketches()


def _read_manifest(run: Path) -> bytes:
    path = run / MANIFEST
    if not run.exists():
        raise ReadError(f"{run} does not exist", _ADVICE)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReadError(f"{path}: {error.strerror or error}", _ADVICE) from error
