"""What became of every sample of the data manifest: used by the final weights, or else what is known of why not.

The lists do not overlap, and their counts add up to the manifest's rows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import FormatError
from auditlog.format.notices import Dataset, parse_notice
from auditlog.format.records import Event, EventKind
from auditlog.ledger.reader import RunReader

MAX_NAMED = 1_000  # samples of one list that a program is told by name


class Fate(enum.StrEnum):
    """What became of a sample."""

    USED = "used"
    SUPERSEDED = "not used by the final weights"
    DROPPED = "dropped by the trainer before training"
    NOT_REACHED = "not reached"
    UNUSED = "never used"

    @property
    def reason(self) -> str:
        """What is known of how that came about."""
        return _REASONS[self]


_REASONS = {
    Fate.USED: "recorded in steps that led to the final weights",
    Fate.SUPERSEDED: "recorded only in steps that a later attempt went back behind",
    Fate.DROPPED: "the training dataset did not hold them when training began",
    Fate.NOT_REACHED: "in the training dataset, and no step used them",
    Fate.UNUSED: "whether the trainer dropped them is not recorded",
}


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one fate.

    Attributes:
        count: How many.
        named: Their sample indices, ascending: all, or only the first ones where the log names no more.
        by_source: How many of each source file; ``None`` where not all are named.
    """

    count: int
    named: NDArray[np.int64]
    by_source: tuple[int, ...] | None


def sample_use(reader: RunReader) -> dict[Fate, Samples]:
    """Return what became of the samples, by fate.

    With a dataset notice of every attempt that took steps there are ``DROPPED`` and ``NOT_REACHED``; otherwise both
    are ``UNUSED``. ``SUPERSEDED`` is there where training was resumed.

    Raises:
        FormatError: If a dataset notice is malformed.
    """
    rows = reader.manifest.data.rows
    logged = [(rank.sample_index(own), own["attempt"], rank.live(own)) for rank, own in _records(reader)]
    index, attempt, live = (np.concatenate(columns) for columns in zip(*logged, strict=True))
    used, ever = np.unique(index[live]), np.unique(index)
    rest = np.setdiff1d(np.arange(rows), ever, assume_unique=True)
    found = {Fate.USED: _all(reader, used)}
    if len(reader.attempts) > 1:
        found[Fate.SUPERSEDED] = _all(reader, np.setdiff1d(ever, used, assume_unique=True))
    absent = _absent(reader, set(attempt.tolist()), set(attempt[live].tolist()))
    return found | ({Fate.UNUSED: _all(reader, rest)} if absent is None else _apart(reader, rest, absent))


def _apart(reader: RunReader, rest: NDArray[np.int64], absent: Dataset) -> dict[Fate, Samples]:
    """Tell the unused samples that the trainer's dataset lacked from those that it held."""
    dropped = np.intersect1d(np.array(absent.named, np.int64), rest)
    others = np.setdiff1d(rest, dropped, assume_unique=True)
    if len(absent.named) == absent.absent:
        return {Fate.DROPPED: _all(reader, dropped), Fate.NOT_REACHED: _all(reader, others)}
    known = others[others < (absent.named or (0,))[-1]]  # beyond it the log does not say which of the two
    return {
        Fate.DROPPED: Samples(absent.absent, dropped, None),
        Fate.NOT_REACHED: Samples(len(rest) - absent.absent, known, None),
    }


def places(reader: RunReader, index: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ``(source_id, row)`` of each sample index."""
    source = _source(reader, index)
    first = np.array([each.first_index for each in reader.manifest.data.sources], np.int64)
    return list(zip(source.tolist(), (index - first[source]).tolist(), strict=True))


def rows_in_words(rows: Sequence[tuple[str, int]], count: int, most: int) -> str:
    """Name rows by file, runs of them by their ends.

    Args:
        rows: File and row of the first samples, in order.
        count: How many there are in all.
        most: How many to name.

    Example:
        >>> rows_in_words([("a.jsonl", 0), ("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 7)], 9, 4)
        'a.jsonl: 0–2; b.jsonl: 7; and 5 more'
    """
    shown = rows[:most]
    files = [
        f"{file}: {', '.join(_runs([row for _, row in group]))}"
        for file, group in groupby(shown, key=lambda place: place[0])
    ]
    more = [f"and {count - len(shown):,} more"] if shown and count > len(shown) else []
    return "; ".join([*files, *more])


def _runs(rows: list[int]) -> Iterator[str]:
    """Yield ``3`` for a row of its own and ``5–9`` for consecutive ones."""
    for _, group in groupby(enumerate(rows), key=lambda item: item[1] - item[0]):
        run = [row for _, row in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}"


def _records(reader: RunReader) -> Iterator[tuple[RunReader, NDArray[np.void]]]:
    for rank in reader.ranks:
        yield rank, rank.records()


def _all(reader: RunReader, index: NDArray[np.int64]) -> Samples:
    sources = len(reader.manifest.data.sources)
    by_source = np.bincount(_source(reader, index), minlength=sources)
    return Samples(len(index), index, tuple(by_source.tolist()))


def _source(reader: RunReader, index: NDArray[np.int64]) -> NDArray[np.int64]:
    first = np.array([source.first_index for source in reader.manifest.data.sources], np.int64)
    found: NDArray[np.int64] = np.searchsorted(first, index, side="right") - 1
    return found


def _absent(reader: RunReader, attempts: set[int], live: set[int]) -> Dataset | None:
    """Return which samples no dataset of a live attempt held; ``None`` if the log does not tell."""
    told = [found for rank in reader.ranks for found in _datasets(rank)]
    if not live or not attempts <= {attempt for attempt, _ in told}:
        return None
    distinct = {dataset for attempt, dataset in told if attempt in attempts}
    if len(distinct) == 1:
        return distinct.pop()
    if any(len(dataset.named) < dataset.absent for dataset in distinct):
        return None  # several datasets, and not all that they lack is named
    common = set.intersection(*(set(dataset.named) for attempt, dataset in told if attempt in live))
    return Dataset(len(common), tuple(sorted(common)))


def _datasets(reader: RunReader) -> Iterator[tuple[int, Dataset]]:
    """Yield each dataset notice of one log with the attempt that it was given in."""
    attempt = 0
    for event in reader.events():
        attempt += event.kind == EventKind.SESSION
        notice = parse_notice(event) if event.kind == EventKind.NOTICE else None
        if isinstance(notice, Dataset):
            _check_inside(event, notice, reader.manifest.data.rows)
            yield attempt, notice


def _check_inside(event: Event, notice: Dataset, rows: int) -> None:
    if max(notice.absent, (notice.named or (0,))[-1] + 1) > rows:
        raise FormatError(f"entry {event.seq}: a dataset notice names samples that the data manifest does not have")
