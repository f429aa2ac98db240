"""From one optimizer step's captured micro-batches to the entry that the log stores.

Runs in a pre-hook of ``optimizer.step``, after clipping: what is compared and stored is the gradient that the
optimizer is about to consume.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attribution.capture.hooks import HookSet
from attribution.capture.micro_batch import Captured
from attribution.capture.modules import Tracking, refuse_unseen
from attribution.capture.segments import Segments
from attribution.errors import CaptureError, SampleIdentityError
from attribution.sketch.layout import SketchLayout
from attribution.sketch.quantize import quantize
from attribution.training.consumed import Consumed, consume, with_gradient
from attribution.training.optimizer_steps import gradient_scale
from attribution.training.padding import Loader, find_padding
from attribution.training.ranks import Ranks
from attribution.training.second_moments import SecondMoments
from attribution.training.uses import Uses
from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError
from auditlog.format.canonical import finite
from auditlog.format.records import RECORD, EventKind, Flag
from auditlog.ledger.ledger import StepEntry
from auditlog.ledger.writer import LedgerWriter
from auditlog.trust.attempts import Attempt

logger = logging.getLogger("gradtrail")


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
        ranks: The processes of this run.
        uses: What was used so far; grows with every step.

    Attributes:
        steps: Optimizer steps recorded.
        open_steps: Those of them whose samples do not add up to the consumed gradient.
        epoch: Epoch that the loop reports; ``None`` records each sample's number of earlier uses instead.
        clip_max_norm: The loop's clipping threshold, where it is known.
        checked: The modules that the self-check saw; ``None`` without one.
        num_items: The step's ``num_items_in_batch``, where the loop has one.
        moments: Told what each step made of its gradient; ``None`` where the raw form alone is stored.
    """

    def __init__(
        self,
        hooks: HookSet,
        tracking: Tracking,
        layout: SketchLayout,
        data: DataManifest,
        writer: LedgerWriter,
        ranks: Ranks,
        uses: Uses,
    ) -> None:
        self.steps = 0
        self.records = 0
        self.epoch: int | None = None
        self.clip_max_norm: float | None = None
        self.num_items: int | None = None
        self.moments: SecondMoments | None = None
        self.checked: frozenset[str] | None = None
        self.time = AuditTime()
        self.worst_residual = 0.0
        self.open_steps = 0
        self._hooks, self._tracking, self._layout = hooks, tracking, layout
        self._data, self._writer, self._ranks = data, writer, ranks
        self._known = {id(p) for p in tracking.trainable.values()}
        self._uses = uses
        self._seen = 0.0  # hook seconds already accounted for
        self._has_warned = False
        self._waited = 0.0  # seconds that the last step waited for the writer

    def begin(self, attempt: Attempt) -> None:
        """Go on from another step: what the weights there did not go through is forgotten."""
        self.steps = attempt.from_step
        self._uses.begin(attempt)

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

    def on_step(self, optimizer: torch.optim.Optimizer, loss_scale: float = 1.0, is_skipped: bool = False) -> None:
        """Record what this optimizer step is about to consume.

        Args:
            optimizer: The optimizer.
            loss_scale: The gradient scaler's scale, by which the loss was multiplied.
            is_skipped: The scaler leaves the step out because a gradient is not finite.

        Raises:
            CaptureError: If the optimizer consumes gradients that audit mode never saw.
        """
        started = perf_counter()
        began = self._hooks.step_began or started
        captured, without_backward = self._hooks.take()
        discarded, self._hooks.discarded = self._hooks.discarded, 0
        share = 1.0 / (loss_scale * self._ranks.size)  # DistributedDataParallel averages over processes
        captured = [each.shared(share) for each in captured]
        self.steps += 1
        self._say_unchecked(captured)
        if without_backward and not captured and not is_skipped:
            refuse_unseen(self._tracking, (), self._tracking.parameters, f"step {self.steps}")
        body = self._describe(optimizer, captured, without_backward)
        body |= {
            "scaler_scale": None if loss_scale == 1.0 else loss_scale,
            "skipped": is_skipped,
            "discarded": discarded,
        }
        gradient, scales = (None, (0.0, 0.0)) if is_skipped else self._consumed(optimizer, captured, body)
        records, index, sketches = self._rows(captured, self._correct(captured, body, loss_scale))
        self._count_uses(captured, records, index)
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
            "clip_max_norm": self.clip_max_norm,
            "loss": finite(sum(loss)),
            "forward_without_backward": without_backward,
            "micro_batches": [
                {"token_ids_sha256": c.token_ids_sha256, "rows": c.segments.rows, "loss": finite(value)}
                | ({"spans": _spans(c.segments)} if c.segments.is_packed else {})
                for c, value in zip(captured, loss, strict=True)
            ],
        }

    def _consumed(
        self, optimizer: torch.optim.Optimizer, captured: list[Captured], body: dict[str, Any]
    ) -> tuple[NDArray[np.int8], tuple[float, float]]:
        """Sketch ``p.grad``, compare it with what the samples add up to, and add both to ``body``."""
        zero = torch.zeros(self._layout.dim, device=self._layout.device)
        expected = self._ranks.sum(torch.stack([c.expected for c in captured]).sum(0) if captured else zero)
        consumed = consume(self._tracking, self._layout, expected, gradient_scale(optimizer))
        self._refuse_strangers(optimizer)
        if consumed.is_open:
            arrived = set[str]().union(*(c.arrived for c in captured))
            self._warn_open(arrived, consumed)
        if math.isfinite(consumed.closing.residual):
            self.worst_residual = max(self.worst_residual, consumed.closing.residual)
        body |= {
            "f": finite(consumed.closing.factor),
            "residual": finite(consumed.closing.residual),
            "grad_norm": finite(consumed.norm),
            "tracked_share": finite(consumed.tracked_share),
        }
        q, scale = quantize((consumed.sketch if consumed.sketch.isfinite().all() else zero)[None])
        if self.moments is not None:  # the step's gradient is stored in the raw form only, to be compared
            q = np.hstack([q, np.zeros_like(q)])
        return q[0], (float(scale[0]), 0.0)

    def _correct(self, captured: list[Captured], body: dict[str, Any], loss_scale: float) -> float:
        """Compare what whitening assumed of this step's gradient with what was found; return the factor still due."""
        if self.moments is None:
            return 1.0
        f = body.get("f")
        found = math.nan if f is None else f * len(captured) / loss_scale
        body["whitened_share"] = [self.moments.whitening().share, finite(found)]
        return self.moments.stepped(found)

    def _refuse_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse parameters that the optimizer moves and that were not trainable when audit mode was attached."""
        strangers = [
            tuple(p.shape)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and id(p) not in self._known
        ]
        if strangers:
            raise CaptureError(
                f"step {self.steps}: the optimizer consumes gradients of {len(strangers)} parameters that audit mode "
                f"does not know (the first has shape {strangers[0]})",
                "They became trainable after audit mode was attached (an adapter was added or switched), or belong to "
                "another model. Attach audit mode when everything that is trained is in place.",
            )

    def _say_unchecked(self, captured: list[Captured]) -> None:
        """Name modules that train and that the self-check did not see: only training, or another output, uses them."""
        if self.checked is None:
            return
        arrived = frozenset[str]().union(*(c.arrived for c in captured))
        unchecked = sorted(arrived - self.checked - self._tracking.parameters.keys())
        if unchecked:
            self.checked |= arrived
            self._writer.event(EventKind.NOTICE, {"notice": "unchecked modules", "modules": unchecked[:1000]})
            logger.warning(
                "audit mode: %d modules train that the self-check did not see, so nothing but conservation confirms "
                "their share of the sketches: %s; this is logged",
                len(unchecked),
                ", ".join(unchecked[:3]),
            )

    def _warn_open(self, arrived: set[str], consumed: Consumed) -> None:
        """Count a step whose samples do not add up to its gradient; refuse it if modules were never seen."""
        residual = consumed.closing.residual
        if math.isfinite(residual) or not arrived:
            names = with_gradient(self._tracking.parameters)
            refuse_unseen(self._tracking, arrived, names, f"step {self.steps}")
        self.open_steps += 1
        if self.open_steps > 1:
            return
        if consumed.norm == 0:
            why = "the gradients were gone before optimizer.step(); does something else take steps inside backward?"
        elif not math.isfinite(residual):
            why = "a loss or gradient is not finite."
        else:
            why = (
                "is zero_grad missing, were gradients thrown away without a step (call audit.discard()), or is "
                "something else added to them, or done to them value by value (clip_grad_value_)?"
            )
        logger.warning(
            "audit mode: the samples of step %d do not add up to the gradient that the optimizer consumes "
            "(residual %.2g): %s Each such step is recorded; show them with: gradtrail show RUN --steps",
            self.steps,
            residual,
            why,
        )

    def _rows(
        self, captured: list[Captured], correction: float
    ) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int8]]:
        """Return the packed records, their sample indices and their int8 sketches, raw and whitened side by side."""
        n = sum(len(c.sample_index) for c in captured)
        records = np.zeros(n, dtype=RECORD)
        if not n:
            width = self._layout.dim * (1 if self.moments is None else 2)
            return records, np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.int8)
        index = torch.cat([c.sample_index for c in captured]).numpy()
        sketches = torch.cat([c.sketch for c in captured])  # (n, D)
        q, scale = quantize(sketches)
        records["step"] = self.steps
        records["micro"] = np.concatenate([np.full(len(c.sample_index), m) for m, c in enumerate(captured)])
        for name, places in zip(
            ("slot", "part"), zip(*(c.segments.slots() for c in captured), strict=True), strict=True
        ):
            records[name] = np.concatenate([np.array(p) for p in places])
        records["epoch"] = self._uses.earlier(index) if self.epoch is None else self.epoch
        records["source_id"], records["row"], records["data_version_id"] = self._data.locate(index)
        for name in ("loss", "n_tokens", "weight", "flags"):
            records[name] = torch.cat([getattr(c, name) for c in captured]).cpu().numpy()
        records["grad_norm"] = sketches.norm(dim=1).cpu().numpy()
        records["scale_raw"] = scale
        whitened = [c.whitened for c in captured if c.whitened is not None]
        if whitened:
            q_whitened, scale = quantize(torch.cat(whitened))
            records["scale_whitened"] = scale * correction
            q = np.hstack([q, q_whitened])
        return records, index, q

    def _count_uses(self, captured: list[Captured], records: NDArray[np.void], index: NDArray[np.int64]) -> None:
        """Count the step's uses over all processes, and flag the records that only fill a batch."""
        if self._ranks.size == 1:  # nothing to even out
            self._uses.add(self.steps, self.epoch, index, np.zeros(len(index), bool))
            return
        is_packed = any(c.segments.is_packed for c in captured)
        own = [c.sample_index.numpy() for c in captured]
        ids, packed = zip(*self._ranks.gather((own, is_packed)), strict=True)
        loader = Loader.active()
        epoch = loader.iteration if self.epoch is None and loader is not None else self.epoch
        used = None if epoch is None else self._uses.in_epoch(epoch)
        if used is None and not self._has_warned and self._ranks.rank == 0:
            self._has_warned = True
            logger.warning(
                "audit mode: the loop does not tell its epoch, so repeats that only fill the last batches cannot be "
                "told from the next epoch's uses. Say it beside sampler.set_epoch(epoch): audit.epoch = epoch"
            )
        padded = find_padding(ids, used, loader, is_packed=any(packed))
        if len(records):
            records["flags"][np.concatenate(padded[self._ranks.rank])] |= np.uint16(Flag.PADDED_DUPLICATE)
        everybody, fills = (np.concatenate([np.zeros(0, int), *chain(*parts)]) for parts in (ids, padded))
        self._uses.add(self.steps, epoch, everybody, fills.astype(bool))


def _spans(segments: Segments) -> list[list[list[int]]]:
    """Return, per sample of a packed batch, ``[row, first token, end, position of the first token]`` of each span."""
    return [[[s.row, s.start, s.end, s.place] for s in spans] for spans in segments.spans or ()]
