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
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from attribution.capture.batch import Batch
from attribution.capture.hooks import HookSet, Mode
from attribution.capture.modules import compiled_modules, find_tracked
from attribution.capture.segments import Segments
from attribution.capture.self_check import check
from attribution.errors import UnsupportedSetupError
from attribution.sketch.layout import DEFAULT_DIM, SketchLayout
from attribution.training.environment import describe_environment, describe_model, describe_tracking
from attribution.training.opening import create_ledger, reopen_ledger
from attribution.training.optimizer_steps import OptimizerSteps
from attribution.training.ranks import Ranks, device_of, innermost, refuse_sharded, refuse_uneven_inputs
from attribution.training.recipe import describe_recipe
from attribution.training.recorder import AuditTime, StepRecorder
from attribution.training.resume import refuse_unlogged, weights_digest
from attribution.training.second_moments import BOTH, RAW, Form, SecondMoments, check_forms, keeps_second_moment
from attribution.training.snapshot import save_snapshot
from attribution.training.uses import Uses
from auditlog.datamanifest import DataManifest
from auditlog.format.manifest import RunManifest
from auditlog.format.records import EventKind
from auditlog.ledger.heads import OnHead
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.ranks import rank_folder, rank_head
from auditlog.ledger.store import MANIFEST
from auditlog.ledger.writer import LedgerWriter
from auditlog.trust.attempts import Attempt
from auditlog.trust.keys import Signer
from auditlog.trust.ranks import rank_origin

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
        origin: Name of the log; by default the key's name and the run folder's, spaces as hyphens.
        purpose: What the operator declares about the system, as plain JSON.
        allow_untracked: Patterns of trainable parameters that may stay out of the sketches.
        mode: ``"observe"``: hooks only, training stays bit-identical. ``"fused"``: linear maps compute their weight
            gradient as the sum of the per-sample gradients; cheaper, and weights differ by rounding.
        on_crossing: What to do with packed documents that can see each other: ``"refuse"``, or ``"mark"`` their records
            as not separable.
        forms: Which forms of each sample's gradient are stored: ``("raw",)`` or ``("raw", "whitened")``. By default
            both where the optimizer is of Adam's type, whose second moment the whitened form is made with. A resumed
            run keeps its own.
        sketch_dim: Sketch size ``D``.
        sketch_seed: Seed of the sketch's random tables.
        training: What the manifest says about the loop, as plain JSON.
        on_error: What trouble with the log does to training: ``"stop"``, or ``"continue_and_mark"``.
        self_check: Compare a few samples of the first batch with autograd before the first step.
        resume: Go on with an interrupted run in that folder, if there is one.
        from_step: The optimizer step that a plain loop goes on from; by default the last one that was logged. It
            loads the weights of that step and skips its data. The Trainer does and says all this by itself.
        accept_loss: Resume a run that lost entries it had signed, or steps that were never logged. The loss is logged.

    Raises:
        DataError: If a source file changed since the manifest was built.
        CoverageGapError: If trainable parameters cannot be tracked and were not allowed to be left out.
        UnsupportedSetupError: If the model is sharded, replicated or compiled already.
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
        mode: Mode = "observe",
        on_crossing: Literal["refuse", "mark"] = "refuse",
        forms: Sequence[Form] | None = None,
        sketch_dim: int = DEFAULT_DIM,
        sketch_seed: str = "0",
        training: Mapping[str, Any] | None = None,
        on_error: Literal["stop", "continue_and_mark"] = "stop",
        self_check: bool = True,
        resume: bool = False,
        from_step: int | None = None,
        accept_loss: bool = False,
    ) -> None:
        self._ranks = Ranks.present()
        self._folder = Path(run)
        self.run = rank_folder(self._folder, self._ranks.rank)
        self._model, self._optimizer, self.data = innermost(model), optimizer, manifest
        self._signer, self._on_head, self._on_error = signer, on_head, on_error
        self._recipe, self._purpose = recipe, dict(purpose or {})
        self.training = dict(training or {})
        self._mode, self._on_crossing = mode, on_crossing
        self._forms = None if forms is None else check_forms(forms)
        self._self_check, self._resume = self_check, resume
        self._from_step, self._accept_loss = from_step, accept_loss
        folder = re.sub(r"[\s+]+", "-", self._folder.resolve().name)  # a log's name holds neither
        self._origin = origin or f"{signer.name}/{folder}"
        _refuse_compiled(self._model)
        self._tracking = find_tracked(self._model, allow_untracked)
        shapes = {name: tuple(p.shape) for name, p in self._tracking.parameters.items()}
        self._layout = SketchLayout(shapes, sketch_dim, sketch_seed)
        self._binding: TrainerBinding | None = None
        self._steps: OptimizerSteps | None = None
        self._is_waiting = False  # resumed, and nobody has said yet from which step
        self._has_begun = False

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
        self._ranks.together(self.data.check_unchanged)
        self._layout.to(device_of(list(self._tracking.parameters.values())))
        self._first_weights = weights_digest(self._tracking.trainable)
        self.hooks = HookSet(
            self._model,
            self._tracking,
            self._layout,
            lambda index: self.recorder.check_index(index),
            self._mode,
            self._on_crossing,
        )
        self._is_waiting = self._ranks.from_first(self._resume and (self.run / MANIFEST).exists())
        if self._forms is None:
            self._forms = BOTH if self._has_second_moment() else RAW
        ledger = self._open_ledger()
        self._forms = ledger.manifest.sketch.forms
        self.run_id, self.attempt, self._reached = ledger.manifest.run_id, ledger.attempt, ledger.last_step
        self.writer = LedgerWriter(ledger, on_error=self._on_error)
        try:
            self._attach()
        except BaseException:
            self._let_go()
            self.writer.close()
            raise
        self._announce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove every hook; seal the run, or leave it open if training ended by an exception."""
        if self._binding is not None:
            self._binding.unbind()
        self._let_go()
        try:
            if error is None:
                self._say_unconsumed()
                self._seal()
        finally:
            self.writer.close()
        if error is not None:
            logger.warning(
                "training ended by %s after step %d; the run is left open, with everything recorded so far in it. "
                "Go on with AuditMode(…, resume=True), or close it with: gradtrail seal %s --abandon",
                type(error).__name__,
                self.recorder.steps,
                self._folder,
            )

    def _attach(self) -> None:
        """Hook model and optimizer, and open the next attempt of a resumed plain loop."""
        self.recorder = StepRecorder(
            self.hooks, self._tracking, self._layout, self.data, self.writer, self._ranks, self._uses
        )
        self.hooks.before_first = self._before_first
        self.hooks.attach()
        if self._optimizer is not None:
            self.follow(self._optimizer)
        if self._binding is not None:
            self._binding.bind()
        elif self._is_waiting:
            last = min(self._ranks.gather(self._reached))
            self.begin(last if self._from_step is None else self._from_step)

    def _let_go(self) -> None:
        """Leave model and optimizer as they were."""
        self.unfollow()
        self.hooks.detach()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the steps of this optimizer (for a trainer that builds its optimizer late)."""
        self.unfollow()
        self._optimizer = inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the real one
        self._steps = OptimizerSteps(
            inner,
            self._tracking.trainable,
            lambda loss_scale, is_skipped: self.recorder.on_step(inner, loss_scale, is_skipped),
        )
        if self._forms == BOTH:
            known = self.recorder.moments  # with what is known of an optimizer that is followed once more
            if known is None or known.optimizer is not inner:
                known = self.recorder.moments = SecondMoments(inner, self._tracking.parameters)
            self.hooks.whitening = known.whitening

    def _has_second_moment(self) -> bool:
        """Tell whether the optimizer, or the one that the trainer is going to make, is of Adam's type."""
        optimizer = None if self._optimizer is None else getattr(self._optimizer, "optimizer", self._optimizer)
        kind, settings = (type(optimizer), optimizer.defaults) if optimizer is not None else (None, {})
        if optimizer is None and self._binding is not None:
            kind, settings = self._binding.planned_optimizer()
        return kind is not None and keeps_second_moment(kind, settings, self._layout.device)

    def unfollow(self) -> None:
        """Record no more steps, until another optimizer is followed."""
        if self._steps is not None:
            self._steps.remove()
            self._steps = None

    def discard(self) -> None:
        """Say that the gradients since the last step were thrown away; the next step's event counts their samples.

        Not needed where ``zero_grad`` sets gradients to ``None``, its default: that is noticed.
        """
        self.hooks.discard()

    def begin(self, step: int, from_attempt: int | None = None) -> None:
        """Say from which optimizer step training goes on; a loop that starts anew opens a new attempt.

        What an aborted step left behind is dropped. The order of the data is the loop's own affair: a resumed loop
        must skip what was trained already.

        Args:
            step: Optimizer steps that the present weights have been through, as the log counts them.
            from_attempt: The attempt that they come from; by default the latest.

        Raises:
            StoreError: If the log lacks steps that the weights have been through, and no loss was accepted.
        """
        self.hooks.forget()
        is_start = step == 0 and not (self._is_waiting or self._has_begun)
        self._has_begun = True
        if is_start:
            return
        if from_attempt is not None and from_attempt > self.attempt and self._accept_loss:
            from_attempt = None  # that attempt is lost as a whole, and so are its steps
        if self._is_waiting and not self._accept_loss:
            refuse_unlogged(self.run, self._ranks.gather((self.attempt, self._reached)), step, from_attempt)
        body = {"environment": describe_environment(), "training": self.training}
        number = self._ranks.together(lambda: self.writer.begin_attempt(step, body, from_attempt=from_attempt))
        parent = number - 1 if from_attempt is None else from_attempt
        repeated = max(0, (self._reached if self._is_waiting else self.recorder.steps) - step)
        self.attempt, self._is_waiting = number, False
        self.recorder.begin(Attempt(number, parent, step))
        logger.warning(
            "audit mode: attempt %d goes on from step %d of attempt %d%s",
            number,
            step,
            parent,
            f"; {repeated} later steps no longer count" if repeated else "",
        )

    @property
    def is_fresh(self) -> bool:
        """Whether the trained parameters are, bit for bit, those that audit mode was entered with."""
        fresh: bool = self._ranks.from_first(weights_digest(self._tracking.trainable) == self._first_weights)
        return fresh

    def _open_ledger(self) -> RunLedger:
        """Create the run's ledger, or open it again."""
        if not self._is_waiting:
            self._uses = Uses(self.data.rows)
            return create_ledger(
                self.run, self._manifest(), self.data, self._signer, self._ranks, on_head=self._on_head
            )
        ledger, self._uses = reopen_ledger(
            self.run,
            self.data,
            self._signer,
            self._ranks,
            on_head=self._on_head,
            accept_loss=self._accept_loss,
            layout=self._layout,
            model=self._model,
        )
        return ledger

    def _before_first(self, batch: Batch, segments: Segments, crosses: bool) -> None:
        """Check on the first batch that what will be recorded is what autograd says, and log the result."""
        if segments.samples > 1 or self._ranks.size > 1:  # one sample alone says nothing of how samples mix
            self.hooks.before_first = None
        refuse_sharded(self._model)  # accelerate and the Trainer wrap the model after audit mode was made
        refuse_uneven_inputs()
        if not self._self_check:
            self.writer.event(EventKind.NOTICE, {"notice": "self-check", "skipped": True})
            logger.warning("audit mode: the self-check was switched off; nothing confirms the sketches of this run")
            return
        found = self._ranks.together(
            lambda: check(self._model, self.hooks, self._tracking, self._layout, batch, segments, apart=not crosses)
        )
        self.writer.event(EventKind.NOTICE, found.to_body())
        self.recorder.checked = found.seen
        logger.log(logging.INFO if found.confirmed else logging.WARNING, "audit mode: %s", found.summary())

    def _say_unconsumed(self) -> None:
        """Say so if samples were captured at the end that no optimizer step consumed."""
        count = self.hooks.unconsumed()
        if count:
            self.writer.event(EventKind.NOTICE, {"notice": "unconsumed", "samples": count})
            logger.warning(
                "audit mode: the gradients of the last %d samples were never consumed by the optimizer that is "
                "followed, so they have no records; if you exchanged the optimizer, call audit.follow(optimizer)",
                count,
            )

    def _seal(self) -> None:
        """Snapshot the trained parameters and close the log; rank 0 last, since its seal names the others' heads."""
        body: dict[str, Any] = {
            "reason": "finished",
            "open_steps": self.recorder.open_steps,
            "audit_share": self.time.share,
            "audit_share_median": self.time.median_share,
        }
        if self._ranks.rank > 0:
            self._ranks.together(lambda: self.writer.seal(body))
        else:
            self._ranks.together(self._snapshot)
            if self._ranks.size > 1:
                body["ranks"] = [rank_head(self.run, rank) for rank in range(1, self._ranks.size)]
            self.writer.seal(body)
        logger.info(
            "sealed %s: %d steps, %d records, worst conservation residual %.1e, audit time %.1f %% of step time",
            self.run,
            self.recorder.steps,
            self.recorder.records,
            self.recorder.worst_residual,
            100 * self.time.share,
        )

    def _snapshot(self) -> None:
        folder = self.run / "snapshots" / "final"
        body = save_snapshot(folder, self._tracking.trainable, self._optimizer, self.recorder.steps, self.attempt)
        self.writer.event(EventKind.MODEL_CHECKPOINT, body)

    def _manifest(self) -> RunManifest:
        return RunManifest(
            run_id=str(uuid.uuid4()),
            origin=rank_origin(self._origin, self._ranks.rank),
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            created_us=time.time_ns() // 1000,
            vkey=str(self._signer.vkey),
            data=self.data.block,
            sketch=self._layout.block(self._forms or RAW),
            model=describe_model(self._model),
            tracking=describe_tracking(self._tracking, self._mode, self._layout.buckets),
            training=self.training,
            recipe=None if self._recipe is None else describe_recipe(self._recipe),
            purpose=self._purpose,
            environment=describe_environment(),
        )

    def _announce(self) -> None:
        """Say what is recorded and what is not, once, before the first step."""
        if self._ranks.rank > 0:
            return
        logger.info(
            "audit mode: %s, %d tracked modules, %d samples, D = %d",
            self.run,
            len(self._tracking.formulas),
            self.data.rows,
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


def _refuse_compiled(model: nn.Module) -> None:
    compiled = compiled_modules(model)
    if compiled:
        raise UnsupportedSetupError(
            f"{compiled[0]} is compiled already; hooks that are added now would never run",
            "Attach audit mode first and compile afterwards: with AuditMode(model, …): model = torch.compile(model).",
        )
