"""Where an unsealed run stands, read before anything is written to it: what it holds, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditlog.errors import DataError, FormatError, StoreError, UsageError
from auditlog.format.manifest import DataBlock, RunManifest
from auditlog.format.notes import Note
from auditlog.format.records import Event, EventKind
from auditlog.ledger.account import Account
from auditlog.ledger.heads import OnHead, handed_over, parse_note, read_heads
from auditlog.ledger.reader import RunReader
from auditlog.ledger.shards import rows_in_use
from auditlog.ledger.store import DATABASE
from auditlog.trust.facts import parse_loss
from auditlog.trust.losses import accepted_heads


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands.

    Attributes:
        run: Its folder.
        manifest_bytes: ``manifest.json``.
        manifest: The same, parsed.
        size: Entries that are stored.
        account: What they count.
        rows: Sketch rows that they refer to.
        has_seal: Whether a SEAL event is among them, signed or not.
        orphans: Heads over more entries than are stored, whose loss nobody has accepted.
        lost_sizes: Sizes of all heads over lost entries, accepted or not.
    """

    run: Path
    manifest_bytes: bytes
    manifest: RunManifest
    size: int
    account: Account
    rows: int
    has_seal: bool
    orphans: tuple[Note, ...]
    lost_sizes: frozenset[int]

    def insist_complete(self) -> None:
        """Refuse a run that is shorter than its heads.

        Raises:
            StoreError: Naming both sizes.
        """
        if not self.orphans:
            return
        signed = max(note.checkpoint().size for note in self.orphans)
        database = self.run / DATABASE
        has_wal = database.with_name(f"{DATABASE}.wal").exists()
        raise StoreError(
            f"{database} holds {self.size:,} entries, a head was signed over {signed:,}: the last "
            f"{signed - self.size:,} are missing" + ("" if has_wal else f", and there is no {DATABASE}.wal"),
            "Look for the write-ahead log, or another copy of the run, before anything is written. To go on without "
            "those entries, and have the log say so: accept_loss=True, or --accept-loss.",
        )

    def loss(self, size: int, missing_steps: tuple[int, int] | None = None) -> dict[str, Any] | None:
        """Return the body of the LOSS_ACCEPTED event, or ``None`` if nothing is lost.

        Args:
            size: Entries in the log now.
            missing_steps: First and last step that were trained and never logged.
        """
        if not self.orphans and missing_steps is None:
            return None
        statements = sorted((note.checkpoint() for note in self.orphans), key=lambda s: (s.size, s.root))
        return {
            "size": size,
            "entries": max((s.size for s in statements), default=size) - size,
            "heads": [{"size": s.size, "root": s.root.hex()} for s in statements],
            "missing_steps": missing_steps and {"first": missing_steps[0], "last": missing_steps[1]},
        }


def new_standing(run: Path, manifest: RunManifest) -> Standing:
    """Return where a run stands that has not begun."""
    return Standing(run, manifest.to_bytes(), manifest, 0, Account(), 0, False, (), frozenset())


def read_standing(run: Path, on_head: OnHead | None = None) -> Standing:
    """Read where an unsealed run stands. Writes nothing.

    Args:
        run: The run folder.
        on_head: Where its heads go. A folder is compared with the log too: a run that was restored from an old
            copy is shorter than what it has handed over.

    Raises:
        ReadError: If the run cannot be read.
        StoreError: If a head belongs to another log.
    """
    with RunReader.open(run) as reader:
        records, events, stored = reader.records(), reader.events(), reader.heads()
        manifest, manifest_bytes = reader.manifest, reader.manifest_bytes
    size = len(records) + len(events)
    accepted = accepted_heads(_losses(events))
    orphans = {}
    for where, data in _all_heads(run, on_head):
        note, statement = parse_note(where, data)
        head = (statement.size, statement.root)
        if head in accepted:
            continue
        twin = stored.get(statement.size)
        if statement.origin != manifest.origin or (twin and twin.checkpoint().root != statement.root):
            raise StoreError(
                f"{where} is a head of another log than {run / DATABASE}",
                "Keep all files as they are and look at: gradtrail verify RUN",
            )
        if statement.size > size:
            orphans[head] = note
    return Standing(
        run=run,
        manifest_bytes=manifest_bytes,
        manifest=manifest,
        size=size,
        account=Account.read(records, events),
        rows=rows_in_use(records, (event.json() for event in events if event.kind == EventKind.STEP)),
        has_seal=any(event.kind == EventKind.SEAL for event in events),
        orphans=tuple(orphans.values()),
        lost_sizes=frozenset(size for size, _ in [*accepted, *orphans]),
    )


def insist_resumable(standing: Standing, data: DataBlock, vkey: str) -> None:
    """Refuse a run that ended, or that this data or key does not belong to.

    Raises:
        UsageError: If it is sealed, or names another long-lived key.
        DataError: If the data is not what it recorded, naming the first difference.
    """
    if standing.has_seal:
        raise UsageError(f"{standing.run} is sealed: it cannot be resumed", "Start a new run in a folder of its own.")
    if standing.manifest.vkey != vkey:
        raise UsageError(
            f"{standing.run} names the key {standing.manifest.vkey}, the signer is {vkey}",
            "Resume with the key that started the run.",
        )
    difference = next(_differences(standing.manifest.data, data), None)
    if difference is not None:
        raise DataError(
            f"{standing.run}: the data is not what the run recorded: {difference}",
            "Restore the data as it was when the run began, or start a new run.",
        )


def _differences(recorded: DataBlock, present: DataBlock) -> Iterator[str]:
    """Yield where two data blocks differ, the files first."""
    for was, now in zip(recorded.sources, present.sources, strict=False):
        for name in type(was).model_fields:
            if getattr(was, name) != getattr(now, name):
                yield f"source file {was.path}: {name} was {getattr(was, name)} and is {getattr(now, name)}"
    if len(recorded.sources) != len(present.sources):
        yield f"there were {len(recorded.sources)} source files, now there are {len(present.sources)}"
    blocks = (recorded, present)
    # The same content may have a newer commit by now.
    roots, now_roots = ([(v.data_version_id, v.kind, v.root) for v in block.versions] for block in blocks)
    if roots != now_roots:
        yield f"versions were {recorded.versions!r} and are {present.versions!r}"
    for name in type(recorded).model_fields.keys() - {"versions"}:
        if getattr(recorded, name) != getattr(present, name):
            yield f"{name} was {getattr(recorded, name)!r} and is {getattr(present, name)!r}"


def _all_heads(run: Path, on_head: OnHead | None) -> Iterator[tuple[str, bytes]]:
    """Yield where a head lies and its bytes: in the run, and in the folder it was handed to."""
    for name, data in read_heads(run).items():
        yield str(run / "heads" / name), data
    for name, data in handed_over(on_head, run).items():
        yield f"{on_head}: {name}", data


def _losses(events: Iterable[Event]) -> Iterator[Any]:
    for event in events:
        if event.kind == EventKind.LOSS_ACCEPTED:
            try:
                yield parse_loss(event.seq, event.json())
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(f"entry {event.seq}: a LOSS_ACCEPTED event without a proper {error}") from error
