"""Signed log checkpoints against the log: the ones it holds, and the files in ``heads/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from auditlog.errors import FormatError
from auditlog.format.notes import LogCheckpoint, Note
from auditlog.trust.losses import AcceptedHeads
from auditlog.trust.sessions import Authority, Fault
from auditlog.trust.verdict import Finding, counted
from auditlog.trust.walk import Walk

LOST = "lost/"  # below heads/: notes over entries that are gone

LOST_WAL = (
    "After a crash a missing write-ahead log (ledger.duckdb.wal) looks like this too: "
    "look for it, or for a copy of the run, before anything is written."
)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A row of the checkpoints table whose note could be parsed. ``number`` is its row, from 0."""

    number: int
    note: Note
    statement: LogCheckpoint
    data: bytes

    @property
    def size(self) -> int:
        """The signed tree size."""
        return self.statement.size

    def __str__(self) -> str:
        return f"log checkpoint {self.number} (size {self.size:,})"


def head_name(size: int) -> str:
    """Return the file name of the head of ``size`` entries."""
    return f"{size:08d}.note"


def read_checkpoints(rows: Sequence[tuple[int, bytes]]) -> tuple[list[StoredCheckpoint], list[Finding]]:
    """Parse the checkpoints table; a row that is no signed checkpoint vouches for nothing and is reported."""
    stored: list[StoredCheckpoint] = []
    findings = []
    for number, (size, data) in enumerate(rows):
        where = f"table checkpoints, row {number}"
        try:
            note = Note.parse(data)
            checkpoint = StoredCheckpoint(number, note, note.checkpoint(), data)
        except FormatError as error:
            findings.append(Finding("E_SIG", f"log checkpoint {number} (size {size:,}): {error}", where))
            continue
        if size != checkpoint.size:
            message = f"{checkpoint}: its row says size {size:,}"
            findings.append(Finding("E_CKPT_ORDER", message, where))
        if stored and checkpoint.size <= stored[-1].size:
            message = f"{checkpoint} follows one of size {stored[-1].size:,}: sizes must rise"
            findings.append(Finding("E_CKPT_ORDER", message, where))
        stored.append(checkpoint)
    return stored, findings


def check_checkpoints(
    stored: Sequence[StoredCheckpoint], walk: Walk, authority: Authority, origin: str
) -> tuple[list[Finding], list[Finding], set[int]]:
    """Compare each signed checkpoint with the log.

    Returns:
        Findings about what the checkpoints say, findings about who says it, and the sizes that the long-lived key
        signed.
    """
    content: list[Finding] = []
    faulty: dict[Fault, list[StoredCheckpoint]] = {}
    long_lived_sizes = set()
    for checkpoint in stored:
        if checkpoint.statement.origin != origin:
            message = f"{checkpoint} belongs to {checkpoint.statement.origin}, this log is {origin}"
            content.append(Finding("E_BIND", message, f"table checkpoints, row {checkpoint.number}"))
        faults, has_long_lived = authority.judge(checkpoint.note, checkpoint.size)
        for fault in faults:
            faulty.setdefault(fault, []).append(checkpoint)
        if has_long_lived:
            long_lived_sizes.add(checkpoint.size)
    signatures = [_signature_finding(*fault, checkpoints) for fault, checkpoints in faulty.items()]
    own = [checkpoint for checkpoint in stored if checkpoint.statement.origin == origin]
    content += _check_truncation(own, walk)
    content += _check_roots(own, walk)
    return content, signatures, long_lived_sizes


def _signature_finding(code: str, what: str, checkpoints: Sequence[StoredCheckpoint]) -> Finding:
    first, more = checkpoints[0], len(checkpoints) - 1
    others = f" and {more} more" if more else ""
    message = f"{first}{others}: {what}"
    return Finding(code, message, f"table checkpoints, row {first.number}")


def _check_truncation(own: Sequence[StoredCheckpoint], walk: Walk) -> list[Finding]:
    beyond = [checkpoint for checkpoint in own if checkpoint.size > walk.size]
    if not beyond:
        return []
    last = max(beyond, key=lambda checkpoint: checkpoint.size)
    message = (
        f"the log ends after {counted(walk.size, 'entry', 'entries')}; {last} commits to {last.size:,}: "
        f"{counted(last.size - walk.size, 'entry', 'entries')} missing"
    )
    return [Finding("E_TRUNC", message, "tables records and events", walk.size, hint=LOST_WAL)]


