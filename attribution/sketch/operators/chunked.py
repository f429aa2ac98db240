"""A sum over chunks, each with an independent operator: ``S x = Σ_c S_c x_c``.

Cross terms between chunks have mean zero, so the sum is unbiased, and a gradient can be sketched as it arrives,
parameter by parameter: the flat gradient is never there as a whole. Nor is it ever filled up to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from attribution.errors import SketchMismatchError
from attribution.sketch.operators.combine import seed_of
from attribution.sketch.operators.operator import Operator
from auditlog.errors import UsageError

CHUNK = 1 << 20


class Chunked(Operator):
    """Independent operators with the same ``D``, added up.

    Args:
        parts: The operators, in the order of the vector's chunks.
        seed: Any text, for the description only: the parts have seeds of their own.

    Raises:
        UsageError: If the parts differ in ``D``.

    Example:
        >>> from attribution.sketch.operators import SRHT
        >>> S = Chunked.of(SRHT, N=2500, D=64, chunk=1000)
        >>> gradients = [torch.ones(10, 50), torch.ones(2000)]  # as they come, one parameter after another
        >>> torch.equal(S.sketch(g.reshape(1, -1) for g in gradients)[0], S @ torch.ones(2500))
        True
    """

    name = "chunked"

    def __init__(self, parts: Sequence[Operator], seed: str = "0") -> None:
        sizes = {part.D for part in parts}
        if len(sizes) != 1:
            raise UsageError(f"chunks have sketches of different sizes: {sorted(sizes)}")
        super().__init__(sum(p.N for p in parts), sizes.pop(), seed, options="/".join(part.digest for part in parts))
        self.parts = tuple(parts)

    @classmethod
    def of(
        cls, kind: Callable[[int, int, str], Operator], N: int, D: int, seed: str = "0", *, chunk: int = CHUNK
    ) -> Chunked:
        """Return chunks of ``chunk`` entries (the last one is what is left), all of one kind of operator."""
        lengths = [min(chunk, N - first) for first in range(0, N, chunk)]
        return cls([kind(length, D, seed_of(seed, c)) for c, length in enumerate(lengths)], seed)

    def sketch(self, pieces: Iterable[Tensor]) -> Tensor:
        """Sketch a vector that arrives in pieces, whose ends need not be those of the chunks.

        Holds one chunk at a time.

        Args:
            pieces: ``(R, k)`` each, ``N`` columns in all.

        Returns:
            ``(R, D)``.

        Raises:
            SketchMismatchError: If the pieces have more or fewer than ``N`` columns.
        """
        chunks = _recut(pieces, [part.N for part in self.parts])
        sketches = (part @ chunk for part, chunk in zip(self.parts, chunks, strict=True))
        return reduce(torch.add, sketches)

    def variance(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the chunks' own variances plus ``Σ_{b≠c} (‖x_b‖²‖y_c‖² + <x_b,y_b><x_c,y_c>) / D``.

        Holds for parts whose sketches of a fixed vector have covariance ``‖x‖²/D`` times the identity.
        """
        lengths = [part.N for part in self.parts]
        xs, ys = torch.split(x, lengths, -1), torch.split(y, lengths, -1)
        own = torch.stack([part.variance(a, b) for part, a, b in zip(self.parts, xs, ys, strict=True)]).sum(0)
        norms_x, norms_y = (torch.stack([(v**2).sum(-1) for v in vs]) for vs in (xs, ys))
        products = torch.stack([(a * b).sum(-1) for a, b in zip(xs, ys, strict=True)])
        between = norms_x.sum(0) * norms_y.sum(0) + products.sum(0) ** 2
        return own + (between - (norms_x * norms_y + products**2).sum(0)) / self.D

    def _forward(self, x: Tensor) -> Tensor:
        return self.sketch([x])

    def _adjoint(self, u: Tensor) -> Tensor:
        return torch.cat([part.adjoint(u) for part in self.parts], dim=1)


def _recut(pieces: Iterable[Tensor], lengths: Sequence[int]) -> Iterator[Tensor]:
    """Yield the same columns in pieces of the given lengths; a piece that fits is passed on as it is."""
    wanted, held = list(reversed(lengths)), 0
    waiting: list[Tensor] = []
    for piece in pieces:
        while piece.shape[1]:
            if not wanted:
                raise SketchMismatchError(f"the gradient has more than the {sum(lengths)} entries of the sketch")
            taken, piece = piece[:, : wanted[-1] - held], piece[:, wanted[-1] - held :]
            waiting.append(taken)
            held += taken.shape[1]
            if held == wanted[-1]:
                yield waiting[0] if len(waiting) == 1 else torch.cat(waiting, dim=1)
                wanted.pop()
                waiting, held = [], 0
    if wanted:
        raise SketchMismatchError(f"the gradient has fewer than the {sum(lengths)} entries of the sketch")
