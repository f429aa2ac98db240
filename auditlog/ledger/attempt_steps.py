"""What each attempt of a run logged, and how much of it still counts."""

from __future__ import annotations

from dataclasses import dataclass

from auditlog.format.records import EventKind
from auditlog.ledger.reader import RunReader


@dataclass(frozen=True, slots=True)
class AttemptSteps:
    """One attempt: the step of an earlier one that it went on from, and the steps that it logged.

    Attributes:
        number: From 1.
        from_attempt: The attempt that it went on from; 0 for the first.
        from_step: The step of that attempt.
        steps: How many steps it logged.
        live_steps: How many of them led to the final weights.
        last_step: The last one; ``None`` if it logged none.
    """

    number: int
    from_attempt: int
    from_step: int
    steps: int
    live_steps: int
    last_step: int | None


def attempt_steps(reader: RunReader) -> list[AttemptSteps]:
    """Return the attempts of a run in order, counted by the steps that its own log holds."""
    logged = [event.json() for event in reader.events(EventKind.STEP)]
    live = [event.json()["attempt"] for event in reader.live_steps()]
    found = []
    for attempt in reader.attempts:
        own = [body["step"] for body in logged if body["attempt"] == attempt.number]
        found.append(
            AttemptSteps(
                attempt.number,
                attempt.from_attempt,
                attempt.from_step,
                len(own),
                live.count(attempt.number),
                max(own, default=None),
            )
        )
    return found
