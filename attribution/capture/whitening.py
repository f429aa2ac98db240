"""The second form of a sketch: the sample's gradient in coordinates in which Adam's step is a plain gradient step.

Adam moves a parameter by ``-lr D_t m_t`` with ``D_t = 1 / (√v̂_t + ε)`` (Kingma & Ba 2015, arXiv:1412.6980). In the
coordinates ``θ' = D^(-1/2) θ`` the gradient is ``D^(1/2) g`` and the step is ``-lr m'``: so inner products of whitened
sketches ``S D_t^(1/2) g`` say what a sample's step did to another quantity, where raw ones leave the scaling out.

``v̂_t`` has the step's own gradient folded in, ``v_t = β₂ v_{t-1} + (1 - β₂) ḡ²``. With the moment from before the
step, entries that had no gradient yet would blow up: all of LoRA's A at the second step. ``ḡ`` is the sum of the very
per-sample gradients that are sketched here, times the share of them that reaches the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attribution.capture.moment import SMALLEST_EPS, SecondMoment
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

    def roots(self, parameter: str, gradient: Tensor, start: int = 0) -> Tensor:
        """Return ``D^(1/2)`` of a stretch of one parameter's entries.

        Args:
            parameter: Its name.
            gradient: ``(n,)`` float32, the micro-batch's own gradient: entries ``start`` to ``start + n``, flattened
                as the sketch takes them.
            start: Number of the first entry.

        Returns:
            ``(n,)`` float32.
        """
        moment = self.moments[parameter]
        if moment.value is None:
            return self._finish(torch.zeros_like(gradient), gradient, moment)
        earlier = _stretch(moment.value, start, len(gradient))
        scaled = torch.mul(
            earlier, moment.decay / _correction(moment), out=torch.empty_like(gradient).view(earlier.shape)
        )
        return self._finish(scaled.view(-1), gradient, moment)

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
            return self._finish(torch.zeros_like(gradient), gradient, moment)
        if is_tall(value.shape):
            earlier = value[numbers % len(value), numbers.div(len(value), rounding_mode="floor")]
        else:
            earlier = value.reshape(-1)[numbers]
        return self._finish(earlier * (moment.decay / _correction(moment)), gradient, moment)

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

    def _finish(self, earlier: Tensor, gradient: Tensor, moment: SecondMoment) -> Tensor:
        """Fold the step's own gradient into the scaled moment and return ``(√v̂ + ε)^(-1/2)``, in place."""
        own = (1.0 - moment.decay) * self.share**2 / _correction(moment)
        total = earlier.addcmul_(gradient, gradient, value=own)
        return total.sqrt_().add_(max(moment.eps, SMALLEST_EPS)).rsqrt_()


def _correction(moment: SecondMoment) -> float:
    """Return Adam's bias correction at the coming step, ``1 - β₂^t``."""
    return 1.0 - moment.decay ** (moment.steps + 1)


def _stretch(value: Tensor, start: int, entries: int) -> Tensor:
    """Return entries of a moment in the order of the sketch; whole lines of a matrix, so that nothing is copied."""
    if value.ndim != 2:
        return value.reshape(-1)[start : start + entries]
    lines = value.t() if is_tall(value.shape) else value
    long = lines.shape[1]
    return lines.narrow(0, start // long, entries // long)
