"""A whole run against knowledge from outside: its own log, the logs of its other ranks, and its custody log.

``auditlog.trust.verify`` judges one log; here they are opened, and what they say of each other is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from auditlog.datamanifest.identities import data_identities
from auditlog.errors import FormatError, ReadError
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import Note, VKey
from auditlog.format.records import Event, EventKind
from auditlog.ledger.custody import FOLDER as CUSTODY
from auditlog.ledger.custody import custody_origin, read_acts, verify_custody_folder
from auditlog.ledger.ranks import rank_folder
from auditlog.ledger.reader import RunReader
from auditlog.trust.anchors import Trust
from auditlog.trust.erasures import NONE, Erasures, read_erasures
from auditlog.trust.heads import SINCE, WHERE, absent_log
from auditlog.trust.ranks import check_final, check_rank, named_ranks, rank_origin, run_origin
from auditlog.trust.sessions import Authority, claimed_keys
from auditlog.trust.verdict import Check, Finding, Verdict, unreadable
from auditlog.trust.verify import missing_log, verify_log

_EXCUSES = ("W_UNANCHORED", "E_ERASED")  # findings that say nothing against who wrote an act, or what it says


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
    logs = _verify_custody_logs(run, trust, custody)
    erasures = read_erasures(event for log in logs for event in log.believed)
    wanted = _Wanted(data, erasures, payloads, progress)
    own = verify_log_folder(run, trust, data=data, erasures=erasures, payloads=payloads, progress=progress)
    if own.manifest.rank:
        alone = f"the other ranks of this run: this is the log of rank {own.manifest.rank} of {own.manifest.world_size}"
        return replace(own.verdict, not_checked=(*own.verdict.not_checked, alone))
    verdict = own.verdict
    for rank in range(1, own.manifest.world_size):
        verdict = _joined(verdict, _verify_rank(own, rank, trust, wanted), trust, f"rank {rank}")
    if own.note is None or not logs:
        verdict = _without_custody(verdict, own, trust, bool(logs))
    else:
        for log in logs:
            verdict = _joined(verdict, log.verdict, trust, log.name)
    return _with_stray_heads(verdict, own, trust)


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


@dataclass(frozen=True, slots=True)
class _CustodyVerdict:
    """The verdict over one custody log, and its events if it is believed."""

    name: str
    verdict: Verdict
    believed: Sequence[Event] = ()


def _verify_custody_logs(run: Path, trust: Trust, elsewhere: Path | None) -> list[_CustodyVerdict]:
    """Verify the run's custody log, and one that is kept elsewhere; nothing without a final note to start from.

    Without a pinned key nobody knows who signed one; then the whole verdict is ``UNANCHORED`` at best.
    """
    folders = {"custody": run / CUSTODY} if (run / CUSTODY).exists() else {}
    if elsewhere is not None:
        folders["custody elsewhere"] = elsewhere
    if not folders:
        return []
    with RunReader.open(run) as reader:
        manifest, note = reader.manifest, _readable_note(reader)
    named = claimed_keys(manifest)
    trust = trust.naming(named)
    found = []
    for name, folder in folders.items():
        brought = trust
        if elsewhere is not None and folder != elsewhere:  # kept heads are those of the other one
            brought = replace(trust, heads=trust.heads_of(manifest.origin), since=None)
        found.append(_verify_custody_log(name, folder, brought, note, named, manifest.origin))
    return found


def _verify_custody_log(
    name: str, folder: Path, trust: Trust, note: Note | None, named: Sequence[VKey], origin: str
) -> _CustodyVerdict:
    """Verify one custody log. One in which anything is wrong excuses nothing; a head is about what came later."""
    try:
        if note is None:
            raise ReadError(f"{folder}: the run has no final note that a custody log could start from")
        verdict = verify_custody_folder(folder, trust, note, named=named)
        events = read_acts(folder)
    except ReadError as error:  # what is wrong with the run itself is said all the same
        return _CustodyVerdict(name, missing_log(custody_origin(origin), unreadable(folder, error)))
    wrong = [f for f in verdict.findings if f.level == "error" and f.code not in _EXCUSES and f.where != WHERE]
    return _CustodyVerdict(name, verdict, () if wrong else events)


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
