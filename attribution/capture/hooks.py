"""Hooks that carry sample ids in and gradients out.

Each tracked module's input is kept as a *saved tensor* of a side node in the autograd graph, never in a closure. So
gradient checkpointing, offloading and any other saved-tensor hook treat it as they treat the module's own input: it
is recomputed or moved with it, and costs no memory of its own. A tensor hook on the module's output reads it when the
output's gradient arrives.

In mode ``observe`` hooks only look, and training stays bit-identical. In mode ``fused`` a linear map's own weight
gradient is computed as the sum of its per-sample gradients (see ``fused``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from attribution.capture import outputs
from attribution.capture.batch import SAMPLE_INDEX, Announced, Batch, read_batch, with_fields
from attribution.capture.burst import Burst
from attribution.capture.crossing import documents_see_each_other
from attribution.capture.formulas import Embedding, Formula, Linear, Work
from attribution.capture.fused import Consume, can_fuse, fuse
from attribution.capture.hook import Hook
from attribution.capture.kept import anchor, keep, take
from attribution.capture.loss import watch_head, watch_units
from attribution.capture.micro_batch import Captured, MicroBatch
from attribution.capture.modules import Tracking
from attribution.capture.per_sample import Piece
from attribution.capture.recompute import output_tensors
from attribution.capture.segments import Segments
from attribution.capture.whitening import Whitening
from attribution.errors import CaptureError, SampleIdentityError, UnsupportedSetupError
from attribution.sketch.layout import SketchLayout, unflatten

Mode = Literal["observe", "fused"]
# Modules are worked off in bursts: right after a large matrix product the first small operation takes several times
# as long as the next. This much of their inputs and gradients may wait, beyond what autograd holds itself.
QUEUE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a module: whose it is, whether by the model's own pass, and what was kept, until it is taken."""

    formula: Formula
    micro: MicroBatch
    is_own: bool
    cell: list[list[Any]]


_AS_IT_IS = nullcontext()
_Waiting = tuple[Formula, MicroBatch, list[Any], Sequence[Tensor | None]]  # … what was kept, output gradients


