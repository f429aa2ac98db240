"""Sparse maps: each coordinate goes, with a sign, to a few random buckets.

Sources: Charikar, Chen and Farach-Colton 2002 (one bucket, CountSketch); Kane and Nelson 2014, arXiv:1012.1577 (``s``
buckets, one in each of ``s`` equal blocks, SJLT). The second moments do not depend on ``s``; the tails do.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from attribution.sketch.operators.dense import iid_variance
from attribution.sketch.operators.operator import Operator
from auditlog.errors import UsageError


class SJLT(Operator):
    """``s`` nonzeros ``±1/√s`` per column, one in each of ``s`` blocks of ``D/s`` rows.

    Costs ``s N`` scattered additions and as many indices.

    Args:
        N: Length of the vectors.
        D: Length of the sketch, a multiple of ``nonzeros``.
        seed: Any text.
        nonzeros: ``s``.

    Raises:
        UsageError: If ``D`` is not a multiple of ``nonzeros``.
    """

    name = "sjlt"

    def __init__(self, N: int, D: int, seed: str = "0", *, nonzeros: int = 4) -> None:
        super().__init__(N, D, seed, options=f"nonzeros={nonzeros}")
        if nonzeros < 1 or D % nonzeros:
            raise UsageError(f"{self.name}: D={D} is not a multiple of nonzeros={nonzeros}")
        self.nonzeros = nonzeros
        for j in range(nonzeros):
            self.tables.integers(f"buckets/{j}", D // nonzeros, N)
            self.tables.signs(f"signs/{j}", N)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``(‖x‖²‖y‖² + <x,y>² − 2 Σ x²y²) / D``."""
        return iid_variance(x, y, self.D, -2.0)

    def _forward(self, x: Tensor) -> Tensor:
        blocks = x.new_zeros(self.nonzeros, len(x), self.D // self.nonzeros)
        for j, block in enumerate(blocks):
            buckets = self.tables.get(f"buckets/{j}", x).expand(x.shape)
            block.scatter_add_(1, buckets, x * self.tables.get(f"signs/{j}", x))
        return blocks.transpose(0, 1).reshape(len(x), self.D) / sqrt(self.nonzeros)

    def _adjoint(self, u: Tensor) -> Tensor:
        lifted = u.new_zeros(len(u), self.N)
        for j, block in enumerate(torch.split(u, self.D // self.nonzeros, 1)):
            lifted = lifted + block[:, self.tables.get(f"buckets/{j}", u)] * self.tables.get(f"signs/{j}", u)
        return lifted / sqrt(self.nonzeros)


class CountSketch(SJLT):
    """One nonzero ``±1`` per column."""

    name = "count_sketch"

    def __init__(self, N: int, D: int, seed: str = "0") -> None:
        super().__init__(N, D, seed, nonzeros=1)
