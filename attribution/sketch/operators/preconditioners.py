"""The first ``D`` rows of a random orthogonal ``N x N`` matrix: what SRHT, AFJL and QK subsample.

Each spreads every coordinate over all rows before most rows are thrown away. A random rotation of ``R^N`` would do so
best and cannot be stored; these are cheap stand-ins, all with rows of unit norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from attribution.sketch.operators import hadamard, moments
from attribution.sketch.operators.tables import Tables
from auditlog.errors import UsageError


class Preconditioner(Protocol):
    """``D`` orthonormal rows in ``R^N``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows' inner products with each vector, ``(R, N)`` to ``(R, D)``."""
        ...

    def adjoint(self, u: Tensor) -> Tensor:
        """Return the rows' sums weighted by each vector, ``(R, D)`` to ``(R, N)``."""
        ...

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the variance over seeds of ``N/D`` times the inner product of two images, ``(...)``."""
        ...

    def fourth(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``N²`` times the mean of ``<row, x>² <row, y>²`` over seeds and rows, ``(...)``."""
        ...


class HadamardRows:
    """Random signs, then Walsh-Hadamard factors with shuffled rows, cut to their first rows."""

    def __init__(self, tables: Tables, N: int, D: int, block: int) -> None:
        self._tables = tables
        self.edges = hadamard.blocks(N, block)
        self.rows = hadamard.leading_rows(self.edges, D)
        tables.signs("signs", N)
        for axis, (edge, rows) in enumerate(zip(self.edges, self.rows, strict=True)):
            order = tables.permutation(f"rows/{axis}", edge)
            tables.keep(f"factor/{axis}", hadamard.sylvester(edge)[order[:rows]])
        self._scale = 1 / sqrt(N)

    def _factors(self, like: Tensor) -> list[Tensor]:
        return [self._tables.get(f"factor/{axis}", like) for axis in range(len(self.edges))]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the rows, leading factor first."""
        return hadamard.transform(x, self._factors(x), self._tables.get("signs", x)) * self._scale

    def adjoint(self, u: Tensor) -> Tensor:
        """Apply the transpose, trailing factor first."""
        return hadamard.transform_adjoint(u * self._scale, self._factors(u), self._tables.get("signs", u))

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the exact variance over signs and shuffles.

        The Gram matrix of the rows has entries ``m_ij`` with ``E m_ij² = Π e_k`` over the factors in which ``i`` and
        ``j`` differ, ``e_k = (B_k − d_k) / (d_k (B_k − 1))``: a complete factor never mixes, one of a single row
        always does. So coordinates that agree in all complete factors share a bucket.
        """
        products = x * y
        mixed_x, mixed_p = self._mix(x**2), self._mix(products)
        pairs = (mixed_x * y**2).sum(-1) + (mixed_p * products).sum(-1)
        return pairs - 2 * (products**2).sum(-1)

    def fourth(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the fourth moment of a sum of signs."""
        return _sign_sum(x, y)

    def _mix(self, x: Tensor) -> Tensor:
        """Multiply by ``E m_ij²``, axis by axis."""
        shaped = x.reshape(*x.shape[:-1], *self.edges)
        for axis, (edge, rows) in enumerate(zip(self.edges, self.rows, strict=True)):
            share = (edge - rows) / (rows * max(edge - 1, 1))
            dim = axis - len(self.edges)
            shaped = (1 - share) * shaped + share * shaped.sum(dim, keepdim=True)
        return shaped.reshape(x.shape)


class HartleyRows:
    """Random signs, then ``D`` random frequencies of a discrete Hartley transform, by FFT.

    The Hartley transform ``Re − Im`` of the Fourier transform is real, symmetric and orthogonal (Bracewell 1983), which
    is how a Fourier pre-conditioner is made real here; the source leaves that open.
    """

    def __init__(self, tables: Tables, N: int, D: int) -> None:
        self._tables, self._N, self._D = tables, N, D
        tables.signs("signs", N)
        tables.distinct("frequencies", N, D)

    def forward(self, x: Tensor) -> Tensor:
        """Transform, keep ``D`` frequencies."""
        return self._hartley(x * self._tables.get("signs", x), self._tables.get("frequencies", x))

    def adjoint(self, u: Tensor) -> Tensor:
        """Put ``D`` frequencies back, transform."""
        frequencies = self._tables.get("frequencies", u)
        spectrum = u.new_zeros(len(u), self._N).index_copy(1, frequencies, u)
        return self._hartley(spectrum) * self._tables.get("signs", u)

    def _hartley(self, x: Tensor, wanted: Tensor | None = None) -> Tensor:
        half = torch.fft.rfft(x, norm="ortho")  # (R, N/2 + 1) complex
        if wanted is None:
            lower = half.real - half.imag
            upper = (half.real + half.imag)[:, 1 : self._N - half.shape[1] + 1]
            return torch.cat([lower, upper.flip(1)], dim=1)
        # Frequency k beyond N/2 is the conjugate of N - k.
        mirrored = wanted >= half.shape[1]
        kept = half[:, torch.where(mirrored, self._N - wanted, wanted)]
        return torch.where(mirrored, kept.real + kept.imag, kept.real - kept.imag)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the variance with all pairs of coordinates alike, which random frequencies make of them."""
        products = x * y
        pairs = (x**2).sum(-1) * (y**2).sum(-1) + products.sum(-1) ** 2 - 2 * (products**2).sum(-1)
        return pairs * (self._N - self._D) / (self._D * max(self._N - 1, 1))

    def fourth(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the fourth moment of a sum of signs; rows are flat up to a factor of √2."""
        return _sign_sum(x, y)


class HaarRows:
    """Kronecker factors drawn uniformly from the rotations, cut to their first rows; no signs are needed."""

    def __init__(self, tables: Tables, edges: Sequence[int], rows: Sequence[int]) -> None:
        if len(rows) != len(edges) or any(not 1 <= d <= b for b, d in zip(edges, rows, strict=False)):
            raise UsageError(f"rows {tuple(rows)} do not fit factors of {tuple(edges)} rows")
        self._tables, self.edges, self.rows = tables, tuple(edges), tuple(rows)
        for axis, (edge, kept) in enumerate(zip(edges, rows, strict=True)):
            tables.haar(f"factor/{axis}", edge, kept)

    def _factors(self, like: Tensor) -> list[Tensor]:
        return [self._tables.get(f"factor/{axis}", like) for axis in range(len(self.edges))]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the rows, leading factor first."""
        return hadamard.transform(x, self._factors(x))

    def adjoint(self, u: Tensor) -> Tensor:
        """Apply the transpose, trailing factor first."""
        return hadamard.transform_adjoint(u, self._factors(u))

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the exact variance, from each factor's fourth moments."""
        sides = [moments.haar(edge, rows) for edge, rows in zip(self.edges, self.rows, strict=True)]
        return moments.fourth(x, y, x, y, self.edges, sides) - (x * y).sum(-1) ** 2

    def fourth(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the exact moment: one row of each factor."""
        return moments.fourth(x, y, x, y, self.edges, [moments.haar(edge, 1) for edge in self.edges])


def _sign_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return ``E (Σσx)² (Σσy)²`` for independent signs, ``(...)``."""
    products = x * y
    norms = (x**2).sum(-1) * (y**2).sum(-1)
    return norms + 2 * products.sum(-1) ** 2 - 2 * (products**2).sum(-1)
