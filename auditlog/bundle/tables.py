"""The tables of a bundle: Parquet, one column for every hashed value and one for each stored hash, bit for bit.

Nothing is dictionary-coded that holds a float, because equal-looking floats (``0.0`` and ``-0.0``, NaNs) would become
one. Nullable columns do not exist: a cell that has no place in the format is not exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from auditlog.format.records import RECORD
from auditlog.ledger.columns import DIGEST_BYTES, TABLES, records_to_arrow, rows_to_arrow
from auditlog.ledger.store import StoredLog
from auditlog.ledger.view import refuse

ROW_GROUP = 65_536
EVENT_ROW_GROUP = 8_192  # bodies are text of any length
SEGMENT_RECORDS = 4 * ROW_GROUP  # a verifier reads a segment in one piece
SEGMENT_EVENTS = 8 * EVENT_ROW_GROUP

_TYPES = {"USMALLINT": pa.uint16(), "UINTEGER": pa.uint32(), "UBIGINT": pa.uint64(), "BIGINT": pa.int64()}
_REPETITIVE = ("micro", "slot", "part", "epoch", "attempt", "flags", "source_id", "data_version_id", "n_tokens", "kind")


def schema(table: str) -> pa.Schema:
    """Return the columns of one table of a bundle, in order; digests have exactly 32 bytes."""
    return pa.schema([pa.field(name, _type(table, name), nullable=False) for name in TABLES[table]])


def records(log: StoredLog) -> Iterator[pa.Table]:
    """Yield the records in ``seq`` order, ``ROW_GROUP`` at a time at most.

    Raises:
        FormatError: If a cell has no place in the format.
    """
    for chunk in log.records(refuse):
        if not len(chunk.rows):
            continue
        yield _fitted("records", records_to_arrow(chunk.rows, list(chunk.leaves)))


def events(log: StoredLog) -> Iterator[pa.Table]:
    """Yield the events in ``seq`` order, ``EVENT_ROW_GROUP`` at a time at most; errors as for ``records``."""
    waiting = []
    for stored in log.events(refuse):
        event = stored.event
        waiting.append((event.fmt, event.seq, event.kind, event.ts_us, event.body, stored.leaf))
        if len(waiting) == EVENT_ROW_GROUP:
            yield _fitted("events", rows_to_arrow("events", waiting))
            waiting = []
    if waiting:
        yield _fitted("events", rows_to_arrow("events", waiting))


def batches(log: StoredLog) -> pa.Table:
    """Return the batches in table order."""
    rows = [(batch.batch, batch.first_seq, batch.entries, batch.chain) for batch in log.batches(refuse)]
    return _fitted("batches", rows_to_arrow("batches", rows))


def checkpoints(log: StoredLog) -> pa.Table:
    """Return the signed log checkpoints in table order."""
    return _fitted("checkpoints", rows_to_arrow("checkpoints", list(log.notes(refuse))))


def write(path: Path, table: str, chunks: Iterable[pa.Table]) -> int:
    """Write one Parquet file, a row group for each chunk, and return its number of rows.

    The same chunks give the same bytes under the same version of pyarrow, whose name the file holds.
    """
    rows = 0
    repetitive = [name for name in TABLES[table] if name in _REPETITIVE]
    with pq.ParquetWriter(
        path, schema(table), compression="zstd", use_dictionary=repetitive, write_statistics=False, store_schema=False
    ) as writer:
        for chunk in chunks:
            writer.write_table(chunk, row_group_size=ROW_GROUP)
            rows += chunk.num_rows
    return rows


def _type(table: str, name: str) -> pa.DataType:
    sql_type = TABLES[table][name]
    if name in ("leaf", "chain") or (table == "records" and RECORD.fields is not None and sql_type == "BLOB"):
        return pa.binary(DIGEST_BYTES)
    return {"FLOAT": pa.float32(), "BLOB": pa.binary()}.get(sql_type) or _TYPES[sql_type]


def _fitted(table: str, rows: pa.Table) -> pa.Table:
    return rows.select(schema(table).names).cast(schema(table))
