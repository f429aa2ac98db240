"""The stored sketches of a run as a stream of blocks, narrowed by what their records say, never copied without need.

A block is a stretch of one shard, seen through its memory map, and the records whose sketches lie in it. Filters
look at records only, so a stretch that holds no wanted sketch is never read. The gradients that the optimizer
consumed lie between the sketches of samples; no record names them, so no block yields them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from auditlog.format.manifest import RunManifest
from auditlog.format.records import RECORD
from auditlog.ledger.columns import number_columns
from auditlog.ledger.shards import SHARD_ROWS, ShardReader
from auditlog.trust.lineage import SourceTable


@dataclass(frozen=True)
class LogSketches:
    """One log's part.

    Attributes:
        records: ``(n,)`` of dtype ``RECORD``.
        shards: What they point into.
    """

    records: NDArray[np.void]
    shards: ShardReader

    @cached_property
    def places(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Shard and row of each record, each ``(n,)``: kept, for picking them out takes a while."""
        return np.ascontiguousarray(self.records["shard"]), np.ascontiguousarray(self.records["shard_row"])


@dataclass(frozen=True, slots=True)
class SketchRows:
    """A block: ``n`` records in ledger order and their stored sketches.

    The value of an entry is ``scale_raw * q`` in the raw form and ``scale_whitened * q`` in the whitened one.

    Attributes:
        records: ``(n,)`` of dtype ``RECORD``.
        span: ``(m, width)`` int8, a read-only view of the memory map; ``m >= n``, for it may hold other rows too.
        place: ``(n,)`` uint32, row of ``span`` that belongs to each record.
        dim: ``D``, entries of one form.
    """

    records: NDArray[np.void]
    span: NDArray[np.int8]
    place: NDArray[np.uint32]
    dim: int

    @property
    def rows(self) -> NDArray[np.int8]:
        """``(n, width)`` int8, raw and whitened form side by side: a view where the rows lie together, else a copy."""
        first = int(self.place[0])
        if np.array_equal(self.place, np.arange(first, first + len(self.place))):
            return self.span[first : first + len(self.place)]
        return self.span[self.place]

    @property
    def raw(self) -> NDArray[np.int8]:
        """``(n, D)`` int8."""
        return self.rows[:, : self.dim]

    @property
    def whitened(self) -> NDArray[np.int8]:
        """``(n, D)`` int8; ``(n, 0)`` in a run that stores the raw form alone."""
        return self.rows[:, self.dim :]

    def to_arrow(self) -> pa.RecordBatch:
        """Return the records' numbers and both forms as lists of ``D`` int8.

        A raw form that lies together on the disk is not copied; beside a whitened one it is, as Arrow wants each
        column in one piece.
        """
        rows = self.rows
        columns: dict[str, Any] = number_columns(self.records)
        columns["raw"] = _int8_lists(rows[:, : self.dim])
        if rows.shape[1] > self.dim:
            columns["whitened"] = _int8_lists(rows[:, self.dim :])
        return pa.record_batch(columns)


class SketchReader:
    """Sketches of chosen records. A ``RunReader`` gives one of a run (``sketches``, ``live_sketches``).

    Works on after the run's database has been closed: it holds the records and maps the shards when they are read.

    Args:
        manifest: The run's manifest.
        logs: The parts in ledger order, one for each rank.
    """

    def __init__(self, manifest: RunManifest, logs: Sequence[LogSketches]) -> None:
        self._manifest = manifest
        self._logs = tuple(logs)

    def __len__(self) -> int:
        return sum(len(log.records) for log in self._logs)

    @property
    def records(self) -> NDArray[np.void]:
        """``(n,)`` of dtype ``RECORD``, in ledger order, rank by rank."""
        return np.concatenate([log.records for log in self._logs])

    @property
    def dim(self) -> int:
        """``D``, entries of one form."""
        return self._manifest.sketch.dim

    @property
    def forms(self) -> tuple[str, ...]:
        """``("raw",)`` or ``("raw", "whitened")``."""
        return self._manifest.sketch.forms

    def where(
        self,
        *,
        sources: Collection[int] | None = None,
        data_versions: Collection[int] | None = None,
        steps: Collection[int] | None = None,
        samples: Collection[int] | None = None,
    ) -> SketchReader:
        """Return a reader of those records for which everything given holds; nothing is read from the shards.

        Args:
            sources: Source ids of the data manifest.
            data_versions: Data version ids.
            steps: Optimizer steps, for instance ``range(1, 101)``.
            samples: Sample indices.
        """
        kept, source_table = [], SourceTable(self._manifest)
        for log in self._logs:
            found = np.ones(len(log.records), np.bool_)
            for values, wanted in (
                (log.records["source_id"], sources),
                (log.records["data_version_id"], data_versions),
                (log.records["step"], steps),
                (source_table.sample_index(log.records), samples),
            ):
                if wanted is not None:
                    found &= _among(values, wanted)
            kept.append(LogSketches(log.records[found], log.shards))
        return SketchReader(self._manifest, kept)

    def blocks(self, span_rows: int = SHARD_ROWS) -> Iterator[SketchRows]:
        """Yield the sketches block by block, in ledger order.

        Args:
            span_rows: Stored rows that one block spans at most.

        Raises:
            StoreError: If a shard is missing or too short.
        """
        for log in self._logs:
            if not len(log.records):
                continue
            shard, row = log.places
            stretch = row // np.uint32(span_rows)
            borders = np.flatnonzero((shard[1:] != shard[:-1]) | (stretch[1:] != stretch[:-1])) + 1
            for start, stop in pairwise([0, *borders.tolist(), len(row)]):
                place = row[start:stop]
                first = int(place.min())
                span = log.shards.span(int(shard[start]), first, int(place.max()) + 1)
                yield SketchRows(log.records[start:stop], span, place - np.uint32(first), self.dim)

    def to_arrow(self, span_rows: int = SHARD_ROWS) -> pa.RecordBatchReader:
        """Return the blocks as a stream of Arrow record batches; ``read_all()`` of it gives a table."""
        numbers: dict[str, Any] = number_columns(np.empty(0, RECORD))
        schema = pa.record_batch(numbers).schema
        for form in self.forms:
            schema = schema.append(pa.field(form, pa.list_(pa.int8(), self.dim)))
        return pa.RecordBatchReader.from_batches(schema, (block.to_arrow() for block in self.blocks(span_rows)))


def _int8_lists(rows: NDArray[np.int8]) -> pa.FixedSizeListArray:
    """Return rows ``(n, D)`` as an Arrow column; no copy is made of rows that are in one piece."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    values = pa.Array.from_buffers(pa.int8(), len(flat), [None, pa.py_buffer(flat)])
    return pa.FixedSizeListArray.from_arrays(values, rows.shape[1])


def _among(values: NDArray[Any], wanted: Collection[int]) -> NDArray[np.bool_]:
    """Return which values are wanted; a range may be far longer than memory."""
    values = values.astype(np.int64)
    if isinstance(wanted, range):
        offset = values - wanted.start
        place, rest = np.divmod(offset, wanted.step)
        inside: NDArray[np.bool_] = (rest == 0) & (place >= 0) & (place < len(wanted))
        return inside
    return np.isin(values, np.fromiter(wanted, np.int64, len(wanted)))
