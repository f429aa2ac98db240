"""Dense Johnson-Lindenstrauss maps: the reference that all others are measured against.

``S = R / √D`` with independent entries of mean 0 and variance 1. Costs ``D N`` numbers and ``2 D N`` operations, so it
is for vectors of at most about a million entries.
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from attribution.sketch.operators.operator import Operator


class Gaussian(Operator):
    """Independent standard Gaussians over ``√D``.

    Example:
        >>> S = Gaussian(N=1000, D=64, seed="a run")
        >>> (S @ torch.ones(3, 1000)).shape, S.adjoint(torch.ones(64)).shape
        (torch.Size([3, 64]), torch.Size([1000]))
    """

    name = "gaussian"
    kurtosis = 3.0

    def __init__(self, N: int, D: int, seed: str = "0") -> None:
        super().__init__(N, D, seed)
        self._draw()

    def _draw(self) -> None:
        self.tables.gaussians("matrix", self.D, self.N)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``(‖x‖²‖y‖² + <x,y>² + (κ₄ − 3) Σ x²y²) / D``, ``κ₄`` the entries' kurtosis."""
        return iid_variance(x, y, self.D, self.kurtosis - 3)

    def _forward(self, x: Tensor) -> Tensor:
        return x @ self.tables.get("matrix", x).T / sqrt(self.D)

    def _adjoint(self, u: Tensor) -> Tensor:
        return u @ self.tables.get("matrix", u) / sqrt(self.D)


class Rademacher(Gaussian):
    """Independent signs over ``√D``."""

    name = "rademacher"
    kurtosis = 1.0

    def _draw(self) -> None:
        self.tables.signs("matrix", self.D, self.N)


def iid_variance(x: Tensor, y: Tensor, dim: int, coincidence: float) -> Tensor:
    """Return ``(‖x‖²‖y‖² + <x,y>² + coincidence · Σ x²y²) / dim``, ``(...)``."""
    products = x * y
    norms = (x**2).sum(-1) * (y**2).sum(-1)
    return (norms + products.sum(-1) ** 2 + coincidence * (products**2).sum(-1)) / dim
