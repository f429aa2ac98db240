"""What the entries say, gathered while they pass: sessions, steps, seals, snapshots and the records' columns.

Only the form of each event is judged here; whether the facts fit together is for ``sessions``, ``steps`` and
``seal`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import FormatError
from auditlog.format.canonical import parse_canonical, whole
from auditlog.format.records import FLOAT_FIELDS, FORMAT_VERSION, RECORD, Event, EventKind
from auditlog.trust.erasures import erasure_of
from auditlog.trust.lineage import UNKNOWN_SAMPLE, SourceTable
from auditlog.trust.verdict import Finding, FindingList

FIRST_CUSTODY_KIND = 32

_KINDS = frozenset(int(kind) for kind in EventKind)
_CANONICAL_NAN = 0x7FC00000
_KEPT = ("seq", "attempt", "step", "micro", "slot", "part", "ts_us")  # columns of records that later checks need
_KEPT_DTYPE = np.dtype([(name, RECORD[name]) for name in _KEPT])


@dataclass(frozen=True, slots=True)
class SessionFact:
    """A SESSION event: where its attempt starts, and its body."""

    seq: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepFact:
    """A STEP event, reduced to what is checked."""

    seq: int
    step: int
    attempt: int
    first_seq: int
    records: int
    gradient: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ResumeFact:
    """A RESUME event: from which step of which earlier attempt this one goes on, and what no longer counts."""

    seq: int
    attempt: int
    from_attempt: int
    from_step: int
    superseded_steps: int
    superseded_records: int


@dataclass(frozen=True, slots=True)
class LossFact:
    """A LOSS_ACCEPTED event: heads ``(size, root)`` whose entries are gone, and steps that were never logged.

    ``size`` is the number of entries that were left; ``missing_steps`` are the first and the last one.
    """

    seq: int
    size: int
    heads: tuple[tuple[int, bytes], ...]
    missing_steps: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class SealFact:
    """A SEAL event."""

    seq: int
    body: dict[str, Any]

    @property
    def abandoned(self) -> bool:
        """Whether somebody closed the run later because nobody resumed it."""
        return self.body.get("reason") == "abandoned"


class Facts:
    """Observer that gathers facts and judges the form of every entry.

    Args:
        sources: The manifest's sources; ``None`` for a custody log.
        opening: For a custody log, the bytes that its first event must hold.
    """

    def __init__(self, sources: SourceTable | None, *, opening: bytes | None = None) -> None:
        self.findings = FindingList()
        self.sessions: list[SessionFact] = []
        self.steps: list[StepFact] = []
        self.resumes: list[ResumeFact] = []
        self.losses: list[LossFact] = []
        self.seals: list[SealFact] = []
        self.snapshots: list[tuple[int, str, str]] = []  # seq, path, SHA-256
        self.first_kind: int | None = None
        self.events = 0
        self._sources = sources
        self._opening = opening
        self._columns: list[NDArray[np.void]] = []
        self._samples: list[NDArray[np.int64]] = []
        self._event_times: list[tuple[int, int]] = []

    # --- records -------------------------------------------------------------------------------------

    def see_records(self, rows: NDArray[np.void]) -> None:
        """Keep the columns that later checks need, and judge each record's values."""
        self._columns.append(rows[list(_KEPT)].astype(_KEPT_DTYPE))
        if self._sources is None:
            self._judge(rows, np.ones(len(rows), bool), "E_EVENT", "a custody log holds no records")
            return
        samples = self._sources.sample_index(rows)
        self._samples.append(samples)
        self._judge(rows, rows["fmt"] != FORMAT_VERSION, "E_ENCODING", f"its format version is not {FORMAT_VERSION}")
        self._judge(rows, samples == UNKNOWN_SAMPLE, "E_ENCODING", "the manifest has no such source file or row")
        is_known = samples != UNKNOWN_SAMPLE
        other_version = is_known & self._sources.version_differs(rows)
        self._judge(rows, other_version, "E_ENCODING", "the manifest gives its source file another data version")
        for name in FLOAT_FIELDS:
            odd = np.isnan(rows[name]) & (rows[name].view(np.uint32) != _CANONICAL_NAN)
            self._judge(rows, odd, "E_ENCODING", f"{name} is a NaN that is not in canonical form")

    def _judge(self, rows: NDArray[np.void], is_wrong: NDArray[np.bool_], code: str, what: str) -> None:
        for row in rows[is_wrong]:
            where = self._sources.describe(row) if self._sources else f"step {row['step']}"
            message = f"record {row['seq']} ({where}): {what}"
            self.findings.add(Finding(code, message, "table records", int(row["seq"])))

    def records(self) -> NDArray[np.void]:
        """Return the columns seq, attempt, step, micro, slot, part and ts_us of all records, ``(n,)``."""
        return np.concatenate(self._columns) if self._columns else np.zeros(0, _KEPT_DTYPE)

    def sample_count(self) -> int:
        """Return how many different samples the records are about."""
        if not self._samples:
            return 0
        distinct = np.unique(np.concatenate(self._samples))
        return int(np.count_nonzero(distinct != UNKNOWN_SAMPLE))

    def times(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return seq and time (microseconds) of every entry, in seq order."""
        records = self.records()
        seq = np.concatenate([records["seq"], np.array([seq for seq, _ in self._event_times], np.uint64)])
        times = np.concatenate([records["ts_us"], np.array([ts_us for _, ts_us in self._event_times], np.int64)])
        order = np.argsort(seq, kind="stable")
        return seq[order], times[order]

    # --- events --------------------------------------------------------------------------------------

    def see_event(self, event: Event) -> None:
        """Judge an event's form and keep what it says."""
        if self.events == 0 and event.seq == 0:
            self.first_kind = event.kind
        self.events += 1
        self._event_times.append((event.seq, event.ts_us))
        if event.fmt != FORMAT_VERSION:
            self._reject(event, f"its format version is {event.fmt}, not {FORMAT_VERSION}")
        if event.kind == EventKind.CUSTODY_OPENED:
            self._check_opening(event)
            return
        is_custody = event.kind >= FIRST_CUSTODY_KIND
        if event.kind not in _KINDS or is_custody != (self._opening is not None):
            self._reject(event, f"kind {event.kind} does not belong into this log")
            return
        try:
            body = parse_canonical(event.body)
        except FormatError as error:
            self._reject(event, f"its body is no canonical JSON ({error})")
            return
        if not isinstance(body, dict):
            self._reject(event, "its body is not a JSON object")
            return
        self._keep(event, EventKind(event.kind), body)

    def _check_opening(self, event: Event) -> None:
        if self._opening is None or event.seq != 0:
            self._reject(event, "only a custody log opens like this, and only once")
        elif event.body != self._opening:
            message = "custody log: it was opened for another run: its first event is not this run's final note"
            self.findings.add(Finding("E_BIND", message, "table events", event.seq))

    def _keep(self, event: Event, kind: EventKind, body: dict[str, Any]) -> None:
        try:
            match kind:
                case EventKind.SESSION:
                    self.sessions.append(SessionFact(event.seq, body))
                case EventKind.STEP:
                    step, attempt = whole(body, "step"), whole(body, "attempt")
                    first_seq, records = whole(body, "first_seq"), whole(body, "records")
                    self.steps.append(StepFact(event.seq, step, attempt, first_seq, records, body.get("gradient")))
                case EventKind.RESUME:
                    attempt, parent, from_step = (whole(body, n) for n in ("attempt", "from_attempt", "from_step"))
                    gone = whole(body, "superseded_steps"), whole(body, "superseded_records")
                    self.resumes.append(ResumeFact(event.seq, attempt, parent, from_step, *gone))
                case EventKind.LOSS_ACCEPTED:
                    self.losses.append(parse_loss(event.seq, body))
                case EventKind.SEAL:
                    self.seals.append(SealFact(event.seq, body))
                case EventKind.ERASURE:
                    erasure_of(event)
                case EventKind.MODEL_CHECKPOINT:
                    for file in body["files"]:
                        self.snapshots.append((event.seq, f"{body['path']}/{file['name']}", str(file["sha256"])))
                case _:
                    pass  # said, hashed and signed; nothing to compare it with
        except (KeyError, TypeError, ValueError) as error:
            self._reject(event, f"a {kind.name} event without a proper {error}")

    def _reject(self, event: Event, why: str) -> None:
        self.findings.add(Finding("E_EVENT", f"event {event.seq}: {why}", "table events", event.seq))


def parse_loss(seq: int, body: dict[str, Any]) -> LossFact:
    """Parse the body of a LOSS_ACCEPTED event.

    Raises:
        KeyError | TypeError | ValueError: If a member is missing or malformed.
    """
    heads = tuple((whole(head, "size"), bytes.fromhex(head["root"])) for head in body["heads"])
    steps = body["missing_steps"]
    missing = None if steps is None else (whole(steps, "first"), whole(steps, "last"))
    return LossFact(seq, whole(body, "size"), heads, missing)
