"""Walsh-Hadamard and other orthogonal transforms as Kronecker products of small factors.

``H_N = H_{B_1} ⊗ … ⊗ H_{B_K}`` in Sylvester's order, so a vector is reshaped to ``(B_1, …, B_K)`` and each axis is
multiplied by its own small matrix: ``N ΣB_i`` multiply-adds, and ``ΣB_i²`` numbers to keep. Shuffling the rows (or the
columns) of each factor shuffles the rows of the whole without an index of length ``N``.

If only the first ``D`` rows of the product are wanted, each factor is cut to its first ``d_i`` rows with ``Πd_i = D``,
``d_i`` filled from the right. Applied leading-first, the first factor already shrinks the tensor, so the cost is about
one read of ``x``; the adjoint goes the other way round.

Source: Schioppa, NeurIPS 2024, arXiv:2402.03994 (listing 1 for the shapes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditlog.errors import UsageError

# Edge of the largest factor. A pass over a tensor costs one read and one write and B multiply-adds per number: on a
# processor's float32 units the two balance near 32 to 64, on a GPU's tensor units at several hundred.
BLOCK = 64
# Numbers that are multiplied by their signs at a time, so that no signed copy of a whole gradient is made.
_PIECE = 1 << 20


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def require_power_of_two(name: str, value: int) -> None:
    """Refuse a size that the transform cannot have.

    Raises:
        UsageError: If ``value`` is not a power of two.
    """
    if value != next_power_of_two(value):
        raise UsageError(f"{name}={value} must be a power of two", f"Take {next_power_of_two(value)}.")


def sylvester(n: int) -> NDArray[np.int8]:
    """Return the ``n`` x ``n`` Hadamard matrix of ones and minus ones, ``(−1)^<bits i, bits j>``.

    Example:
        >>> sylvester(2).tolist()
        [[1, 1], [1, -1]]
    """
    matrix = np.ones((1, 1), dtype=np.int8)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def blocks(n: int, largest: int = BLOCK) -> tuple[int, ...]:
    """Return the edges ``(B_1, …, B_K)`` of the factors of a power of two; the odd one leads.

    Example:
        >>> blocks(2**13, 64)
        (2, 64, 64)
    """
    found: list[int] = []
    while n > 1:
        found.insert(0, min(n, largest))
        n //= found[0]
    return tuple(found) or (1,)


def leading_rows(edges: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return how many rows ``d_i`` of each factor make the first ``dim`` rows of their product.

    Example:
        >>> leading_rows((2, 64, 64), 512)
        (1, 8, 64)
    """
    found: list[int] = []
    for edge in reversed(edges):
        found.insert(0, min(edge, dim))
        dim //= found[0]
    return tuple(found)


def transform(x: Tensor, factors: Sequence[Tensor], signs: Tensor | None = None) -> Tensor:
    """Apply a Kronecker product of factors, leading-first, after multiplying by signs.

    Args:
        x: ``(R, ΠB_i)``.
        factors: ``(d_i, B_i)`` each.
        signs: ``(ΠB_i,)``, or None for none.

    Returns:
        ``(R, Πd_i)``.
    """
    first, *rest = factors
    x = _leading_axis(x.reshape(len(x), first.shape[1], -1), first, signs)  # (R, d_1, ΠB_{i>1})
    done, left = first.shape[0], x.shape[2]
    for factor in rest:
        left //= factor.shape[1]
        x = _axis(x.reshape(-1, factor.shape[1], left), factor)
        done *= factor.shape[0]
    return x.reshape(-1, done * left)


def transform_adjoint(u: Tensor, factors: Sequence[Tensor], signs: Tensor | None = None) -> Tensor:
    """Apply the transpose of ``transform``, trailing-first, so that the tensor grows as late as it can.

    Args:
        u: ``(R, Πd_i)``.
        factors: ``(d_i, B_i)`` each.
        signs: ``(ΠB_i,)``, or None for none.

    Returns:
        ``(R, ΠB_i)``.
    """
    rows, right = len(u), 1
    for factor in reversed(factors):
        u = _axis(u.reshape(-1, factor.shape[0], right), factor.T)
        right *= factor.shape[1]
    lifted = u.reshape(rows, right)
    return lifted if signs is None else lifted * signs


def _axis(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply the middle axis of ``(R, B, P)`` by ``(d, B)``, to ``(R, d, P)``."""
    if x.shape[2] == 1:
        return (x[:, :, 0] @ factor.T)[:, :, None]
    return torch.bmm(factor.expand(len(x), *factor.shape), x)


def _leading_axis(x: Tensor, factor: Tensor, signs: Tensor | None) -> Tensor:
    """Multiply ``(R, B, P)`` by its signs and by ``(d, B)``, a piece of ``P`` at a time."""
    if signs is None:
        return _axis(x, factor)
    signs = signs.view(x.shape[1:])
    step = max(1, _PIECE // (len(x) * x.shape[1]))
    pieces = [_axis(x[:, :, a : a + step] * signs[:, a : a + step], factor) for a in range(0, x.shape[2], step)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
