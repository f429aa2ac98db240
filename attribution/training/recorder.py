"""From one optimizer step's captured micro-batches to the entry that the log stores.

Runs in a pre-hook of ``optimizer.step``, after clipping: what is compared and stored is the gradient that the
optimizer is about to consume.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attribution.capture.conservation import conserve
from attribution.capture.hooks import HookSet
from attribution.capture.micro_batch import Captured
from attribution.capture.modules import Tracking
from attribution.errors import SampleIdentityError
from attribution.sketch.layout import SketchLayout
from attribution.sketch.quantize import quantize
from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError
from auditlog.format.canonical import finite
from auditlog.format.records import RECORD
from auditlog.ledger.ledger import StepEntry
from auditlog.ledger.writer import LedgerWriter

logger = logging.getLogger("gradtrail")

TOLERATED_RESIDUAL = 1e-2  # float32 closes to 1e-5, bf16 to a few 1e-3


@dataclass(slots=True)
class AuditTime:
    """What audit mode took from the training thread, in seconds, over all steps.

    Attributes:
        hooks: In hooks, including the comparison at the optimizer step.
        writer: Waiting for the writer thread to accept a step.
        steps: The steps themselves, from the first forward pass to the optimizer step, audit included.
        shares: ``(hooks + writer) / step`` of each step.
    """

    hooks: float = 0.0
    writer: float = 0.0
    steps: float = 0.0
    shares: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Audit time over step time, over all steps."""
        return (self.hooks + self.writer) / self.steps if self.steps else 0.0

    @property
    def median_share(self) -> float:
        """Median of the steps' own shares; one slow first step does not move it."""
        return float(np.median(self.shares)) if self.shares else 0.0


