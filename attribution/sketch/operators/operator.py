"""What every sketch operator is: a fixed random linear map ``S: R^N -> R^D`` with ``E[SᵀS] = I``.

So ``E<Sx, Sy> = <x, y>``: inner products of sketches are unbiased estimates of inner products of gradients. How far
they stray is the operator's own closed form, ``variance``. Nothing here knows where gradients come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from attribution.errors import SketchMismatchError
from attribution.sketch.operators.tables import Tables
from auditlog.errors import UsageError


class Operator(ABC):
    """A random linear map, fixed by its name, ``N``, ``D``, options and seed.

    ``S @ x`` sketches, ``S.adjoint(u)`` lifts back; both take any number of leading axes, float32 or float64, on any
    device, and are differentiable. Half precision is computed in float32.

    Args:
        N: Length of the vectors that it takes.
        D: Length of the sketch.
        seed: Any text; part of every random table's key.
        padded: Length to which vectors are filled up with zeros inside, ``N`` if not given.
        options: What else fixes the map; part of its description.

    Attributes:
        name: The operator's name in the registry.
        family: Operators of one family have the same random tables for the same sizes and seed.
        description: Text that fixes the map together with the seed.
        tables: The random tables.

    Raises:
        UsageError: If ``N`` or ``D`` is not positive.
    """

    name: ClassVar[str]
    family: ClassVar[str] = ""

    def __init__(self, N: int, D: int, seed: str = "0", *, padded: int | None = None, options: str = "") -> None:
        if N < 1 or D < 1:
            raise UsageError(f"{self.name}: N={N} and D={D} must be positive")
        self.N, self.D, self.seed, self.padded = N, D, seed, padded or N
        rest = f"/N={self.padded}/D={D}/{options}"
        self.description = self.name + rest
        self.tables = Tables(f"gradtrail/operator/{seed}/{self.family or self.name}{rest}", self.description)

    @property
    def digest(self) -> str:
        """SHA-256 over the description, the seed and all random tables."""
        return self.tables.digest

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return ``S x`` for each vector of ``x``, ``(..., N)`` to ``(..., D)``."""
        rows = _rows(x, self.N, f"{self.name}: S @ x")
        return self._forward(self._pad(rows)).reshape(*x.shape[:-1], self.D)

    def adjoint(self, u: Tensor) -> Tensor:
        """Return ``Sᵀ u`` for each vector of ``u``, ``(..., D)`` to ``(..., N)``."""
        lifted = self._adjoint(_rows(u, self.D, f"{self.name}: the adjoint"))
        return lifted[:, : self.N].reshape(*u.shape[:-1], self.N)

    def _pad(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, self.padded - self.N)) if self.padded > self.N else x

    @abstractmethod
    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the variance of ``<Sx, Sy>`` over seeds, a closed form.

        Args:
            x: ``(..., N)``.
            y: ``(..., N)``.

        Returns:
            ``(...)``.
        """

    @abstractmethod
    def _forward(self, x: Tensor) -> Tensor:
        """Sketch rows: ``(R, padded)`` to ``(R, D)``."""

    @abstractmethod
    def _adjoint(self, u: Tensor) -> Tensor:
        """Lift rows: ``(R, D)`` to ``(R, padded)``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.description}, seed={self.seed!r})"


def _rows(x: Tensor, length: int, what: str) -> Tensor:
    if x.shape[-1:] != (length,):
        raise SketchMismatchError(
            f"{what} takes vectors of length {length}, this tensor has shape {tuple(x.shape)}",
            "Flatten the gradient in the order in which the operator was built, and check that the model is the same.",
        )
    rows = x.reshape(-1, length)
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
