"""A linear map whose weight gradient *is* the sum of the per-sample gradients that are recorded.

The plain backward pass reads input and output gradient once for the weight gradient, and capture would read them
again. Here both come from one product per sample, so the optimizer consumes exactly what was recorded; weights
differ from the plain run by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attribution.capture.formulas import Formula, Linear

# (input, output gradient) -> gradients of weight and bias, None where not trained
Consume = Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]


def fused_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, consume: Consume) -> Tensor:
    """Return ``x Wᵀ + b``; on the backward pass ``consume`` gives the parameters' gradients.

    Under autocast everything is cast as torch's own linear map casts it.

    Args:
        x: ``(…, d_in)``.
        weight: ``(d_out, d_in)``, or ``(d_in, d_out)`` if ``transposed``.
        bias: ``(d_out,)`` or ``None``.
        transposed: How the weight is stored.
        consume: Called once, with the input and the gradient of the output.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            return _FusedLinear.apply(x, weight, bias, transposed, consume)
    return _FusedLinear.apply(x, weight, bias, transposed, consume)


def can_fuse(formula: Formula, factored: Collection[str]) -> bool:
    """Tell whether a module's forward is its class's own, and there are per-sample weight gradients to add up.

    Args:
        formula: The module's formula.
        factored: Parameters whose per-sample gradients are never formed.
    """
    if not isinstance(formula, Linear) or "forward" in vars(formula.module):
        return False
    return "weight" in formula.parameters and formula.parameters["weight"] not in factored


def fuse(module: nn.Module, transposed: bool, consumer: Callable[[], Consume | None]) -> Callable[[], None]:
    """Let a linear module use ``fused_linear`` wherever ``consumer`` gives something; return how to undo it.

    The module's class becomes a subclass of itself for the while. A copy or a pickle of it is of the class it was, so
    a copy of the model that outlives the audit is a plain one.
    """
    plain = type(module)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        consume = consumer() if self is module else None
        if consume is None:
            return plain.forward(self, x)  # type: ignore[no-any-return]
        return fused_linear(x, self.weight, self.bias, transposed, consume)

    def reduce(self: nn.Module, protocol: int) -> Any:
        _, _, *state = plain.__reduce_ex__(self, protocol)
        return object.__new__, (plain,), *state

    names = {"forward": torch.compiler.disable(forward), "__reduce_ex__": reduce, "__module__": plain.__module__}
    module.__class__ = type(plain.__name__, (plain,), names)

    def undo() -> None:
        module.__class__ = plain

    return undo


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, consume: Consume) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.consume = transposed, consume
        if not transposed:
            return torch.nn.functional.linear(x, weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        out = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return out.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = grad @ (weight.t() if ctx.transposed else weight) if ctx.needs_input_grad[0] else None
        of_weight, of_bias = ctx.consume(x, grad)
        return (
            of_x,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype),
            None,
            None,
        )
