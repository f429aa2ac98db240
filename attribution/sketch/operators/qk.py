"""QK: a Kronecker product of cut random rotations. ``S = √(N/D) · (Q_1 ⊗ … ⊗ Q_K)``.

Source: Schioppa, NeurIPS 2024, arXiv:2402.03994, eq. (8). ``Q_i`` is the first ``D_i`` rows of a random rotation of
``R^{B_i}``, ``ΠD_i = D``. It keeps next to no random numbers (``Σ B_i D_i``), and pays for it: where a factor keeps few
rows, all coordinates share them, and the error falls with the smallest ``D_i`` rather than with ``D``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

from torch import Tensor

from attribution.sketch.operators import hadamard
from attribution.sketch.operators.operator import Operator
from attribution.sketch.operators.preconditioners import HaarRows
from attribution.sketch.operators.srht import transform_size
from auditlog.errors import UsageError


class QK(Operator):
    """Cut rotations, one per axis.

    Args:
        N: Length of the vectors.
        D: Length of the sketch, a power of two.
        seed: Any text.
        block: Edge ``B_i`` of the largest factor.
        rows: ``D_i`` of each factor; filled from the right, as in the paper, if not given.

    Raises:
        UsageError: If the product of ``rows`` is not ``D``.
    """

    name = "qk"

    def __init__(
        self, N: int, D: int, seed: str = "0", *, block: int = hadamard.BLOCK, rows: Sequence[int] | None = None
    ) -> None:
        padded = transform_size(self.name, N, D)
        edges = hadamard.blocks(padded, block)
        kept = tuple(rows or hadamard.leading_rows(edges, D))
        if prod(kept) != D:
            raise UsageError(f"{self.name}: rows {kept} multiply to {prod(kept)}, not to D={D}")
        super().__init__(N, D, seed, padded=padded, options=f"block={block}/rows={','.join(map(str, kept))}")
        self._rows = HaarRows(self.tables, edges, kept)
        self._scale = sqrt(padded / D)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the exact variance, from each factor's fourth moments."""
        return self._rows.variance(self._pad(x), self._pad(y))

    def _forward(self, x: Tensor) -> Tensor:
        return self._rows.forward(x) * self._scale

    def _adjoint(self, u: Tensor) -> Tensor:
        return self._rows.adjoint(u * self._scale)
