"""Two-sided Kronecker maps of one weight's gradient: ``S(G) = P G Qᵀ``.

For ``G = Σ_t g_t x_tᵀ`` that is ``Σ_t (P g_t)(Q x_t)ᵀ``: both factors are projected before they meet, so the gradient
is never formed. ``P`` has ``k_out`` rows, ``Q`` has ``k_in``; a side that is no longer than its ``k`` is left as it is,
without noise. LoGRA's bottleneck (Choe et al. 2024, arXiv:2405.13954) is the implicit form of this map, and one block
per layer, concatenated, is the usual way to use it. Summed into one vector of ``D`` by each layer's own fold, the same
blocks keep far more per stored number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from torch import Tensor

from attribution.sketch.operators import moments
from attribution.sketch.operators.chunked import Chunked
from attribution.sketch.operators.combine import Composed, Concatenated, seed_of
from attribution.sketch.operators.operator import Operator
from attribution.sketch.operators.rolled_fold import RolledFold


class Weight(NamedTuple):
    """The shape of one linear map's weight."""

    d_out: int
    d_in: int


class TwoSided(Operator):
    """One weight's gradient between two Gaussian projections.

    Args:
        weight: ``(d_out, d_in)``.
        k_out: Rows of ``P``; the identity if ``d_out`` is no larger.
        k_in: Rows of ``Q``; the identity if ``d_in`` is no larger.
        seed: Any text.

    Example:
        >>> S = TwoSided(Weight(d_out=6, d_in=50), k_out=6, k_in=8)
        >>> g, x = torch.randn(3, 6), torch.randn(3, 50)  # three tokens
        >>> torch.allclose(S @ (g.T @ x).flatten(), S.contract(x[None], g[None])[0], atol=1e-5)
        True
    """

    name = "two_sided"

    def __init__(self, weight: Weight, k_out: int, k_in: int, seed: str = "0") -> None:
        self.weight = Weight(*weight)
        self.k_out, self.k_in = min(k_out, self.weight.d_out), min(k_in, self.weight.d_in)
        options = f"weight={self.weight.d_out}x{self.weight.d_in}/k={self.k_out}x{self.k_in}"
        super().__init__(self.weight.d_out * self.weight.d_in, self.k_out * self.k_in, seed, options=options)
        for side, k, d in (("out", self.k_out, self.weight.d_out), ("in", self.k_in, self.weight.d_in)):
            if k < d:
                self.tables.gaussians(side, k, d)

    def contract(self, activations: Tensor, output_grads: Tensor) -> Tensor:
        """Sketch ``Σ_t g_t x_tᵀ`` from its factors.

        Args:
            activations: ``(B, T, d_in)``.
            output_grads: ``(B, T, d_out)``.

        Returns:
            ``(B, D)``.
        """
        return (self._out(output_grads).mT @ self._in(activations)).flatten(1)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the exact variance, equation (K) of METHODS.md."""
        sides = [
            moments.gaussian(k) if k < d else moments.IDENTITY
            for k, d in zip((self.k_out, self.k_in), self.weight, strict=True)
        ]
        return moments.fourth(x, y, x, y, self.weight, sides) - (x * y).sum(-1) ** 2

    def _forward(self, x: Tensor) -> Tensor:
        gradients = x.view(-1, *self.weight)
        return self._out(self._in(gradients).mT).mT.flatten(1)

    def _adjoint(self, u: Tensor) -> Tensor:
        blocks = u.reshape(-1, self.k_out, self.k_in)
        if "out" in self.tables:
            blocks = self.tables.get("out", u).T @ blocks / sqrt(self.k_out)
        if "in" in self.tables:
            blocks = blocks @ self.tables.get("in", u) / sqrt(self.k_in)
        return blocks.flatten(1)

    def _out(self, vectors: Tensor) -> Tensor:
        return vectors @ self.tables.get("out", vectors).T / sqrt(self.k_out) if "out" in self.tables else vectors

    def _in(self, vectors: Tensor) -> Tensor:
        return vectors @ self.tables.get("in", vectors).T / sqrt(self.k_in) if "in" in self.tables else vectors


def concatenated(weights: Sequence[Weight], k_out: int, k_in: int, seed: str = "0") -> Concatenated:
    """Return one two-sided block per layer, side by side: what LoGRA and Traceprop store."""
    return Concatenated([TwoSided(w, k_out, k_in, seed_of(seed, m)) for m, w in enumerate(weights)], seed)


def summed(weights: Sequence[Weight], k_out: int, k_in: int, D: int, seed: str = "0") -> Chunked:
    """Return one two-sided block per layer, each folded with its own signs and roll into the same ``D`` numbers."""
    parts = []
    for m, weight in enumerate(weights):
        block = TwoSided(weight, k_out, k_in, seed_of(seed, m))
        parts.append(Composed(RolledFold(block.D, D, seed_of(seed, f"{m}/fold")), block))
    return Chunked(parts, seed)
