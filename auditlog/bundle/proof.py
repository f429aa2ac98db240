"""Proves that one entry is in a run's log: a text to mail, that anyone checks offline, without the run.

The text is a C2SP *tlog-proof*: the entry's index, the hashes from its leaf to the root, and a signed log checkpoint.
The format's ``extra`` line, which is authenticated by nothing but what the rest shows, holds the entry itself (its row,
and an event's body) and the certificate of the session whose key signed the checkpoint.

Source: https://c2sp.org/tlog-proof.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from auditlog.errors import FormatError, UsageError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.merkle import inclusion_path, verify_inclusion
from auditlog.format.notes import Note
from auditlog.format.records import FORMAT_VERSION, Event, EventKind, record_leaves
from auditlog.ledger.reader import RunReader

TITLE = "c2sp.org/tlog-proof@v1"
EXTRA_FORMAT = "gradtrail/proof"


def prove_entry(run: Path, seq: int) -> str:
    """Return the proof that entry ``seq`` is in the log of a run, under its largest signed log checkpoint.

    Args:
        run: The run folder; for another rank's log, the folder of that rank.
        seq: The entry.

    Raises:
        UsageError: If there is no such entry, or no signed log checkpoint covers it yet.
        FormatError: If the entries as they stand do not give the signed root, so that nothing can be proved.
        ReadError: If the run cannot be read.
    """
    with RunReader.open(run) as reader:
        notes = {size: note for size, note in reader.heads().items() if size > seq}
        entries, leaves = _leaves(reader)
        if not 0 <= seq < entries:
            raise UsageError(
                f"there is no entry {seq}: the log has {entries:,}", "gradtrail show RUN says what it holds."
            )
        if not notes:
            raise UsageError(
                f"no signed log checkpoint covers entry {seq} yet",
                "Wait for the next one, or close a crashed run: gradtrail seal RUN --abandon.",
            )
        size = max(notes)
        statement = notes[size].checkpoint()
        path = inclusion_path(leaves[:size], seq) if len(leaves) >= size else []
        if len(leaves) < size or not verify_inclusion(leaves[seq], seq, size, path, statement.root):
            raise FormatError(
                f"the entries do not give the root that was signed over {size:,} of them, so nothing can be proved",
                "gradtrail verify RUN says what is wrong.",
            )
        extra = _entry(reader, seq) | {"session": _session(reader, notes[size])}
    return proof_text(seq, path, notes[size], canonical_bytes(extra))


def proof_text(seq: int, path: list[bytes], note: Note, extra: bytes) -> str:
    """Return a proof as text: ``path`` are the sibling hashes, lowest first."""
    lines = [TITLE, f"extra {_base64(extra)}", f"index {seq}", *map(_base64, path), "", ""]
    return "\n".join(lines) + note.to_bytes().decode()


def _leaves(reader: RunReader) -> tuple[int, list[bytes]]:
    """Return how many entries are stored, and the leaf hashes of those before the first hole."""
    records = reader.records()
    leaves = dict(zip(records["seq"].tolist(), record_leaves(records), strict=True))
    events = reader.events()
    leaves |= {event.seq: event.leaf() for event in events}
    unbroken = next((seq for seq in range(len(leaves)) if seq not in leaves), len(leaves))
    return len(records) + len(events), [leaves[seq] for seq in range(unbroken)]


def _entry(reader: RunReader, seq: int) -> dict[str, Any]:
    """Return the row of an entry, and an event's body."""
    entry: dict[str, Any] = {"format": EXTRA_FORMAT, "fmt": FORMAT_VERSION}
    event = next((event for event in reader.events() if event.seq == seq), None)
    if event is not None:
        return entry | {"row": event.row().hex(), "body": event.body.decode()}
    records = reader.records()
    return entry | {"row": records[records["seq"] == seq].tobytes().hex()}


def _session(reader: RunReader, note: Note) -> dict[str, Any] | None:
    """Return the certificate of the session whose key signed the note; ``None`` where no session key did."""
    names = {signature.name for signature in note.signatures}
    for event in reader.events(EventKind.SESSION):
        body = _body(event)
        if str(body.get("certificate", {}).get("session_vkey", "")).partition("+")[0] in names:
            return body
    return None


def _body(event: Event) -> dict[str, Any]:
    try:
        return event.json()
    except json.JSONDecodeError as error:
        raise FormatError(f"entry {event.seq}: its body is no JSON", "gradtrail verify says more.") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
