"""What is known of one peer after a run, and the figures that compare peers with us. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks import medians

OURS, OBSERVE, LOGRA, POST_HOC = "ours, fused", "ours, observe", "LoGRA-style", "plain second pass"
DATTRI = "dattri-llm"  # its rows' names begin so
MARK = "rows: "  # begins the line in which a peer's process prints its rows; peers print things of their own


@dataclass(frozen=True, slots=True)
class Span:
    """A median of milliseconds, and the interval that covers it in 95 of 100 cases (see ``medians``)."""

    ms: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Span:
        """Summarise seconds."""
        found = medians.of([1e3 * s for s in seconds])
        return cls(found.value, found.low, found.high)


@dataclass(frozen=True, slots=True)
class Row:
    """One peer, or one way of using it. Times are per step of ``samples`` samples.

    Attributes:
        peer: Its name.
        records: What exactly is stored, in words.
        version: Of the package; empty for what is written here.
        plain: The plain step in the peer's own process.
        added: What a step with the peer takes longer than the plain step of the same round.
        cpu_added: The same in CPU seconds of the process, all threads.
        gross: Time in the recorder's own code, where it can be told.
        dispatch: What its hooks cost outside of their own clocks.
        replaced: The plain weight gradients that our ``fused`` mode computes in their place.
        net: ``gross + dispatch - replaced``; on a GPU, where the host's clock does not tell, ``added``.
        second_pass: Of methods that need a pass of their own: that pass over the samples of one step.
        bytes_per_sample: Stored per sample and use.
        samples: Samples in a step.
        rounds: How often it was measured.
        note: What a reader must know to compare.
        failed: Why there are no figures.
    """

    peer: str
    records: str = ""
    version: str = ""
    plain: Span | None = None
    added: Span | None = None
    cpu_added: Span | None = None
    gross: Span | None = None
    dispatch: Span | None = None
    replaced: Span | None = None
    net: Span | None = None
    second_pass: Span | None = None
    bytes_per_sample: int | None = None
    samples: int = 0
    rounds: int = 0
    note: str = ""
    failed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Row:
        """Read what ``to_json`` gave."""
        spans = {f.name for f in fields(cls) if "Span" in str(f.type)}
        values: dict[str, Any] = {name: Span(**value) if name in spans else value for name, value in body.items()}
        return cls(**values)


def ratios(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures ``ratio.*``, each with the interval that the ends of both sides' intervals give.

    A peer with several rows is compared by its cheapest. A figure is ``None`` where a side was not measured, or where
    the denominator is not above zero, which ``<name>.why`` then says; its interval also where the denominator cannot
    be told from zero.
    """
    by_name = {row.peer: row for row in rows}
    ours, observe = by_name.get(OURS, Row(OURS)), by_name.get(OBSERVE, Row(OBSERVE))
    logra, second = by_name.get(LOGRA, Row(LOGRA)), by_name.get(POST_HOC, Row(POST_HOC)).second_pass
    offloads = [row for name, row in by_name.items() if name.startswith(DATTRI) and row.added]
    dattri = min(offloads, key=lambda row: row.added.ms if row.added else 0.0, default=Row(DATTRI))
    sides = {
        "dattri_llm": (ours.net, dattri.added),
        "dattri_llm.added": (ours.added, dattri.added),
        "dattri_llm.cpu_added": (ours.cpu_added, dattri.cpu_added),
        "logra_baseline": (ours.net, logra.net),
        "logra_baseline.observe": (observe.net, logra.net),
        "logra_baseline.cpu_added": (ours.cpu_added, logra.cpu_added),
        "posthoc": (second, ours.net),
        "posthoc.gross": (second, ours.gross),
        "posthoc.observe": (second, observe.net),
    }
    found: dict[str, Any] = {}
    for name, (upper, lower) in sides.items():
        found |= _ratio(f"ratio.{name}", upper, lower)
    return found


def _ratio(name: str, upper: Span | None, lower: Span | None) -> dict[str, Any]:
    if upper is None or lower is None:
        return {name: None, f"{name}.interval": None}
    if lower.ms <= 0:
        return {name: None, f"{name}.interval": None, f"{name}.why": "no ratio: its denominator is not above zero"}
    value = upper.ms / lower.ms
    if lower.low <= 0:
        return {name: value, f"{name}.interval": None}
    ends = [top / bottom for top in (upper.low, upper.high) for bottom in (lower.low, lower.high)]
    return {name: value, f"{name}.interval": [min(ends), max(ends)]}
