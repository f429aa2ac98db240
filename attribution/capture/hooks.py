"""Hooks that carry sample ids in and gradients out, and leave training bit-identical.

Each tracked module's input is kept as a *saved tensor* of a side node in the autograd graph, never in a closure. So
gradient checkpointing, offloading and any other saved-tensor hook treat it as they treat the module's own input: it
is recomputed or moved with it, and costs no memory of its own. A tensor hook on the module's output reads it when the
output's gradient arrives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from attribution.capture import units
from attribution.capture.micro_batch import Captured, MicroBatch
from attribution.capture.modules import TrackedModule, Tracking
from attribution.capture.per_sample import by_sample, linear_bias, linear_weight
from attribution.errors import CaptureError, SampleIdentityError
from attribution.sketch.layout import SketchLayout

SAMPLE_INDEX = "sample_index"
# Modules are worked off in bursts: right after a large matrix product the first small operation takes several times
# as long as the next. This much of their inputs and gradients may wait, beyond what autograd holds itself.
QUEUE_BYTES = 16 << 20

_TAKE_IDS = "Take sample_index from attribution.dataset(manifest) and let the collator stack it unchanged."

_Waiting = tuple[TrackedModule, MicroBatch, Tensor, Tensor]  # … activations, output gradient


class HookSet:
    """Captures per-sample sketches of every training forward/backward pass of one model.

    Args:
        model: The model whose ``forward`` receives the batch.
        tracking: Its tracked modules.
        layout: Where gradients land; on the model's device.
        check_index: Called with each batch's ids before anything is captured; raises if they are not usable.

    Attributes:
        seconds: Time spent in hooks, over all passes.
        step_began: ``perf_counter`` at the first training forward pass since the last ``take``.
        labels: Labels for the next forward pass, where the loop keeps them from the model; reset after use.
    """

    def __init__(
        self,
        model: nn.Module,
        tracking: Tracking,
        layout: SketchLayout,
        check_index: Callable[[Tensor], None] = lambda index: None,
    ) -> None:
        self.seconds = 0.0
        self.step_began: float | None = None
        self.labels: Tensor | None = None
        self._model, self._tracking, self._layout = model, tracking, layout
        self._check_index = check_index
        self._next_token = _predicts_next_token(model)
        self._anchor = torch.empty(0, *[1] * 8, device=layout.device, requires_grad=True)
        self._open: MicroBatch | None = None
        self._done: list[Captured] = []
        self._handles: list[Any] = []
        self._queue: list[_Waiting] = []
        self._queued = 0  # bytes that the queue holds on to
        self._scratch: dict[tuple[int, int], Tensor] = {}
        self._passes_without_backward = 0

    def attach(self) -> None:
        """Register every hook."""
        hold = self._handles.append
        hold(self._model.register_forward_pre_hook(self._on_batch, with_kwargs=True))
        hold(self._model.register_forward_hook(self._on_output, with_kwargs=True))
        for tracked in self._tracking.modules:
            hold(tracked.module.register_forward_hook(functools.partial(self._on_forward, tracked)))

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> tuple[list[Captured], int]:
        """Close the open micro-batch and hand over what the optimizer step consumes.

        Returns:
            The step's micro-batches in order, and how many forward passes had no backward pass.
        """
        self._close()
        done, without = self._done, self._passes_without_backward
        self._done, self._passes_without_backward, self.step_began = [], 0, None
        return done, without

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
        batch = args[0] if not kwargs and len(args) == 1 and isinstance(args[0], Mapping) else kwargs
        index = batch.get(SAMPLE_INDEX)
        # In evaluation mode a pass may be mere inference, so only one that brings ids can be meant for training.
        if torch.is_grad_enabled() and (model.training or index is not None):
            self._close()
            self.step_began = self.step_began or started
            self._open = self._start(index, batch, args)
            self._open.is_training = model.training
        self.seconds += perf_counter() - started
        if index is None:
            return None
        without = {key: value for key, value in batch.items() if key != SAMPLE_INDEX}
        return (args, without) if batch is kwargs else ((without,), kwargs)

    def _start(self, index: Any, batch: Mapping[str, Any], args: tuple[Any, ...]) -> MicroBatch:
        tensors = [value for value in (*batch.values(), *args) if isinstance(value, Tensor)]
        if index is None:
            fields = ", ".join(map(str, batch)) or "no named fields"
            raise SampleIdentityError(
                f"the batch carries no {SAMPLE_INDEX} (it has {fields}), so its rows cannot be tied to the data",
                "Build the dataset with attribution.dataset(manifest) and keep the column through map and collator:\n"
                "  train_dataset=dataset(manifest).map(tokenize)   # tokenize must not drop sample_index\n"
                "  model(**batch)                                  # plain loop: pass the batch with its sample_index",
            )
        index = _as_integers(index)
        token_ids = batch.get("input_ids")
        rows = next((len(t) for t in [token_ids, *tensors] if isinstance(t, Tensor) and t.ndim), 0)
        if index.ndim != 1 or len(index) != rows:
            raise SampleIdentityError(
                f"{SAMPLE_INDEX} has shape {tuple(index.shape)}, the batch has {rows} rows: one id per row is needed",
                "If rows are packed from several documents, packing is not supported yet; turn it off.",
            )
        self._check_index(index)
        return MicroBatch(index, token_ids, self._layout.dim, self._layout.device)

    def _on_forward(self, tracked: TrackedModule, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Keep the module's input in the graph and wait for its output's gradient."""
        if self._open is None or not output.requires_grad:
            return
        started = perf_counter()
        if not args:
            raise CaptureError(
                f"module {tracked.name} was called without a positional input",
                "Call it as module(x), or leave it out with allow_untracked.",
            )
        node = _keep(args[0], self._anchor)
        output.register_hook(functools.partial(self._on_gradient, tracked, self._open, [node]))
        self.seconds += perf_counter() - started

    def _on_output(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Gather the logits that the units need and wait for their gradient."""
        named = args[0] if args and isinstance(args[0], Mapping) else kwargs
        labels = self.labels if self.labels is not None else named.get("labels")
        self.labels = None
        logits = _logits(output)
        if self._open is None or logits is None or not logits.requires_grad:
            return
        started = perf_counter()
        targets = None if labels is None else units.align_targets(logits, labels.to(logits.device), self._next_token)
        if targets is not None:
            needed = units.gather_logits(logits, targets)
            logits.register_hook(functools.partial(self._on_logits_gradient, self._open, needed))
        else:
            node = _keep(logits.detach(), self._anchor)
            logits.register_hook(functools.partial(self._on_bare_gradient, self._open, [node]))
        self.seconds += perf_counter() - started

    # --- backward pass --------------------------------------------------------------------------------------

    def _on_gradient(self, tracked: TrackedModule, micro: MicroBatch, cell: list[Any], output_grads: Tensor) -> None:
        """Queue one module's input and output gradient, and work the queue off when it is long enough."""
        started = perf_counter()
        if micro.closed:
            raise CaptureError(
                f"module {tracked.name}: a gradient arrived after its micro-batch was closed",
                "Call backward after each forward pass, before the next forward pass or optimizer.step().",
            )
        activations = _take(cell)
        self._queue.append((tracked, micro, activations, output_grads))
        self._queued += activations.nbytes + output_grads.nbytes
        micro.arrived += 1
        if self._queued > QUEUE_BYTES:
            self._work_off()
        self.seconds += perf_counter() - started

    def _work_off(self) -> None:
        """Form and sketch the queued modules' per-sample gradients, in float32 whatever autocast says."""
        queue, self._queue, self._queued = self._queue, [], 0
        maps = self._layout.maps
        with torch.no_grad(), _without_autocast(queue):
            for tracked, micro, activations, output_grads in _side_by_side(queue):
                x = by_sample(activations, micro.samples, tracked.name)  # (B, T, d_in)
                g = by_sample(output_grads, micro.samples, tracked.name)  # (B, T, d_out)
                if tracked.weight is not None:
                    fold = maps[tracked.weight]
                    out = self._scratch_for(micro.samples, len(fold.signs))
                    fold.add_to(micro.sums, linear_weight(x, g, tracked.transposed, out))
                if tracked.bias is not None:
                    maps[tracked.bias].add_to(micro.sums, linear_bias(g))

    def _scratch_for(self, samples: int, entries: int) -> Tensor:
        """Return a ``(B, n)`` tensor to overwrite: one that is reused stays in the cache."""
        key = (samples, entries)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(key, device=self._layout.device)
        return self._scratch[key]

    def _on_logits_gradient(self, micro: MicroBatch, needed: units.TokenLogits, gradient: Tensor) -> None:
        started = perf_counter()
        micro.units = units.measure(needed, gradient)
        self.seconds += perf_counter() - started

    def _on_bare_gradient(self, micro: MicroBatch, cell: list[Any], gradient: Tensor) -> None:
        """Measure without labels: the targets are read off the gradient."""
        started = perf_counter()
        logits = _take(cell)
        needed = units.gather_logits(logits, units.targets_from_gradient(gradient))
        micro.units = units.measure(needed, gradient)
        self.seconds += perf_counter() - started


def _as_integers(index: Any) -> Tensor:
    """Return ids as ``(B,)`` int64 on the CPU; never by rounding."""
    try:
        tensor = torch.as_tensor(index).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleIdentityError(f"{SAMPLE_INDEX} is not a tensor of integers: {error}", _TAKE_IDS) from error
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        raise SampleIdentityError(f"{SAMPLE_INDEX} has type {tensor.dtype}, integers are needed", _TAKE_IDS)
    return tensor.to("cpu", torch.int64)


def _side_by_side(queue: list[_Waiting]) -> list[_Waiting]:
    """Bring modules with one and the same input together, so that it is read into the cache once."""
    groups: dict[int, list[_Waiting]] = {}
    for waiting in queue:
        groups.setdefault(waiting[2].data_ptr(), []).append(waiting)
    return [waiting for group in groups.values() for waiting in group]


def _without_autocast(queue: list[_Waiting]) -> Any:
    kind = queue[0][3].device.type if queue else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _keep(tensor: Tensor, anchor: Tensor) -> Any:
    """Return a node of the autograd graph that saves ``tensor``, the way autograd saves a module's own input.

    The product with an empty anchor (a leading dimension of size 0) that requires a gradient saves its other factor
    and computes nothing. A custom autograd function does the same at several times the cost.
    """
    return (tensor * anchor).grad_fn


def _take(cell: list[Any]) -> Tensor:
    """Return the tensor that a node from ``_keep`` saved, and drop the node. Under checkpointing it is recomputed here.

    Raises:
        CaptureError: If it was taken before.
    """
    if not cell:
        raise CaptureError(
            "a second backward pass reached the same forward pass",
            "Run the forward pass again before each backward pass, or add the losses and call backward once.",
        )
    saved: Tensor = cell.pop()._saved_self
    return saved


def _logits(output: Any) -> Tensor | None:
    """Find the logits over two or more classes in what a model returned."""
    if isinstance(output, Tensor):
        logits = output
    else:
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    fits = isinstance(logits, Tensor) and logits.ndim in (2, 3) and logits.shape[-1] > 1
    return logits if fits else None


def _predicts_next_token(model: nn.Module) -> bool:
    """Tell whether position ``t`` predicts label ``t + 1``: by the model's own loss, else for every sequence."""
    kind = getattr(model, "loss_type", None)
    return kind is None or "CausalLM" in str(kind)
