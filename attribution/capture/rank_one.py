"""The whitened form of a large weight: Adam's second moment as an outer product of row and column means.

With ``v ≈ r cᵀ / mean(r)`` (Adafactor; Shazeer & Stern 2018, arXiv:1804.04235) ``D^(1/2)`` is an outer product as
well, so it is put into the folds of both sides, and the gradient need not be formed.

The second moment moves slowly, so its means are read again when it is a tenth older: after steps 1, 2, 3, ..., 10, 11,
13, 15, ... Only rows that are seldom used move fast, those of a vocabulary: there, and where no moment is known yet,
the step's own gradient is folded in, its squares taken as if tokens were independent: ``Σ_t a_t² b_t²ᵀ``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attribution.capture.moment import SMALLEST_EPS, SecondMoment
from attribution.sketch.routes import is_table
from attribution.sketch.two_sided import STRETCH_ENTRIES, TwoSidedFold

_AGE = 1.1
# A row that hardly had a gradient so far counts as one with this share of the mean: its entries are enlarged tenfold
# at most.
_FLOOR = 1e-4


class Means(NamedTuple):
    """Row and column means of squares, ``(rows,)`` and ``(columns,)``."""

    rows: Tensor
    columns: Tensor


class _Read(NamedTuple):
    """What was read: when, the bias-corrected means, and the map that is made with them alone."""

    steps: int
    means: Means
    is_empty: bool
    scaled: TwoSidedFold


class RankOne:
    """Keeps the means of every large weight's second moment from step to step."""

    def __init__(self) -> None:
        self._read: dict[str, _Read] = {}

    def scaled(
        self,
        parameter: str,
        fold: TwoSidedFold,
        moment: SecondMoment,
        own: Callable[[], Means],
    ) -> TwoSidedFold:
        """Return the map of the whitened gradient.

        Args:
            parameter: Its name.
            fold: Its map.
            moment: Its second moment before the coming step.
            own: Gives the means of the squares of what the optimizer will get of this micro-batch.
        """
        if moment.value is None:
            return _scale(fold, own(), moment.eps)
        read = self._read.get(parameter)
        if read is None or moment.steps >= _AGE * read.steps:
            read = self._read[parameter] = _look(fold, moment.value, moment)
        if not (read.is_empty or is_table(moment.value.shape)):
            return read.scaled
        share = (1.0 - moment.decay) / (1.0 - moment.decay ** (moment.steps + 1))
        rows, columns = (torch.lerp(earlier, new, share) for earlier, new in zip(read.means, own(), strict=True))
        return _scale(fold, Means(rows, columns), moment.eps)


def squares_of_product(of_rows: Tensor, of_columns: Tensor) -> Means:
    """Return the means of ``Σ_t (a_ti b_tj)²`` over all samples' tokens.

    Args:
        of_rows: ``a_t``, ``(S, T, rows)`` float32.
        of_columns: ``b_t``, ``(S, T, columns)``.
    """
    a, b = of_rows.flatten(0, 1), of_columns.flatten(0, 1)
    rows, columns = a.new_zeros(a.shape[1]), b.new_zeros(b.shape[1])
    lines = max(1, STRETCH_ENTRIES // (a.shape[1] + b.shape[1]))
    for first in range(0, len(a), lines):
        a_squares, b_squares = a[first : first + lines].square(), b[first : first + lines].square()
        rows.addmv_(a_squares.t(), b_squares.mean(1))
        columns.addmv_(b_squares.t(), a_squares.mean(1))
    return Means(rows, columns)


def squares_of_lookup(numbers: Tensor, of_columns: Tensor, rows: int) -> Means:
    """Return the same for a table that was looked up: ``a_t`` is one in row ``i_t`` and zero elsewhere.

    Args:
        numbers: The rows ``i_t``, ``(S, T)`` int64.
        of_columns: ``b_t``, ``(S, T, columns)`` float32.
        rows: Rows of the table.
    """
    squares = of_columns.flatten(0, 1).square()
    by_row = squares.new_zeros(rows).index_add_(0, numbers.flatten(), squares.mean(1))
    return Means(by_row, squares.sum(0) / rows)


def means_of(squares: Tensor) -> Means:
    """Return the means of a matrix of squares."""
    return Means(squares.mean(1), squares.mean(0))


def _look(fold: TwoSidedFold, value: Tensor, moment: SecondMoment) -> _Read:
    """Read a second moment."""
    correction = 1.0 - moment.decay**moment.steps
    means = Means(*(mean.float() / correction for mean in means_of(value)))
    return _Read(moment.steps, means, not bool(means.rows.any()), _scale(fold, means, moment.eps))


def _scale(fold: TwoSidedFold, means: Means, eps: float) -> TwoSidedFold:
    """Put ``a`` and ``b`` into a map, ``a_i b_j ≈ (√v̂_ij + ε)^(-1/2)``."""
    mean, least = means.rows.mean(), max(eps, SMALLEST_EPS) ** 2
    rows = (means.rows.clamp(min=_FLOOR * mean) + least) / (mean + least)
    columns = means.columns.clamp(min=_FLOOR * mean) + least
    return fold.scaled(rows.pow(-0.25), columns.pow(-0.25))
