"""How the batches table divides the log into blocks, and where that table contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditlog.trust.logview import StoredBatch
from auditlog.trust.verdict import Finding, FindingList

_NO_END = 1 << 65  # beyond any sequence number


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive entries up to ``end``: those of one batch, or some that no batch covers.

    ``is_tail`` marks the endless block behind the last batch.
    """

    end: int
    batch: StoredBatch | None
    is_tail: bool = False


def blocks(batches: Sequence[StoredBatch], findings: FindingList) -> Iterator[Block]:
    """Yield the blocks that the batches cut the log into, then the endless tail; reports a broken table."""
    position = number = 0
    for row, batch in enumerate(batches):
        if batch.batch != number or batch.first_seq != position or batch.entries < 1:
            findings.add(_batch_finding(row, number, position, batch))
        number = batch.batch + 1
        if batch.entries < 1 or batch.first_seq < position:
            continue
        if batch.first_seq > position:
            yield Block(batch.first_seq, None)
        position = batch.first_seq + batch.entries
        yield Block(position, batch)
    while True:
        yield Block(_NO_END, None, is_tail=True)


def _batch_finding(row: int, number: int, position: int, batch: StoredBatch) -> Finding:
    where = f"table batches, row {row}"
    if batch.batch > number and batch.first_seq > position:
        end = batch.first_seq - 1
        return Finding("E_LOST", f"batch {number} is missing: no batch covers entries {position} to {end}", where)
    return Finding(
        "E_BATCH",
        f"row {row} says batch {batch.batch}, first entry {batch.first_seq}, {batch.entries} entries; "
        f"expected batch {number} from entry {position}",
        where,
    )
