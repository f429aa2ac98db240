"""FJL: a sparse Gaussian matrix after a randomised Hadamard transform. ``S = √(N/D) · G_s · H · B``.

Source: Ailon and Chazelle, STOC 2006 (eq. 2 of arXiv:2402.03994). Each row of ``G_s`` has ``m`` nonzeros at random
columns, ``N(0, 1/m)``, so ``E[SᵀS] = I``; ``m = ⌈ln² points⌉`` follows the source's ``Θ(D log² M)`` nonzeros for ``M``
points. Memory ``N + 2 m D``: the index vectors grow with ``D``. A baseline.
"""

from __future__ import annotations

from math import ceil, log, sqrt

from torch import Tensor

from attribution.sketch.operators import hadamard
from attribution.sketch.operators.operator import Operator


class FJL(Operator):
    """Sparse Gaussian rows on a spread vector.

    Args:
        N: Length of the vectors.
        D: Length of the sketch.
        seed: Any text.
        points: Number of vectors whose distances are to be kept.
        block: Edge of the largest Hadamard factor.
    """

    name = "fjl"

    def __init__(self, N: int, D: int, seed: str = "0", *, points: int = 1000, block: int = hadamard.BLOCK) -> None:
        self.nonzeros = ceil(log(points) ** 2)
        padded = hadamard.next_power_of_two(N)
        super().__init__(N, D, seed, padded=padded, options=f"block={block}/nonzeros={self.nonzeros}")
        self.edges = hadamard.blocks(padded, block)
        self.tables.signs("signs", padded)
        self.tables.integers("columns", padded, D, self.nonzeros)
        self.tables.gaussians("weights", D, self.nonzeros)
        for axis, edge in enumerate(self.edges):
            self.tables.keep(f"factor/{axis}", hadamard.sylvester(edge))
        # 1/√N of the transform, √(N/D), 1/√m of the weights, √N because a column is met with probability 1/N.
        self._scale = 1 / sqrt(D * self.nonzeros)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``((1 − 1/m)(‖x‖²‖y‖² + 2<x,y>²) + 3/m E_4 − <x,y>²) / D``, ``E_4`` a sign sum's fourth moment."""
        products, m = x * y, self.nonzeros
        norms, squares = (x**2).sum(-1) * (y**2).sum(-1), products.sum(-1) ** 2
        sign_sum = norms + 2 * squares - 2 * (products**2).sum(-1)
        return ((1 - 1 / m) * (norms + 2 * squares) + 3 / m * sign_sum - squares) / self.D

    def _forward(self, x: Tensor) -> Tensor:
        spread = hadamard.transform(x, self._factors(x), self.tables.get("signs", x))
        weights, columns = self.tables.get("weights", x), self.tables.get("columns", x)
        total = x.new_zeros(len(x), self.D)
        for j in range(self.nonzeros):
            total = total + spread[:, columns[:, j]] * weights[:, j]
        return total * self._scale

    def _adjoint(self, u: Tensor) -> Tensor:
        weights, columns = self.tables.get("weights", u), self.tables.get("columns", u)
        spread = u.new_zeros(len(u), self.padded)
        for j in range(self.nonzeros):
            spread = spread.index_add(1, columns[:, j], u * weights[:, j])
        return hadamard.transform_adjoint(spread * self._scale, self._factors(u), self.tables.get("signs", u))

    def _factors(self, like: Tensor) -> list[Tensor]:
        return [self.tables.get(f"factor/{axis}", like) for axis in range(len(self.edges))]