class HookSet:
    """Captures per-sample sketches of every training forward/backward pass of one model.

    Args:
        model: The model whose ``forward`` receives the batch.
        tracking: Its tracked modules.
        layout: Where gradients land; on the model's device.
        check_index: Called with each batch's ids before anything is captured; raises if they are not usable.
        mode: ``"observe"`` or ``"fused"``.
        on_crossing: What happens to packed documents that see each other: ``"refuse"``, or ``"mark"`` their records
            as not separable.

    Attributes:
        seconds: Time spent in hooks, over all passes.
        step_began: ``perf_counter`` at the first training forward pass since the last ``take``.
        announced: What the loop says about the next forward pass; reset after use.
        rows_per_sample: Rows or documents per id; 2 for preference pairs.
        discarded: Samples whose gradients were thrown away since the last ``take``.
        before_first: Called with the first training batch and with the first of several samples, its layout, and
            whether its documents see each other, until it is set to ``None``.
        whitening: Gives what each micro-batch's second form is made with.
    """

    def __init__(
        self,
        model: nn.Module,
        tracking: Tracking,
        layout: SketchLayout,
        check_index: Callable[[Tensor], None] = lambda index: None,
        mode: Mode = "observe",
        on_crossing: Literal["refuse", "mark"] = "refuse",
    ) -> None:
        self.seconds = 0.0
        self.step_began: float | None = None
        self.announced = Announced()
        self.rows_per_sample = 1
        self.discarded = 0
        self.before_first: Callable[[Batch, Segments, bool], None] | None = None
        self.whitening: Callable[[], Whitening | None] = lambda: None
        self._model, self._tracking, self._layout = model, tracking, layout
        self._check_index, self._mode, self._on_crossing = check_index, mode, on_crossing
        self._next_token = outputs.predicts_next_token(model)
        self._anchor = anchor(layout.device)
        self._open: MicroBatch | None = None
        self._is_first = True  # no training batch has come yet
        self._on_model = True  # the model's own hooks act; not inside ``aside``
        self._wants_ids = SAMPLE_INDEX in inspect.signature(model.forward).parameters
        self._is_announced = False  # the loop says whose rows a pass has
        self._is_inside = False  # the audited model's own forward pass is under way
        self._done: list[Captured] = []
        self._undo: list[Callable[[], None]] = []
        self._queue: list[_Waiting] = []
        self._queued = 0  # bytes that the queue holds on to
        self._burst = Burst(layout.device)
        self._crosses: bool | None = None  # whether packed documents see each other; tried out once
        self._quiet = False  # a module is being run again, or a self-check uses the model: not a pass of the loop
        self._passes_without_backward = 0

    def attach(self) -> None:
        """Register every hook. A compiler leaves them alone and breaks its graphs around them."""
        if any(isinstance(hook, Hook) for hook in self._model._forward_pre_hooks.values()):
            raise UnsupportedSetupError(
                "the model is audited already", "Leave the first AuditMode before you enter another on the same model."
            )
        hold, eager = self._undo.append, torch.compiler.disable
        hold(self._model.register_forward_pre_hook(Hook(eager(self._on_batch)), with_kwargs=True).remove)
        hold(self._model.register_forward_hook(Hook(eager(self._on_output)), with_kwargs=True).remove)
        on_forward = eager(self._on_forward)
        for formula in self._tracking.formulas:
            if self._mode == "fused" and can_fuse(formula, self._layout.buckets):
                hold(self._fuse(formula))
            else:
                hook = Hook(on_forward, formula)
                hold(formula.module.register_forward_hook(hook, with_kwargs=True).remove)
        head = outputs.head_of(self._model)
        if head is not None:  # so that compiled code, too, hands the logits over where their gradient can be seen
            hold(head.register_forward_hook(Hook(eager(_nothing))).remove)

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        while self._undo:
            self._undo.pop()()

    def take(self) -> tuple[list[Captured], int]:
        """Close the open micro-batch and hand over what the optimizer step consumes.

        Returns:
            The step's micro-batches in order, and how many forward passes had no backward pass.
        """
        self._close()
        done, without = self._done, self._passes_without_backward
        self._done, self._passes_without_backward, self.step_began = [], 0, None
        return done, without

    def discard(self) -> None:
        """Drop the samples captured since the last step, whose gradients the loop threw away, and count them."""
        self._close()
        self.discarded += sum(len(c.sample_index) for c in self._done)
        self._done, self._passes_without_backward = [], 0

    def unconsumed(self) -> int:
        """Close the open micro-batch and return how many samples were captured since the last optimizer step."""
        self._close()
        return sum(len(c.sample_index) for c in self._done)

    def forget(self) -> None:
        """Drop what a step that was broken off left behind: it belongs to no optimizer step."""
        if self._open is not None:
            self._open.closed = True
        self._open, self._done, self._passes_without_backward, self.step_began = None, [], 0, None
        self._queue, self._queued, self.announced = [], 0, Announced()
        self._burst.forget()

    @contextmanager
    def aside(self, micro: MicroBatch) -> Iterator[None]:
        """Capture what happens inside into ``micro``, without any trace in the run."""
        kept, self._open = self._open, micro
        model_hooks, self._on_model = self._on_model, False
        try:
            yield
            self._work_off()
        finally:
            self._open, self._on_model = kept, model_hooks
            self._queue, self._queued = [], 0
            self._burst.forget()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Capture nothing inside."""
        quiet, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = quiet

    def _close(self) -> None:
        if self._open is None:
            return
        self._work_off()
        micro, self._open = self._open, None
        captured = micro.close()
        if captured is not None:
            self._done.append(captured)
        elif micro.is_training:
            self._passes_without_backward += 1

    # --- forward pass ---------------------------------------------------------------------------------------

    def _on_batch(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the ids out of the batch, and open a micro-batch if this pass trains."""
        started = perf_counter()
        is_own = self._on_model and not self._quiet
        batch = read_batch(args, kwargs, self.announced if is_own else Announced())
        # In evaluation mode a pass may be mere inference, so only one that brings ids can be meant for training.
        if is_own and torch.is_grad_enabled() and (model.training or batch.index is not None):
            self._begin(batch, started)
        self.seconds += perf_counter() - started
        if self._wants_ids:
            return None
        if SAMPLE_INDEX in kwargs:
            return args, {key: value for key, value in kwargs.items() if key != SAMPLE_INDEX}
        if batch.mapping is not None and SAMPLE_INDEX in batch.mapping:
            return (with_fields(batch.mapping, batch.fields),), kwargs
        return None

    def _begin(self, batch: Batch, started: float) -> None:
        """Open a micro-batch."""
        self._close()
        if self._done and all(p.grad is None for p in self._tracking.parameters.values()):
            self.discard()  # the loop threw the gradients away without a step
        self._refuse_second_pass(batch)
        self.announced = Announced(labels=batch.labels)
        index, segments = batch.layout(self.rows_per_sample)
        self._check_index(index)
        crosses = self._documents_cross(batch, segments)
        if self.before_first is not None and (segments.samples > 1 or self._is_first):
            self._is_first = False
            self.before_first(batch, segments, crosses)
        self.step_began = self.step_began or started
        self._open = MicroBatch(index, segments, batch.token_ids, self._layout, self.whitening())
        self._open.is_training = self._model.training
        self._is_inside = True
        self._open.not_separable = crosses

    def _refuse_second_pass(self, batch: Batch) -> None:
        """Refuse a pass without ids where the loop announces them, one pass at a time."""
        if batch.index is None and self._is_announced:
            raise CaptureError(
                "a second forward pass in one training step: only the first one's rows have been announced",
                "Run one forward pass per training step, on all its rows; passes that are not trained on belong under "
                "torch.no_grad().",
            )
        self._is_announced = self._is_announced or self.announced.index is not None

    def _documents_cross(self, batch: Batch, segments: Segments) -> bool:
        """Tell whether documents that share a row see each other; refuse them unless they may be marked."""
        crosses = batch.crosses_documents
        if segments.is_packed and not crosses:
            if self._crosses is None:
                with self.silent():
                    self._crosses = documents_see_each_other(self._model, batch.fields, segments)
            crosses = self._crosses
        if crosses and self._on_crossing == "refuse":
            raise SampleIdentityError(
                "the batch holds several documents per row, and they see each other: no gradient is one document's own",
                "Pack with position_ids that restart, without attention_mask and with use_cache=False "
                "(attribution.PackingCollator does), or accept records that are marked as not separable: "
                "AuditMode(…, on_crossing='mark').",
            )
        return crosses

    def _on_forward(
        self, formula: Formula, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Keep what the module's gradients need in the graph, and wait for its output's gradient."""
        micro = self._open
        if micro is None or self._quiet or not torch.is_grad_enabled():
            return None
        started = perf_counter()
        changed = None
        if isinstance(output, Tensor):
            if not output.requires_grad:
                return None
            if isinstance(formula, Embedding) and len(output) == 1 < micro.segments.rows:
                # One row of positions for the whole batch: give each row its own gradient.
                output = changed = output.expand(micro.segments.rows, *output.shape[1:])
                args = tuple(ids.expand(micro.segments.rows, *ids.shape[1:]) for ids in args)
            call = self._call(formula, micro, args, kwargs)
            output.register_hook(functools.partial(self._on_gradient, call))
        else:
            # One output may have been made from another: through views only what comes from outside arrives.
            output = changed = pytree.tree_map(_view, output)
            places = [t is not None and t.requires_grad for t in output_tensors(output)]
            if not any(places):
                return None
            call = self._call(formula, micro, args, kwargs)
            found = [t for t, place in zip(output_tensors(output), places, strict=True) if place and t is not None]
            register_multi_grad_hook(found, functools.partial(self._on_gradients, call, places))
        self.seconds += perf_counter() - started
        return changed

    def _fuse(self, formula: Linear) -> Callable[[], None]:
        """Let a module compute its weight gradient as the sum of the per-sample gradients; return how to undo it."""

        def consumer() -> Consume | None:
            micro = self._open
            if micro is None or self._quiet or not torch.is_grad_enabled():
                return None
            return functools.partial(self._consume, formula, micro, self._is_own_pass())

        return fuse(formula.module, formula.transposed, consumer)

    def _call(self, formula: Formula, micro: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        return _Call(formula, micro, self._is_own_pass(), [keep(formula.keep(args, kwargs), self._anchor)])

    def _is_own_pass(self) -> bool:
        """Tell whether a module is called by the audited model's own pass; checkpointing calls it inside backward."""
        return self._is_inside or not self._on_model or torch._C._current_graph_task_id() != -1

    def _on_output(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Gather what the units need and wait for the gradient."""
        micro = self._open
        if micro is None or self._quiet or not torch.is_grad_enabled() or not (self._is_inside or not self._on_model):
            return
        self._is_inside = False
        started = perf_counter()
        labels = kwargs.get("labels")
        if self._on_model:
            labels, self.announced = self.announced.labels, Announced()
        if outputs.find(output, "aux_loss") is not None and outputs.find(output, "loss") is not None:
            micro.not_separable = True
        watch_head(output, labels, self._tracking, micro)
        if self._on_model:
            watch_units(output, labels, micro, self._next_token, self._anchor, self._spend)
        self._spend(perf_counter() - started)

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds

    # --- backward pass --------------------------------------------------------------------------------------

    def _on_gradients(self, call: _Call, places: list[bool], gradients: Sequence[Tensor | None]) -> None:
        """Put the gradients of those outputs that have one into the places of all outputs."""
        arrived = iter(gradients)
        self._arrive(call, [next(arrived) if place else None for place in places])

    def _on_gradient(self, call: _Call, gradient: Tensor) -> None:
        self._arrive(call, (gradient,))

    def _arrive(self, call: _Call, gradients: Sequence[Tensor | None]) -> None:
        """Queue what one module kept with its output's gradients, and work the queue off when it is long enough."""
        started = perf_counter()
        self._refuse_stray(call.formula, call.micro, call.is_own)
        kept = take(call.cell)
        self._queue.append((call.formula, call.micro, kept, gradients))
        self._queued += sum(t.nbytes for t in (*kept, *gradients) if isinstance(t, Tensor))
        call.micro.arrive(call.formula.name, gradients)
        if self._queued > QUEUE_BYTES:
            self._work_off()
        self.seconds += perf_counter() - started

    def _refuse_stray(self, formula: Formula, micro: MicroBatch, is_own: bool) -> None:
        """Refuse a gradient that comes too late, or from a call that was not part of the audited model's own pass."""
        if micro.closed:
            raise CaptureError(
                f"module {formula.name}: a gradient arrived after its micro-batch was closed",
                "Call backward after each forward pass, before the next forward pass or optimizer.step().",
            )
        if is_own:
            return
        if self._on_crossing == "refuse":
            raise CaptureError(
                f"module {formula.name} was called outside of the audited model's training pass, so the rows it "
                "worked on may be other samples'",
                "Call the audited model itself with every batch and its sample_index, or accept records that are "
                "marked as not separable: AuditMode(…, on_crossing='mark').",
            )
        micro.not_separable = True

    def _work_off(self) -> None:
        """Form and sketch the queued modules' per-sample gradients, in float32 whatever autocast says."""
        queue, self._queue, self._queued = self._queue, [], 0
        with torch.no_grad(), self.silent(), _without_autocast(self._layout.device):
            for formula, micro, kept, gradients in _side_by_side(queue):
                needs_totals = micro.whitening is not None
                work = Work(kept, gradients, micro.segments, self._burst.room, needs_totals, self._layout.buckets)
                for part in formula.gradients(work):
                    self._burst.add(micro, part)
            self._burst.work_off()
            for _, micro, _, _ in queue:
                micro.rest()

    def _consume(
        self, formula: Linear, micro: MicroBatch, is_own: bool, x: Tensor, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sketch a fused module's per-sample gradients and return their sums, the module's own gradients."""
        started = perf_counter()
        self._refuse_stray(formula, micro, is_own)
        totals: dict[str, list[Tensor]] = {}
        with _without_autocast(self._layout.device):
            for piece in formula.gradients(Work((x,), (gradient,), micro.segments, self._burst.room)):
                assert isinstance(piece, Piece)
                # The sum is autograd's, which may add to it; the burst makes its own.
                totals.setdefault(piece.parameter, []).append(piece.values.sum(0))
                self._burst.add(micro, piece)
        micro.arrive(formula.name, (gradient,))
        of_weight = _as_matrix(totals[formula.parameters["weight"]], formula.module.weight.shape)
        of_bias = totals.get(formula.parameters.get("bias", ""))
        self.seconds += perf_counter() - started
        return of_weight, None if of_bias is None else of_bias[0]


def _as_matrix(stretches: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return a flattened gradient in its weight's shape."""
    flat = stretches[0] if len(stretches) == 1 else torch.cat(list(stretches))
    return unflatten(flat, shape)[0].contiguous()


def _nothing(module: nn.Module, args: Any, output: Any) -> None:
    return None


def _view(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _side_by_side(queue: list[_Waiting]) -> list[_Waiting]:
    """Bring modules with one and the same input together, so that it is read into the cache once."""
    groups: dict[int, list[_Waiting]] = {}
    for waiting in queue:
        kept = waiting[2]
        key = kept[0].data_ptr() if kept and isinstance(kept[0], Tensor) else id(waiting)
        groups.setdefault(key, []).append(waiting)
    return [waiting for group in groups.values() for waiting in group]


def _without_autocast(device: torch.device) -> Any:
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS
