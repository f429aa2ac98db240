"""A run folder, opened for reading: records, events, heads, sketches, and the view that ``verify`` judges.

Never creates or changes a file, so a missing path is an error and nothing else. What it reads here is *stored*,
not verified: ``verify_run`` says what it is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.datamanifest.identities import data_identities
from auditlog.errors import FormatError, ReadError
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import Note
from auditlog.format.records import RECORD, Event, EventKind
from auditlog.ledger.custody import FOLDER as CUSTODY
from auditlog.ledger.custody import custody_origin, read_custody, verify_custody_folder
from auditlog.ledger.ranks import rank_folder
from auditlog.ledger.shards import ShardReader
from auditlog.ledger.sketch_reader import LogSketches, SketchReader
from auditlog.ledger.store import DATABASE, MANIFEST, StoredLog
from auditlog.ledger.view import FolderView, final_note, refuse
from auditlog.trust.anchors import Trust
from auditlog.trust.attempts import Attempt, is_live, read_attempts
from auditlog.trust.erasures import NONE, Erasures, read_erasures
from auditlog.trust.heads import SINCE, WHERE, absent_log
from auditlog.trust.ranks import check_final, check_rank, named_ranks, rank_origin, run_origin
from auditlog.trust.sessions import Authority, claimed_keys
from auditlog.trust.verdict import Check, Finding, Verdict, unreadable
from auditlog.trust.verify import missing_log, verify_log

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


def verify_run(
    run: Path,
    trust: Trust,
    *,
    data: Path | None = None,
    custody: Path | None = None,
    payloads: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Verify a run folder, the logs of its other ranks and its custody log, against knowledge from outside.

    Args:
        run: The run folder; or that of one rank, which is then verified alone.
        trust: Pinned keys and kept heads.
        data: Folder with the source files; with it, each record's commitment to its sample is opened too.
        custody: A custody log of this run that is kept elsewhere. Kept heads of the custody log are then those of
            this one.
        payloads: Open the commitments to sketches and salts too; without, the log alone is verified.
        progress: Called with the number of entries read so far.

    Raises:
        ReadError: If something cannot be read at all. That is no verdict about the content.
        DataError: If ``data`` lacks a source file.
    """
    run = Path(run)
    erasures = _believed_erasures(run, trust, custody)
    wanted = _Wanted(data, erasures, payloads, progress)
    own = verify_log_folder(run, trust, data=data, erasures=erasures, payloads=payloads, progress=progress)
    if own.manifest.rank:
        alone = f"the other ranks of this run: this is the log of rank {own.manifest.rank} of {own.manifest.world_size}"
        return replace(own.verdict, not_checked=(*own.verdict.not_checked, alone))
    verdict = own.verdict
    for rank in range(1, own.manifest.world_size):
        verdict = _joined(verdict, _verify_rank(own, rank, trust, wanted), trust, f"rank {rank}")
    return _with_stray_heads(_with_custody(verdict, own, trust, custody), own, trust)


@dataclass(frozen=True, slots=True)
class LogVerdict:
    """The verdict over one log folder, and what others are compared with: manifest, seal and final note."""

    path: Path
    verdict: Verdict
    manifest: RunManifest
    seal: dict[str, Any] | None
    note: Note | None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What of each log is to be looked at: the arguments that all ranks share."""

    data: Path | None
    erasures: Erasures
    payloads: bool
    progress: Callable[[int], None] | None


def verify_log_folder(
    run: Path,
    trust: Trust,
    *,
    data: Path | None = None,
    erasures: Erasures = NONE,
    payloads: bool = True,
    progress: Callable[[int], None] | None = None,
) -> LogVerdict:
    """Verify one folder's own log, without other ranks and custody; arguments and errors as for ``verify_run``.

    ``erasures`` are those of a custody log that is believed.
    """
    with RunReader.open(run) as reader:
        manifest = reader.manifest
        identities = None if data is None else data_identities(manifest, data)
        verdict = verify_log(
            reader.view(), trust, identities=identities, erasures=erasures, payloads=payloads, progress=progress
        )
        note = _readable_note(reader) if verdict.sealed else None
        seal = next((event.json() for event in reader.events(EventKind.SEAL)), None) if note else None
    return LogVerdict(run, verdict, manifest, seal, note)


def _believed_erasures(run: Path, trust: Trust, elsewhere: Path | None) -> Erasures:
    """Return what custody logs say was erased. One in which anything is wrong excuses nothing.

    Without a pinned key nobody knows who signed it; then the whole verdict is ``UNANCHORED`` at best.
    """
    folders = [folder for folder in (run / CUSTODY, elsewhere) if folder is not None and folder.exists()]
    if not folders:
        return NONE
    with RunReader.open(run) as reader:
        note, named = _readable_note(reader), claimed_keys(reader.manifest)
    if note is None:
        return NONE
    brought = replace(trust.naming(named), heads=(), since=None)
    events: list[Event] = []
    for folder in folders:
        try:
            verdict = verify_custody_folder(folder, brought, note, named=named)
            excused = ("W_UNANCHORED", "E_ERASED")
            if not any(f.level == "error" and f.code not in excused for f in verdict.findings):
                events += read_custody(folder.parent, folder.name)
        except ReadError:
            continue  # said where the custody log itself is verified
    return read_erasures(events)


def _verify_rank(run: LogVerdict, rank: int, trust: Trust, wanted: _Wanted) -> Verdict:
    """Verify the log of one rank, and that it is the one which rank 0 sealed."""
    folder = rank_folder(run.path, rank)
    if not folder.exists():
        finding = Finding("E_LOST", f"{folder} is missing: the records of this rank are not here", str(folder))
        return missing_log(rank_origin(run.manifest.origin, rank), finding)
    try:
        own = verify_log_folder(
            folder,
            replace(trust, origin=None, origins=()),
            data=wanted.data,
            erasures=wanted.erasures,
            payloads=wanted.payloads,
            progress=wanted.progress,
        )
    except ReadError as error:
        return missing_log(rank_origin(run.manifest.origin, rank), unreadable(folder, error))
    findings = check_rank(run.manifest, own.manifest, rank)
    if run.seal is not None:
        final = None if own.note is None else own.note.checkpoint()
        findings += check_final(final, own.verdict.entries, named_ranks(run.seal).get(rank))
    check = Check("rank 0", "failed" if findings else "passed", "same run, data and sketch; sealed by rank 0 as it is")
    verdict = own.verdict
    return replace(verdict, findings=(*verdict.findings, *findings), checks=(*verdict.checks, check))


def _with_custody(verdict: Verdict, own: LogVerdict, trust: Trust, elsewhere: Path | None) -> Verdict:
    """Add what the run's custody log, and one that is kept elsewhere, say; or that there is none."""
    named = claimed_keys(own.manifest)
    trust = trust.naming(named)
    logs = {"custody": own.path / CUSTODY} if (own.path / CUSTODY).exists() else {}
    if elsewhere is not None:
        logs["custody elsewhere"] = elsewhere
    if own.note is None or not logs:
        return _without_custody(verdict, own, trust, bool(logs))
    for name, folder in logs.items():
        brought = trust
        if elsewhere is not None and folder != elsewhere:
            brought = replace(trust, heads=trust.heads_of(own.manifest.origin), since=None)
        try:
            other = verify_custody_folder(folder, brought, own.note, named=named)
        except ReadError as error:  # what is wrong with the run itself is said all the same
            other = missing_log(custody_origin(own.manifest.origin), unreadable(folder, error))
        verdict = _joined(verdict, other, trust, name)
    return verdict


def _without_custody(verdict: Verdict, own: LogVerdict, trust: Trust, is_there: bool) -> Verdict:
    """Say that no custody log was read, and what kept heads of one make of that."""
    why, unread = "the folder holds no custody log", ["what was done with the run after its seal: no custody log"]
    if own.note is None:
        why = "the run has no seal that can be read, which a custody log starts from"
        unread = ["the custody log, because the run has no final note that can be read"] if is_there else []
    heads = trust.heads_of(custody_origin(own.manifest.origin))
    authority = Authority(trust.vkeys or claimed_keys(own.manifest), trust.is_pinned)
    findings = absent_log(heads, authority, why)
    checks = (Check("custody log", "failed", f"{len(heads)} kept heads are of it: {why}"),) if findings else ()
    return replace(
        verdict,
        findings=(*verdict.findings, *findings),
        checks=(*verdict.checks, *checks),
        not_checked=(*verdict.not_checked, *unread),
    )


def _with_stray_heads(verdict: Verdict, own: LogVerdict, trust: Trust) -> Verdict:
    """Report kept heads that bear this run's name and are of none of its logs, so that nothing was compared."""
    origin = own.manifest.origin
    logs = {rank_origin(origin, rank) for rank in range(own.manifest.world_size)} | {custody_origin(origin)}
    origins = [head.checkpoint().origin for head in trust.all_heads]
    strays = [name for name in origins if name not in logs and run_origin(name) == run_origin(origin)]
    findings = [Finding("E_BIND", f"the kept head is of {name}; this run has no such log", WHERE) for name in strays]
    return replace(verdict, findings=(*verdict.findings, *findings))


def _readable_note(reader: RunReader) -> Note | None:
    """Return the final note; ``None`` where a cell in its way does not fit the format, which is a finding already."""
    try:
        return reader.final_note
    except FormatError:
        return None


def _joined(run: Verdict, other: Verdict, trust: Trust, name: str) -> Verdict:
    """Return the run's verdict with what another log of it adds: one line if all is well there, else every check."""
    # Whether the whole is anchored was decided with the run, whose final note the other log is bound to.
    findings = tuple(f for f in other.findings if f.code != "W_UNANCHORED")
    own = tuple(f for f in run.findings if f.code != "W_UNANCHORED")
    unanchored = tuple(f for f in run.findings if f.code == "W_UNANCHORED")  # said last: it is the least
    if any(check.status == "failed" for check in other.checks):
        checks = tuple(replace(check, name=f"{name}: {check.name}") for check in other.checks)
    else:
        passed = sum(check.status == "passed" for check in other.checks)
        checks = (Check(f"{name} log", "passed", f"{other.entries:,} entries, {passed} checks like those above"),)
        checks += tuple(replace(c, name=f"{name}: {c.name}") for c in other.checks if c.name == SINCE)
    said_already = {*run.not_checked, Trust(trust.vkeys).leaves_open()}
    open_points = tuple(f"{name} log: {point}" for point in other.not_checked if point not in said_already)
    return replace(
        run,
        findings=own + tuple(replace(f, message=f"{name}: {f.message}") for f in findings) + unanchored,
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
