"""Sketch operators: random linear maps ``S: R^N -> R^D`` that keep inner products, each with its variance.

``S @ x`` sketches, ``S.adjoint(u)`` lifts. Here are the maps of the literature and what they are known for; the one
that training records with is ``rolled_fold``, per parameter and summed.
"""

from __future__ import annotations

from attribution.sketch.operators.affd import AFFD, FastAFFD
from attribution.sketch.operators.afjl import AFJL, FourierAFJL, HaarAFJL
from attribution.sketch.operators.chunked import Chunked
from attribution.sketch.operators.combine import Composed, Concatenated
from attribution.sketch.operators.count_sketch import SJLT, CountSketch
from attribution.sketch.operators.dense import Gaussian, Rademacher
from attribution.sketch.operators.ffd import FFD
from attribution.sketch.operators.fjl import FJL
from attribution.sketch.operators.kronecker import TwoSided, Weight
from attribution.sketch.operators.operator import Operator
from attribution.sketch.operators.qk import QK
from attribution.sketch.operators.rolled_fold import PlainFold, RolledFold
from attribution.sketch.operators.srht import SRHT
from auditlog.errors import UsageError

__all__ = [
    "AFFD",
    "AFJL",
    "FFD",
    "FJL",
    "OPERATORS",
    "QK",
    "SJLT",
    "SRHT",
    "Chunked",
    "Composed",
    "Concatenated",
    "CountSketch",
    "FastAFFD",
    "FourierAFJL",
    "Gaussian",
    "HaarAFJL",
    "Operator",
    "PlainFold",
    "Rademacher",
    "RolledFold",
    "TwoSided",
    "Weight",
    "operator",
]

OPERATORS = {
    kind.name: kind
    for kind in (
        Gaussian,
        Rademacher,
        CountSketch,
        SJLT,
        RolledFold,
        PlainFold,
        SRHT,
        FJL,
        FFD,
        AFFD,
        FastAFFD,
        AFJL,
        FourierAFJL,
        HaarAFJL,
        QK,
    )
}


def operator(name: str, N: int, D: int, seed: str = "0") -> Operator:
    """Return the operator of that name for flat vectors, with its default options.

    Raises:
        UsageError: If there is no such operator, or it cannot have these sizes.

    Example:
        >>> S = operator("srht", N=1000, D=128, seed="a run")
        >>> x, y = torch.randn(2, 1000)
        >>> torch.allclose(S @ (2 * x + y), 2 * (S @ x) + S @ y, atol=1e-4)
        True
    """
    if name not in OPERATORS:
        raise UsageError(f"there is no sketch operator {name!r}", f"Take one of: {', '.join(OPERATORS)}.")
    return OPERATORS[name](N, D, seed)
