"""A complete sealed run in memory, as ``verify`` sees one, and the means to change it as an attacker would.

Small enough to build in well under a second: 1 session, 110 steps of 8 records, one snapshot, one seal; batches of
64 entries, a signed log checkpoint every 256 entries and at the end. ``kept_head`` was handed over at size 768.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from auditlog.format.canonical import canonical_bytes
from auditlog.format.chain import LogState
from auditlog.format.commitments import (
    SALT_BYTES,
    gradient_commitment,
    sample_commitment,
    sample_identity,
    sketch_commitment,
)
from auditlog.format.digests import sha256
from auditlog.format.manifest import (
    DataBlock,
    DataVersion,
    RunManifest,
    SketchBlock,
    SketchParameter,
    Source,
)
from auditlog.format.merkle import root_hash
from auditlog.format.notes import LogCheckpoint, Note, NoteSigner, sign_note
from auditlog.format.records import RECORD, Event, EventKind, record_leaves
from auditlog.trust.certificates import make_certificate, session_name
from auditlog.trust.checkpoints import head_name
from auditlog.trust.keys import Signer
from auditlog.trust.logview import StoredBatch, StoredEvent, StoredRecords
from auditlog.trust.verdict import Finding

ORIGIN = "bank.example/credit-2026-12"
DIM = 16
SAMPLES = 50
BATCH = 64
HEAD_EVERY = 256
KEPT_SIZE = 768
START_US = 1_764_547_200_123_457  # a time that is not a whole millisecond


@dataclass
class MemoryLog:
    """A ``LogView`` whose every part may be changed at will."""

    genesis: bytes
    run_manifest: RunManifest | None
    rows: Any  # (n,) RECORD
    leaves: list[bytes]
    stored_events: list[StoredEvent]
    stored_batches: list[StoredBatch]
    notes: list[tuple[int, bytes]]
    head_files: dict[str, bytes]
    salts: dict[int, bytes] = field(default_factory=dict)
    sketches: dict[tuple[int, int], tuple[bytes, bytes]] = field(default_factory=dict)
    step_salts: dict[tuple[int, int], bytes] = field(default_factory=dict)
    digests: dict[str, str | None] = field(default_factory=dict)
    opener_findings: list[Finding] = field(default_factory=list)
    chunk: int = 100
    name: str = "runs/credit-2026-12"

    def genesis_document(self) -> bytes:
        return self.genesis

    def manifest(self) -> RunManifest | None:
        return self.run_manifest

    def findings(self) -> Sequence[Finding]:
        return self.opener_findings

    def records(self) -> Iterator[StoredRecords]:
        order = np.argsort(self.rows["seq"], kind="stable")
        for i in range(0, len(order), self.chunk):
            part = order[i : i + self.chunk]
            yield StoredRecords(self.rows[part], [self.leaves[j] for j in part])

    def events(self) -> Iterator[StoredEvent]:
        yield from sorted(self.stored_events, key=lambda stored: stored.event.seq)

    def batches(self) -> Sequence[StoredBatch]:
        return self.stored_batches

    def checkpoints(self) -> Sequence[tuple[int, bytes]]:
        return self.notes

    def heads(self) -> Mapping[str, bytes]:
        return self.head_files

    def salt(self, index: int) -> bytes | None:
        return self.salts.get(index)

    def sketch(self, shard: int, shard_row: int) -> tuple[bytes, bytes] | None:
        return self.sketches.get((shard, shard_row))

    def step_salt(self, shard: int, row: int) -> bytes | None:
        return self.step_salts.get((shard, row))

    def file_digests(self) -> Mapping[str, str | None]:
        return self.digests

    # --- what an attacker does -----------------------------------------------------------------------

    def record_at(self, seq: int) -> int:
        """Return the row number of the record ``seq``."""
        (at,) = np.flatnonzero(self.rows["seq"] == seq)
        return int(at)

    def set_field(self, seq: int, name: str, value: Any) -> None:
        """UPDATE records SET name = value WHERE seq = seq."""
        self.rows[name][self.record_at(seq)] = value

    def delete(self, first: int, end: int) -> None:
        """DELETE FROM records and events WHERE first <= seq < end."""
        keep = (self.rows["seq"] < first) | (self.rows["seq"] >= end)
        self.leaves = [leaf for leaf, kept in zip(self.leaves, keep, strict=True) if kept]
        self.rows = self.rows[keep]
        self.stored_events = [s for s in self.stored_events if not first <= s.event.seq < end]

    def shift(self, first: int, by: int) -> None:
        """Renumber everything from entry ``first`` on."""
        moved = self.rows["seq"] >= first
        self.rows["seq"][moved] = self.rows["seq"][moved].astype(np.int64) + by
        self.stored_events = [
            StoredEvent(replace(s.event, seq=s.event.seq + by), s.leaf) if s.event.seq >= first else s
            for s in self.stored_events
        ]

    def rehash(self) -> None:
        """Recompute every stored leaf from the rows."""
        self.leaves = record_leaves(self.rows)
        self.stored_events = [StoredEvent(s.event, s.event.leaf()) for s in self.stored_events]

    def rechain(self) -> None:
        """Recompute every stored leaf and every batch's chain value."""
        self.rehash()
        state, leaves, batches = LogState(self.genesis), self.all_leaves(), []
        for batch in self.stored_batches:
            state.extend(leaves[batch.first_seq : batch.first_seq + batch.entries])
            batches.append(replace(batch, chain=state.chain))
        self.stored_batches = batches

    def resign(self, *signers: NoteSigner, final: Sequence[NoteSigner]) -> None:
        """Sign every checkpoint anew over the entries as they stand; ``final`` sign the last."""
        leaves = self.all_leaves()
        origin = Note.parse(self.notes[0][1]).checkpoint().origin
        sizes = [size for size, _ in self.notes if size <= len(leaves)]
        self.notes = []
        for size in sizes:
            who = final if size == sizes[-1] else signers
            self.add_note(sign_note(LogCheckpoint(origin, size, root_hash(leaves[:size])).text(), *who))
        self.head_files = {head_name(size): note for size, note in self.notes}

    def add_note(self, note: Note) -> None:
        size = note.checkpoint().size
        self.notes.append((size, note.to_bytes()))
        self.head_files[head_name(size)] = note.to_bytes()

    def drop_notes_above(self, size: int, *, files: bool = True) -> None:
        """Forget the log checkpoints of more than ``size`` entries."""
        self.notes = [(s, note) for s, note in self.notes if s <= size]
        if files:
            self.head_files = {n: f for n, f in self.head_files.items() if n <= head_name(size)}

    def all_leaves(self) -> list[bytes]:
        """Return the stored leaves of all entries in order."""
        both = list(zip(self.rows["seq"].tolist(), self.leaves, strict=True))
        both += [(s.event.seq, s.leaf) for s in self.stored_events]
        return [leaf for _, leaf in sorted(both, key=lambda pair: pair[0])]

    @property
    def size(self) -> int:
        return len(self.rows) + len(self.stored_events)


