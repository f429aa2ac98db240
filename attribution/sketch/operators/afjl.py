"""AFJL: a pre-conditioner's first rows, each with a Gaussian gain. ``S = √(N/D) · R_D · G_v · H · B``.

Source: Schioppa, NeurIPS 2024, arXiv:2402.03994, eq. (7), with the pre-conditioners of its ablation. The gains cost two
thirds of the accuracy and buy nothing: ``D · Var ≈ 3 ‖x‖²‖y‖² + 5 <x,y>²``, against ``1`` and ``1`` for SRHT, which is
the same map without them. Only the first ``D`` rows and gains are ever used, so the factors are cut to them first.
"""

from __future__ import annotations

from abc import abstractmethod
from math import sqrt

from torch import Tensor

from attribution.sketch.operators import hadamard
from attribution.sketch.operators.operator import Operator
from attribution.sketch.operators.preconditioners import HaarRows, HadamardRows, HartleyRows, Preconditioner
from attribution.sketch.operators.srht import transform_size


class _GainedRows(Operator):
    """Rows of a pre-conditioner, times Gaussian gains."""

    def __init__(self, N: int, D: int, seed: str = "0", *, block: int = hadamard.BLOCK) -> None:
        super().__init__(N, D, seed, padded=transform_size(self.name, N, D), options=f"block={block}")
        self._rows = self._precondition(block)
        self.tables.gaussians("gains", D)
        self._scale = sqrt(self.padded / D)

    @abstractmethod
    def _precondition(self, block: int) -> Preconditioner: ...

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the variance of the rows without gains plus ``2/D`` times their fourth moment."""
        x, y = self._pad(x), self._pad(y)
        return self._rows.variance(x, y) + 2 / self.D * self._rows.fourth(x, y)

    def _forward(self, x: Tensor) -> Tensor:
        return self._rows.forward(x) * (self.tables.get("gains", x) * self._scale)

    def _adjoint(self, u: Tensor) -> Tensor:
        return self._rows.adjoint(u * (self.tables.get("gains", u) * self._scale))


class AFJL(_GainedRows):
    """Walsh-Hadamard rows with Gaussian gains, as in the paper.

    Args:
        N: Length of the vectors.
        D: Length of the sketch, a power of two.
        seed: Any text.
        block: Edge of the largest factor; part of the map.
    """

    name = "afjl"

    def _precondition(self, block: int) -> Preconditioner:
        return HadamardRows(self.tables, self.padded, self.D, block)


class FourierAFJL(_GainedRows):
    """Hartley rows (an FFT made real) with Gaussian gains."""

    name = "afjl_fft"

    def _precondition(self, block: int) -> Preconditioner:
        return HartleyRows(self.tables, self.padded, self.D)


class HaarAFJL(_GainedRows):
    """Kronecker factors of random rotations with Gaussian gains; no signs."""

    name = "afjl_q"

    def _precondition(self, block: int) -> Preconditioner:
        edges = hadamard.blocks(self.padded, block)
        return HaarRows(self.tables, edges, hadamard.leading_rows(edges, self.D))
