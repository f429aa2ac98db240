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
        n = len(signs)
        self._blocks = n // dim if n // dim > _FEW_BLOCKS else 0
        starts = range(self._blocks * dim, n, SPAN * dim)
        self._pieces = [(i, min(SPAN * dim, n - i), signs[i : i + SPAN * dim]) for i in starts]

    def add_to(self, sums: Tensor, values: Tensor) -> None:
        """Add the unwrapped sketch of each row of ``values`` to the same row of ``sums``, in place.

        Args:
            sums: Float32, from ``unwrapped``.
            values: ``(B, n)`` float32, one flattened gradient per row.
        """
        for start, length, signs in self._pieces:
            sums.narrow(1, self.offset, length).addcmul_(values.narrow(1, start, length), signs)
        if self._blocks:
            end = self._blocks * self.dim
            signed = values.narrow(1, 0, end) * self.signs[:end]  # (B, blocks * D)
            sums.narrow(1, self.offset, self.dim).add_(signed.view(-1, self._blocks, self.dim).sum(1))

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
