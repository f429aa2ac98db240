"""The gradient that an optimizer step is about to consume, compared with what the samples add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attribution.capture.conservation import Conservation, conserve
from attribution.capture.modules import Tracking
from attribution.sketch.layout import SketchLayout

TOLERATED_RESIDUAL = 1e-2  # float32 closes to 1e-5, bf16 to a few 1e-3


@dataclass(frozen=True, slots=True)
class Consumed:
    """One step's gradient.

    Attributes:
        sketch: ``(D,)`` float32.
        closing: How well the samples add up to it.
        norm: Norm of the tracked parameters' gradient.
        tracked_share: Their share of the squared norm of the whole gradient; NaN if that is zero.
    """

    sketch: Tensor
    closing: Conservation
    norm: float
    tracked_share: float

    @property
    def is_open(self) -> bool:
        """Whether the samples do not add up to it; also where either is not finite, or the gradient is gone."""
        return not self.closing.residual <= TOLERATED_RESIDUAL


@torch.no_grad()
def consume(tracking: Tracking, layout: SketchLayout, expected: Tensor, scale: float) -> Consumed:
    """Sketch ``p.grad`` and compare.

    Args:
        tracking: The tracked parameters.
        layout: Where gradients land.
        expected: ``(D,)``, what the samples add up to.
        scale: Factor that ``p.grad`` still carries.
    """
    grads = {name: p.grad for name, p in tracking.parameters.items() if p.grad is not None}
    sketch = layout.sketch(grads) / scale
    norm = _norm(list(grads.values()))
    others = _norm([p.grad for p in tracking.left_out if p.grad is not None])
    whole = norm**2 + others**2
    share = 1.0 if not tracking.untracked else norm**2 / whole if whole else math.nan
    return Consumed(sketch, conserve(expected, sketch), norm / scale, share)


def with_gradient(parameters: dict[str, nn.Parameter]) -> list[str]:
    """Return the names of the parameters whose gradient is not zero."""
    return [name for name, p in parameters.items() if p.grad is not None and bool(p.grad.any())]


def _norm(tensors: list[Tensor]) -> float:
    """Return the norm of all tensors as one vector."""
    if not tensors:
        return 0.0
    single = [t if t.dtype is torch.float32 else t.float() for t in tensors]
    return float(torch.stack(torch._foreach_norm(single)).norm())
