"""One small instance of every sketch operator, by name, for tests that all operators must pass."""

from __future__ import annotations

from collections.abc import Callable

from attribution.sketch.operators import OPERATORS, SRHT, Chunked, Composed, CountSketch, Operator, TwoSided, Weight
from attribution.sketch.operators.kronecker import concatenated, summed

WEIGHTS = [Weight(12, 20), Weight(30, 4), Weight(9, 5)]  # 405 entries

Build = Callable[[str], Operator]

# 405 entries: neither a power of two nor a multiple of D, so every operator that fills up does.
N, D = 405, 32

FLAT: dict[str, Build] = {name: (lambda seed, kind=kind: kind(N, D, seed)) for name, kind in OPERATORS.items()}
COMPOSITE: dict[str, Build] = {
    "two_sided": lambda seed: TwoSided(Weight(15, 27), 4, 6, seed),
    "two_sided, one side left": lambda seed: TwoSided(Weight(27, 15), 4, 15, seed),
    "concatenated": lambda seed: concatenated(WEIGHTS, 3, 5, seed),
    "summed": lambda seed: summed(WEIGHTS, 3, 5, 8, seed),
    "chunked": lambda seed: Chunked.of(SRHT, N, D, seed, chunk=100),
    "composed": lambda seed: Composed(SRHT(64, D, seed), CountSketch(N, 64, f"{seed}/first")),
}
ALL = FLAT | COMPOSITE
