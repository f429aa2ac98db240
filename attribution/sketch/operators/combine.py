"""Operators made of operators: one after another, and side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attribution.sketch.operators.operator import Operator
from auditlog.errors import UsageError


def seed_of(seed: str, part: object) -> str:
    """Return the seed of one part of a composite operator, so that parts are independent."""
    return f"{seed}/{part}"


class Composed(Operator):
    """``outer · inner``: the inner sketch is sketched again.

    Args:
        outer: An operator whose pairs of coordinates meet alike (all but ``FFD`` and the Kronecker maps).
        inner: What is applied first.

    Raises:
        UsageError: If the sizes do not fit.
    """

    name = "composed"

    def __init__(self, outer: Operator, inner: Operator) -> None:
        if outer.N != inner.D:
            raise UsageError(f"{outer!r} takes {outer.N} numbers, {inner!r} gives {inner.D}")
        super().__init__(inner.N, outer.D, inner.seed, options=f"{outer.digest}/{inner.digest}")
        self.outer, self.inner = outer, inner

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the inner variance plus the outer one of the inner sketches, to first order in the inner one.

        Both stages count: ``1/r² ≈ 1 + κ_inner + κ_outer``.
        """
        first = self.inner.variance(x, y)
        norms, squares = (x**2).sum(-1) * (y**2).sum(-1), (x * y).sum(-1) ** 2
        return first + (norms + squares + first) / self.D

    def _forward(self, x: Tensor) -> Tensor:
        return self.outer @ (self.inner @ x)

    def _adjoint(self, u: Tensor) -> Tensor:
        return self.inner.adjoint(self.outer.adjoint(u))


class Concatenated(Operator):
    """Each part of the vector has its own operator, and the sketches stand side by side: ``D = Σ D_i``.

    Args:
        parts: The operators, in the order of the vector's parts.
        seed: Any text, for the description only.
    """

    name = "concatenated"

    def __init__(self, parts: Sequence[Operator], seed: str = "0") -> None:
        digests = "/".join(part.digest for part in parts)
        super().__init__(sum(p.N for p in parts), sum(p.D for p in parts), seed, options=digests)
        self.parts = tuple(parts)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the parts, which are independent."""
        lengths = [part.N for part in self.parts]
        pairs = zip(self.parts, torch.split(x, lengths, -1), torch.split(y, lengths, -1), strict=True)
        return torch.stack([part.variance(a, b) for part, a, b in pairs]).sum(0)

    def _forward(self, x: Tensor) -> Tensor:
        pieces = zip(self.parts, torch.split(x, [part.N for part in self.parts], 1), strict=True)
        return torch.cat([part @ piece for part, piece in pieces], dim=1)

    def _adjoint(self, u: Tensor) -> Tensor:
        pieces = zip(self.parts, torch.split(u, [part.D for part in self.parts], 1), strict=True)
        return torch.cat([part.adjoint(piece) for part, piece in pieces], dim=1)
