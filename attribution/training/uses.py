"""How often, and in which epoch, each sample was used by the steps that still count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from auditlog.format.records import Flag
from auditlog.ledger.reader import RunReader
from auditlog.trust.attempts import FIRST, Attempt, is_live

# What one step, or one process's log, used: attempt, step, epoch, sample and whether it only filled a batch.
USE = np.dtype([("attempt", "<u2"), ("step", "<u8"), ("epoch", "<u4"), ("index", "<u4"), ("padded", "?")])


class Uses:
    """Counts uses of samples over all processes of a run; twenty bytes per use.

    Args:
        rows: Samples in the data manifest.
    """

    def __init__(self, rows: int) -> None:
        self._uses: list[NDArray[np.void]] = []
        self._attempts: list[Attempt] = [FIRST]
        self._counts = np.zeros(rows, np.int64)
        self._in_epoch = np.zeros(rows, bool)
        self._epoch: int | None = None

    @classmethod
    def resumed(cls, rows: int, attempts: Iterable[Attempt], uses: Iterable[NDArray[np.void]]) -> Uses:
        """Return the uses that a run's logs tell of, one array per process."""
        found = cls(rows)
        found._attempts, found._uses = list(attempts), list(uses)
        found._count()
        return found

    def earlier(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how often each of these samples was used before, repeats that only fill batches left out."""
        counts: NDArray[np.int64] = self._counts[index]
        return counts

    def in_epoch(self, epoch: int) -> NDArray[np.bool_]:
        """Return which samples, ``(rows,)``, this epoch used so far."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._in_epoch[:] = False
            for use in map(self._live, self._uses):
                self._in_epoch[use["index"][use["epoch"] == epoch]] = True
        return self._in_epoch

    def add(self, step: int, epoch: int | None, index: NDArray[np.int64], padded: NDArray[np.bool_]) -> None:
        """Count a step's uses, over all processes."""
        use = np.zeros(len(index), USE)
        use["attempt"], use["step"], use["index"], use["padded"] = self._attempts[-1].number, step, index, padded
        use["epoch"] = self._counts[index] if epoch is None else epoch
        self._uses.append(use)
        np.add.at(self._counts, index[~padded], 1)
        if epoch is not None and epoch == self._epoch:
            self._in_epoch[index] = True

    def begin(self, attempt: Attempt) -> None:
        """Leave out what the weights at the new attempt's start did not go through."""
        self._attempts.append(attempt)
        self._count()

    def _count(self) -> None:
        self._epoch = None
        self._counts[:] = 0
        for use in map(self._live, self._uses):
            np.add.at(self._counts, use["index"][~use["padded"]].astype(np.int64), 1)

    def _live(self, use: NDArray[np.void]) -> NDArray[np.void]:
        live: NDArray[np.void] = use[is_live(self._attempts, use["attempt"], use["step"])]
        return live


def read_uses(run: Path) -> tuple[list[Attempt], NDArray[np.void]]:
    """Return the attempts and all uses that one process's log tells of."""
    with RunReader.open(run) as reader:
        records = reader.records()
        uses = np.zeros(len(records), USE)
        for name in ("attempt", "step", "epoch"):
            uses[name] = records[name]
        uses["index"] = reader.sample_index(records)
        uses["padded"] = records["flags"] & Flag.PADDED_DUPLICATE != 0
        return list(reader.attempts), uses