@dataclass
class MemoryRun:
    """A log with the keys that signed it."""

    log: MemoryLog
    signer: Signer
    session: Signer
    kept_head: Note

    def copy(self) -> MemoryRun:
        return MemoryRun(copy.deepcopy(self.log), self.signer, self.session, self.kept_head)


def make_manifest(signer: Signer, *, origin: str = ORIGIN, run_id: str = "run-1") -> RunManifest:
    digest = "ab" * 32
    sources = tuple(
        Source(
            source_id=i,
            path=f"data/part-{i}.jsonl",
            format="jsonl",
            sha256=sha256(bytes([i])).hex(),
            size_bytes=1000,
            content_sha256=digest,
            rows=rows,
            first_index=first,
            data_version_id=version,
        )
        for i, (rows, first, version) in enumerate([(20, 0, 0), (18, 20, 0), (12, 38, 1)])
    )
    versions = tuple(DataVersion(data_version_id=i, kind="files", revision=f"v{i}", root=digest) for i in (0, 1))
    return RunManifest(
        run_id=run_id,
        origin=origin,
        created_us=START_US,
        vkey=str(signer.vkey),
        data=DataBlock(text_fields=("text",), sources=sources, versions=versions, rows=SAMPLES),
        sketch=SketchBlock(
            kind="rolled-sign-fold",
            dim=DIM,
            forms=("raw",),
            seed="7",
            tables_sha256=digest,
            route="exact",
            parameters=(SketchParameter(name="w", shape=(4, 4), offset=0),),
        ),
        model={},
        tracking={},
        training={},
        environment={},
    )


def identity_of(manifest: RunManifest, index: int) -> bytes:
    """Return the identity of a sample whose raw row is its index in decimal."""
    source = next(s for s in reversed(manifest.data.sources) if s.first_index <= index)
    row = index - source.first_index
    return sample_identity(bytes.fromhex(source.sha256), row, sha256(str(index).encode()))


