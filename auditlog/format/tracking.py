"""The manifest's ``tracking`` block as a reader wants it: how gradients were taken, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MODES = {
    "observe": "hooks only; weights bit-identical to a run without audit mode",
    "fused": "linear weight gradients are computed as the sum of the recorded ones; weights differ by rounding",
}


@dataclass(frozen=True, slots=True)
class Untracked:
    """A trainable parameter that left no sketch: its name, its number of entries, and why."""

    name: str
    entries: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tracking:
    """What of the trainable parameters is tracked.

    Attributes:
        mode: ``observe`` or ``fused``; empty where it is not recorded.
        trainable_entries: Entries of all trainable parameters; ``None`` where it is not recorded.
        tracked_entries: Entries of the tracked ones.
        coverage: Share of them that is tracked, 0 to 1.
        routes: How modules get their gradients (``"linear, exact"``), and how many do so.
        untracked: The parameters that are left out, in name order.
    """

    mode: str = ""
    trainable_entries: int | None = None
    tracked_entries: int | None = None
    coverage: float | None = None
    routes: tuple[tuple[str, int], ...] = ()
    untracked: tuple[Untracked, ...] = ()

    @classmethod
    def read(cls, block: dict[str, Any]) -> Tracking:
        """Read the block, which the log itself does not interpret; what is not there in a known form is left open."""
        reasons = _entries(block, "reasons", str)
        return cls(
            mode=str(block.get("mode") or ""),
            trainable_entries=_number(block, "trainable_entries", int),
            tracked_entries=_number(block, "tracked_entries", int),
            coverage=_number(block, "coverage", int | float),
            routes=tuple(sorted(_entries(block, "routes", int).items())),
            untracked=tuple(
                Untracked(name, entries, reasons.get(name, "no reason is recorded"))
                for name, entries in sorted(_entries(block, "untracked", int).items())
            ),
        )

    @property
    def mode_in_words(self) -> str:
        """What the mode means for the trained weights."""
        return f"{self.mode}: {_MODES[self.mode]}" if self.mode in _MODES else self.mode or "not recorded"

    @property
    def routes_in_words(self) -> str:
        """How many modules get their gradients by which route."""
        return "; ".join(f"{number:,} × {route}" for route, number in self.routes) or "not recorded"


def _number(block: dict[str, Any], name: str, kind: Any) -> Any:
    value = block.get(name)
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _entries(block: dict[str, Any], name: str, kind: Any) -> dict[str, Any]:
    """Return a member that maps names to values of one kind."""
    value = block.get(name)
    return {key: each for key, each in value.items() if isinstance(each, kind)} if isinstance(value, dict) else {}
