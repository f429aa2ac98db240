"""AFFD: two shuffled Hadamard transforms with Gaussian gains between them.

``S = R_D · √(N/D) · H^{π2} · G · H^{π1} · B``: ``B`` random signs, ``H^{π1}`` with shuffled rows, ``G`` a diagonal of
standard Gaussians, ``H^{π2}`` with shuffled columns, ``R_D`` the first ``D`` entries.

Source: Schioppa, NeurIPS 2024, arXiv:2402.03994, eq. (6) and theorem 3.2: relative errors beyond ``ε`` have
probability at most about ``exp(−C ε² D / log² N)``.

**The second transform is a fold and a rotation.** In Sylvester's order the first ``d`` rows of ``H_B`` depend on the
last ``log₂ d`` bits of the column only, so they are ``H_d · F`` with ``F`` a matrix of zeros and ones that adds up
columns by those bits. Axis by axis, ``R_D H^{π2}_N = √(D/N) · Ĥ_D · Fold`` with an orthogonal ``Ĥ_D``: it changes no
inner product and no norm. ``AFFD`` applies it, ``FastAFFD`` leaves it out. Applied leading-first, the cut factors of
the second transform are cheap, so what is saved is little: the first transform is the cost of both.
"""

from __future__ import annotations

from math import prod, sqrt

import numpy as np
from torch import Tensor

from attribution.sketch.operators import hadamard
from attribution.sketch.operators.operator import Operator
from attribution.sketch.operators.srht import transform_size


class AFFD(Operator):
    """The map as published.

    Args:
        N: Length of the vectors.
        D: Length of the sketch, a power of two.
        seed: Any text.
        block: Edge of the largest Hadamard factor; part of the map.
    """

    name = "affd"
    family = "affd"

    def __init__(self, N: int, D: int, seed: str = "0", *, block: int = hadamard.BLOCK) -> None:
        super().__init__(N, D, seed, padded=transform_size(self.name, N, D), options=f"block={block}")
        self.edges = hadamard.blocks(self.padded, block)
        self.rows = hadamard.leading_rows(self.edges, D)
        self.tables.signs("signs", self.padded)
        self.tables.gaussians("gains", self.padded)
        for axis, edge in enumerate(self.edges):
            order = self.tables.permutation(f"rows/{axis}", edge)
            self.tables.keep(f"first/{axis}", hadamard.sylvester(edge)[order])
        self._draw_second()

    def _draw_second(self) -> None:
        """Draw the second transform: factors cut to their first rows, columns shuffled."""
        for axis, (edge, rows) in enumerate(zip(self.edges, self.rows, strict=True)):
            columns = self.tables.permutation(f"columns/{axis}", edge)
            self.tables.keep(f"second/{axis}", hadamard.sylvester(edge)[:rows, columns])

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``(1/D − 1/N)(‖x‖²‖y‖² + <x,y>²) + 2/N (‖x‖²‖y‖² + 2<x,y>² − 2 Σ x²y²)``, ``N`` padded.

        The first term is two coordinates that meet in a bucket, the second a coordinate's own gain. Exact in the mean
        over how buckets are chosen.
        """
        products = x * y
        norms, squares = (x**2).sum(-1) * (y**2).sum(-1), products.sum(-1) ** 2
        meeting = (1 / self.D - 1 / self.padded) * (norms + squares)
        return meeting + 2 / self.padded * (norms + 2 * squares - 2 * (products**2).sum(-1))

    def _forward(self, x: Tensor) -> Tensor:
        spread = hadamard.transform(x, self._factors("first", x), self.tables.get("signs", x))
        return self._second(spread * self.tables.get("gains", x)) / sqrt(self.padded)

    def _adjoint(self, u: Tensor) -> Tensor:
        gained = self._second_adjoint(u / sqrt(self.padded)) * self.tables.get("gains", u)
        return hadamard.transform_adjoint(gained, self._factors("first", u), self.tables.get("signs", u))

    def _second(self, x: Tensor) -> Tensor:
        """Apply ``√(N/D) R_D H^{π2}``, ``(R, N)`` to ``(R, D)``."""
        return hadamard.transform(x, self._factors("second", x)) / sqrt(self.D)

    def _second_adjoint(self, u: Tensor) -> Tensor:
        return hadamard.transform_adjoint(u / sqrt(self.D), self._factors("second", u))

    def _factors(self, which: str, like: Tensor) -> list[Tensor]:
        return [self.tables.get(f"{which}/{axis}", like) for axis in range(len(self.edges))]


class FastAFFD(AFFD):
    """AFFD without its last rotation: equal inner products, one transform.

    Of the second transform's factors, complete ones only shuffle buckets, so nothing is left of them; those of one row
    are sums; at most one is cut in between.

    Example:
        >>> x = torch.randn(2, 1000, dtype=torch.float64)
        >>> slow, fast = AFFD(1000, 32) @ x, FastAFFD(1000, 32) @ x
        >>> bool(torch.isclose(slow[0] @ slow[1], fast[0] @ fast[1]))
        True
    """

    name = "affd_fast"

    def _draw_second(self) -> None:
        """Draw which columns of the cut factor are added up: those with equal last bits before the shuffle."""
        axis = next((a for a, rows in enumerate(self.rows) if rows > 1), len(self.rows) - 1)
        self._before, self._edge = prod(self.edges[:axis]), self.edges[axis]
        low_bits = self.tables.permutation(f"columns/{axis}", self._edge) % self.rows[axis]
        self.tables.keep("groups", (np.arange(self.rows[axis])[:, None] == low_bits).astype(np.int8))

    def _second(self, x: Tensor) -> Tensor:
        summed = x.view(len(x), self._before, self._edge, -1).sum(1)
        return (self.tables.get("groups", x) @ summed).flatten(1)

    def _second_adjoint(self, u: Tensor) -> Tensor:
        groups = self.tables.get("groups", u)
        spread = groups.T @ u.reshape(len(u), len(groups), -1)  # (R, edge, N / (before edge))
        return spread[:, None].expand(-1, self._before, -1, -1).flatten(1)