class Builder:
    """Writes a log entry by entry, as the real ledger would."""

    def __init__(self, manifest: RunManifest, signer: Signer, seed: int = 0) -> None:
        self.manifest = manifest
        self.signer = signer
        self.session = signer
        self.attempt = 0
        self.done: list[tuple[int, int, int]] = []  # attempt, step, records; 0 records for a step event
        self.lines: dict[int, tuple[int, int]] = {}  # attempt -> from which attempt and step it goes on
        self.random = np.random.default_rng(seed)
        self.log = MemoryLog(manifest.to_bytes(), manifest, np.zeros(0, RECORD), [], [], [], [], {})
        self.log.salts = {i: self.random.bytes(32) for i in range(SAMPLES)}
        self.state = LogState(self.log.genesis)
        self.batched = 0
        self.shard_row = 0
        self.now_us = START_US

    def append(self, leaf: bytes) -> None:
        self.state.append(leaf)
        if self.state.size - self.batched == BATCH:
            self.close_batch()
        if self.state.size % HEAD_EVERY == 0:
            self.sign(self.session)

    def close_batch(self) -> None:
        entries = self.state.size - self.batched
        if entries:
            self.log.stored_batches.append(
                StoredBatch(len(self.log.stored_batches), self.batched, entries, self.state.chain)
            )
        self.batched = self.state.size

    def sign(self, *signers: NoteSigner) -> Note:
        self.close_batch()
        self.log.notes = [(size, note) for size, note in self.log.notes if size < self.state.size]
        note = sign_note(LogCheckpoint(self.manifest.origin, self.state.size, self.state.root()).text(), *signers)
        self.log.add_note(note)
        return note

    def event(self, kind: EventKind, body: dict[str, Any]) -> None:
        self.now_us += 1
        event = Event(self.state.size, kind, self.now_us, canonical_bytes(body))
        self.log.stored_events.append(StoredEvent(event, event.leaf()))
        self.append(event.leaf())

    def start_attempt(self, from_step: int | None = None, from_attempt: int | None = None, **wrong: Any) -> None:
        """Open the next attempt and say from where it goes on, which is the last step unless given."""
        self.open_session(**wrong)
        if self.attempt > 1:
            self.resume(from_step, from_attempt)

    def resume(
        self, from_step: int | None = None, from_attempt: int | None = None, wrong: dict[str, Any] | None = None
    ) -> None:
        """Append a RESUME event; ``wrong`` replaces members of its body."""
        if from_step is None:
            from_step = max((step for _, step, records in self.done if records == 0), default=0)
        self.lines[self.attempt] = (from_attempt or self.attempt - 1, from_step)
        gone = [records for attempt, step, records in self.done if not self.counts(attempt, step)]
        body = {
            "attempt": self.attempt,
            "from_attempt": from_attempt or self.attempt - 1,
            "from_step": from_step,
            "superseded_steps": sum(records == 0 for records in gone),
            "superseded_records": sum(gone),
        }
        self.event(EventKind.RESUME, body | (wrong or {}))

    def counts(self, attempt: int, step: int) -> bool:
        """Say whether a step leads to the present weights, by walking back from the present attempt."""
        at = self.attempt
        while at != attempt:
            if at not in self.lines or step > self.lines[at][1]:
                return False
            at = self.lines[at][0]
        return True

    def open_session(self, **wrong: Any) -> None:
        """Append the next attempt's certificate; ``wrong`` replaces members of it before they are signed."""
        self.attempt += 1
        self.session = Signer.ephemeral(session_name(self.manifest.origin, self.attempt))
        members: dict[str, Any] = {
            "origin": self.manifest.origin,
            "run_id": self.manifest.run_id,
            "attempt": self.attempt,
            "manifest_sha256": sha256(self.log.genesis).hex(),
            "first_size": self.state.size,
            "first_root": self.state.root(),
            "session_vkey": self.session.vkey,
        }
        self.event(EventKind.SESSION, make_certificate(self.signer, **(members | wrong)))

    def step(self, step: int, count: int = 8, *, open_ended: bool = False, **wrong: int) -> None:
        """Append a step's records and, unless ``open_ended``, its event; ``wrong`` replaces members of its body."""
        rows = np.zeros(count, RECORD)
        first_seq = self.state.size
        for slot in range(count):
            self._fill(rows[slot : slot + 1], first_seq + slot, step, slot)
        leaves = record_leaves(rows)
        self.log.rows = np.concatenate([self.log.rows, rows])
        self.log.leaves += leaves
        for leaf in leaves:
            self.append(leaf)
        self.done.append((self.attempt, step, count))
        if not open_ended:
            self.done.append((self.attempt, step, 0))
            gradient = self._gradient()
            body = {"step": step, "attempt": self.attempt, "first_seq": first_seq, "records": count}
            self.event(EventKind.STEP, body | {"gradient": gradient, "f": 1, "residual": 1e-6} | wrong)

    def _fill(self, row: Any, seq: int, step: int, slot: int) -> None:
        index = int(self.random.integers(SAMPLES))
        source = next(s for s in reversed(self.manifest.data.sources) if s.first_index <= index)
        self.now_us += 3
        values = {
            "seq": seq,
            "step": step,
            "slot": slot,
            "epoch": step // 20,
            "attempt": self.attempt,
            "source_id": source.source_id,
            "row": index - source.first_index,
            "data_version_id": source.data_version_id,
            "ts_us": self.now_us,
            "loss": self.random.random() * 3,
            "n_tokens": 5,
            "weight": 0.125,
            "grad_norm": self.random.random(),
            "shard_row": self.shard_row,
            "scale_raw": self.random.random(),
        }
        for name, value in values.items():
            row[name] = value
        sketch = self._sketch()
        salt, scale = self.log.salts[index], float(row["scale_raw"][0])
        row["sample_commit"] = np.void(sample_commitment(salt, identity_of(self.manifest, index)))
        row["sketch_commit"] = np.void(sketch_commitment(salt, scale, 0.0, *sketch))

    def _sketch(self) -> tuple[bytes, bytes]:
        sketch = (self.random.bytes(DIM), b"")
        self.log.sketches[0, self.shard_row] = sketch
        self.shard_row += 1
        return sketch

    def _gradient(self) -> dict[str, Any]:
        scale = float(np.float32(self.random.random()))
        place = {"shard": 0, "row": self.shard_row}
        salt = self.random.bytes(SALT_BYTES)
        self.log.step_salts[0, self.shard_row] = salt
        commitment = gradient_commitment(salt, scale, 0.0, *self._sketch())
        return place | {"scale_raw": scale, "scale_whitened": 0, "commitment": commitment.hex()}

    def snapshot(self, step: int) -> None:
        data = sha256(b"weights")
        self.log.digests["snapshots/final/trainable.safetensors"] = data.hex()
        files = [{"name": "trainable.safetensors", "sha256": data.hex(), "size_bytes": 7}]
        self.event(EventKind.MODEL_CHECKPOINT, {"path": "snapshots/final", "step": step, "files": files})

    def seal(self, *signers: NoteSigner, reason: str = "finished") -> Note:
        steps = sum(s.event.kind == EventKind.STEP for s in self.log.stored_events)
        self.event(EventKind.SEAL, {"reason": reason, "records": len(self.log.rows), "steps": steps})
        return self.sign(*signers)


