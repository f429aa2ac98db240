"""Whether the optimizer steps are complete: none missing or double, each with as many records as its event counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from auditlog.trust.attempts import Attempt
from auditlog.trust.facts import Facts, StepFact
from auditlog.trust.verdict import Finding, counted, limited

CLOCK_TOLERANCE_US = 1_000_000  # a clock is set back by a second now and then; more is worth a note


def check_steps(
    facts: Facts, attempts: Sequence[Attempt], *, altered: Collection[int] = (), finished: bool
) -> list[Finding]:
    """Check that steps are contiguous within each attempt and that their records are all there.

    An attempt may repeat steps of those before it, because it goes on from an older snapshot; it may not leave any
    out, and no sample use is logged twice in one attempt. Records without a step event are what a crash leaves at
    the end of an attempt.

    Args:
        facts: What the entries say.
        attempts: Those that say from where they went on.
        altered: Entries that were changed after logging. They are reported already, so what they say now is not
            held against the steps.
        finished: Whether the last attempt says it came to its end, so that it must leave nothing open.
    """
    changed = np.array(sorted(altered), np.uint64)
    records = facts.records()
    records = records[~np.isin(records["seq"], changed)]
    findings = _check_places(facts, records)
    findings += _check_doubles(records)
    findings += _check_contiguous(facts, attempts)
    findings += _check_counts(facts, records, changed, finished=finished)
    return limited(findings)


def _check_places(facts: Facts, records: NDArray[np.void]) -> list[Finding]:
    """Every record and step belongs to the attempt whose session it stands in."""
    starts = np.array([session.seq for session in facts.sessions], np.uint64)
    findings = []
    attempt = np.searchsorted(starts, records["seq"], side="right")
    strangers = records[attempt != records["attempt"]]
    if len(strangers):
        first, more = strangers[0], len(strangers) - 1
        others = f", and {more:,} more with it" if more else ""
        message = f"record {first['seq']} says attempt {first['attempt']} and stands in another{others}"
        findings.append(Finding("E_EVENT", message, "table records", int(first["seq"])))
    for fact in facts.steps:
        present = int(np.searchsorted(starts, np.uint64(fact.seq), side="right"))
        if fact.attempt != present:
            message = f"step {fact.step} (event {fact.seq}) says attempt {fact.attempt} and stands in {present}"
            findings.append(Finding("E_EVENT", message, "table events", fact.seq))
    return findings


def _check_doubles(records: NDArray[np.void]) -> list[Finding]:
    """Find sample uses that stand in the log twice, as a batch that was sent again after an error would."""
    _, first = np.unique(records["seq"], return_index=True)  # one entry that is there twice is reported elsewhere
    records = records[first]
    keys = records[["attempt", "step", "micro", "slot", "part"]]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[place] != np.arange(len(records)))
    if not len(repeated):
        return []
    again, once = records[repeated[0]], records[first[place[repeated[0]]]]
    more = f", and {len(repeated) - 1:,} more like it" if len(repeated) > 1 else ""
    message = (
        f"record {again['seq']} repeats record {once['seq']}: attempt {again['attempt']}, step {again['step']}, "
        f"micro-batch {again['micro']}, row {again['slot']}, part {again['part']} was logged twice{more}"
    )
    return [Finding("E_SEQ", message, "table records", int(again["seq"]))]


def _check_contiguous(facts: Facts, attempts: Sequence[Attempt]) -> list[Finding]:
    findings = []
    starts = {attempt.number: attempt.from_step + 1 for attempt in attempts}
    done = 0  # steps up to here are in the log
    for previous, fact in pairwise([None, *facts.steps]):
        assert fact is not None  # only the first of the pairs' left sides is None
        if previous is not None and previous.attempt == fact.attempt:
            expected = previous.step + 1
        elif fact.attempt in starts:
            expected = starts[fact.attempt]
        else:  # it does not say from where it goes on, which is reported
            expected = min(done + 1, fact.step)
        if fact.step != expected or fact.step < 1:
            message = f"step {fact.step} (event {fact.seq}): {_missing_steps(expected, fact.step)}"
            findings.append(Finding("E_GAP_STEP", message, "table events", fact.seq))
        done = max(done, fact.step)
    return findings


def _missing_steps(expected: int, found: int) -> str:
    if found <= expected:
        return f"it comes too late, step {expected} was expected"
    return f"step {expected} is missing" if found == expected + 1 else f"steps {expected} to {found - 1} are missing"


def _check_counts(
    facts: Facts, records: NDArray[np.void], changed: NDArray[np.uint64], *, finished: bool
) -> list[Finding]:
    """Compare the records of each (attempt, step) with what the step's event counts."""
    order = np.lexsort((records["seq"], records["step"], records["attempt"]))
    records = records[order]
    keys = records[["attempt", "step"]]
    _, starts, counts = np.unique(keys, return_index=True, return_counts=True)
    present = {
        (int(keys["attempt"][i]), int(keys["step"][i])): (int(records["seq"][i]), int(n))
        for i, n in zip(starts, counts, strict=True)
    }
    findings = []
    shifted = []
    for fact in facts.steps:
        first_seq, count = present.pop((fact.attempt, fact.step), (fact.first_seq, 0))
        first, end = np.searchsorted(changed, [fact.first_seq, fact.first_seq + fact.records])
        if first < end:
            continue
        if count != fact.records:
            findings.append(_wrong_count(fact, count))
        elif first_seq != fact.first_seq:
            shifted.append((fact, first_seq))
    if shifted:
        findings.append(_shifted(*shifted[0], len(shifted) - 1))
    findings += _leftovers(present, facts.steps, len(facts.sessions), finished=finished)
    return findings


