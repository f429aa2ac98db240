"""Two-sided sign-fold: the linear map ``S`` from one large weight's gradient into ``D`` buckets.

A large weight's gradient ``G = Σ_t a_t b_tᵀ`` is never formed. Both sides are folded first, ``P a_t`` and ``Q b_t``,
and the small matrix ``P G Qᵀ = Σ_t (P a_t)(Q b_t)ᵀ`` enters the parameter's own rolled sign-fold. ``P`` and ``Q`` have
one random sign per column, in row ``i mod k``, so ``E[PᵀP] = I`` and the whole map is unbiased. Contracted for whole
samples before it is stored, it needs no more room than an exact gradient's sketch; concatenated per layer the same
small matrices are LoGRA (Choe et al. 2024, arXiv:2405.13954).

``P`` belongs to the rows of the stored weight and ``Q`` to its columns, whatever uses them: a table that serves as
embedding and as head has one map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attribution.sketch.sign_fold import SignFold

# Rows of vectors are folded in stretches of about this many entries, so that the products stay in the cache.
STRETCH_ENTRIES = 1 << 19


class SideFold:
    """The fold of one axis: entry ``i`` times its weight is added to bucket ``i mod k``.

    An axis that is no longer than ``k`` is kept as it is, but for the signs.

    Args:
        weights: ``(n,)`` float32: random signs, or signs times positive factors.
        buckets: ``k``.

    Attributes:
        buckets: ``min(k, n)``.
    """

    def __init__(self, weights: Tensor, buckets: int) -> None:
        self.weights, self.buckets = weights, min(buckets, len(weights))

    def scaled(self, factors: Tensor) -> SideFold:
        """Return the fold of ``factors ∘ x``, ``factors`` being ``(n,)``."""
        return SideFold(self.weights * factors, self.buckets)

    def fold(self, values: Tensor) -> Tensor:
        """Return ``(…, k)`` from ``(…, n)`` float32."""
        return fold_all(values, [self])[0]

    def unfold(self, values: Tensor) -> Tensor:
        """Return the adjoint, ``(…, n)`` from ``(…, k)``."""
        numbers = torch.arange(len(self.weights), device=values.device)
        return values[..., numbers % self.buckets] * self.weights

    def to(self, device: torch.device) -> SideFold:
        """Return the same fold on ``device``."""
        return SideFold(self.weights.to(device), self.buckets)


def fold_all(values: Tensor, sides: Sequence[SideFold]) -> list[Tensor]:
    """Fold the same vectors by several folds of one length and number of buckets, reading them once.

    Args:
        values: ``(…, n)`` float32.
        sides: The folds.

    Returns:
        ``(…, k)`` for each.
    """
    n, k = len(sides[0].weights), sides[0].buckets
    flat = values.reshape(-1, n)
    blocks = -(-n // k)
    lines = max(1, STRETCH_ENTRIES // (blocks * k))
    signed = flat.new_empty(min(lines, len(flat)), blocks * k)
    signed[:, n:] = 0  # what the last block lacks
    folded = [flat.new_empty(len(flat), k) for _ in sides]
    for first in range(0, len(flat), lines):
        part = flat[first : first + lines]
        room = signed[: len(part)]
        for side, out in zip(sides, folded, strict=True):
            torch.mul(part, side.weights, out=room[:, :n])
            torch.sum(room.view(len(part), blocks, k), 1, out=out[first : first + lines])
    return [out.view(*values.shape[:-1], k) for out in folded]


class TwoSidedFold:
    """One large parameter's map.

    Args:
        rows: Fold of the stored weight's first axis.
        columns: Fold of its second axis.
        core: Map of the small matrix, row by row: ``rows.buckets * columns.buckets`` entries.
    """

    def __init__(self, rows: SideFold, columns: SideFold, core: SignFold) -> None:
        self.rows, self.columns, self.core = rows, columns, core

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        return len(self.rows.weights), len(self.columns.weights)

    @property
    def offset(self) -> int:
        """Bucket of the small matrix's first entry."""
        return self.core.offset

    def scaled(self, rows: Tensor, columns: Tensor) -> TwoSidedFold:
        """Return the map of ``diag(rows) G diag(columns)``."""
        return TwoSidedFold(self.rows.scaled(rows), self.columns.scaled(columns), self.core)

    def add_product(self, sums: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
        """Add the unwrapped sketch of ``Σ_t a_t b_tᵀ`` of each sample to its row of ``sums``, in place.

        Args:
            sums: Float32, from ``unwrapped``.
            of_rows: ``P a_t``, ``(S, T, k_rows)`` float32.
            of_columns: ``Q b_t``, ``(S, T, k_columns)``.
        """
        self.core.add_to(sums, torch.bmm(of_rows.transpose(1, 2), of_columns).flatten(1))

    def add_entries(self, sums: Tensor, numbers: Tensor, of_columns: Tensor) -> None:
        """Add the sketch of ``Σ_t e_{i_t} b_tᵀ``: the gradient of a table that was looked up, in place.

        Args:
            sums: Float32, from ``unwrapped``.
            numbers: The rows ``i_t``, ``(S, T)`` int64; one may occur more than once.
            of_columns: ``Q b_t``, ``(S, T, k_columns)`` float32.
        """
        samples, k = len(numbers), self.rows.buckets
        signed = of_columns * self.rows.weights[numbers][:, :, None]
        buckets = numbers % k + k * torch.arange(samples, device=numbers.device)[:, None]
        small = signed.new_zeros(samples * k, self.columns.buckets)
        small.index_add_(0, buckets.flatten(), signed.flatten(0, 1))
        self.core.add_to(sums, small.view(samples, -1))

    def add_matrices(self, sums: Tensor, gradients: Tensor) -> None:
        """Add the sketch of whole gradients, ``(B, rows, columns)`` float32, in place."""
        half = self.columns.fold(gradients)  # (B, rows, k_columns)
        small = self.rows.fold(half.transpose(1, 2))  # (B, k_columns, k_rows)
        self.core.add_to(sums, small.transpose(1, 2).flatten(1))

    def adjoint(self, sketch: Tensor) -> Tensor:
        """Return ``Sᵀ`` of each row: ``(B, D)`` to ``(B, rows, columns)``."""
        small = self.core.adjoint(sketch).view(-1, self.rows.buckets, self.columns.buckets)
        return self.rows.unfold(self.columns.unfold(small).transpose(1, 2)).transpose(1, 2)
