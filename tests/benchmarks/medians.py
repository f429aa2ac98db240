"""Medians of paired measurements, with intervals that assume nothing about how the noise is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Median:
    """A median and an interval that covers it in at least 95 of 100 cases; the whole range for fewer than six values.

    Attributes:
        value: The median of the values.
        low: Lower end of the interval.
        high: Its upper end.
    """

    value: float
    low: float
    high: float

    def figures(self, name: str) -> dict[str, Any]:
        """Return the entries of ``results.json`` for it."""
        return {name: self.value, f"{name}.interval": [self.low, self.high]}


def of(values: Sequence[float]) -> Median:
    """Return the median of ``values`` with its interval.

    The interval runs from the k-th smallest to the k-th largest value: the true median falls below all but k - 1 of n
    values with the binomial probability of fewer than k heads in n throws (David and Nagaraja 2003, 7.1).

    Example:
        >>> of([3.0, 1.0, 2.0])
        Median(value=2.0, low=1.0, high=3.0)
    """
    ordered, n = sorted(values), len(values)
    k = 1
    while 2 * sum(comb(n, heads) for heads in range(k + 1)) <= (1 - LEVEL) * 2**n:
        k += 1
    return Median(median(ordered), ordered[k - 1], ordered[n - k])
