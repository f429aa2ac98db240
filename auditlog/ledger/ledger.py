"""The run's ledger: the only writer of a run folder.

Takes whole optimizer steps, gives every sample use its record and every step its event, and commits to
sketches and samples. Order of a batch: sketches synced, entries in the database, signature, note file,
hand-over. A step is never split over two batches. Not thread-safe: ``LedgerWriter`` owns it on its thread.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.datamanifest import DataManifest
from auditlog.errors import StoreError, UsageError
from auditlog.format.canonical import finite
from auditlog.format.commitments import gradient_commitment, sample_commitment, sketch_commitment
from auditlog.format.digests import sha256
from auditlog.format.manifest import RunManifest
from auditlog.format.merkle import EMPTY_ROOT
from auditlog.format.notes import Note
from auditlog.format.records import FORMAT_VERSION, RECORD, EventKind, canonical_floats
from auditlog.ledger.appender import Appender, now_us
from auditlog.ledger.files import write_once
from auditlog.ledger.heads import OnHead, check_on_head
from auditlog.ledger.salts import Salts, create_salts
from auditlog.ledger.shards import ShardWriter
from auditlog.ledger.store import MANIFEST
from auditlog.trust.certificates import FIRST_ATTEMPT, make_certificate, session_name
from auditlog.trust.keys import Signer

BATCH_ENTRIES = 4_096
BATCH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One optimizer step as the recorder hands it over: ``n`` sample uses and the gradient they add up to.

    Attributes:
        records: ``(n,)`` of dtype ``RECORD`` with everything filled in that the recorder knows. The ledger
            fills ``fmt``, ``seq``, ``attempt``, ``ts_us``, ``shard``, ``shard_row`` and both commitments.
        index: ``(n,)`` int64, the sample index behind each record.
        sketches: ``(n, width)`` int8, raw and whitened form side by side.
        gradient: ``(width,)`` int8, sketch of the gradient that the optimizer consumed; ``None`` if skipped.
        gradient_scales: Its two scales; a form that is not stored has scale 0.
        body: The step event's body, without what the ledger adds: ``first_seq``, ``records``, ``attempt``,
            ``gradient``.
    """

    records: NDArray[np.void]
    index: NDArray[np.int64]
    sketches: NDArray[np.int8]
    gradient: NDArray[np.int8] | None
    gradient_scales: tuple[float, float]
    body: dict[str, Any]


