"""Adam's second moment of one parameter, as the optimizer holds it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SMALLEST_EPS = 1e-12  # an optimizer with ε = 0 would divide by zero where no gradient ever arrived


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """One parameter's second moment as it stands before the coming step.

    Attributes:
        value: Adam's ``v``, in the parameter's shape; ``None`` before the first step.
        decay: ``β₂``.
        eps: ``ε``.
        steps: Steps that ``v`` has been through.
    """

    value: Tensor | None
    decay: float
    eps: float
    steps: int
