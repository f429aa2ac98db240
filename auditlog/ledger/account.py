"""What a run has logged so far, by attempt and step: the totals of its seal, and from where it may go on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from auditlog.format.records import Event, EventKind
from auditlog.trust.attempts import Attempt, is_live, read_attempts


class Account:
    """Counts steps and records as they are logged.

    Attributes:
        attempts: The attempts so far; empty before the first.
        records: Records logged, over all attempts.
    """

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.records = 0
        self._steps: list[tuple[int, int]] = []  # attempt, step
        self._uses: list[tuple[int, int, int]] = []  # attempt, step, records
        self._reached: dict[int, int] = {}  # attempt -> the last step that its weights went through

    @classmethod
    def read(cls, records: NDArray[np.void], events: Iterable[Event]) -> Account:
        """Return the account of a stored log: its records ``(n,)`` and its events.

        Raises:
            FormatError: If an attempt does not say from where it went on.
        """
        account = cls()
        events = list(events)
        for attempt in read_attempts(events):
            account.begin(attempt)
        for event in events:
            if event.kind == EventKind.STEP:
                body = event.json()
                account._add_step(int(body["attempt"]), int(body["step"]))
        keys, counts = np.unique(records[["attempt", "step"]], return_counts=True)
        account._uses = [(int(a), int(s), int(n)) for (a, s), n in zip(keys, counts, strict=True)]
        account.records = len(records)
        return account

    @property
    def steps(self) -> int:
        """Step events logged, over all attempts."""
        return len(self._steps)

    @property
    def attempt(self) -> int:
        """Number of the present attempt; 0 before the first."""
        return len(self.attempts)

    @property
    def highest_step(self) -> int:
        """The highest step logged in any attempt."""
        return max((step for _, step in self._steps), default=0)

    def reached(self, attempt: int) -> int:
        """Return the last step that the weights of an attempt went through; 0 for one that there was not."""
        return self._reached.get(attempt, 0)

    def begin(self, attempt: Attempt) -> None:
        """Open the next attempt."""
        self.attempts.append(attempt)
        self._reached[attempt.number] = attempt.from_step

    def add(self, step: int, records: int) -> None:
        """Count one step of the present attempt and its records."""
        self._add_step(self.attempt, step)
        self._uses.append((self.attempt, step, records))
        self.records += records

    def live(self) -> tuple[int, int]:
        """Return how many steps and records led to the weights as they are now."""
        steps = np.array(self._steps, np.uint64).reshape(-1, 2)
        uses = np.array(self._uses, np.uint64).reshape(-1, 3)
        live_uses = is_live(self.attempts, uses[:, 0], uses[:, 1])
        return int(is_live(self.attempts, steps[:, 0], steps[:, 1]).sum()), int(uses[live_uses, 2].sum())

    def superseded(self) -> dict[str, int]:
        """Return what a RESUME event says about what no longer counts."""
        live_steps, live_records = self.live()
        return {"superseded_steps": self.steps - live_steps, "superseded_records": self.records - live_records}

    def totals(self) -> dict[str, int]:
        """Return what a seal says about the log."""
        live_steps, live_records = self.live()
        totals = {"records": self.records, "steps": self.steps, "attempts": self.attempt}
        return totals | {"live_records": live_records, "live_steps": live_steps}

    def _add_step(self, attempt: int, step: int) -> None:
        self._steps.append((attempt, step))
        self._reached[attempt] = max(step, self.reached(attempt))
