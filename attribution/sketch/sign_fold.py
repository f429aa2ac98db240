"""Rolled sign-fold: the linear map ``S`` from one parameter's gradient into ``D`` buckets.

Entry ``e`` of the flattened gradient is multiplied by its sign and added to bucket ``(offset + e) mod D``, so
``E[SᵀS] = I`` and ``E<Sx, Sy> = <x, y>`` over the signs. Each parameter has its own signs and its own roll: without
the roll, outlier features that all modules share would pile up in the same buckets.

Sums are kept unwrapped, over several times ``D`` buckets of which each ``D`` continues the one before, and wrapped
once at the end. So an ordinary parameter costs one fused multiply-add, wherever its offset lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Entries that one fused multiply-add takes, in units of D; the unwrapped sums are one D wider.
SPAN = 4
# Parameters of more blocks than this are signed, summed over their blocks, and added once.
_FEW_BLOCKS = 32


class SignFold:
    """One parameter's map.

    Args:
        signs: ``(n,)`` float32 in {-1, +1}.
        offset: Bucket of entry 0, in ``[0, dim)``.
        dim: Number of buckets ``D``.
    """

    def __init__(self, signs: Tensor, offset: int, dim: int) -> None:
        self.signs, self.offset, self.dim = signs, offset, dim

    def stretch(self, start: int, entries: int) -> Tensor:
        """Return the signs of entries ``start`` to ``start + entries``."""
        return self.signs if entries == self.signs.shape[0] else self.signs.narrow(0, start, entries)

    def add_to(self, sums: Tensor, values: Tensor, start: int = 0) -> None:
        """Add the unwrapped sketch of each row of ``values`` to the same row of ``sums``, in place.

        Args:
            sums: Float32, from ``unwrapped``.
            values: ``(B, k)`` float32: entries ``start`` to ``start + k`` of one flattened gradient per row.
            start: Number of the first entry.
        """
        signs = self.stretch(start, values.shape[1])
        self.add_products(sums.unsqueeze(1), values, signs.unsqueeze(0), start)

    def add_products(self, sums: Tensor, values: Tensor, factors: Tensor, start: int = 0) -> None:
        """Add the sketches of several forms of the same values, reading them once.

        Args:
            sums: ``(B, F, …)`` float32: ``F`` rows of ``unwrapped`` for each row of values.
            values: ``(B, k)`` float32, as for ``add_to``.
            factors: ``(F, k)`` float32: the signs, times what each entry is multiplied by.
            start: Number of the first entry.
        """
        length, bucket = values.shape[1], (self.offset + start) % self.dim
        if length <= SPAN * self.dim:
            sums.narrow(2, bucket, length).addcmul_(values.unsqueeze(1), factors)
            return
        blocks = length // self.dim if length // self.dim > _FEW_BLOCKS else 0
        in_blocks = blocks * self.dim
        if blocks:
            for form, signs in enumerate(factors):
                signed = values.narrow(1, 0, in_blocks) * signs.narrow(0, 0, in_blocks)  # (B, blocks * D)
                sums[:, form].narrow(1, bucket, self.dim).add_(signed.view(-1, blocks, self.dim).sum(1))
        apart = values.unsqueeze(1)
        for first in range(in_blocks, length, SPAN * self.dim):
            few = min(SPAN * self.dim, length - first)
            sums.narrow(2, bucket, few).addcmul_(apart.narrow(2, first, few), factors.narrow(1, first, few))

    def scatter_to(self, sums: Tensor, entries: Tensor, values: Tensor) -> None:
        """Add single entries of each row's gradient: entry ``entries[b, k]`` has value ``values[b, k]``, in place.

        Args:
            sums: Float32, from ``unwrapped``.
            entries: ``(B, k)`` int64; an entry may occur more than once.
            values: ``(B, k)`` float32.
        """
        sums.scatter_add_(1, (entries + self.offset) % self.dim, values * self.signs[entries])

    def adjoint(self, sketch: Tensor) -> Tensor:
        """Return ``Sᵀ`` of each row: ``(B, D)`` to ``(B, n)``."""
        n = len(self.signs)
        buckets = (torch.arange(n, device=sketch.device) + self.offset) % self.dim
        return sketch[:, buckets] * self.signs

    def to(self, device: torch.device) -> SignFold:
        """Return the same map on ``device``."""
        return SignFold(self.signs.to(device), self.offset, self.dim)


def unwrapped(rows: int, dim: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros to add sketches to, ``(rows, (1 + SPAN) D)``."""
    return torch.zeros(rows, (1 + SPAN) * dim, device=device, dtype=dtype)


def wrap(sums: Tensor) -> Tensor:
    """Return the sketches, ``(B, D)``, from unwrapped sums."""
    return sums.view(len(sums), 1 + SPAN, -1).sum(1)
