"""Which weights are folded on both sides, by a cost model over shapes alone, so that it is the same everywhere.

Costs are in floating-point operations of a matrix product, for one sample of ``T`` tokens and a weight of ``r x c``:

    exact      2 T r c + 16 r c                  form the gradient, then fold it
    factored   16 T (r + c) + 2 T k_r k_c        fold both sides of every token, then contract

A folded entry passes through memory, which takes as long as 16 operations (2.5 entries a nanosecond and core against
40 GFLOP/s). The exact route has no error of a first fold and can be whitened entry by entry, so it is kept until it
costs eight times as much: adapters, norms, biases and small matrices always, the weights of a whole model hardly ever.
"""

from __future__ import annotations

from collections.abc import Sequence

BUCKETS = 64  # of each side; see METHODS.md for the sizes that were compared
# Of a vocabulary: few of its rows belong to one sample, all look alike, and whitening makes the rare ones large. Folded
# into 64 buckets, different tokens are taken for each other.
TABLE_BUCKETS = 2048
TABLE_RATIO = 8  # a side that is so many times as long as the other is a vocabulary
TOKENS = 128  # per sample, for the choice alone
ENTRY_FLOPS = 16
WORTH_OF_EXACTNESS = 8


def buckets_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the buckets of both sides of a weight on the factored route, ``None`` on the exact route."""
    if len(shape) != 2:
        return None
    rows, columns = shape
    buckets = _side(rows, columns), _side(columns, rows)
    is_worth_it = exact_flops(shape, TOKENS) > WORTH_OF_EXACTNESS * factored_flops(shape, buckets, TOKENS)
    return buckets if is_worth_it else None


def is_table(shape: Sequence[int]) -> bool:
    """Tell whether one side of a weight is a vocabulary."""
    return max(shape) > TABLE_RATIO * min(shape)


def _side(n: int, other: int) -> int:
    return min(n, TABLE_BUCKETS if n > TABLE_RATIO * other else BUCKETS)


def exact_flops(shape: Sequence[int], tokens: int) -> int:
    """Return the cost of one sample's gradient on the exact route."""
    rows, columns = shape
    return (2 * tokens + ENTRY_FLOPS) * rows * columns


def factored_flops(shape: Sequence[int], buckets: tuple[int, int], tokens: int) -> int:
    """Return the cost on the factored route."""
    return ENTRY_FLOPS * tokens * sum(shape) + 2 * tokens * buckets[0] * buckets[1]
