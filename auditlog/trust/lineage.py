"""Names for people: which source file and row a record is about, and what was changed in a row that was edited."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from auditlog.format.digests import leaf_hash
from auditlog.format.manifest import RunManifest
from auditlog.format.records import RECORD

UNKNOWN_SAMPLE = -1

_INTEGER_FIELDS = tuple(name for name in RECORD.names or () if RECORD[name].kind in "iu")
_NEAR = 3  # values this close to the present one are tried
_MAX_NEIGHBOURS = 64


class SourceTable:
    """The manifest's source files, looked up by record.

    Args:
        manifest: The run's manifest, as it stands.
    """

    def __init__(self, manifest: RunManifest) -> None:
        sources = manifest.data.sources
        self._by_id = {source.source_id: source for source in sources}
        size = max(self._by_id, default=-1) + 2  # the last place stands for every unknown id
        self._first = np.zeros(size, np.int64)
        self._rows = np.zeros(size, np.int64)
        self._version = np.full(size, -1, np.int64)
        for source in sources:
            self._first[source.source_id] = source.first_index
            self._rows[source.source_id] = source.rows
            self._version[source.source_id] = source.data_version_id

    def path(self, source_id: int) -> str:
        """Return the path of a source file, or words that say there is none."""
        source = self._by_id.get(source_id)
        return source.path if source else f"unknown source {source_id}"

    def describe(self, record: np.void) -> str:
        """Return step, source file and row of one record, as they stand."""
        return f"step {record['step']}, {self.path(int(record['source_id']))} row {record['row']}"

    def sample_index(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        """Return the sample index of each record, ``(n,)``; -1 where source or row do not exist."""
        source = np.minimum(rows["source_id"], len(self._first) - 1)
        inside = rows["row"] < self._rows[source].astype(np.uint64)
        index = self._first[source] + rows["row"].astype(np.int64)
        return np.where(inside, index, UNKNOWN_SAMPLE)

    def version_differs(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return where a record names another data version than its source file has, ``(n,)``."""
        source = np.minimum(rows["source_id"], len(self._first) - 1)
        differs: NDArray[np.bool_] = self._version[source] != rows["data_version_id"]
        return differs


def changed_field(record: np.void, hashed_leaf: bytes, neighbours: NDArray[np.void]) -> tuple[str, int] | None:
    """Find the one integer field whose old value gives ``hashed_leaf``, by trying likely values.

    Candidates are values near the present one and those of neighbouring records. Most edits by hand are of this
    sort; anything else (a float, a commitment, two fields at once) is not found.

    Returns:
        Name of the field and the value it had when it was hashed, or ``None``.
    """
    trial = np.array([record], dtype=RECORD)
    for field in _INTEGER_FIELDS:
        present = int(record[field])
        for value in _candidates(field, present, neighbours):
            trial[field] = value
            if leaf_hash(trial.tobytes()) == hashed_leaf:
                return field, value
        trial[field] = present
    return None


def _candidates(field: str, present: int, neighbours: NDArray[np.void]) -> Iterator[int]:
    bounds = np.iinfo(RECORD[field])
    near = (present + delta for delta in range(-_NEAR, _NEAR + 1) if delta)
    values = set(np.unique(neighbours[field])[:_MAX_NEIGHBOURS].tolist()) - {present}
    for value in (*near, 0, *sorted(values)):
        if bounds.min <= value <= bounds.max and value != present:
            yield value
