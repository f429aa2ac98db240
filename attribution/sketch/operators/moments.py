"""Exact fourth moments of Kronecker products of random factors.

A factor ``P`` with ``E[PᵀP] = I`` enters second moments of inner products only through

    E[(PᵀP)_pq (PᵀP)_rs] = a δ_pq δ_rs + b (δ_pr δ_qs + δ_ps δ_qr)

with ``a = 1, b = 1/k`` for ``k`` rows of Gaussians of variance ``1/k``, ``a = 1, b = 0`` for the identity, and Haar's
values below. For a product of independent factors the moment is the sum, over one of the three terms per factor, of
the product of its coefficients times a contraction of the four vectors. Two factors give eq. (K) of METHODS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Side(NamedTuple):
    """The two coefficients ``a`` and ``b`` of one factor."""

    a: float
    b: float


IDENTITY = Side(1.0, 0.0)


def gaussian(rows: int) -> Side:
    """Return the coefficients of ``rows`` rows of independent Gaussians of variance ``1/rows``."""
    return Side(1.0, 1.0 / rows)


def haar(n: int, rows: int) -> Side:
    """Return the coefficients of ``rows`` rows of a random rotation of ``R^n``, scaled by ``√(n/rows)``."""
    if rows == n:
        return IDENTITY
    k, d = rows, n
    return Side(d * (k * (d + 1) - 2) / (k * (d - 1) * (d + 2)), d * (d - k) / (k * (d - 1) * (d + 2)))


def fourth(x: Tensor, y: Tensor, z: Tensor, w: Tensor, edges: Sequence[int], sides: Sequence[Side]) -> Tensor:
    """Return ``E <Sx, Sy> <Sz, Sw>`` for a Kronecker product ``S`` of independent factors.

    Args:
        x: ``(..., Πn_i)``; so are ``y``, ``z`` and ``w``.
        y: See ``x``.
        z: See ``x``.
        w: See ``x``.
        edges: Columns ``n_i`` of each factor.
        sides: Coefficients of each factor.

    Returns:
        ``(...)``, computed in float64.
    """
    lead = (x * y * z * w).shape[:-1]
    shared = _contracted_first(edges, sides)
    others = [axis for axis in range(len(edges)) if axis not in shared]
    flat = []
    for v in (x, y, z, w):
        tensor = v.expand(*lead, v.shape[-1]).reshape(-1, *edges).permute(0, *(a + 1 for a in (*others, *shared)))
        flat.append(tensor.reshape(len(tensor), prod(edges[a] for a in others), -1).double())
    inner, outer = sides[shared[0]], [(edges[axis], sides[axis]) for axis in others]
    found = [_one(vectors, inner, outer) for vectors in zip(*flat, strict=True)]
    return torch.tensor(found, dtype=torch.float64, device=x.device).reshape(lead)


def _contracted_first(edges: Sequence[int], sides: Sequence[Side]) -> list[int]:
    """Return the axes that make the first, cheapest contraction: all that are left as they are, or the longest one."""
    return [axis for axis, side in enumerate(sides) if side == IDENTITY] or [edges.index(max(edges))]


def _one(vectors: Sequence[Tensor], inner: Side, outer: Sequence[tuple[int, Side]]) -> float:
    """Return the moment for four ``(M, C)`` vectors: axes of ``outer``, flattened, then the one of ``inner``."""
    total = 0.0
    shape = [edge for edge, _ in outer]
    for (i, j, k, m), weight in _pairings(inner):
        left = (vectors[i] @ vectors[j].T).reshape(shape * 2)
        right = (vectors[k] @ vectors[m].T).reshape(shape * 2)
        for choice in product(*(_pairings(side) for _, side in outer)):
            labels: list[list[int]] = [[], [], [], []]
            for axis, (pairing, _) in enumerate(choice):
                for place, vector in enumerate(pairing):
                    labels[vector].append(2 * axis + place // 2)
            value = torch.einsum(left, labels[i] + labels[j], right, labels[k] + labels[m], [])
            total += weight * prod(coefficient for _, coefficient in choice) * float(value)
    return total


def _pairings(side: Side) -> list[tuple[tuple[int, int, int, int], float]]:
    """Return which two vectors share an index on one axis, and with which coefficient."""
    pairings = [((0, 1, 2, 3), side.a), ((0, 2, 1, 3), side.b), ((0, 3, 1, 2), side.b)]
    return [each for each in pairings if each[1]]
