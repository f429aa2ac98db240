"""The product's own map (``attribution.sketch.sign_fold``) seen as an operator.

Entry ``e`` goes with its sign to bucket ``(offset + e) mod D``: one read of ``x``, no lookup. Used per parameter, each
with its own signs and its own roll, and summed (``Chunked``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attribution.sketch import rng
from attribution.sketch.operators.operator import Operator
from attribution.sketch.sign_fold import SignFold, unwrapped, wrap


class RolledFold(Operator):
    """Signs, then every ``D``-th entry added up, beginning at a random bucket.

    With the seed ``<run's seed>/<parameter>`` the tables are those of that parameter in ``SketchLayout``.
    """

    name = "rolled_fold"

    def __init__(self, N: int, D: int, seed: str = "0") -> None:
        super().__init__(N, D, seed)
        purpose = f"gradtrail/{seed}"
        self.tables.keep("signs", rng.signs(f"{purpose}/signs", N))
        self.offset = self._offset(purpose)
        self.tables.keep("offset", torch.tensor([self.offset]).numpy())

    def _offset(self, purpose: str) -> int:
        return rng.offset(f"{purpose}/offset", self.D)

    def _fold(self, like: Tensor) -> SignFold:
        return SignFold(self.tables.get("signs", like), self.offset, self.D)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``Σ_b (X_b Y_b + P_b²) − 2 Σ x²y²``: sums of ``x²``, ``y²`` and ``xy`` over each bucket ``b``.

        For a generic vector that is ``(‖x‖²‖y‖² + <x,y>² − 2 Σ x²y²) / D``; it is more where large entries of both
        vectors lie a multiple of ``D`` apart.
        """
        products = x * y
        pairs = self._buckets(x**2) * self._buckets(y**2) + self._buckets(products) ** 2
        return pairs.sum(-1) - 2 * (products**2).sum(-1)

    def _buckets(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, -self.N % self.D))
        return padded.reshape(*x.shape[:-1], -1, self.D).sum(-2)

    def _forward(self, x: Tensor) -> Tensor:
        sums = unwrapped(len(x), self.D, x.device, x.dtype)
        self._fold(x).add_to(sums, x)
        return wrap(sums)

    def _adjoint(self, u: Tensor) -> Tensor:
        return self._fold(u).adjoint(u)


class PlainFold(RolledFold):
    """The fold without a roll: what happens to outlier features that all parameters share is its known failure."""

    name = "plain_fold"

    def _offset(self, purpose: str) -> int:
        return 0
