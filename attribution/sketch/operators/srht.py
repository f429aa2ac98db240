"""Subsampled randomised Hadamard transform: ``S = √(N/D) · R_D · H · B``.

``B`` random signs, ``H`` Walsh-Hadamard with shuffled rows, ``R_D`` the first ``D`` of them. One read of ``x`` and the
variance of a dense Gaussian map for generic vectors. Sources: Ailon and Chazelle, STOC 2006; Tropp 2011,
arXiv:1011.1595.
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from attribution.sketch.operators import hadamard
from attribution.sketch.operators.operator import Operator
from attribution.sketch.operators.preconditioners import HadamardRows


def transform_size(name: str, N: int, D: int) -> int:
    """Return the length to which vectors of a fast transform are filled up: a power of two of at least ``D``.

    Raises:
        UsageError: If ``D`` is not a power of two.
    """
    hadamard.require_power_of_two(f"{name}: D", D)
    return max(hadamard.next_power_of_two(N), D)


class SRHT(Operator):
    """The first rows of a shuffled Walsh-Hadamard transform of a randomly signed vector.

    Args:
        N: Length of the vectors.
        D: Length of the sketch, a power of two.
        seed: Any text.
        block: Edge of the largest Hadamard factor; part of the map, since each factor's rows are shuffled.

    Example:
        >>> S = SRHT(N=1000, D=1024)
        >>> x = torch.linspace(-1, 1, 1000, dtype=torch.float64)
        >>> bool(torch.isclose((S @ x).norm(), x.norm()))  # D = N: nothing is thrown away
        True
    """

    name = "srht"

    def __init__(self, N: int, D: int, seed: str = "0", *, block: int = hadamard.BLOCK) -> None:
        super().__init__(N, D, seed, padded=transform_size(self.name, N, D), options=f"block={block}")
        self._rows = HadamardRows(self.tables, self.padded, D, block)
        self._scale = sqrt(self.padded / D)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the exact variance; ``(‖x‖²‖y‖² + <x,y>²) / D`` for generic vectors and ``D`` well below ``N``."""
        return self._rows.variance(self._pad(x), self._pad(y))

    def _forward(self, x: Tensor) -> Tensor:
        return self._rows.forward(x) * self._scale

    def _adjoint(self, u: Tensor) -> Tensor:
        return self._rows.adjoint(u * self._scale)
