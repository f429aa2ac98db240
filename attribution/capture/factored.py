"""Parameters on the factored route: what modules show of them is folded on both sides, then contracted by sample."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attribution.capture.per_sample import Lookup, Part, Piece, Product
from attribution.capture.rank_one import Means, means_of, squares_of_lookup, squares_of_product
from attribution.capture.whitening import Whitening
from attribution.sketch.layout import unflatten
from attribution.sketch.two_sided import SideFold, TwoSidedFold, fold_all


class FactoredSums:
    """Adds large weights' gradients to one micro-batch's sketches.

    Args:
        sums: Of the raw form, from ``unwrapped``.
        whitened_sums: Of the whitened form; ``None`` without one.
        whitening: What it is made with.
    """

    def __init__(self, sums: Tensor, whitened_sums: Tensor | None, whitening: Whitening | None) -> None:
        self._sums, self._whitened_sums, self._whitening = sums, whitened_sums, whitening
        self._folded: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, part: Part, fold: TwoSidedFold) -> None:
        """Sketch a part of the samples' gradients of one parameter."""
        if isinstance(part, Product):
            self._add_product(part, fold)
        elif isinstance(part, Lookup):
            self._add_lookup(part, fold)
        else:
            assert isinstance(part, Piece)
            self._add_whole(part, fold)

    def forget(self) -> None:
        """Let go of the inputs that several modules may share."""
        self._folded.clear()

    def _add_product(self, part: Product, fold: TwoSidedFold) -> None:
        scaled = self._scaled(part.parameter, fold, lambda: squares_of_product(part.of_rows, part.of_columns))
        rows = self._fold(part.of_rows, fold.rows, None if scaled is None else scaled.rows)
        columns = self._fold(part.of_columns, fold.columns, None if scaled is None else scaled.columns)
        fold.add_product(self._sums, rows[0], columns[0])
        if scaled is not None and self._whitened_sums is not None:
            scaled.add_product(self._whitened_sums, rows[1], columns[1])

    def _add_lookup(self, part: Lookup, fold: TwoSidedFold) -> None:
        numbers = part.numbers
        scaled = self._scaled(part.parameter, fold, lambda: squares_of_lookup(numbers, part.of_columns, fold.shape[0]))
        columns = self._fold(part.of_columns, fold.columns, None if scaled is None else scaled.columns)
        fold.add_entries(self._sums, numbers, columns[0])
        if scaled is not None and self._whitened_sums is not None:
            scaled.add_entries(self._whitened_sums, numbers, columns[1])

    def _add_whole(self, part: Piece, fold: TwoSidedFold) -> None:
        """Add gradients that had to be formed, of some samples."""
        matrices = unflatten(part.values, fold.shape)
        samples = slice(part.first, part.first + len(matrices))
        fold.add_matrices(self._sums[samples], matrices)
        total = part.values.sum(0) if part.total is None else part.total
        scaled = self._scaled(part.parameter, fold, lambda: means_of(unflatten(total[None], fold.shape)[0].square()))
        if scaled is not None and self._whitened_sums is not None:
            scaled.add_matrices(self._whitened_sums[samples], matrices)

    def _scaled(self, parameter: str, fold: TwoSidedFold, own: Callable[[], Means]) -> TwoSidedFold | None:
        return None if self._whitening is None else self._whitening.scaled(parameter, fold, own)

    def _fold(self, values: Tensor, side: SideFold, scaled: SideFold | None) -> list[Tensor]:
        """Fold vectors for both forms; in the raw form modules with one input fold it once."""
        key = values.data_ptr(), id(side)
        known = self._folded.get(key)
        if known is None or known[0].shape != values.shape:
            raw, *others = fold_all(values, [side] if scaled is None else [side, scaled])
            self._folded[key] = values, raw
            return [raw, *others]
        return [known[1]] if scaled is None else [known[1], scaled.fold(values)]
