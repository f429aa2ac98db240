"""A run folder, opened for reading: records, events, heads, sketches, and the view that ``verify`` judges.

Never creates or changes a file, so a missing path is an error and nothing else. What it reads here is *stored*,
not verified: ``verify_run`` says what it is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import DataError, FormatError, ReadError
from auditlog.format.commitments import sample_identity
from auditlog.format.digests import sha256
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import Note
from auditlog.format.records import RECORD, Event, EventKind
from auditlog.ledger.custody import FOLDER as CUSTODY
from auditlog.ledger.custody import verify_custody_folder
from auditlog.ledger.shards import ShardReader
from auditlog.ledger.store import DATABASE, MANIFEST, StoredLog
from auditlog.ledger.view import FolderView, final_note, refuse
from auditlog.trust.anchors import Trust
from auditlog.trust.verdict import Check, Verdict
from auditlog.trust.verify import verify_log

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
        """Close the database."""
        self._log.close()

    def records(self) -> NDArray[np.void]:
        """Return all records ``(n,)`` of dtype ``RECORD`` in ``seq`` order."""
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

    def sketches(self, block: int = 8_192) -> Iterator[tuple[NDArray[np.void], NDArray[np.int8]]]:
        """Yield ``(records, sketches)`` block by block: ``(b,)`` of ``RECORD`` and ``(b, width)`` int8.

        The value of entry ``j`` is ``scale_raw * q[j]`` for ``j < dim``, ``scale_whitened * q[j]`` behind it.

        Raises:
            StoreError: If a shard is missing or too short.
        """
        records = self.records()
        for first in range(0, len(records), block):
            rows = records[first : first + block]
            yield rows, self.sketch_rows(rows["shard"], rows["shard_row"])

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


def verify_run(
    run: Path, trust: Trust, *, data: Path | None = None, progress: Callable[[int], None] | None = None
) -> Verdict:
    """Verify a run folder, and its custody log if it has one, against knowledge from outside.

    Args:
        run: The run folder.
        trust: Pinned keys and kept heads.
        data: Folder with the source files; with it, each record's commitment to its sample is opened too.
        progress: Called with the number of entries read so far.

    Raises:
        ReadError: If something cannot be read at all. That is no verdict about the content.
        DataError: If ``data`` lacks a source file.
    """
    with RunReader.open(run) as reader:
        identities = None if data is None else data_identities(reader.manifest, data)
        verdict = verify_log(reader.view(), trust, identities=identities, progress=progress)
        note = _readable_note(reader) if verdict.sealed else None
    has_custody = (Path(run) / CUSTODY).exists()
    if has_custody and note is not None:
        return _joined(verdict, verify_custody_folder(Path(run), trust, note), trust)
    unread = "what was done with the run after its seal: the folder holds no custody log"
    if has_custody:
        unread = "the custody log, because the run has no final note that can be read"
    return replace(verdict, not_checked=(*verdict.not_checked, *([unread] if has_custody or verdict.sealed else [])))


def _readable_note(reader: RunReader) -> Note | None:
    """Return the final note; ``None`` where a cell in its way does not fit the format, which is a finding already."""
    try:
        return reader.final_note
    except FormatError:
        return None


def data_identities(manifest: RunManifest, folder: Path) -> Callable[[int], bytes]:
    """Return a function from sample index to the identity that the source files in ``folder`` give it now.

    Raises:
        DataError: If a source file is missing or has fewer rows than the manifest says.
    """
    identities: list[bytes] = []
    for source in manifest.data.sources:
        path = folder / source.path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path}: {error.strerror or error}", "Name the folder that the manifest's paths start from."
            ) from error
        digest, rows = sha256(content), content.split(b"\n")
        if len(rows) < source.rows:
            raise DataError(f"{path}: {len(rows)} rows, the manifest says {source.rows}")
        identities += [sample_identity(digest, row, sha256(raw)) for row, raw in enumerate(rows[: source.rows])]
    return identities.__getitem__


def _joined(run: Verdict, custody: Verdict | None, trust: Trust) -> Verdict:
    """Return the run's verdict with what its custody log adds: one line if all is well there, else every check."""
    if custody is None:
        return run
    # Whether the whole is anchored was decided with the run, whose final note the custody log starts from.
    findings = tuple(f for f in custody.findings if f.code != "W_UNANCHORED")
    if any(check.status == "failed" for check in custody.checks):
        checks = tuple(replace(check, name=f"custody: {check.name}") for check in custody.checks)
    else:
        passed = sum(check.status == "passed" for check in custody.checks)
        checks = (Check("custody log", "passed", f"{custody.entries:,} entries, {passed} checks like those above"),)
    said_already = {*run.not_checked, Trust(trust.vkeys).leaves_open()}
    open_points = tuple(f"custody log: {point}" for point in custody.not_checked if point not in said_already)
    return replace(
        run,
        findings=run.findings + tuple(replace(f, message=f"custody: {f.message}") for f in findings),
        checks=run.checks + checks,
        not_checked=run.not_checked + open_points,
    )


def _read_manifest(run: Path) -> bytes:
    path = run / MANIFEST
    if not run.exists():
        raise ReadError(f"{run} does not exist", _ADVICE)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReadError(f"{path}: {error.strerror or error}", _ADVICE) from error
