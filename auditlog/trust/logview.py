"""What ``verify`` reads: a log as rows, opened by somebody else (``auditlog.ledger``, a bundle, a test).

Stored hashes are handed over as they stand. They help to name a bad row and are never believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from auditlog.format.manifest import RunManifest
from auditlog.format.records import Event
from auditlog.trust.verdict import Finding


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """A stretch of the records table in ``seq`` order: ``(n,)`` rows of dtype ``RECORD``, ``n`` stored leaves."""

    rows: NDArray[np.void]
    leaves: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One row of the events table."""

    event: Event
    leaf: bytes


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """One row of the batches table; ``chain`` is the running chain value after its last entry."""

    batch: int
    first_seq: int
    entries: int
    chain: bytes


class LogView(Protocol):
    """A log, opened for reading. Whoever implements it reports what it cannot hand over in ``findings``."""

    @property
    def name(self) -> str:
        """How messages call this log, usually its folder."""

    def genesis_document(self) -> bytes:
        """Return what the chain starts from: the manifest's bytes, or for a custody log the run's final note."""

    def manifest(self) -> RunManifest | None:
        """Return the parsed manifest; ``None`` for a custody log."""

    def findings(self) -> Sequence[Finding]:
        """Return what opening the log brought up already (schema, encoding)."""

    def records(self) -> Iterator[StoredRecords]:
        """Yield the records in ``seq`` order."""

    def events(self) -> Iterator[StoredEvent]:
        """Yield the events in ``seq`` order."""

    def batches(self) -> Sequence[StoredBatch]:
        """Return the batches in table order."""

    def checkpoints(self) -> Sequence[tuple[int, bytes]]:
        """Return (size column, note bytes) of the signed log checkpoints in table order."""

    def heads(self) -> Mapping[str, bytes]:
        """Return the note files in ``heads/`` by file name."""

    def salt(self, index: int) -> bytes | None:
        """Return the salt of a sample by its index in the manifest; ``None`` if erased or missing."""

    def sketch(self, shard: int, shard_row: int) -> tuple[bytes, bytes] | None:
        """Return a stored sketch as (raw bytes, whitened bytes); ``None`` if missing."""

    def step_salt(self, shard: int, row: int) -> bytes | None:
        """Return the salt of the gradient that a step stored there; ``None`` if erased or missing."""

    def file_digests(self) -> Mapping[str, str | None]:
        """Return SHA-256 (hex) of each snapshot file that MODEL_CHECKPOINT events name; ``None`` if missing.

        Keys are ``<path>/<name>`` as the event spells them.
        """
