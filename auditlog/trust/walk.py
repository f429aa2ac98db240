"""One pass over all entries: order, hashes, chain and tree, every one of them recomputed from the rows.

Hashes stored beside the rows only serve to say *what* was changed. A chain break or an edited row does not end the
pass: from there the chain is taken up from the stored value, so that later changes are located as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from auditlog.format.chain import chain_after
from auditlog.format.digests import genesis
from auditlog.format.merkle import Frontier
from auditlog.format.records import Event, EventKind, record_leaves
from auditlog.trust.batches import Block, blocks
from auditlog.trust.lineage import SourceTable, changed_field
from auditlog.trust.logview import LogView, StoredBatch, StoredRecords
from auditlog.trust.verdict import Finding, FindingList, counted

_MAX_DIAGNOSED = 50  # edited rows for which the changed field is searched


class Observer(Protocol):
    """Whoever wants to see the entries as they pass."""

    def see_records(self, rows: NDArray[np.void]) -> None:
        """Take a stretch of records."""

    def see_event(self, event: Event) -> None:
        """Take one event."""


@dataclass(slots=True)
class Walk:
    """What the pass found.

    ``roots`` are over the entries as they stand; ``logged_roots`` over the hashes that the chain vouches for,
    present only where rows differ from them. Sizes whose root cannot be computed are missing from both.
    """

    size: int = 0
    roots: dict[int, bytes] = field(default_factory=dict)
    logged_roots: dict[int, bytes] = field(default_factory=dict)
    root: bytes | None = None
    order: FindingList = field(default_factory=FindingList)
    hashes: FindingList = field(default_factory=FindingList)
    chain: FindingList = field(default_factory=FindingList)
    batches: FindingList = field(default_factory=FindingList)
    first_bad: int | None = None  # the first entry that is known to be wrong
    altered: set[int] = field(default_factory=set)  # entries whose row does not give its stored hash

    @property
    def rows_differ(self) -> bool:
        """Whether chain and tree hold only for the entries as they were logged, not for all rows as they stand."""
        return bool(self.logged_roots)

    def mark_bad(self, seq: int) -> None:
        """Remember the first entry from which the log does not hold."""
        self.first_bad = seq if self.first_bad is None else min(self.first_bad, seq)


@dataclass(slots=True)
class _Altered:
    """An entry whose row and stored hash disagree, until the chain says which of the two was logged."""

    seq: int
    code: str
    what: str
    detail: str  # which field had which value, where that can be told


def walk_entries(
    log: LogView,
    *,
    sizes: Iterable[int],
    covered: int,
    observers: Sequence[Observer],
    sources: SourceTable | None,
    session_kind: int | None,
    progress: Callable[[int], None] | None = None,
) -> Walk:
    """Read every entry once and recompute everything that is computed from rows.

    Args:
        log: The opened log.
        sizes: Tree sizes at which the root is wanted.
        covered: The largest size that a signed checkpoint covers; entries beyond need no batch.
        observers: Are shown every entry.
        sources: Names records; ``None`` for a log without records.
        session_kind: Event kind before which the root is wanted as well.
        progress: Called now and then with the number of entries read.
    """
    walker = _Walker(log, sizes, covered, sources)
    events = _Events(log, observers, walker, session_kind)
    for chunk in log.records():
        for observer in observers:
            observer.see_records(chunk.rows)
        _take_records(chunk, events, walker)
        if progress is not None:
            progress(walker.position)
    events.take_before(None)
    walker.finish()
    if progress is not None:
        progress(walker.position)
    return walker.walk


class _Events:
    """The events of a log, which are taken where they stand between the records."""

    def __init__(self, log: LogView, observers: Sequence[Observer], walker: _Walker, session_kind: int | None) -> None:
        self._events, self._observers = log.events(), observers
        self._walker, self._session_kind = walker, session_kind
        self.upcoming = next(self._events, None)

    def take_before(self, seq: int | None) -> None:
        """Take the events that stand before an entry, or all that are left."""
        while self.upcoming is not None and (seq is None or self.upcoming.event.seq < seq):
            event, stored = self.upcoming.event, self.upcoming.leaf
            self.upcoming = next(self._events, None)
            for observer in self._observers:
                observer.see_event(event)
            leaf = event.leaf()
            if leaf != stored:
                self._walker.alter_event(event)
            self._walker.take(event.seq, leaf, stored, event.kind == self._session_kind)


def _take_records(chunk: StoredRecords, events: _Events, walker: _Walker) -> None:
    """Take a stretch of records and the events between them; where nothing is odd, run by run."""
    sequence = chunk.rows["seq"].astype(np.int64)
    leaves, kept = record_leaves(chunk.rows), list(chunk.leaves)
    starts = [0, *(np.flatnonzero(np.diff(sequence) != 1) + 1).tolist()] if len(sequence) else []
    for start, end in zip(starts, [*starts[1:], len(sequence)], strict=True):
        first = int(sequence[start])
        events.take_before(first)
        upcoming = events.upcoming
        is_alone = upcoming is None or upcoming.event.seq >= first + end - start
        run = leaves[start:end]
        if is_alone and first == walker.position and run == kept[start:end]:
            walker.take_run(run)
            continue
        for i in range(start, end):
            events.take_before(int(sequence[i]))
            if leaves[i] != kept[i]:
                walker.alter_record(chunk.rows, i, kept[i])
            walker.take(int(sequence[i]), leaves[i], kept[i], wants_root=False)


class _Walker:
    """The running state of ``walk_entries``."""

    def __init__(self, log: LogView, sizes: Iterable[int], covered: int, sources: SourceTable | None) -> None:
        self.walk = Walk()
        self.position = 0
        self._sources = sources
        self._covered = covered
        self._sizes = sorted(set(sizes), reverse=True)  # next one last
        self._rows_tree = Frontier()
        self._logged_tree: Frontier | None = None  # exists once rows and logged hashes part
        self._tree_holds = True
        self._chain: bytes | None = genesis(log.genesis_document())
        self._stored_chain: bytes | None = None  # the other value the chain may go on from
        self._suspect: StoredBatch | None = None
        self._blocks = blocks(log.batches(), self.walk.batches)
        self._block = next(self._blocks)
        self._block_start = 0
        self._leaves: list[bytes] = []
        self._stored: list[bytes] = []
        self._altered: list[_Altered] = []
        self._marks: set[int] = set()
        self._has_hole = False

    def alter_record(self, rows: NDArray[np.void], index: int, stored: bytes) -> None:
        """Note that the row at ``index`` does not give its stored hash."""
        row = rows[index]
        where = self._sources.describe(row) if self._sources else f"step {row['step']}"
        detail = ""
        if len(self.walk.hashes) + len(self._altered) < _MAX_DIAGNOSED:
            found = changed_field(row, stored, rows[max(0, index - 512) : index + 512])
            if found:
                detail = self._describe_change(row, *found)
        self._alter(_Altered(int(row["seq"]), "E_LEAF", f"record {row['seq']} ({where})", detail))

    def _describe_change(self, row: np.void, name: str, value: int) -> str:
        was, now = str(value), str(row[name])
        if name == "source_id" and self._sources:
            was, now = (f"{i} ({self._sources.path(int(i))})" for i in (was, now))
        return f"{name} was {was} and is {now} now"

    def alter_event(self, event: Event) -> None:
        """Note that an event does not give its stored hash."""
        what = f"event {event.seq} ({_kind_name(event.kind)})"
        self._alter(_Altered(event.seq, "E_EVENT", what, ""))

    def _alter(self, altered: _Altered) -> None:
        self._altered.append(altered)
        self.walk.altered.add(altered.seq)

    def take_run(self, leaves: list[bytes]) -> None:
        """Take the next entries, whose rows give the hashes stored beside them."""
        while leaves:
            room = self._block.end - self.position
            part, leaves = leaves[:room], leaves[room:]
            self._leaves += part
            self._stored += part
            self.position += len(part)
            if self.position >= self._block.end:
                self._close_block()

    def take(self, seq: int, leaf: bytes, stored: bytes, wants_root: bool) -> None:
        """Take the next entry."""
        if seq != self.position:
            if seq < self.position:
                self._report_order(seq, f"entry {seq} is there twice")
                return
            self._report_gap(self.position, seq)
            self._skip_to(seq)
        if wants_root:
            self._marks.add(seq)
        self._leaves.append(leaf)
        self._stored.append(stored)
        self.position = seq + 1
        if self.position >= self._block.end:
            self._close_block()

    def finish(self) -> None:
        """Close the last block, which may be cut short."""
        cut_short = self._block.batch is not None and self.position < self._block.end
        unfilled = [self._block.batch] if cut_short else []
        unfilled += [block.batch for block in self._remaining()]
        for batch in unfilled:
            if batch is not None:
                self._report_unfilled(batch)
        self._has_hole = self._has_hole or cut_short
        self._close_block()
        self._settle_suspect(resolved=None)
        self.walk.size = self.position
        self.walk.root = self._rows_tree.root() if self._tree_holds else None

    def _remaining(self) -> Iterator[Block]:
        """Yield the blocks that no entry has reached, without the endless tail."""
        for block in self._blocks:
            if block.batch is None and block.is_tail:
                return
            yield block

    def _report_unfilled(self, batch: StoredBatch) -> None:
        have = max(0, self.position - batch.first_seq)
        message = (
            f"batch {batch.batch} should hold {counted(batch.entries, 'entry', 'entries')} and holds {have:,}: "
            f"the log ends after {self.position:,}"
        )
        self.walk.batches.add(Finding("E_LOST", message, "table batches"))

    # --- order ---------------------------------------------------------------------------------------

    def _report_order(self, seq: int, message: str) -> None:
        self.walk.mark_bad(seq)
        self.walk.order.add(Finding("E_SEQ", message, "tables records and events", seq))

    def _report_gap(self, first: int, end: int) -> None:
        if end - first == 1:
            message = f"entry {first} is missing"
        else:
            message = f"entries {first} to {end - 1} are missing ({end - first:,})"
        self._report_order(first, message)

    def _skip_to(self, seq: int) -> None:
        """Go on behind a hole: the tree ends here, the chain is taken up at the next stored value."""
        self._grow_trees(self._leaves, self._leaves)
        self._leaves, self._stored = [], []
        self._tree_holds = False
        self._has_hole = True
        while self._block.end <= seq:
            self.position = self._block.end
            self._close_block()
            self._has_hole = True
        self.position = seq

    # --- chain and tree ------------------------------------------------------------------------------

    def _close_block(self) -> None:
        leaves, batch = self._leaves, self._block.batch
        logged = leaves
        if self._has_hole:
            self._chain, self._stored_chain = (batch.chain if batch else None), None
            self._settle_altered(
                "unknown", "entries around it are missing, so which of the two was logged cannot be told"
            )
        else:
            logged = self._check_chain(batch)
        self._grow_trees(leaves, logged)
        if batch is None and leaves and self._block_start < self._covered and self.walk.first_bad is None:
            end = self._block_start + len(leaves)
            self.walk.batches.add(
                Finding("E_BATCH", f"entries {self._block_start} to {end - 1} belong to no batch", "table batches")
            )
        self._leaves, self._stored, self._altered = [], [], []
        self._has_hole = False
        self._block_start = self._block.end
        self._block = next(self._blocks)

    def _check_chain(self, batch: StoredBatch | None) -> list[bytes]:
        """Compare the block's chain value with the stored one; return the leaves that were logged, as far as known."""
        rows_end = chain_after(self._chain, self._leaves) if self._chain is not None else None
        if batch is None or (rows_end is None and self._stored_chain is None):
            self._settle_altered("unknown", "no batch covers it, so which of the two was logged cannot be told")
            if self._altered:
                self.walk.mark_bad(self._altered[0].seq)
            self._chain = rows_end if batch is None else batch.chain
            return self._leaves
        if rows_end == batch.chain:
            self._settle_suspect(resolved="value")
            self._settle_altered("hash")
            self._chain, self._stored_chain = batch.chain, None
            return self._leaves
        return self._explain_chain(batch, rows_end)

    def _explain_chain(self, batch: StoredBatch, rows_end: bytes | None) -> list[bytes]:
        """The rows do not lead to the stored chain value: try what else may have been logged."""
        starts = [chain for chain in (self._chain, self._stored_chain) if chain is not None]
        variants = [self._leaves, self._stored] if self._altered else [self._leaves]
        for leaves in variants:
            for start in starts:
                if chain_after(start, leaves) != batch.chain:
                    continue
                self._settle_suspect(resolved="value" if start is self._chain else "entries")
                if leaves is self._stored:
                    self._settle_altered("row")
                    self.walk.mark_bad(self._altered[0].seq)
                else:
                    self._settle_altered("hash")
                self._chain, self._stored_chain = batch.chain, None
                return leaves
        self._settle_suspect(resolved=None)
        self._settle_altered("unknown", "the chain agrees with neither")
        self._suspect = batch
        self._chain, self._stored_chain = rows_end, batch.chain
        return self._leaves

    def _settle_suspect(self, resolved: str | None) -> None:
        """Report the batch whose chain value did not come out, now that the next batch says why."""
        batch, self._suspect = self._suspect, None
        if batch is None:
            return
        span = f"batch {batch.batch} (entries {batch.first_seq} to {batch.first_seq + batch.entries - 1})"
        why = {
            "value": "its entries fit the batch after it, so the stored chain value itself was changed",
            "entries": "an entry of it was changed together with its hash; later batches go on from the old value",
            None: "an entry of this batch, or the chain value before it, was changed",
        }[resolved]
        if resolved != "value":
            self.walk.mark_bad(batch.first_seq)
        if resolved == "entries" and batch.first_seq == 0:
            why = "what the chain starts from is not what it was (the manifest), or an entry was changed with its hash"
        message = f"{span} does not lead to its stored chain value: {why}"
        self.walk.chain.add(Finding("E_CHAIN", message, "table batches", batch.first_seq))

    def _settle_altered(self, culprit: Literal["row", "hash", "unknown"], why: str = "") -> None:
        """Report the block's altered entries, now that the chain has said whether row or hash is what was logged."""
        for altered in self._altered:
            is_record = altered.code == "E_LEAF"
            untold = "in which field cannot be told" if is_record else "its kind, time or body is another one"
            message = {
                "row": f"{altered.what} was changed after it was logged: {altered.detail or untold}",
                "hash": f"{altered.what}: the hash stored beside it was changed; the row is the one that was logged",
                "unknown": f"{altered.what} does not give the hash stored beside it: {altered.detail or why}",
            }[culprit]
            table = "table records" if is_record else "table events"
            self.walk.hashes.add(Finding(altered.code, message, table, altered.seq))

    def _grow_trees(self, leaves: list[bytes], logged: list[bytes]) -> None:
        """Take the block into the tree, stopping at every size whose root is wanted."""
        if logged is not leaves and self._logged_tree is None:
            self._logged_tree = self._rows_tree.copy()
        start, end = self._block_start, self._block_start + len(leaves)
        done = 0
        for size in self._due(end):
            self._extend(leaves, logged, done, size - start)
            done = size - start
            if self._tree_holds:
                self.walk.roots[size] = self._rows_tree.root()
                if self._logged_tree is not None:
                    self.walk.logged_roots[size] = self._logged_tree.root()
        self._extend(leaves, logged, done, len(leaves))

    def _extend(self, leaves: list[bytes], logged: list[bytes], first: int, end: int) -> None:
        if not self._tree_holds:
            return
        self._rows_tree.extend(leaves[first:end])
        if self._logged_tree is not None:
            self._logged_tree.extend(logged[first:end])

    def _due(self, end: int) -> list[int]:
        """Take the wanted sizes up to ``end`` from the list."""
        due = {size for size in self._marks if size <= end}
        self._marks -= due
        while self._sizes and self._sizes[-1] <= end:
            due.add(self._sizes.pop())
        return sorted(due)


def _kind_name(kind: int) -> str:
    return EventKind(kind).name if kind in set(EventKind) else f"kind {kind}"