class RunLedger:
    """Writes one run folder from the session certificate to the seal. Make it with ``create``.

    Attributes:
        path: The run folder.
        manifest: What the run declared before step 1.
        steps: Step events appended so far.
        records: Records appended so far.
    """

    def __init__(
        self, path: Path, manifest: RunManifest, data: DataManifest, signer: Signer, *, on_head: OnHead | None
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.steps = 0
        self.records = 0
        self._data = data
        self._signer = signer
        self._session = Signer.ephemeral(session_name(manifest.origin, FIRST_ATTEMPT))
        self._dim = manifest.sketch.dim
        self._width = manifest.sketch.dim * len(manifest.sketch.forms)
        self._log = Appender.create(path, manifest.origin, manifest.to_bytes(), on_head=on_head)
        self._shards = ShardWriter(path, self._width)
        self._salts = Salts(path)
        self._flushed_at = time.monotonic()
        self._sealing = False

    @classmethod
    def create(
        cls,
        run: Path,
        manifest: RunManifest,
        data: DataManifest,
        signer: Signer,
        *,
        on_head: OnHead | None = None,
    ) -> RunLedger:
        """Start a run folder: manifest, salts, database, session certificate and the first head.

        Args:
            run: A folder that does not exist yet, or is empty.
            manifest: Its ``data`` must be ``data.block`` and its ``vkey`` the signer's.
            data: The data manifest, for the samples' identities.
            signer: The long-lived key. It signs the session certificate now and the seal at the end; the
                checkpoints between are signed by a session key that never leaves this process's memory.
            on_head: Where every head is handed to, so that it binds the operator.

        Raises:
            UsageError: If the folder is not empty or the arguments contradict each other.
            StoreError: If the disk or ``on_head`` refuses; nothing is left behind.
        """
        _check_call(run, manifest, data, signer)
        check_on_head(on_head, run)
        existed = run.exists()
        try:
            write_once(run / MANIFEST, manifest.to_bytes())
            create_salts(run, data.rows)
            ledger = cls(run, manifest, data, signer, on_head=on_head)
            ledger.append_event(EventKind.SESSION, ledger._certificate())
            ledger.flush()
        except BaseException:
            # The folder was empty, so all of it is ours; a half-started run would only be in the way.
            shutil.rmtree(run, ignore_errors=True)
            if existed:
                run.mkdir()
            raise
        return ledger

    @property
    def origin(self) -> str:
        """The log's name in its checkpoints."""
        return self.manifest.origin

    @property
    def size(self) -> int:
        """Entries appended so far."""
        return self._log.size

    @property
    def waiting(self) -> int:
        """Entries that are appended and not yet stored."""
        return self._log.waiting

    def append_step(self, entry: StepEntry) -> None:
        """Append the step's records, then its event; stores what waits when a batch is full or ten seconds old.

        Raises:
            UsageError: If the arrays do not fit together or a sample index is not in the manifest.
            StoreError: If the disk refuses. If the sketches could not be written the step is *not* recorded;
                otherwise it waits for the next flush.
        """
        self._check_step(entry)
        n = len(entry.records)
        rows, gradient = self._commit_to(entry)
        first_seq = self._log.size
        rows["seq"] = first_seq + np.arange(n, dtype=np.uint64)
        if n:
            self._log.add_records(rows)
        body = {"first_seq": first_seq, "records": n, "attempt": FIRST_ATTEMPT, "gradient": gradient}
        self._log.add_event(EventKind.STEP, entry.body | body)
        self.steps += 1
        self.records += n
        self._flush_if_due(room_for=n + 1)  # the next step is probably as large

    def append_event(self, kind: EventKind, body: dict[str, Any]) -> int:
        """Append an event other than a step; returns its ``seq``.

        Raises:
            FormatError: If the body has no canonical JSON form.
            StoreError: If a flush that was due fails; the event waits for the next one.
        """
        seq = self._log.add_event(kind, body).seq
        self._flush_if_due()
        return seq

    def flush(self) -> None:
        """Make everything appended so far durable, signed and handed over.

        Raises:
            StoreError: If something refuses; what is not yet done is tried again at the next flush.
        """
        if self._sealing:  # only the seal's own checkpoint may follow a seal
            return
        self._flushed_at = time.monotonic()
        self._shards.sync()
        self._log.flush(self._session)

    def seal(self, body: dict[str, Any]) -> Note:
        """Close the run: the seal is its last entry, and both keys sign the last checkpoint.

        Args:
            body: What the seal says beside ``records`` and ``steps``; ``reason`` is ``"finished"`` unless given.

        Raises:
            Error: If the key, the disk or ``on_head`` refuses. The run then stays unsealed and can be closed
                by ``gradtrail seal RUN --abandon``.
        """
        self.flush()
        self._shards.close(cut=True)
        self._sealing = True
        totals = {"records": self.records, "steps": self.steps}
        self._log.add_event(EventKind.SEAL, {"reason": "finished"} | body | totals)
        try:
            self._log.flush(self._session, self._signer)
        finally:
            self._log.close()
        assert self._log.note is not None  # flush has just signed one
        return self._log.note

    def close_unsealed(self) -> None:
        """Leave the run as it is, after a failure: what was stored stays, the run verifies as incomplete."""
        try:
            self._shards.close(cut=False)
        finally:
            self._log.close()

    def _certificate(self) -> dict[str, Any]:
        return make_certificate(
            self._signer,
            origin=self.manifest.origin,
            run_id=self.manifest.run_id,
            attempt=FIRST_ATTEMPT,
            manifest_sha256=sha256(self.manifest.to_bytes()).hex(),
            first_size=0,
            first_root=EMPTY_ROOT,
            session_vkey=self._session.vkey,
        )

    def _flush_if_due(self, *, room_for: int = 1) -> None:
        is_full = self._log.waiting + room_for > BATCH_ENTRIES
        if is_full or time.monotonic() - self._flushed_at >= BATCH_SECONDS:
            self.flush()

    def _check_step(self, entry: StepEntry) -> None:
        n = len(entry.records)
        expected = {"index": (n,), "sketches": (n, self._width), "gradient": (self._width,)}
        for name, shape in expected.items():
            array = getattr(entry, name)
            if array is not None and array.shape != shape:
                raise UsageError(f"step {entry.body.get('step')}: {name} has shape {array.shape}, expected {shape}")
        if entry.records.dtype != RECORD:
            raise UsageError(f"step {entry.body.get('step')}: records must have the dtype RECORD")
        outside = (entry.index < 0) | (entry.index >= self._data.rows)
        if outside.any():
            raise UsageError(
                f"step {entry.body.get('step')}: sample_index {int(entry.index[outside][0])} is outside the data "
                f"manifest, which has {self._data.rows} rows"
            )

    def _commit_to(self, entry: StepEntry) -> tuple[NDArray[np.void], dict[str, Any] | None]:
        """Write the step's sketches and return its records and its gradient block, complete but for ``seq``."""
        sketches = entry.sketches if entry.gradient is None else np.vstack([entry.sketches, entry.gradient[None]])
        places = self._shards.append(np.ascontiguousarray(sketches, np.int8))
        n = len(entry.records)
        rows = canonical_floats(entry.records.copy())
        rows["fmt"], rows["attempt"], rows["ts_us"] = FORMAT_VERSION, FIRST_ATTEMPT, now_us()
        rows["shard"], rows["shard_row"] = places.shard[:n], places.row[:n]
        for i, index in enumerate(entry.index.tolist()):
            salt = self._salt(index)
            raw, whitened = self._forms(entry.sketches[i])
            scales = float(rows["scale_raw"][i]), float(rows["scale_whitened"][i])
            rows["sample_commit"][i] = np.void(sample_commitment(salt, self._data.identity(index)))
            rows["sketch_commit"][i] = np.void(sketch_commitment(salt, *scales, raw, whitened))
        if entry.gradient is None:
            return rows, None
        scales = float(np.float32(entry.gradient_scales[0])), float(np.float32(entry.gradient_scales[1]))
        commitment = gradient_commitment(*scales, *self._forms(entry.gradient))
        return rows, {
            "shard": int(places.shard[n]),
            "row": int(places.row[n]),
            "scale_raw": finite(scales[0]),
            "scale_whitened": finite(scales[1]),
            "commitment": commitment.hex(),
        }

    def _forms(self, sketch: NDArray[np.int8]) -> tuple[bytes, bytes]:
        """Return a row's raw and whitened bytes; the whitened half has no length in a raw-only run."""
        return sketch[: self._dim].tobytes(), sketch[self._dim :].tobytes()

    def _salt(self, index: int) -> bytes:
        salt = self._salts.salt(index)
        if salt is None:
            raise StoreError(f"{self.path / 'salts.bin'}: no salt for sample {index}")
        return salt


def _check_call(run: Path, manifest: RunManifest, data: DataManifest, signer: Signer) -> None:
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UsageError(f"{run} exists and is not empty", "Name a new folder: a run is never written over.")
    if manifest.data != data.block:
        raise UsageError("the run manifest's data block is not the data manifest's")
    if manifest.vkey != str(signer.vkey):
        raise UsageError(f"the run manifest names the key {manifest.vkey}, the signer is {signer.vkey}")
