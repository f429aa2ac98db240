"""Gradient conservation: what the samples gave must be what the optimizer got.

With ``a = Σ weight · sketch`` over a step's samples and ``b`` the sketch of the gradient about to be consumed,
``b = f a`` with ``f`` = 1, or the clip factor. Finds omitted samples, wrong accumulation, masking and scale errors
between samples. It cannot see a common wrong factor, exchanged ids, or gradients that leak between samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Conservation:
    """How well one step closes.

    Attributes:
        factor: ``f = <a, b> / <a, a>``; NaN if ``a`` is zero or not finite.
        residual: ``‖b - f a‖ / ‖b‖``; NaN likewise.
    """

    factor: float
    residual: float


def conserve(expected: Tensor, consumed: Tensor) -> Conservation:
    """Compare what the samples add up to with what the optimizer consumes.

    Args:
        expected: ``a``, ``(D,)``.
        consumed: ``b``, ``(D,)``.
    """
    a, b = expected.double(), consumed.double()
    power = float(a @ a)
    if power == 0.0:
        empty = float(b.norm()) == 0.0
        return Conservation(factor=float("nan"), residual=0.0 if empty else float("nan"))
    factor = float(a @ b) / power
    norm = float(b.norm())
    residual = float((b - factor * a).norm()) / norm if norm > 0 else float("nan")
    return Conservation(factor=factor, residual=residual)
