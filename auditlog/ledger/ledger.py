"""The run's ledger: the only writer of a run folder.

Takes whole optimizer steps, gives every sample use its record and every step its event, and commits to
sketches and samples. Order of a batch: sketches synced, entries in the database, signature, note file,
hand-over. A step is never split over two batches. Not thread-safe: ``LedgerWriter`` owns it on its thread.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from auditlog.datamanifest import DataManifest
from auditlog.errors import StoreError, UsageError
from auditlog.format.digests import sha256
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger.appender import Appender
from auditlog.ledger.files import write_once
from auditlog.ledger.heads import RANKS, OnHead, certificate_name, check_on_head, set_aside
from auditlog.ledger.ranks import insist_ranks
from auditlog.ledger.resume import Standing, insist_resumable, new_standing, read_standing
from auditlog.ledger.salts import create_salts
from auditlog.ledger.steps import StepEntry, StepWriter
from auditlog.ledger.store import MANIFEST
from auditlog.trust.attempts import FIRST, Attempt
from auditlog.trust.certificates import make_certificate, session_name
from auditlog.trust.keys import Signer

__all__ = ["BATCH_ENTRIES", "BATCH_SECONDS", "RunLedger", "StepEntry"]

BATCH_ENTRIES = 4_096
BATCH_SECONDS = 10.0


class RunLedger:
    """Writes one run folder from the session certificate to the seal. Make it with ``create`` or ``resume``.

    Attributes:
        path: The run folder.
        manifest: What the run declared before step 1.
    """

    def __init__(
        self, standing: Standing, data: DataManifest, signer: Signer, log: Appender, *, accept_loss: bool = False
    ) -> None:
        self.path = standing.run
        self.manifest = standing.manifest
        self._standing = standing
        self._accept_loss = accept_loss
        self._account = standing.account
        self._signer = signer
        self._session: Signer | None = None  # none until an attempt is opened
        self._log = log
        self._sketches = StepWriter(self.path, self.manifest.sketch, data, written=standing.rows)
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

        In a run of several processes rank 0 creates the run first, then each other rank its ``rank_folder``.

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
            standing = new_standing(run, manifest)
            write_once(run / MANIFEST, standing.manifest_bytes)
            create_salts(run, data.rows)
            log = Appender.create(run, manifest.origin, standing.manifest_bytes, on_head=on_head)
            ledger = cls(standing, data, signer, log)
            ledger._open_session(FIRST)
            ledger.flush()
        except BaseException:
            # The folder was empty, so all of it is ours; a half-started run would only be in the way.
            shutil.rmtree(run, ignore_errors=True)
            if existed:
                run.mkdir()
            raise
        return ledger

    @classmethod
    def resume(
        cls,
        run: Path,
        data: DataManifest,
        signer: Signer,
        *,
        on_head: OnHead | None = None,
        accept_loss: bool = False,
    ) -> RunLedger:
        """Open an unsealed run again. Nothing is written before ``begin_attempt``.

        Args:
            run: The run folder.
            data: The data manifest, built again from the same files.
            signer: The long-lived key that started the run.
            on_head: Where heads are handed to from now on.
            accept_loss: Go on although entries were lost, or steps were never logged, and have the log say so.

        Raises:
            UsageError: If the run is sealed or another key's.
            DataError: If the data is not what the run recorded.
            StoreError: If the database cannot be read, its entries do not give the roots that were signed, or it is
                shorter than a head and ``accept_loss`` is not given. Nothing is deleted.
        """
        run = Path(run)
        check_on_head(on_head, run)
        standing = read_standing(run, on_head)
        insist_resumable(standing, data.block, str(signer.vkey))
        if not accept_loss:
            standing.insist_complete()
        log = Appender.resume(
            run, standing.manifest.origin, standing.manifest_bytes, on_head=on_head, lost_sizes=standing.lost_sizes
        )
        return cls(standing, data, signer, log, accept_loss=accept_loss)

    def begin_attempt(
        self, from_step: int, body: dict[str, Any] | None = None, *, from_attempt: int | None = None
    ) -> int:
        """Open the next attempt: training goes on from an earlier step, in this process or a new one.

        A new session key is certified; later steps of earlier attempts no longer count. Everything is durable, signed
        and handed over when this returns.

        Args:
            from_step: The optimizer step whose weights training goes on from; 0 for a start from scratch.
            body: What the RESUME event says beside its own members.
            from_attempt: The attempt in which those weights came about; the present one unless given.

        Returns:
            The new attempt's number.

        Raises:
            UsageError: If there is no such attempt, or the run is sealed.
            StoreError: If the weights went through steps that are not in the log and no loss was accepted, or the
                disk or ``on_head`` refuses.
        """
        attempt = self._next_attempt(from_step, from_attempt)
        reached = self._account.reached(attempt.from_attempt)
        missing = (reached + 1, from_step) if from_step > reached else None
        if missing and not self._accept_loss:
            raise StoreError(
                f"{self.path}: attempt {attempt.from_attempt} is logged up to step {reached}, training would go on "
                f"from step {from_step}: the steps between were trained and not logged",
                f"Go on from a snapshot of step {reached} or earlier, or say that they are lost: accept_loss=True.",
            )
        self.flush()
        set_aside(self.path, self._standing.orphans)
        loss = self._standing.loss(self._log.size, missing)
        last_step = self._account.highest_step
        self._open_session(attempt)
        if loss is not None:
            self._log.add_event(EventKind.LOSS_ACCEPTED, loss)
        says = {"attempt": attempt.number, "from_attempt": attempt.from_attempt, "from_step": from_step}
        says |= {"last_step": last_step} | self._account.superseded()
        self._log.add_event(EventKind.RESUME, (body or {}) | says)
        self._standing = replace(self._standing, orphans=())
        self.flush()
        return attempt.number

    @property
    def steps(self) -> int:
        """Step events logged so far, over all attempts."""
        return self._account.steps

    @property
    def records(self) -> int:
        """Records logged so far, over all attempts."""
        return self._account.records

    @property
    def attempt(self) -> int:
        """Number of the latest attempt."""
        return self._account.attempt

    @property
    def last_step(self) -> int:
        """The last step that the latest attempt's weights went through: its own, or the one it goes on from."""
        return self._account.reached(self.attempt)

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
            UsageError: If the arrays do not fit together, a sample index is not in the manifest, or the step does
                not come after those of this attempt: a loop that starts again is a new attempt.
            StoreError: If the disk refuses. If the sketches could not be written the step is *not* recorded;
                otherwise it waits for the next flush.
        """
        self._insist_open()
        n, step = len(entry.records), int(entry.body["step"])
        if step <= self.last_step:
            raise UsageError(
                f"step {step} comes after step {self.last_step} of attempt {self.attempt}",
                "A loop that starts again, or goes on from an older snapshot, first calls begin_attempt(from_step).",
            )
        self._sketches.check(entry)
        rows, gradient = self._sketches.write(entry, self.attempt)
        first_seq = self._log.size
        rows["seq"] = first_seq + np.arange(n, dtype=np.uint64)
        if n:
            self._log.add_records(rows)
        body = {"first_seq": first_seq, "records": n, "attempt": self.attempt, "gradient": gradient}
        self._log.add_event(EventKind.STEP, entry.body | body)
        self._account.add(step, n)
        self._flush_if_due(room_for=n + 1)  # the next step is probably as large

    def append_event(self, kind: EventKind, body: dict[str, Any]) -> int:
        """Append an event other than a step; returns its ``seq``.

        Raises:
            UsageError: If the run was resumed and no attempt is open yet.
            FormatError: If the body has no canonical JSON form.
            StoreError: If a flush that was due fails; the event waits for the next one.
        """
        self._insist_open()
        seq = self._log.add_event(kind, body).seq
        self._flush_if_due()
        return seq

    def flush(self) -> None:
        """Make everything appended so far durable, signed and handed over.

        Raises:
            StoreError: If something refuses; what is not yet done is tried again at the next flush.
        """
        if self._sealing or self._session is None:  # only the seal's own checkpoint may follow a seal
            return
        self._flushed_at = time.monotonic()
        self._sketches.sync()
        self._log.flush(self._session)

    def seal(self, body: dict[str, Any]) -> Note:
        """Close the run: the seal is its last entry, and both keys sign the last checkpoint.

        Args:
            body: What the seal says beside its totals; ``reason`` is ``"finished"`` unless given. Rank 0 of several
                gives ``ranks``, the ``rank_head`` of each other rank.

        Raises:
            UsageError: If no attempt is open, or ranks are missing.
            Error: If the key, the disk or ``on_head`` refuses. The run then stays unsealed and can be closed
                by ``gradtrail seal RUN --abandon``.
        """
        session = self._insist_open()
        insist_ranks(self.manifest, body)
        self.flush()
        self._sketches.close(cut=True)
        self._sealing = True
        self._log.add_event(EventKind.SEAL, {"reason": "finished"} | body | self._account.totals())
        try:
            self._log.flush(session, self._signer)
        finally:
            self._log.close()
        assert self._log.note is not None  # flush has just signed one
        return self._log.note

    def close_unsealed(self) -> None:
        """Leave the run as it is, after a failure: what was stored stays, the run verifies as incomplete."""
        try:
            self._sketches.close(cut=False)
        finally:
            self._log.close()

    def _next_attempt(self, from_step: int, from_attempt: int | None) -> Attempt:
        if self._sealing:
            raise UsageError(f"{self.path} is sealed", "Start a new run in a folder of its own.")
        parent = self.attempt if from_attempt is None else from_attempt
        if from_step < 0 or not min(1, self.attempt) <= parent <= self.attempt:
            raise UsageError(f"{self.path}: there is no step {from_step} of attempt {parent} to go on from")
        return Attempt(self.attempt + 1, parent, from_step)

    def _open_session(self, attempt: Attempt) -> None:
        """Make a session key for an attempt and append its certificate."""
        self._session = Signer.ephemeral(session_name(self.origin, attempt.number))
        certificate = make_certificate(
            self._signer,
            origin=self.origin,
            run_id=self.manifest.run_id,
            attempt=attempt.number,
            manifest_sha256=sha256(self._standing.manifest_bytes).hex(),
            first_size=self._log.size,
            first_root=self._log.root,
            session_vkey=self._session.vkey,
        )
        event = self._log.add_event(EventKind.SESSION, certificate)
        # Whoever keeps heads can then tell who signed them, whatever becomes of this log.
        self._log.hand_over(certificate_name(attempt.number, self._session.vkey), event.body)
        self._account.begin(attempt)

    def _insist_open(self) -> Signer:
        """Return the session key; there is none before a resumed run has said from where it goes on."""
        if self._session is None:
            raise UsageError(
                f"{self.path} was resumed, and no attempt is open",
                "Call begin_attempt(from_step) before anything else.",
            )
        return self._session

    def _flush_if_due(self, *, room_for: int = 1) -> None:
        is_full = self._log.waiting + room_for > BATCH_ENTRIES
        if is_full or time.monotonic() - self._flushed_at >= BATCH_SECONDS:
            self.flush()


def _check_call(run: Path, manifest: RunManifest, data: DataManifest, signer: Signer) -> None:
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UsageError(f"{run} exists and is not empty", "Name a new folder: a run is never written over.")
    if manifest.data != data.block:
        raise UsageError("the run manifest's data block is not the data manifest's")
    is_rank = run.parent.name == RANKS and run.name == str(manifest.rank)
    if not 0 <= manifest.rank < manifest.world_size or is_rank != (manifest.rank > 0):
        raise UsageError(
            f"{run} is not the folder of rank {manifest.rank} of {manifest.world_size}",
            "Rank 0 writes the run folder, each other rank rank_folder(run, rank).",
        )
    if manifest.vkey != str(signer.vkey):
        raise UsageError(f"the run manifest names the key {manifest.vkey}, the signer is {signer.vkey}")