class StepRecorder:
    """Turns each optimizer step into one ``StepEntry``.

    Args:
        hooks: Where micro-batches are captured.
        tracking: The tracked parameters.
        layout: Where gradients land.
        data: Resolves sample indices.
        writer: Takes the entries.

    Attributes:
        steps: Optimizer steps recorded.
        open_steps: Those of them whose samples do not add up to the consumed gradient.
        epoch: Epoch that the loop reports; ``None`` records each sample's number of earlier uses instead.
        clip_max_norm: The loop's clipping threshold, where it is known.
        num_items: The step's ``num_items_in_batch``, where the loop has one.
    """

    def __init__(
        self,
        hooks: HookSet,
        tracking: Tracking,
        layout: SketchLayout,
        data: DataManifest,
        writer: LedgerWriter,
    ) -> None:
        self.steps = 0
        self.records = 0
        self.epoch: int | None = None
        self.clip_max_norm: float | None = None
        self.num_items: int | None = None
        self.time = AuditTime()
        self.worst_residual = 0.0
        self.open_steps = 0
        self._hooks, self._tracking, self._layout = hooks, tracking, layout
        self._data, self._writer = data, writer
        self._uses = np.zeros(data.rows, dtype=np.int64)
        self._seen = 0.0  # hook seconds already accounted for
        self._waited = 0.0  # seconds that the last step waited for the writer

    def check_index(self, index: Tensor) -> None:
        """Refuse ids that the data manifest does not have, before anything is captured.

        Raises:
            SampleIdentityError: Naming step, row and id.
        """
        try:
            self._data.locate(index.numpy())
        except DataError as error:
            bad = (index < 0) | (index >= self._data.rows)
            slot = int(bad.nonzero()[0, 0])
            raise SampleIdentityError(
                f"step {self.steps + 1}, row {slot} of the batch: {error.message}", error.advice()
            ) from error

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what this optimizer step is about to consume."""
        started = perf_counter()
        began = self._hooks.step_began or started
        captured, without_backward = self._hooks.take()
        self.steps += 1
        body = self._describe(optimizer, captured, without_backward)
        gradient, scales = self._consumed(captured, body)
        records, index, sketches = self._rows(captured)
        self.records += len(records)
        own = perf_counter() - started
        hook_s = self._hooks.seconds - self._seen + own
        self._seen = self._hooks.seconds
        # What the writer took is known only after it took it: each step's event says what the step before waited.
        body["audit"] = {"hook_s": hook_s, "writer_s": self._waited, "step_s": perf_counter() - began}
        before = self._writer.blocked_s
        self._writer.step(StepEntry(records, index, sketches, gradient, scales, body))
        self._waited = self._writer.blocked_s - before
        self._account(hook_s, self._waited, perf_counter() - began)

    def _account(self, hooks: float, writer: float, step: float) -> None:
        self.time.hooks += hooks
        self.time.writer += writer
        self.time.steps += step
        self.time.shares.append((hooks + writer) / step if step else 0.0)

    def _describe(
        self, optimizer: torch.optim.Optimizer, captured: list[Captured], without_backward: int
    ) -> dict[str, Any]:
        """Return the step event's body as far as it needs no comparison."""
        loss = [float(torch.nansum(c.loss * c.weight)) for c in captured]
        return {
            "step": self.steps,
            "epoch": self.epoch,
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
            "weight_decay": [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups],
            "num_items": self.num_items,
            "scaler_scale": None,
            "clip_max_norm": self.clip_max_norm,
            "skipped": False,
            "loss": finite(sum(loss)),
            "forward_without_backward": without_backward,
            "micro_batches": [
                {"token_ids_sha256": c.token_ids_sha256, "rows": len(c.sample_index), "loss": finite(value)}
                for c, value in zip(captured, loss, strict=True)
            ],
        }

    def _consumed(self, captured: list[Captured], body: dict[str, Any]) -> tuple[NDArray[np.int8], tuple[float, float]]:
        """Sketch ``p.grad``, compare it with what the samples add up to, and add both to ``body``."""
        grads = {n: p.grad for n, p in self._tracking.parameters.items() if p.grad is not None}
        with torch.no_grad():
            consumed = self._layout.sketch(grads)  # (D,)
            zero = torch.zeros_like(consumed)
            expected = torch.stack([c.expected for c in captured]).sum(0) if captured else zero
            closing = conserve(expected, consumed)
            norm = _norm(list(grads.values()))
            if not consumed.isfinite().all():
                consumed = zero
            q, scale = quantize(consumed[None])
        body |= {
            "f": finite(closing.factor),
            "residual": finite(closing.residual),
            "grad_norm": finite(norm),
            "tracked_share": finite(self._tracked_share(norm)),
        }
        if math.isfinite(closing.residual):
            self.worst_residual = max(self.worst_residual, closing.residual)
        if norm != 0 and not closing.residual <= TOLERATED_RESIDUAL:  # also where either is not finite
            self._warn_open(len(captured), closing.residual)
        return q[0], (float(scale[0]), 0.0)

    def _warn_open(self, micro_batches: int, residual: float) -> None:
        """Count a step whose samples do not add up to its gradient; say so loudly the first time."""
        self.open_steps += 1
        if self.open_steps > 1:
            return
        if not micro_batches:
            why = "no sample was captured: is the batch passed to the audited model, with its sample_index?"
        elif not math.isfinite(residual):
            why = "a loss or gradient is not finite"
        else:
            why = "is zero_grad missing, or is something else added to the gradients?"
        logger.warning(
            "audit mode: the samples of step %d do not add up to the gradient that the optimizer consumes "
            "(residual %.2g): %s Each such step is recorded; show them with: gradtrail show RUN --steps",
            self.steps,
            residual,
            why,
        )

    def _tracked_share(self, tracked_norm: float) -> float:
        """Return the tracked parameters' share of the squared norm of the whole gradient."""
        if not self._tracking.untracked:
            return 1.0
        others = [p.grad for p in self._tracking.left_out if p.grad is not None]
        whole = tracked_norm**2 + _norm(others) ** 2
        return tracked_norm**2 / whole if whole else math.nan

    def _rows(self, captured: list[Captured]) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int8]]:
        """Return the packed records, their sample indices and their int8 sketches."""
        n = sum(len(c.sample_index) for c in captured)
        records = np.zeros(n, dtype=RECORD)
        if not n:
            return records, np.zeros(0, dtype=np.int64), np.zeros((0, self._layout.dim), dtype=np.int8)
        index = torch.cat([c.sample_index for c in captured]).numpy()
        sketches = torch.cat([c.sketch for c in captured])  # (n, D)
        q, scale = quantize(sketches)
        records["step"] = self.steps
        records["micro"] = np.concatenate([np.full(len(c.sample_index), m) for m, c in enumerate(captured)])
        records["slot"] = np.concatenate([np.arange(len(c.sample_index)) for c in captured])
        records["epoch"] = self._uses[index] if self.epoch is None else self.epoch
        records["source_id"], records["row"], records["data_version_id"] = self._data.locate(index)
        for name in ("loss", "n_tokens", "weight", "flags"):
            records[name] = torch.cat([getattr(c, name) for c in captured]).cpu().numpy()
        records["grad_norm"] = sketches.norm(dim=1).cpu().numpy()
        records["scale_raw"] = scale
        np.add.at(self._uses, index, 1)
        return records, index, q


def _norm(tensors: list[Tensor]) -> float:
    """Return the norm of all tensors as one vector."""
    if not tensors:
        return 0.0
    return float(torch.stack(torch._foreach_norm([t.detach().float() for t in tensors])).norm())
