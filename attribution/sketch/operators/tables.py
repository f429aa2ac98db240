"""Random tables of one linear map: the same on every machine, hashed, and at hand where the data is.

Everything is drawn from raw Philox words (``attribution.sketch.rng``), each table under a name of its own. Signs,
integers and permutations involve no distribution code. Gaussians are made by Box and Muller's formula in float64 and
rounded to multiples of 2⁻¹⁶: another ``log`` or ``cos`` that differs in its last bits gives the same table, and float32
holds it exactly. Orthogonal tables come from LAPACK, whose last bits differ between machines; the digest then says so.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attribution.sketch import rng

# Gaussians are drawn and rounded so many at a time, which bounds the memory that drawing takes.
_BLOCK = 1 << 20
_GRID = 2.0**16


class Tables:
    """The random tables of one map.

    Args:
        purpose: What keys the random words; maps with the same purpose have the same tables.
        description: Everything else that fixes the map; part of the digest.
    """

    def __init__(self, purpose: str, description: str) -> None:
        self._purpose = purpose
        self._digest = hashlib.sha256(f"{purpose}\0{description}\0".encode())
        self._host: dict[str, NDArray[Any]] = {}
        self._ready: dict[str, Tensor] = {}

    @property
    def digest(self) -> str:
        """SHA-256 over the description and all tables, in the order in which they were drawn."""
        return self._digest.hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._host

    def get(self, name: str, like: Tensor) -> Tensor:
        """Return a table on the device of ``like``: numbers in its dtype, indices as int64.

        The last conversion is kept, so a stream of gradients of one kind converts each table once.
        """
        ready = self._ready.get(name)
        dtype = torch.int64 if self._host[name].dtype == np.int64 else like.dtype
        if ready is None or ready.dtype != dtype or ready.device != like.device:
            ready = self._ready[name] = torch.from_numpy(self._host[name]).to(like.device, dtype)
        return ready

    def keep(self, name: str, table: NDArray[Any]) -> None:
        """Add a table that was made elsewhere from this map's own purpose."""
        self._host[name] = table
        self._digest.update(f"{name}\0{table.shape}\0".encode())
        self._digest.update(np.ascontiguousarray(table, table.dtype.newbyteorder("<")).data)

    def signs(self, name: str, *shape: int) -> None:
        """Draw independent signs, int8."""
        self.keep(name, rng.signs(f"{self._purpose}/{name}", int(np.prod(shape))).reshape(shape))

    def gaussians(self, name: str, *shape: int) -> None:
        """Draw independent standard Gaussians, float32."""
        table = np.empty(int(np.prod(shape)), dtype=np.float32)
        for block, first in enumerate(range(0, len(table), _BLOCK)):
            part = table[first : first + _BLOCK]
            part[:] = gaussians(f"{self._purpose}/{name}/{block}", len(part))
        self.keep(name, table.reshape(shape))

    def integers(self, name: str, bound: int, *shape: int) -> None:
        """Draw independent integers in ``[0, bound)``, int64. The bias of the reduction is below ``bound / 2**64``."""
        words = rng.words(f"{self._purpose}/{name}", int(np.prod(shape)))
        self.keep(name, (words % np.uint64(bound)).astype(np.int64).reshape(shape))

    def distinct(self, name: str, bound: int, n: int) -> None:
        """Draw ``n`` different integers in ``[0, bound)`` in random order, int64, without a table of ``bound``."""
        drawn = 2 * n
        while True:
            candidates = rng.words(f"{self._purpose}/{name}", drawn) % np.uint64(bound)
            values, first = np.unique(candidates, return_index=True)
            if len(values) >= n:
                order = np.argsort(first)[:n]  # the first n that are new, in the order in which they came
                return self.keep(name, values[order].astype(np.int64))
            drawn *= 2

    def permutations(self, name: str, count: int, n: int) -> None:
        """Draw ``count`` independent permutations of ``n`` (Fisher-Yates on raw words), ``(count, n)`` int64."""
        self.keep(name, permutations(f"{self._purpose}/{name}", count, n))

    def permutation(self, name: str, n: int) -> NDArray[np.int64]:
        """Draw one permutation of ``n`` without keeping it: for rows or columns of a factor."""
        shuffled: NDArray[np.int64] = permutations(f"{self._purpose}/{name}", 1, n)[0]
        return shuffled

    def haar(self, name: str, n: int, rows: int) -> None:
        """Draw the first ``rows`` rows of an ``n`` x ``n`` orthogonal matrix, uniform under rotation, float64.

        The Q of a Gaussian matrix's QR with the signs of R's diagonal (Mezzadri 2007, arXiv:math-ph/0609050).
        """
        square = gaussians(f"{self._purpose}/{name}", n * rows).reshape(n, rows)
        q, r = np.linalg.qr(square)
        self.keep(name, np.ascontiguousarray((q * np.sign(np.diag(r))).T))


def gaussians(purpose: str, n: int) -> NDArray[np.float64]:
    """Return ``n`` standard Gaussians, multiples of 2⁻¹⁶: ``√(−2 ln u) · (cos 2πv, sin 2πv)``."""
    words = rng.words(purpose, 2 * (-(-n // 2)))
    uniform = ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53  # in (0, 1]
    radius = np.sqrt(-2.0 * np.log(uniform[0::2]))
    angle = 2.0 * np.pi * uniform[1::2]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    drawn: NDArray[np.float64] = np.rint(pairs.reshape(-1)[:n] * _GRID) / _GRID
    return drawn


def permutations(purpose: str, count: int, n: int) -> NDArray[np.int64]:
    """Return ``count`` independent uniform permutations of ``n``, ``(count, n)``."""
    words = rng.words(purpose, count * n).reshape(count, n)
    others = (words % np.arange(1, n + 1, dtype=np.uint64)).tolist()  # others[i] in [0, i]
    shuffled = [list(range(n)) for _ in range(count)]
    for order, other in zip(shuffled, others, strict=True):
        for last in range(n - 1, 0, -1):
            order[last], order[other[last]] = order[other[last]], order[last]
    return np.array(shuffled, dtype=np.int64)
