"""A module's forward pass once more, on the tensors it saw, for gradients that have no closed formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from attribution.capture.segments import Segments
from attribution.errors import CaptureError


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a module was called, without the tensors: the rest of its arguments and the autocast state.

    Attributes:
        spec: Structure of ``(args, kwargs)``.
        autocast: Device type and dtype, or ``None`` if autocast was off.
    """

    spec: Any
    autocast: tuple[str, torch.dtype] | None


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], kind: str) -> tuple[list[Any], CallShape]:
    """Return the leaves of a call, tensors among them, and what is needed to repeat it."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
    leaves = [None if _is_cache(leaf) else leaf for leaf in leaves]  # a second call must not write into it
    is_on = torch.is_autocast_enabled(kind)
    return leaves, CallShape(spec, (kind, torch.get_autocast_dtype(kind)) if is_on else None)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, tuple | list | dict)


def _is_cache(value: Any) -> bool:
    """Tell a cache of keys and values by what it can do; a training pass does not read from one."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def call_again(
    module: nn.Module, shape: CallShape, leaves: Sequence[Any], parameters: Mapping[str, Tensor]
) -> list[Tensor | None]:
    """Call a module with other parameters; returns its outputs, ``None`` where one is not a tensor.

    A parameter that the module shares with a child is exchanged in the module only: the child captures its own use.
    """
    args, kwargs = pytree.tree_unflatten(list(leaves), shape.spec)
    kind, dtype = shape.autocast or ("cpu", None)
    with torch.autocast(kind, dtype=dtype, enabled=shape.autocast is not None, cache_enabled=False):
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # a second call must not count
        output = functional_call(module, {**buffers, **parameters}, args, kwargs, tie_weights=False)
    return output_tensors(output)


def output_tensors(output: Any) -> list[Tensor | None]:
    """Return a module's outputs in order; ``None`` where one is not a tensor."""
    return [leaf if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(output)]


def gradient_of(
    module: nn.Module,
    shape: CallShape,
    leaves: Sequence[Any],
    output_grads: Sequence[Tensor | None],
    parameters: Mapping[str, Tensor],
    segments: Segments,
    sample: int | None,
) -> dict[str, Tensor]:
    """Return one sample's gradient of a module's own parameters, by running the module on that sample alone.

    Args:
        module: The module; nothing in it may draw random numbers.
        shape: How it was called.
        leaves: The arguments it was called with.
        output_grads: Gradient w.r.t. each of its outputs, ``None`` where none arrived.
        parameters: The parameters by their name within the module.
        segments: Layout of the micro-batch.
        sample: Which one; ``None`` for all of them together.

    Raises:
        CaptureError: If what it returns for one sample is not that sample's part of what it returned.
    """
    own = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad():
        outputs = call_again(module, shape, [_part(leaf, segments, sample) for leaf in leaves], own)
    pairs = [
        (out, grad)
        for out, whole in zip(outputs, output_grads, strict=True)
        if whole is not None and out is not None and (grad := _part(whole, segments, sample)).numel()
    ]
    for out, grad in pairs:
        if out.numel() != grad.numel():
            raise CaptureError(
                f"{type(module).__name__}, run again on one sample, returns {tuple(out.shape)}; that sample's part of "
                f"the gradient is {tuple(grad.shape)}",
                "The module mixes samples or changes their number. Leave it out with allow_untracked.",
            )
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        list(own.values()),
        [grad.reshape(out.shape) for out, grad in pairs],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(p) if grad is None else grad for (name, p), grad in zip(own.items(), found, strict=True)
    }


def _part(leaf: Any, segments: Segments, sample: int | None) -> Any:
    """Return one sample's part of an argument; what all samples share stays whole."""
    if not isinstance(leaf, Tensor):
        return leaf
    if sample is None:
        return leaf.detach()
    cut = segments.cut(leaf.detach(), sample)
    return leaf.detach() if cut is None else cut