def _check_roots(own: Sequence[StoredCheckpoint], walk: Walk) -> list[Finding]:
    """Name the first checkpoint whose root does not come out, and the stretch in which the change must lie."""
    failed: list[StoredCheckpoint] = []
    good_size = 0
    for checkpoint in own:
        root = walk.roots.get(checkpoint.size)
        if root is None:
            continue
        if checkpoint.statement.root == root:
            good_size = max(good_size, checkpoint.size) if not failed else good_size
        elif checkpoint.statement.root != walk.logged_roots.get(checkpoint.size):
            failed.append(checkpoint)
    if not failed:
        return []
    first = failed[0]
    if first.size > good_size:
        walk.mark_bad(good_size)
    later = f"; {counted(len(failed) - 1, 'later one')} cannot hold either" if len(failed) > 1 else ""
    good = f"the one of size {good_size:,} still does" if good_size else "no earlier one does"
    message = (
        f"{first} does not have the root of the entries before {first.size:,}, {good}: "
        f"what was changed lies in entries {good_size:,} to {first.size - 1:,}{later}"
    )
    return [Finding("E_ROOT", message, f"table checkpoints, row {first.number}", good_size)]


def check_head_files(
    files: Mapping[str, bytes],
    stored: Sequence[StoredCheckpoint],
    walk: Walk,
    accepted: AcceptedHeads = MappingProxyType({}),
    *,
    sealed: bool,
) -> list[Finding]:
    """Compare ``heads/`` with the checkpoints table: the same notes, byte for byte.

    A crash may leave the last note in one of the two places only, so in an open run that is just a note. Notes in
    ``heads/lost/`` that an accepted loss names need no row: their entries are gone.
    """
    files = {name: data for name, data in files.items() if not (name.startswith(LOST) and _names(accepted, data))}
    findings = []
    by_name = {head_name(checkpoint.size): checkpoint for checkpoint in stored}
    for name, checkpoint in by_name.items():
        if name in files and files[name] != checkpoint.data:
            message = f"heads/{name} and the checkpoints table hold two different notes of size {checkpoint.size:,}"
            findings.append(Finding("E_CKPT_ORDER", message, f"heads/{name}"))
    missing = sorted(name for name in by_name if name not in files)
    if missing:
        is_last = len(missing) == 1 and bool(stored) and missing[0] == head_name(stored[-1].size)
        message = f"heads/{missing[0]} is missing{_and_more(missing)}; its note is in the checkpoints table"
        findings.append(_lost(message, is_note=is_last and not sealed))
    extra = sorted(name for name in files if name not in by_name)
    findings += _check_extra_files(extra, files, walk, sealed=sealed)
    return findings


def _names(accepted: AcceptedHeads, note: bytes) -> bool:
    try:
        statement = Note.parse(note).checkpoint()
    except FormatError:
        return False
    return (statement.size, statement.root) in accepted


def _check_extra_files(extra: Sequence[str], files: Mapping[str, bytes], walk: Walk, *, sealed: bool) -> list[Finding]:
    findings: list[Finding] = []
    beyond: list[tuple[int, str]] = []
    known: list[tuple[int, str]] = []
    for name in extra:
        try:
            size = Note.parse(files[name]).checkpoint().size
        except FormatError as error:
            findings.append(Finding("E_CKPT_ORDER", f"heads/{name} is no signed log checkpoint: {error}", "heads/"))
            continue
        (beyond if size > walk.size else known).append((size, name))
    if beyond:
        size, name = max(beyond)
        message = f"heads/{name} commits to {size:,} entries, the log ends after {walk.size:,}"
        findings.append(Finding("E_TRUNC", message, f"heads/{name}", walk.size, hint=LOST_WAL))
    if known:
        names = [name for _, name in known]
        message = f"heads/{names[0]}{_and_more(names)} has no row in the checkpoints table"
        findings.append(_lost(message, is_note=len(known) == 1 and not sealed))
    return findings


def _lost(message: str, *, is_note: bool) -> Finding:
    if is_note:
        return Finding("N_HEAD", f"{message} (a crash leaves this)", "heads/", level="note")
    return Finding("E_LOST", message, "heads/")


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
