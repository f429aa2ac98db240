"""The custody log: what was done with a sealed run afterwards, in ``custody/`` beside it.

Same format as the run's own log, events only. It starts from the bytes of the run's final note, is signed by
the long-lived key of whoever acts, and is open-ended: that its tail was cut shows only against a kept head.
Results are files in ``custody/results/``; the log holds salted commitments to them, so they can be erased.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from auditlog.errors import FormatError, ReadError, UsageError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.commitments import SALT_BYTES, document_commitment
from auditlog.format.notes import Note, VKey
from auditlog.format.records import Event, EventKind
from auditlog.ledger.appender import Appender
from auditlog.ledger.files import write_once
from auditlog.ledger.store import DATABASE, StoredLog
from auditlog.ledger.view import FolderView, final_note, refuse
from auditlog.trust.anchors import Trust
from auditlog.trust.erasures import read_erasures
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import Check, Finding, Verdict
from auditlog.trust.verify import verify_custody

FOLDER = "custody"
RESULTS = "results"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


def custody_origin(origin: str) -> str:
    """Return the origin of the custody log of the run ``origin``."""
    return f"{origin}/custody"


class CustodyLog:
    """Appends acts to a run's custody log. Each act is a batch and a signed checkpoint of its own.

    The database is open only while an act is written. Make it with ``open``.

    Attributes:
        folder: The run's ``custody/``.
    """

    def __init__(self, folder: Path, signer: Signer, run_note: Note) -> None:
        self.folder = folder
        self._signer = signer
        self._origin = custody_origin(run_note.checkpoint().origin)
        self._genesis = run_note.to_bytes()

    @classmethod
    def open(cls, run: Path, signer: Signer) -> CustodyLog:
        """Open the custody log of a sealed run, and start it if this is the first act.

        Raises:
            UsageError: If the run is not sealed.
            ReadError: If the run cannot be read.
        """
        with StoredLog(_database(run)) as log:
            note = final_note(log)
        if note is None:
            raise UsageError(
                f"{run} is not sealed, so nothing can be logged about it yet",
                f"A crashed run is closed by: gradtrail seal {run} --abandon --key KEY",
            )
        custody = cls(Path(run) / FOLDER, signer, note)
        if not (custody.folder / DATABASE).exists():
            custody._start()
        return custody

    def append(self, kind: EventKind, body: dict[str, Any]) -> Event:
        """Append one act, sign a checkpoint over the log and write it to ``custody/heads/``.

        Raises:
            StoreError: If the log's stored entries do not fit its last checkpoint, or the disk refuses.
        """
        log = Appender.resume(self.folder, self._origin, self._genesis)
        try:
            event = log.add_event(kind, body)
            log.flush(self._signer)
        finally:
            log.close()
        return event

    def write_result(self, name: str, document: dict[str, Any]) -> dict[str, str]:
        """Write ``custody/results/<name>.json`` and its salt; returns what the act's event says about it.

        Args:
            name: Lower-case letters, digits, ``.``, ``_`` and ``-``.
            document: JSON; written in canonical form.

        Raises:
            UsageError: If the name is not usable or taken.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(f"not a name for a result: {name!r}")
        path = self.folder / RESULTS / f"{name}.json"
        if path.exists():
            raise UsageError(f"{path} exists already", "Give the result another name.")
        content, salt = canonical_bytes(document), os.urandom(SALT_BYTES)
        write_once(path.with_suffix(".salt"), salt, mode=0o600)
        write_once(path, content)
        return {"file": f"{RESULTS}/{name}.json", "commitment": document_commitment(salt, content).hex()}

    def _start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        log = Appender.create(self.folder, self._origin, self._genesis)
        try:
            log.add_event(EventKind.CUSTODY_OPENED, self._genesis)
            log.flush(self._signer)
        finally:
            log.close()


def read_custody(run: Path) -> list[Event]:
    """Return the acts in a run's custody log, the opening included; empty if there is no custody log.

    Stored, not verified: see ``verify_run``.
    """
    return read_acts(Path(run) / FOLDER)


def read_acts(folder: Path) -> list[Event]:
    """Return the acts in the custody log in ``folder``, as ``read_custody`` does."""
    database = folder / DATABASE
    if not database.exists():
        return []
    with StoredLog(database) as log:
        return [stored.event for stored in log.events(refuse)]


def erased_samples(run: Path) -> Mapping[tuple[int, int], int]:
    """Return ``(source_id, row) -> custody entry`` of the samples that were erased. Stored, not verified."""
    return read_erasures(read_custody(run)).samples


