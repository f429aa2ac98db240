"""Adam's second moment of one parameter, as the optimizer holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

SMALLEST_EPS = 1e-12  # an optimizer with ε = 0 would divide by zero where no gradient ever arrived


class Settings(NamedTuple):
    """What a moment's estimate at the coming step depends on beside itself: ``β₂``, ``ε``, and steps so far."""

    decay: float
    eps: float
    steps: int


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

    @property
    def settings(self) -> Settings:
        """What parameters of one group have in common."""
        return Settings(self.decay, self.eps, self.steps)