def build_run(signer: Signer, *, steps: int = 110, seed: int = 0, **manifest: str) -> MemoryRun:
    """Return a finished and sealed run."""
    builder = Builder(make_manifest(signer, **manifest), signer, seed)
    builder.start_attempt()
    for step in range(1, steps + 1):
        builder.step(step)
    builder.snapshot(steps)
    builder.seal(builder.session, signer)
    kept = dict(builder.log.notes).get(KEPT_SIZE, builder.log.notes[-1][1])
    return MemoryRun(builder.log, signer, builder.session, Note.parse(kept))


def build_custody(run: MemoryRun, signer: Signer, acts: int = 3) -> MemoryLog:
    """Return a custody log for a run: each act is a batch with a log checkpoint of its own."""
    final_note = run.log.notes[-1][1]
    log = MemoryLog(final_note, None, np.zeros(0, RECORD), [], [], [], [], {}, name="custody")
    state = LogState(final_note)
    for number in range(acts + 1):
        body = final_note if number == 0 else canonical_bytes({"estimator": "inline-cosine", "number": number})
        kind = EventKind.QUERY if number else EventKind.CUSTODY_OPENED
        event = Event(number, kind, START_US + number, body)
        log.stored_events.append(StoredEvent(event, event.leaf()))
        state.append(event.leaf())
        log.stored_batches.append(StoredBatch(number, number, 1, state.chain))
        log.add_note(sign_note(LogCheckpoint(f"{ORIGIN}/custody", state.size, state.root()).text(), signer))
    return log