def _wrong_count(fact: StepFact, count: int) -> Finding:
    message = f"step {fact.step} (event {fact.seq}) counts {counted(fact.records, 'record')}; the log holds {count}"
    return Finding("E_GAP_STEP", message, "table events", fact.seq)


def _shifted(fact: StepFact, first_seq: int, more: int) -> Finding:
    message = (
        f"step {fact.step} (event {fact.seq}) says that its records start at entry {fact.first_seq}; "
        f"they start at {first_seq}{f', and {more} later steps are shifted too' if more else ''}"
    )
    return Finding("E_GAP_STEP", message, "table events", fact.seq)


def _leftovers(
    open_steps: dict[tuple[int, int], tuple[int, int]], steps: Sequence[StepFact], attempts: int, *, finished: bool
) -> list[Finding]:
    """Report records whose step has no event. A crash explains them at an attempt's end, nothing does elsewhere."""
    last_step = {fact.attempt: fact.step for fact in steps}
    findings = []
    for (attempt, step), (seq, count) in open_steps.items():
        message = f"{counted(count, 'record')} of step {step} (from entry {seq}) without a step event"
        is_tail = step == last_step.get(attempt, step - 1) + 1 and not (finished and attempt == attempts)
        if is_tail:
            message += ": the attempt ended within this step"
            findings.append(Finding("N_OPEN_STEP", message, "table records", seq, level="note"))
        else:
            findings.append(Finding("E_GAP_STEP", message, "table records", seq))
    return findings


def check_clock(facts: Facts) -> list[Finding]:
    """Note where the operator's clock went back. Order in the log is ``seq``, never time, so this is no failure."""
    seq, times = facts.times()
    back = np.flatnonzero(np.diff(times) < -CLOCK_TOLERANCE_US)
    if not len(back):
        return []
    at = int(back[0])
    seconds = (int(times[at]) - int(times[at + 1])) / 1e6
    more = f", and at {len(back) - 1} more" if len(back) > 1 else ""
    message = f"the clock goes back by {seconds:,.0f} s at entry {seq[at + 1]}{more}: times are the operator's word"
    return [Finding("N_CLOCK", message, "column ts_us", int(seq[at + 1]), level="note")]
