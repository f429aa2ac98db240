"""Pieces of per-sample gradients wait, and are sketched in bursts.

Right after a large matrix product the first small operation takes several times as long as the next, and what
whitening needs can be computed for many short pieces as for one long one. So pieces wait until the pool is full.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from attribution.capture.micro_batch import MicroBatch
from attribution.capture.per_sample import Part, Piece

# This many entries wait, over all samples: few enough to stay in the last cache.
POOL_ENTRIES = 2 << 20


class Burst:
    """Pieces that were formed and are not sketched yet, and the memory that they are formed in.

    Args:
        device: Of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.empty(0, device=device, dtype=torch.float32)
        self._taken = 0  # entries of the pool
        self._waiting: list[tuple[MicroBatch, Piece]] = []
        self._entries = 0  # of all pieces that wait, in the pool or not

    def room(self, samples: int, short: int, long: int) -> Tensor:
        """Return a tensor of this shape to overwrite, until the next burst: reused memory stays in the cache."""
        size = samples * short * long
        if self._taken + size > self._pool.numel():
            self.work_off()
            if size > self._pool.numel():
                self._pool = self._pool.new_empty(max(size, POOL_ENTRIES))
        first, self._taken = self._taken, self._taken + size
        return self._pool.as_strided((samples, short, long), (short * long, long, 1), first)

    def add(self, micro: MicroBatch, part: Part) -> None:
        """Let a piece wait, and sketch other parts at once."""
        if not isinstance(part, Piece):
            micro.add(part)
            return
        self._waiting.append((micro, part))
        self._entries += part.values.numel()
        if self._entries > POOL_ENTRIES:
            self.work_off()

    def work_off(self) -> None:
        """Sketch the pieces that wait and free the pool."""
        waiting = self._waiting
        self.forget()
        for micro, pieces in itertools.groupby(waiting, key=lambda each: each[0]):
            micro.add_pieces([piece for _, piece in pieces])

    def forget(self) -> None:
        """Drop the pieces that wait."""
        self._waiting, self._taken, self._entries = [], 0, 0
