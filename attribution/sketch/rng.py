"""Random signs and offsets that are the same on every device, NumPy and torch version.

Raw 64-bit words of Philox4x64 (Salmon et al., SC 2011), a counter-based generator whose raw stream NumPy keeps
fixed, keyed by SHA-256 of what the words are for. No distribution code is involved: a sign is one bit, an
offset is one word reduced modulo D.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def words(purpose: str, n: int) -> NDArray[np.uint64]:
    """Return the first ``n`` raw words of the stream named ``purpose``, ``(n,)`` uint64."""
    digest = hashlib.sha256(purpose.encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    stream: NDArray[np.uint64] = np.random.Philox(key=key, counter=0).random_raw(n)
    return stream


def signs(purpose: str, n: int) -> NDArray[np.int8]:
    """Return ``n`` independent signs, ``(n,)`` int8 in {-1, +1}; bit ``i`` of the stream is sign ``i``."""
    stream = words(purpose, -(-n // 64)).astype("<u8")
    bits = np.unpackbits(stream.view(np.uint8), count=n, bitorder="little")
    return (1 - 2 * bits.astype(np.int8)).astype(np.int8)


def offset(purpose: str, dim: int) -> int:
    """Return one offset in ``[0, dim)``. The bias of the reduction is below ``dim / 2**64``."""
    return int(words(purpose, 1)[0] % np.uint64(dim))
