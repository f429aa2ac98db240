"""From evidence to rating: how far verified records reach a duty. Never above the register's ceiling.

A rating is not a statement that a duty is fulfilled. Declarations play no part in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from reports.obligations import Obligation, Rating

_ORDER: tuple[Rating, ...] = ("none", "partial", "full")


@dataclass(frozen=True)
class Coverage:
    """How far the evidence at hand reaches one duty."""

    obligation: Obligation
    rating: Rating
    present: tuple[str, ...]  # evidence at hand; support where the rating says so, context where it is none
    missing: tuple[str, ...]


def rate(obligation: Obligation, available: Collection[str]) -> Coverage:
    """Rate one duty.

    Args:
        obligation: The duty.
        available: Names of the evidence that is present *and* verified.
    """
    present = tuple(name for name in obligation.evidence if name in available)
    missing = tuple(name for name in obligation.evidence if name not in available)
    reached: Rating = "full" if present and not missing else "partial" if present else "none"
    if any(name not in available for name in obligation.requires):
        reached = "none"
    return Coverage(obligation, min(reached, obligation.ceiling, key=_ORDER.index), present, missing)


def rate_all(obligations: Iterable[Obligation], available: Collection[str]) -> tuple[Coverage, ...]:
    """Rate duties in their order."""
    return tuple(rate(obligation, available) for obligation in obligations)
