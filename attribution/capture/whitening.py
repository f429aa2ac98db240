"""The second form of a sketch: the sample's gradient in coordinates in which Adam's step is a plain gradient step.

Adam moves a parameter by ``-lr D_t m_t`` with ``D_t = 1 / (√v̂_t + ε)`` (Kingma & Ba 2015, arXiv:1412.6980). In the
coordinates ``θ' = D^(-1/2) θ`` the gradient is ``D^(1/2) g`` and the step is ``-lr m'``: so inner products of whitened
sketches ``S D_t^(1/2) g`` say what a sample's step did to another quantity, where raw ones leave the scaling out.

``v̂_t`` has the step's own gradient folded in, ``v_t = β₂ v_{t-1} + (1 - β₂) ḡ²``. With the moment from before the
step, entries that had no gradient yet would blow up: all of LoRA's A at the second step. ``ḡ`` is the sum of the very
per-sample gradients that are sketched here, times the share of them that reaches the optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attribution.capture.moment import SMALLEST_EPS, SecondMoment, Settings
from attribution.capture.per_sample import Piece
from attribution.capture.rank_one import Means, RankOne
from attribution.sketch.layout import is_tall
from attribution.sketch.two_sided import TwoSidedFold


class Whitening:
    """``D_t^(1/2)`` of every tracked parameter, for one micro-batch.

    Args:
        moments: By parameter name.
        share: What becomes of a micro-batch's own gradient on its way into the optimizer, as a factor: clipping,
            the gradient scaler's scale, and how many micro-batches there are. Known only when the step is taken,
            so the last step's is the estimate.
        rank_one: What is known of large weights' moments from earlier steps.
    """

    def __init__(self, moments: Mapping[str, SecondMoment], share: float, rank_one: RankOne | None = None) -> None:
        self.moments, self.share = moments, share
        self._rank_one = rank_one or RankOne()

    @property
    def is_first(self) -> bool:
        """Whether no parameter has a moment yet: then a wrong share is a common factor and can be taken out later."""
        return all(moment.value is None for moment in self.moments.values())

    def roots(self, pieces: Sequence[Piece]) -> Tensor:
        """Return ``D^(1/2)`` of the entries of several pieces, end to end.

        Args:
            pieces: Of one micro-batch. Pieces of single samples bring the sum over all.

        Returns:
            ``(n,)`` float32, ``n`` being the sum of the pieces' lengths.
        """
        moments = [self.moments[piece.parameter] for piece in pieces]
        own = torch.cat([piece.values.sum(0) if piece.total is None else piece.total for piece in pieces])
        found = torch.cat([_earlier(piece, moment) for piece, moment in zip(pieces, moments, strict=True)])
        first, lengths = 0, (piece.values.shape[1] for piece in pieces)
        for moment, run in itertools.groupby(zip(moments, lengths, strict=True), key=lambda each: each[0].settings):
            entries = sum(length for _, length in run)
            self._finish(found.narrow(0, first, entries), own.narrow(0, first, entries), moment)
            first += entries
        return found

    def roots_at(self, parameter: str, gradient: Tensor, numbers: Tensor) -> Tensor:
        """Return ``D^(1/2)`` of single entries.

        Args:
            parameter: Its name.
            gradient: ``(k,)`` float32, the micro-batch's own gradient at these entries.
            numbers: ``(k,)`` int64, the entries.
        """
        moment = self.moments[parameter]
        value = moment.value
        if value is None:
            return self._finish(torch.zeros_like(gradient), gradient, moment.settings)
        if is_tall(value.shape):
            earlier = value[numbers % len(value), numbers.div(len(value), rounding_mode="floor")]
        else:
            earlier = value.reshape(-1)[numbers]
        return self._finish(earlier.float(), gradient, moment.settings)

    def scaled(self, parameter: str, fold: TwoSidedFold, own: Callable[[], Means]) -> TwoSidedFold:
        """Return a large weight's map with ``D^(1/2)`` put into it, as an outer product.

        Args:
            parameter: Its name.
            fold: Its map.
            own: Gives the means of the squares of the micro-batch's own gradient.
        """

        def consumed() -> Means:
            return Means(*(mean * self.share**2 for mean in own()))

        return self._rank_one.scaled(parameter, fold, self.moments[parameter], consumed)

    def _finish(self, earlier: Tensor, gradient: Tensor, settings: Settings) -> Tensor:
        """Fold the step's own gradient into the moment and return ``(√v̂ + ε)^(-1/2)``, in place."""
        correction = 1.0 - settings.decay ** (settings.steps + 1)  # Adam's bias correction at the coming step
        share = (1.0 - settings.decay) * self.share**2 / correction
        total = earlier.mul_(settings.decay / correction).addcmul_(gradient, gradient, value=share)
        return total.sqrt_().add_(max(settings.eps, SMALLEST_EPS)).rsqrt_()


def _earlier(piece: Piece, moment: SecondMoment) -> Tensor:
    """Return the entries of a moment that a piece has, in the order of the sketch; zeros where there is none yet."""
    value, entries = moment.value, piece.values.shape[1]
    if value is None:
        return piece.values.new_zeros(entries)
    if value.ndim == 2:
        lines = value.t() if is_tall(value.shape) else value
        if entries != lines.numel():  # pieces of a matrix are whole lines, so that nothing else is copied
            long = lines.shape[1]
            lines = lines.narrow(0, piece.start // long, entries // long)
        flat = lines.reshape(-1)
    else:
        flat = value.reshape(-1).narrow(0, piece.start, entries)
    return flat if flat.dtype is torch.float32 else flat.float()
