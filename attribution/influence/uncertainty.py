"""How far a score can be off because a gradient was sketched. Says nothing of training noise or of the model.

For vectors ``x, y`` and a random sign sketch ``S`` with ``D`` buckets, ``E<Sx, Sy> = <x, y>`` and

    Var<Sx, Sy> = (|x|² |y|² + <x, y>²) / D      (generic vectors; less where single entries dominate)

The sums over a source file share the sketch, so their errors are correlated: a total's error comes from the sketch
of the total, never from adding the samples' variances.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.floating[Any]]


def dot_se(norm: ArrayLike, query_norm: ArrayLike, score: ArrayLike, dim: int) -> Array:
    """Return the standard error of an inner product of two sketches.

    Args:
        norm: ``|u|`` of the sample, or of a source file's summed sketch.
        query_norm: ``|z|`` of the query.
        score: The inner product.
        dim: Sketch size ``D``.
    """
    product = np.asarray(norm, dtype=np.float64) * np.asarray(query_norm, dtype=np.float64)
    return np.sqrt((product**2 + np.asarray(score, dtype=np.float64) ** 2) / dim)


def cosine_se(cosine: ArrayLike, dim: int) -> Array:
    """Return the standard error of a cosine between two sketches, ``(1 - c²) / sqrt(D)``."""
    return (1.0 - np.asarray(cosine, dtype=np.float64) ** 2) / np.sqrt(dim)


def noise_floor(n: int, dim: int, alpha: float = 0.05) -> float:
    """Return the ``|cosine|`` that unrelated gradients pass with probability ``alpha``, anywhere among ``n`` samples.

    Without any true similarity a cosine of sketches is normal with variance ``1 / D``. Bonferroni over ``n`` samples
    and both signs.

    Example:
        >>> round(noise_floor(1_000_000, 4096), 3)
        0.085
    """
    return NormalDist().inv_cdf(1.0 - alpha / (2 * max(n, 1))) / dim**0.5
