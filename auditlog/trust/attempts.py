"""Attempts: which steps led to the weights as they are now, and which were given up or trained again.

Every attempt but the first goes on from a step of an earlier one. What the present weights went through is one
line back from the last attempt; everything off that line is *superseded*: still logged, signed and verified, but
no part of the result. What lies on the line is *live*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from auditlog.errors import FormatError
from auditlog.format.canonical import whole
from auditlog.format.records import Event, EventKind
from auditlog.trust.certificates import FIRST_ATTEMPT
from auditlog.trust.facts import Facts, LossFact, ResumeFact
from auditlog.trust.verdict import Finding, counted

_NO_END = (1 << 64) - 1  # beyond any step


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt, and the step of an earlier one that it goes on from.

    The first goes on from step 0 of none (0); from a later step only where all entries before it were lost.
    """

    number: int
    from_attempt: int
    from_step: int


FIRST = Attempt(FIRST_ATTEMPT, 0, 0)


def read_attempts(events: Iterable[Event]) -> list[Attempt]:
    """Return the attempts that SESSION and RESUME events tell of, in order.

    Raises:
        FormatError: If an attempt does not say from where it went on.
    """
    sessions = 0
    attempts: dict[int, Attempt] = {}
    for event in events:
        if event.kind == EventKind.SESSION:
            sessions += 1
            attempts |= {FIRST_ATTEMPT: FIRST} if sessions == 1 else {}
        elif event.kind == EventKind.RESUME:
            try:
                body = event.json()
                attempt = Attempt(*(whole(body, n) for n in ("attempt", "from_attempt", "from_step")))
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(f"entry {event.seq}: a RESUME event without a proper {error}") from error
            attempts[attempt.number] = attempt
    if list(attempts) != list(range(1, sessions + 1)):
        raise FormatError(f"{sessions} attempts, and {len(attempts)} of them say from where they went on")
    return list(attempts.values())


def live_until(attempts: Sequence[Attempt]) -> dict[int, int]:
    """Return, for each attempt on the line back from the last one, up to which of its steps it counts."""
    by_number = {attempt.number: attempt for attempt in attempts}
    until: dict[int, int] = {}
    bound = _NO_END
    attempt = attempts[-1] if attempts else None
    while attempt is not None and attempt.number not in until:
        until[attempt.number] = bound
        bound = min(bound, attempt.from_step)
        attempt = by_number.get(attempt.from_attempt)
    return until


def is_live(attempts: Sequence[Attempt], attempt: ArrayLike, step: ArrayLike) -> NDArray[np.bool_]:
    """Return which (attempt, step) pairs, two arrays ``(n,)``, led to the weights at the end of the last attempt."""
    number, at = np.asarray(attempt, np.uint64), np.asarray(step, np.uint64)
    live = np.zeros(len(number), bool)
    for each, bound in live_until(attempts).items():
        live |= (number == each) & (at <= np.uint64(bound))
    return live


def check_attempts(facts: Facts, *, altered: Collection[int] = ()) -> tuple[list[Attempt], list[Finding]]:
    """Check that each attempt but the first, which need not, says once and truly from where it goes on.

    Args:
        facts: What the entries say.
        altered: Entries that were changed after logging and are reported already.

    Returns:
        The attempts that say it, in order, and the findings.
    """
    known = {FIRST_ATTEMPT: FIRST}
    findings = []
    starts = [session.seq for session in facts.sessions]
    for number, (first, end) in enumerate(pairwise([*starts, _NO_END]), start=FIRST_ATTEMPT):
        own = [fact for fact in facts.resumes if first < fact.seq < end]
        if number > FIRST_ATTEMPT and not own:
            message = f"attempt {number} (entry {first}) does not say from where it went on: it has no RESUME event"
            findings.append(Finding("E_EVENT", message, "table events", first))
        for position, fact in enumerate(own):
            wrong = _misplaced(facts, fact, number, position)
            if wrong and fact.seq not in altered:
                message = f"RESUME event {fact.seq}: {wrong}"
                findings.append(Finding("E_EVENT", message, "table events", fact.seq))
            if not wrong:
                known[number] = Attempt(number, fact.from_attempt, fact.from_step)
                findings += _check_start(facts, fact, known)
                findings += [] if altered else _check_superseded(facts, fact, known)
    return list(known.values()), findings


def _misplaced(facts: Facts, fact: ResumeFact, number: int, position: int) -> str:
    """Return what is wrong with the place and form of a RESUME event; empty if nothing is."""
    if position:
        return f"attempt {number} has said already from where it went on"
    if fact.attempt != number:
        return f"it is about attempt {fact.attempt} and stands in {number}"
    if not (number == FIRST_ATTEMPT and fact.from_attempt == 0) and not 1 <= fact.from_attempt < number:
        return f"attempt {number} cannot go on from attempt {fact.from_attempt}"
    if any(step.attempt == number and step.seq < fact.seq for step in facts.steps):
        return f"it stands behind steps of attempt {number}"
    return ""


def _check_start(facts: Facts, fact: ResumeFact, known: dict[int, Attempt]) -> list[Finding]:
    """The weights that an attempt starts from must have gone through logged steps only."""
    own = max((step.step for step in facts.steps if step.attempt == fact.from_attempt), default=0)
    parent = known.get(fact.from_attempt)
    reached = max(own, parent.from_step if parent else 0)
    return [_missing_steps(facts.losses, fact, reached)] if fact.from_step > reached else []


def _check_superseded(facts: Facts, fact: ResumeFact, known: dict[int, Attempt]) -> list[Finding]:
    """Compare what a RESUME event says no longer counts with what was logged before it."""
    findings = []
    attempts = [known[number] for number in sorted(known)]
    records = facts.records()
    records = records[records["seq"] < fact.seq]
    steps = [step for step in facts.steps if step.seq < fact.seq]
    live_steps = is_live(attempts, [step.attempt for step in steps], [step.step for step in steps])
    live_records = is_live(attempts, records["attempt"], records["step"])
    for name, said, found in (
        ("step", fact.superseded_steps, int((~live_steps).sum())),
        ("record", fact.superseded_records, int((~live_records).sum())),
    ):
        if said != found:
            message = (
                f"RESUME event {fact.seq} counts {counted(said, name)} that no longer count; the log holds {found}"
            )
            findings.append(Finding("E_GAP_STEP", message, "table events", fact.seq))
    return findings


def _missing_steps(losses: Iterable[LossFact], fact: ResumeFact, reached: int) -> Finding:
    missing = (reached + 1, fact.from_step)
    names = f"step {missing[0]}" if missing[0] == missing[1] else f"steps {missing[0]} to {missing[1]}"
    accepted = next((loss.seq for loss in losses if loss.missing_steps == missing and loss.seq < fact.seq), None)
    message = f"attempt {fact.attempt} goes on from step {fact.from_step}: {names} went into it and are not in the log"
    if accepted is not None:
        message += f"; that loss was accepted at entry {accepted}"
        return Finding("E_LOSS_ACCEPTED", message, "table events", fact.seq)
    return Finding("E_GAP_STEP", message, "table events", fact.seq)
