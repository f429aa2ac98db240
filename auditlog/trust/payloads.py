"""Sketches, salts and sample identities against the commitments in the records.

These lie outside the log so that they can be erased; as long as they are there, they must be the committed ones.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.format.canonical import whole
from auditlog.format.commitments import gradient_commitment, sample_commitment, sketch_commitment
from auditlog.format.records import Event
from auditlog.trust.erasures import NONE, Erasures
from auditlog.trust.facts import StepFact
from auditlog.trust.lineage import UNKNOWN_SAMPLE, SourceTable
from auditlog.trust.logview import LogView
from auditlog.trust.verdict import Finding, counted, limited

_RESTORE = "Put the file back from a copy; only a signed erasure event could explain why it is gone."
_FINISH = "It was broken off, or the files were put back from a copy: give the same gradtrail erase command again."
_MAX_OTHER_SALTS = 64  # salts of other failing samples that are tried on a failing record


class Payloads:
    """Observer that opens each record's commitments.

    Args:
        log: Hands over salts and sketches.
        sources: Maps records to samples.
        identities: Gives the 72 identity bytes of a sample from the source data, if the verifier has the data.
        erasures: What a custody log that is believed says was erased.
    """

    def __init__(
        self,
        log: LogView,
        sources: SourceTable,
        identities: Callable[[int], bytes] | None = None,
        erasures: Erasures = NONE,
    ) -> None:
        self._erasures = erasures
        self._kept: dict[int, list[int]] = defaultdict(list)  # custody entry -> seqs of what should be gone
        self.erased = 0
        self._log = log
        self._sources = sources
        self._identities = identities
        self._missing_rows: dict[int, list[int]] = defaultdict(list)  # shard -> seqs
        self._missing_salts: dict[int, list[int]] = defaultdict(list)  # sample -> seqs
        self._wrong: list[tuple[int, np.void]] = []  # sample, record
        self._uses: dict[int, int] = defaultdict(int)
        self._foreign: list[Finding] = []
        self.opened = 0

    def see_event(self, event: Event) -> None:
        """Events commit to no sample."""

    def see_records(self, rows: NDArray[np.void]) -> None:
        """Open the commitments of a stretch of records."""
        samples = self._sources.sample_index(rows)
        for row, sample in zip(rows, samples.tolist(), strict=True):
            if sample != UNKNOWN_SAMPLE:
                self._open(row, sample)

    def _open(self, row: np.void, sample: int) -> None:
        self._uses[sample] += 1
        seq = int(row["seq"])
        salt = self._log.salt(sample)
        sketch = self._log.sketch(int(row["shard"]), int(row["shard_row"]))
        erasure = self._erasures.samples.get((int(row["source_id"]), int(row["row"])))
        if erasure is not None:
            self._see_erased(erasure, seq, salt is not None or (sketch is not None and is_there(sketch)))
            return
        if salt is None:
            self._missing_salts[sample].append(seq)
        if sketch is None:
            self._missing_rows[int(row["shard"])].append(seq)
        if salt is None:
            return
        if sketch is not None:
            self.opened += 1
            if _commitment(row, salt, sketch) != row["sketch_commit"].tobytes():
                self._wrong.append((sample, row.copy()))
        if self._identities is not None:
            self._check_identity(row, sample, salt, self._identities)

    def _see_erased(self, erasure: int, seq: int, is_left: bool) -> None:
        if is_left:
            self._kept[erasure].append(seq)
        else:
            self.erased += 1

    def describe(self) -> str:
        """Say what was compared, and what was not because it was erased."""
        opened = f"{self.opened:,} stored sketches were compared with their commitments"
        if not self.erased:
            return opened
        entries = sorted(set(self._erasures.samples.values()))
        named = ("custody entry " if len(entries) == 1 else "custody entries ") + ", ".join(map(str, entries))
        return f"{opened}; {counted(self.erased, 'sketch', 'sketches')} and their salts were erased under {named}"

    def _check_identity(self, row: np.void, sample: int, salt: bytes, identities: Callable[[int], bytes]) -> None:
        if sample_commitment(salt, identities(sample)) != row["sample_commit"].tobytes():
            message = (
                f"record {row['seq']} ({self._sources.describe(row)}): the data at this place is not what was committed"
            )
            self._foreign.append(Finding("E_OPENING", message, "salts.bin, source files", int(row["seq"])))

    def findings(self, altered: Collection[int] = ()) -> list[Finding]:
        """Return what does not open, and what is not there to be opened.

        Args:
            altered: Records that were changed after logging; that they do not open says nothing new.
        """
        self._wrong = [(sample, row) for sample, row in self._wrong if int(row["seq"]) not in altered]
        self._foreign = [finding for finding in self._foreign if finding.seq not in altered]
        return [*self._wrong_findings(), *limited(self._foreign), *self._missing_findings()]

    def _wrong_findings(self) -> list[Finding]:
        """Tell a changed sketch from a changed salt: under the latter no use of the sample opens."""
        by_sample: dict[int, list[np.void]] = defaultdict(list)
        for sample, row in self._wrong:
            by_sample[sample].append(row)
        suspects = list(by_sample)[:_MAX_OTHER_SALTS]
        findings = []
        for sample, rows in by_sample.items():
            owner = self._owner_of_salt(rows[0], sample, suspects)
            if owner is not None:
                findings.append(self._exchanged(sample, rows, owner))
            elif len(rows) == self._uses[sample] > 1:
                findings.append(self._changed_salt(sample, rows))
            else:
                findings += [self._changed_sketch(row) for row in rows]
        return limited(sorted(findings, key=lambda finding: finding.seq or 0))

    def _exchanged(self, sample: int, rows: Sequence[np.void], owner: int) -> Finding:
        row = rows[0]
        message = (
            f"sample {sample} ({self._sources.path(int(row['source_id']))} row {row['row']}): "
            f"{counted(len(rows), 'record')}, first {row['seq']}, open only with the salt that is stored "
            f"for sample {owner}"
        )
        return Finding("E_OPENING", message, "salts.bin", int(row["seq"]))

    def _changed_salt(self, sample: int, rows: Sequence[np.void]) -> Finding:
        row = rows[0]
        message = (
            f"sample {sample} ({self._sources.path(int(row['source_id']))} row {row['row']}): none of its "
            f"{len(rows)} records, first {row['seq']}, opens: its salt was changed, or all its sketches were"
        )
        return Finding("E_PAYLOAD", message, "salts.bin, sketches/", int(row["seq"]))

    def _changed_sketch(self, row: np.void) -> Finding:
        message = f"record {row['seq']} ({self._sources.describe(row)}): its stored sketch is not the committed one"
        place = f"sketches/{row['shard']:06d}.npy row {row['shard_row']}"
        return Finding("E_PAYLOAD", message, place, int(row["seq"]))

    def _owner_of_salt(self, row: np.void, sample: int, suspects: Sequence[int]) -> int | None:
        sketch = self._log.sketch(int(row["shard"]), int(row["shard_row"]))
        if sketch is None:
            return None
        for other in suspects:
            salt = self._log.salt(other)
            if salt is None or other == sample:
                continue
            if _commitment(row, salt, sketch) == row["sketch_commit"].tobytes():
                return other
        return None

    def _missing_findings(self) -> list[Finding]:
        findings = []
        for shard, seqs in sorted(self._missing_rows.items()):
            count = counted(len(seqs), "sketch", "sketches")
            message = f"shard {shard}: {count} missing without an erasure event, first that of record {seqs[0]}"
            findings.append(Finding("E_ERASED", message, f"sketches/{shard:06d}.npy", seqs[0], hint=_RESTORE))
        for sample, seqs in sorted(self._missing_salts.items()):
            message = (
                f"sample {sample}: its salt is gone without an erasure event ({len(seqs)} records, first {seqs[0]})"
            )
            findings.append(Finding("E_ERASED", message, "salts.bin", seqs[0]))
        for erasure, seqs in sorted(self._kept.items()):
            message = (
                f"custody entry {erasure} says that a sample was erased, and it is still there "
                f"({counted(len(seqs), 'record')}, first {seqs[0]})"
            )
            findings.append(Finding("E_ERASED", message, "salts.bin, sketches/", seqs[0], hint=_FINISH))
        return limited(findings)


def check_gradients(steps: Sequence[StepFact], log: LogView, erasures: Erasures = NONE) -> list[Finding]:
    """Open the commitment of each step's consumed gradient, but for those that an erasure took with it."""
    findings: list[Finding] = []
    missing: dict[int, list[StepFact]] = defaultdict(list)  # by shard
    for fact in steps:
        gradient = fact.gradient
        if gradient is None:
            continue
        what = f"step {fact.step} (event {fact.seq})"
        try:
            place = whole(gradient, "shard"), whole(gradient, "row")
            sketch, salt = log.sketch(*place), log.step_salt(*place)
            erasure = erasures.gradients.get((fact.attempt, fact.step))
            if erasure is not None:
                if salt is not None or (sketch is not None and is_there(sketch)):
                    message = f"{what}: custody entry {erasure} says that its gradient was erased; it is still there"
                    findings.append(Finding("E_ERASED", message, "sketches/", fact.seq, hint=_FINISH))
            elif sketch is None or salt is None:
                missing[gradient["shard"]].append(fact)
            elif _gradient_commitment(salt, gradient, sketch) != gradient["commitment"]:
                message = f"{what}: the stored sketch of its consumed gradient is not the committed one"
                where = f"sketches/{gradient['shard']:06d}.npy row {gradient['row']}"
                findings.append(Finding("E_PAYLOAD", message, where, fact.seq))
        except (KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            message = f"{what}: its gradient lacks a proper {error}"
            findings.append(Finding("E_EVENT", message, "table events", fact.seq))
    for shard, facts in sorted(missing.items()):
        count = counted(len(facts), "sketch", "sketches")
        message = (
            f"shard {shard}: {count} of consumed gradients, or their salts, missing, first that of step {facts[0].step}"
        )
        findings.append(Finding("E_ERASED", message, f"sketches/{shard:06d}.npy", facts[0].seq, hint=_RESTORE))
    return limited(findings)


def is_there(sketch: tuple[bytes, bytes]) -> bool:
    """Tell whether a stored row holds anything but zeros."""
    return any(half.strip(b"\0") for half in sketch)


def _commitment(row: np.void, salt: bytes, sketch: tuple[bytes, bytes]) -> bytes:
    return sketch_commitment(salt, float(row["scale_raw"]), float(row["scale_whitened"]), *sketch)


def _gradient_commitment(salt: bytes, gradient: dict[str, Any], sketch: tuple[bytes, bytes]) -> str:
    # A scale that is not finite stands as null in the event and as NaN in the commitment.
    raw, whitened = (math.nan if gradient[n] is None else gradient[n] for n in ("scale_raw", "scale_whitened"))
    return gradient_commitment(salt, raw, whitened, *sketch).hex()