def custody_head(run: Path) -> Note | None:
    """Return the custody log's latest head, to be kept elsewhere; ``None`` if there is no custody log."""
    database = Path(run) / FOLDER / DATABASE
    if not database.exists():
        return None
    with StoredLog(database) as log:
        notes = log.notes(refuse)
    return Note.parse(notes[-1][1]) if notes else None


def read_result(run: Path, name: str) -> dict[str, Any]:
    """Return a result, after comparing it with the commitment in the custody log.

    Raises:
        ReadError: If the file or its salt is missing, or no act in the log names it.
        FormatError: If it is not what the log committed to.
    """
    file = f"{RESULTS}/{name}.json"
    acts = read_custody(run)
    commitment = _commitments(acts).get(file)
    if commitment is None:
        raise ReadError(f"no act in the custody log of {run} names {file}")
    erasure = read_erasures(acts).results.get(file)
    if erasure is not None:
        raise ReadError(f"{file} was erased under custody entry {erasure}, because it named an erased sample")
    finding = _check_result(Path(run) / FOLDER, file, *commitment)
    if finding is not None:
        raise (ReadError if finding.code == "E_ERASED" else FormatError)(finding.message)
    document: dict[str, Any] = json.loads((Path(run) / FOLDER / file).read_bytes())
    return document


def verify_custody_folder(folder: Path, trust: Trust, run_note: Note, *, named: Sequence[VKey] = ()) -> Verdict:
    """Verify a custody log and the result files it names.

    Args:
        folder: The run's ``custody/``, or a folder of the same kind that somebody keeps elsewhere.
        trust: Pinned keys; of the kept heads only those of the custody log.
        run_note: The run's final note, which the custody log starts from.
        named: Keys that the run names; see ``verify_custody``.

    Raises:
        ReadError: If it cannot be read.
    """
    if not (folder / DATABASE).is_file():
        raise ReadError(f"{folder / DATABASE} is missing" + (f", but {folder} is there" if folder.exists() else ""))
    with StoredLog(folder / DATABASE) as log:
        view = FolderView(folder, log, run_note.to_bytes(), None)
        verdict = verify_custody(view, trust, run_note.to_bytes(), named=named)
        events = [stored.event for stored in view.events()]
    commitments, erased = _commitments(events), read_erasures(events).results
    found = [_check_result(folder, file, *commitment, erased.get(file)) for file, commitment in commitments.items()]
    findings = tuple(finding for finding in found if finding is not None)
    detail = f"{len(commitments)} result files" + (f", {len(erased)} of them erased" if erased else "")
    check = Check("results", "failed" if findings else "passed", detail)
    return replace(verdict, findings=verdict.findings + findings, checks=(*verdict.checks, check))


def _database(run: Path) -> Path:
    path = Path(run) / DATABASE
    if not path.is_file():
        raise ReadError(f"{path} is missing: not a run folder")
    return path


def _commitments(events: list[Event]) -> dict[str, tuple[int, str]]:
    """Return ``file -> (seq, commitment)`` of every result that an act names; malformed bodies name none."""
    found: dict[str, tuple[int, str]] = {}
    for event in events:
        if event.kind == EventKind.CUSTODY_OPENED:
            continue
        try:
            result = event.json()["result"]
            found[str(result["file"])] = (event.seq, str(result["commitment"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _check_result(folder: Path, file: str, seq: int, commitment: str, erasure: int | None = None) -> Finding | None:
    """Compare a result file with its commitment; one that custody entry ``erasure`` took must be gone."""
    name = file.removeprefix(f"{RESULTS}/").removesuffix(".json")
    path = folder / RESULTS / f"{name}.json"
    if not _NAME.fullmatch(name):
        return Finding("E_EVENT", f"entry {seq} names a result outside {RESULTS}/: {file!r}", seq=seq)
    if erasure is not None:
        if not path.exists():
            return None
        return Finding("E_ERASED", f"{file} was erased under custody entry {erasure}; it is still there", file, seq)
    try:
        content, salt = path.read_bytes(), path.with_suffix(".salt").read_bytes()
    except FileNotFoundError as error:
        return Finding("E_ERASED", f"{error.filename} is missing and no act says that it was erased", file, seq)
    except OSError as error:
        return Finding("E_IO", f"{path}: {error.strerror or error}", file, seq)
    if document_commitment(salt, content).hex() != commitment:
        return Finding("E_EVENT", f"{file} is not what entry {seq} committed to", file, seq)
    return None
