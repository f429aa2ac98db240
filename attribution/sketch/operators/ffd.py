"""FFD: Fastfood used as a sketch. A baseline with a proven flaw.

``S x = Σ_b B_b · H · Π_bᵀ · G_b · H · x_b`` over blocks ``x_b`` of ``D`` entries: ``H`` Walsh-Hadamard, ``G_b``
Gaussian gains, ``Π_b`` a permutation, ``B_b`` signs. Sources: Le, Sarlós and Smola, ICML 2013, arXiv:1408.3060;
Schioppa, NeurIPS 2024, arXiv:2402.03994, theorem 3.1.

**The flaw.** Nothing randomises a block before its first transform. For ``x_1 = H e_1``, other blocks zero,
``‖S x‖² = g_1²``: a single squared Gaussian with variance 2, at every ``D``. AFFD has a sign diagonal there.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from attribution.sketch.operators import hadamard
from attribution.sketch.operators.operator import Operator


class FFD(Operator):
    """Fastfood's adjoint, block by block.

    Args:
        N: Length of the vectors.
        D: Length of the sketch, a power of two.
        seed: Any text.
        block: Edge of the largest Hadamard factor; not part of the map.
    """

    name = "ffd"

    def __init__(self, N: int, D: int, seed: str = "0", *, block: int = hadamard.BLOCK) -> None:
        hadamard.require_power_of_two(f"{self.name}: D", D)
        self.count = -(-N // D)
        super().__init__(N, D, seed, padded=self.count * D)
        self.edges = hadamard.blocks(D, block)
        self.tables.signs("signs", self.count, D)
        self.tables.gaussians("gains", self.count, D)
        self.tables.permutations("order", self.count, D)
        for edge in set(self.edges):
            self.tables.keep(f"factor/{edge}", hadamard.sylvester(edge))

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``Σ_{b≠c} (‖x_b‖²‖y_c‖² + <x_b,y_b><x_c,y_c>) / D + 2 Σ (H x_b)² (H y_b)²``, exact.

        Blocks against each other behave as a dense map; a block against itself does only if ``H x_b`` is flat.
        """
        x, y = (self._pad(v).reshape(*v.shape[:-1], self.count, self.D) for v in (x, y))
        norms_x, norms_y, products = (x**2).sum(-1), (y**2).sum(-1), (x * y).sum(-1)  # (..., count)
        between = norms_x.sum(-1) * norms_y.sum(-1) + products.sum(-1) ** 2
        own = (norms_x * norms_y + products**2).sum(-1)
        gains = 2 * (self._transformed(x) ** 2 * self._transformed(y) ** 2).sum((-1, -2))
        return (between - own) / self.D + gains

    def _forward(self, x: Tensor) -> Tensor:
        blocks = self._transformed(x.view(len(x), self.count, self.D)) * self.tables.get("gains", x)
        # Π_bᵀ: entry i goes to place order[i].
        placed = torch.zeros_like(blocks).scatter(2, self._order(blocks), blocks)
        return (self._transformed(placed) * self.tables.get("signs", x)).sum(1)

    def _adjoint(self, u: Tensor) -> Tensor:
        blocks = self._transformed(u[:, None] * self.tables.get("signs", u))
        picked = blocks.gather(2, self._order(blocks)) * self.tables.get("gains", u)
        return self._transformed(picked).reshape(len(u), self.padded)

    def _order(self, blocks: Tensor) -> Tensor:
        return self.tables.get("order", blocks).expand(blocks.shape)

    def _transformed(self, blocks: Tensor) -> Tensor:
        """Return ``H`` of the last axis, normalised."""
        factors = [self.tables.get(f"factor/{edge}", blocks) for edge in self.edges]
        return (hadamard.transform(blocks.reshape(-1, self.D), factors) / sqrt(self.D)).view(blocks.shape)
