"""Rolled sign-fold: the linear map ``S`` from one parameter's gradient into ``D`` buckets.

Entry ``e`` of the flattened gradient is multiplied by its sign and added to bucket ``(offset + e) mod D``, so
``E[SᵀS] = I`` and ``E<Sx, Sy> = <x, y>`` over the signs. Each parameter has its own signs and its own roll: without
the roll, outlier features that all modules share would pile up in the same buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Up to this many blocks one fused multiply-add per block beats forming the signed copy and summing it.
_FEW_BLOCKS = 8


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
        head = min(dim - offset, n)
        self._blocks = (n - head) // dim
        self._body = slice(head, head + self._blocks * dim)
        pieces = [(offset, 0, head), (0, self._body.stop, n)]
        if self._blocks <= _FEW_BLOCKS:
            pieces += [(0, start, start + dim) for start in range(head, self._body.stop, dim)]
            self._blocks = 0
        # What of ``values`` goes where in ``out``: everything that is not in the long body.
        self._pieces = [
            (slice(bucket, bucket + end - start), slice(start, end), signs[start:end])
            for bucket, start, end in pieces
            if end > start
        ]

    def add_to(self, out: Tensor, values: Tensor) -> None:
        """Add the sketch of each row of ``values`` to the same row of ``out``, in place.

        Args:
            out: ``(B, D)`` float32.
            values: ``(B, n)`` float32, one flattened gradient per row.
        """
        for buckets, entries, signs in self._pieces:
            out[:, buckets].addcmul_(values[:, entries], signs)
        if self._blocks:
            signed = values[:, self._body] * self.signs[self._body]  # (B, blocks * D)
            out += signed.view(-1, self._blocks, self.dim).sum(1)

    def adjoint(self, sketch: Tensor) -> Tensor:
        """Return ``Sᵀ`` of each row: ``(B, D)`` to ``(B, n)``."""
        n = len(self.signs)
        buckets = (torch.arange(n, device=sketch.device) + self.offset) % self.dim
        return sketch[:, buckets] * self.signs

    def to(self, device: torch.device) -> SignFold:
        """Return the same map on ``device``."""
        return SignFold(self.signs.to(device), self.offset, self.dim)
