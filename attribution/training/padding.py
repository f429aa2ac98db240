"""Repeats that only fill the last batches of an epoch, so that every process gets equally many rows.

Distributed loaders close an epoch with rows from its beginning: torch's ``DistributedSampler(drop_last=False)``,
accelerate's ``even_batches``, its iterable and its dispatched loaders. Such a repeat did shape the weights: it is
recorded, counts in sums and scores, and carries a flag that says why it is there.

What is a repeat? accelerate says when a loader is at its end and how many rows of the last batch, over all processes,
are real ones; there the position decides, and a sample that legitimately comes twice is never taken for padding. A
loader that does not know its length says only that it is at its end; then it is the second use within the epoch. A
plain loop says nothing: where it tells its epoch (``audit.epoch = epoch``, beside ``sampler.set_epoch(epoch)``), each
second use within the epoch counts as padding; where it does not, nothing is flagged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Loader:
    """What accelerate says about the loader that the loop is going through.

    Attributes:
        iteration: How often the loop went through it before.
        at_end: Its last batch has been handed out.
        real: Rows of the last batch, over all processes, that are no padding; ``None`` if it does not know.
    """

    iteration: int
    at_end: bool
    real: int | None

    @classmethod
    def active(cls) -> Loader | None:
        """Return accelerate's active loader; ``None`` in a loop without one."""
        state = sys.modules.get("accelerate.state")
        if state is None or not state.GradientState._shared_state:
            return None
        loader = state.GradientState().active_dataloader
        if loader is None:
            return None
        remainder = loader.remainder
        is_full = remainder == 0 or (remainder < 0 and loader._drop_last)
        real = sys.maxsize if is_full else remainder if remainder > 0 else None
        return cls(getattr(loader, "iteration", 0), bool(loader.end_of_dataloader), real)


def find_padding(
    ids: Sequence[Sequence[Ids]], used: NDArray[np.bool_] | None, loader: Loader | None, *, is_packed: bool = False
) -> list[list[NDArray[np.bool_]]]:
    """Return which samples of a step only fill its batches.

    Args:
        ids: Samples of each process and micro-batch, in order.
        used: ``(rows,)``, which samples were used in this epoch before; ``None`` if the epoch is not known.
        loader: accelerate's loader, if the loop goes through one.
        is_packed: Rows hold several samples, so the loader's count of rows does not count samples.

    Returns:
        One mask for each of ``ids``.
    """
    padded = [[np.zeros(len(micro), bool) for micro in of_rank] for of_rank in ids]
    last = max((len(of_rank) for of_rank in ids), default=0) - 1
    if last < 0 or (loader is not None and not loader.at_end):
        return padded
    if loader is not None and loader.real is not None and not is_packed:
        position = 0
        for own, mask in zip(ids, padded, strict=True):
            if len(own) > last:
                mask[last][:] = position + np.arange(len(own[last])) >= loader.real
                position += len(own[last])
        return padded
    if used is None:
        return padded
    seen = used.copy()
    for micro in range(last + 1):
        for own, mask in zip(ids, padded, strict=True):
            if len(own) > micro:
                _, first = np.unique(own[micro], return_index=True)
                mask[micro][:] = True
                mask[micro][first] = False
                mask[micro] |= seen[own[micro]]
                seen[own[micro]] = True
    return padded
