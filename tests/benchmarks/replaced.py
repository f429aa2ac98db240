"""The time that plain training takes for the weight gradients which mode ``fused`` computes instead.

A plain step is taken in which each of those linear maps runs the very operations that torch runs for it, forward and
backward, from an autograd function that looks at the clock around the product for the weight gradient. So the product
has its own operands, layouts and threads, stands at its own place in the backward pass, and finds the caches as the
plain step leaves them; nothing is kept for later and nothing runs twice. The gradients are bit for bit torch's own.
The clock has the product and the allocation of its result; the function's dispatch is left out, which makes the time
to be subtracted smaller, never larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Clock = Callable[[], float]


class Stopwatch:
    """Adds up seconds on a clock.

    Attributes:
        seconds: The sum so far.
        clock: Says what time it is.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds = clock, 0.0


class _PlainLinear(torch.autograd.Function):
    """``y = x Wᵀ + b`` as torch computes it, its weight gradient timed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, watch: Stopwatch) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.watch = transposed, watch
        if not transposed:
            return nn.functional.linear(x, weight, bias)
        flat = x.view(-1, x.shape[-1])
        out = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return out.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        g, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = g.mm(weight.t() if ctx.transposed else weight).view_as(x)
        started = ctx.watch.clock()
        of_weight = flat.t().mm(g) if ctx.transposed else g.t().mm(flat)
        of_bias = g.sum(0) if ctx.needs_input_grad[2] else None
        ctx.watch.seconds += ctx.watch.clock() - started
        return of_x, of_weight, of_bias, None, None


@contextmanager
def timed(modules: Sequence[nn.Module], watch: Stopwatch) -> Iterator[None]:
    """Let these linear maps time their weight gradients."""
    for module in modules:
        module.forward = _forward(module, watch)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _forward(module: Any, watch: Stopwatch) -> Callable[[Tensor], Tensor]:
    transposed = isinstance(module, Conv1D)
    return lambda x: _PlainLinear.apply(x, module.weight, module.bias, transposed, watch)  # type: ignore[no-untyped-call]
