"""Audit mode: what the user turns on around an ordinary training run.

    with AuditMode(model, optimizer, manifest, run="runs/credit", signer=signer):
        for batch in loader:
            model(**batch).loss.backward(); optimizer.step(); optimizer.zero_grad()

    with AuditMode.attach(trainer, manifest, run="runs/credit", signer=signer):
        trainer.train()

Entering opens the log and hooks the model; leaving takes a snapshot, seals the log and removes every hook. An
exception leaves the run open (it verifies as incomplete) with everything recorded so far in it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from attribution.capture.hooks import HookSet
from attribution.capture.modules import find_tracked
from attribution.errors import CaptureError
from attribution.sketch.layout import DEFAULT_DIM, SketchLayout
from attribution.training.environment import describe_environment, describe_model, describe_tracking
from attribution.training.recipe import describe_recipe
from attribution.training.recorder import AuditTime, StepRecorder
from attribution.training.snapshot import save_snapshot
from auditlog.datamanifest import DataManifest
from auditlog.format.manifest import RunManifest
from auditlog.format.records import EventKind
from auditlog.ledger.heads import OnHead
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.writer import LedgerWriter
from auditlog.trust.keys import Signer

if TYPE_CHECKING:
    from transformers import Trainer

    from attribution.training.hf import TrainerBinding

logger = logging.getLogger("gradtrail")


class AuditMode:
    """Records every training step of one model while the context is open.

    Args:
        model: The model as it is trained; its ``forward`` receives the batch with its ``sample_index``.
        optimizer: The optimizer whose steps are recorded.
        manifest: The data, from ``DataManifest.build``.
        run: Folder to create for this run.
        signer: The long-lived key. It certifies this session's own key and signs the seal.
        on_head: Whom every signed head is handed to as it is made: a folder, ``"command:…"`` or a callable.
            Without it nothing outside this machine binds the operator.
        recipe: ``"train.py:build"``, the function that rebuilds model and data for query and replay.
        origin: Name of the log; by default the key's name and the run folder's.
        purpose: What the operator declares about the system, as plain JSON.
        allow_untracked: Patterns of trainable parameters that may stay out of the sketches.
        sketch_dim: Sketch size ``D``.
        sketch_seed: Seed of the sketch's random tables.
        training: What the manifest says about the loop, as plain JSON.
        on_error: What trouble with the log does to training: ``"stop"``, or ``"continue_and_mark"``.

    Raises:
        DataError: If a source file changed since the manifest was built.
        CoverageGapError: If trainable parameters cannot be tracked and were not allowed to be left out.
        UsageError: If the run folder exists already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        manifest: DataManifest,
        *,
        run: str | Path,
        signer: Signer,
        on_head: OnHead | None = None,
        recipe: str | None = None,
        origin: str | None = None,
        purpose: Mapping[str, Any] | None = None,
        allow_untracked: Sequence[str] = (),
        sketch_dim: int = DEFAULT_DIM,
        sketch_seed: str = "0",
        training: Mapping[str, Any] | None = None,
        on_error: Literal["stop", "continue_and_mark"] = "stop",
    ) -> None:
        self.run = Path(run)
        self._model, self._optimizer, self._data = model, optimizer, manifest
        self._signer, self._on_head, self._on_error = signer, on_head, on_error
        self._recipe, self._purpose = recipe, dict(purpose or {})
        self._training = dict(training or {})
        self._origin = origin or f"{signer.name}/{self.run.resolve().name}"
        self._tracking = find_tracked(model, allow_untracked)
        shapes = {name: tuple(p.shape) for name, p in self._tracking.parameters.items()}
        self._layout = SketchLayout(shapes, sketch_dim, sketch_seed)
        self._binding: TrainerBinding | None = None
        self._step_handle: Any = None

    @classmethod
    def attach(cls, trainer: Trainer, manifest: DataManifest, **options: Any) -> AuditMode:
        """Return audit mode for a Hugging Face ``Trainer``; options as for the class itself.

        Keeps ``sample_index`` among the trainer's columns and restores everything when the context ends.

        Raises:
            SampleIdentityError: If the training dataset has no ``sample_index`` column.
        """
        from attribution.training.hf import TrainerBinding, describe_trainer

        audit = cls(trainer.model, None, manifest, training=describe_trainer(trainer), **options)
        audit._binding = TrainerBinding(trainer, audit)
        return audit

    @property
    def time(self) -> AuditTime:
        """What audit mode took from the training thread so far."""
        return self.recorder.time

    @property
    def epoch(self) -> int | None:
        """Epoch written to the records; a plain loop may set it. ``None`` records each sample's earlier uses."""
        return self.recorder.epoch

    @epoch.setter
    def epoch(self, value: int | None) -> None:
        self.recorder.epoch = value

    def __enter__(self) -> AuditMode:
        """Open the log and hook model and optimizer."""
        self._data.check_unchanged()
        self._layout.to(_one_device(self._tracking.parameters))
        ledger = RunLedger.create(self.run, self._manifest(), self._data, self._signer, on_head=self._on_head)
        self.writer = LedgerWriter(ledger, on_error=self._on_error)
        self.hooks = HookSet(self._model, self._tracking, self._layout, lambda index: self.recorder.check_index(index))
        self.recorder = StepRecorder(self.hooks, self._tracking, self._layout, self._data, self.writer)
        self.hooks.attach()
        if self._optimizer is not None:
            self.follow(self._optimizer)
        if self._binding is not None:
            self._binding.bind()
        self._announce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove every hook; seal the run, or leave it open if training ended by an exception."""
        if self._binding is not None:
            self._binding.unbind()
        if self._step_handle is not None:
            self._step_handle.remove()
        self.hooks.detach()
        try:
            if error is None:
                self._seal()
        finally:
            self.writer.close()
        if error is not None:
            logger.warning(
                "training ended by %s after step %d; the run is left open, with everything recorded so far in it. "
                "Close it with: gradtrail seal %s --abandon",
                type(error).__name__,
                self.recorder.steps,
                self.run,
            )

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the steps of this optimizer (for a trainer that builds its optimizer late)."""
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the real one
        if self._step_handle is not None:
            self._step_handle.remove()
        self._optimizer = inner
        self._step_handle = inner.register_step_pre_hook(lambda opt, args, kwargs: self.recorder.on_step(opt))

    def _seal(self) -> None:
        """Snapshot the trained parameters and close the log."""
        body = save_snapshot(
            self.run / "snapshots" / "final", self._tracking.trainable, self._optimizer, self.recorder.steps
        )
        self.writer.event(EventKind.MODEL_CHECKPOINT, body)
        self.writer.seal(
            {
                "reason": "finished",
                "open_steps": self.recorder.open_steps,
                "audit_share": self.time.share,
                "audit_share_median": self.time.median_share,
            }
        )
        logger.info(
            "sealed %s: %d steps, %d records, worst conservation residual %.1e, audit time %.1f %% of step time",
            self.run,
            self.recorder.steps,
            self.recorder.records,
            self.recorder.worst_residual,
            100 * self.time.share,
        )

    def _manifest(self) -> RunManifest:
        return RunManifest(
            run_id=str(uuid.uuid4()),
            origin=self._origin,
            created_us=time.time_ns() // 1000,
            vkey=str(self._signer.vkey),
            data=self._data.block,
            sketch=self._layout.block(),
            model=describe_model(self._model),
            tracking=describe_tracking(self._tracking),
            training=self._training,
            recipe=None if self._recipe is None else describe_recipe(self._recipe),
            purpose=self._purpose,
            environment=describe_environment(),
        )

    def _announce(self) -> None:
        """Say what is recorded and what is not, once, before the first step."""
        logger.info(
            "audit mode: %s, %d tracked modules, %d samples, D = %d",
            self.run,
            len(self._tracking.modules),
            self._data.rows,
            self._layout.dim,
        )
        if self._tracking.untracked:
            logger.warning(
                "audit mode: %.2f %% of the trainable entries are not tracked (%s); this is signed into the run",
                100 * (1 - self._tracking.coverage),
                ", ".join(self._tracking.untracked),
            )
        if self._on_head is None:
            logger.warning(
                "audit mode: no head leaves this machine, so nothing here binds the operator. "
                "Hand heads to somebody else: AuditMode(…, on_head='/mnt/auditor')."
            )


def _one_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    """Return the device of all tracked parameters.

    Raises:
        CaptureError: If they are spread over several.
    """
    devices = {p.device for p in parameters.values()}
    if len(devices) != 1:
        raise CaptureError(
            f"the tracked parameters are spread over {sorted(map(str, devices))}",
            "A model split over devices is not supported yet; train the adapter on one device.",
        )
    return devices.pop()
