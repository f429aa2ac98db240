"""Section 11, the gradients: how they were taken, whether a check confirmed it, and which parameters left none."""

from __future__ import annotations

from reports.document import MEASURED, RECORDED, Block, Column, Fact, Heading, Table
from reports.evidence import Evidence
from reports.formats import quantity, short
from reports.text import shorten

MOST_NAMED = 20  # parameters that left no sketch


def capture_facts(evidence: Evidence) -> list[Fact]:
    """Return mode, coverage, routes and the self-check."""
    tracking, place = evidence.tracking.found, str(evidence.tracking.ref)
    return [
        Fact("Trained values, of which tracked", _coverage(evidence), MEASURED, place),
        Fact("How gradients were taken", shorten(tracking.mode_in_words, 200), RECORDED, place),
        Fact("Modules and their route", shorten(tracking.routes_in_words, 400), RECORDED, place),
        *_self_check(evidence),
    ]


def _coverage(evidence: Evidence) -> str:
    tracking, share = evidence.tracking.found, evidence.steps.tracked_share_min
    if tracking.trainable_entries is None or tracking.tracked_entries is None:
        return "not recorded"
    said = f"{tracking.trainable_entries:,}, {tracking.tracked_entries:,}"
    if tracking.coverage is not None:
        said += f" ({tracking.coverage:.2%})"
    if tracking.untracked and share is not None:
        said += f"; at least {share:.2%} of each step's squared gradient norm"
    return said


def _self_check(evidence: Evidence) -> list[Fact]:
    """Return what the self-check found; of several, the one with the largest error."""
    checks = evidence.self_checks
    if not checks:
        return []
    worst = max(checks, key=lambda check: (not check.found.confirmed, check.found.error))
    several = f"{len(checks)} checks, the least favourable: " if len(checks) > 1 else ""
    return [Fact("Self-check before the first step", several + worst.found.sentence(short), MEASURED, str(worst.ref))]


def untracked(evidence: Evidence) -> tuple[Block, ...]:
    """Return the trainable parameters that left no sketch, with the reason; nothing if there are none."""
    left_out = evidence.tracking.found.untracked
    if not left_out:
        return ()
    rest = len(left_out) - MOST_NAMED
    return (
        Heading("Trained parameters that left no sketch"),
        Table(
            (Column("Parameter", 44, "mono"), Column("Values", 12, "number"), Column("Why", 44)),
            tuple(
                (shorten(each.name, 120), f"{each.entries:,}", shorten(each.reason, 200))
                for each in left_out[:MOST_NAMED]
            ),
            caption=f"And {quantity(rest, 'further parameter')}, in evidence.json." if rest > 0 else "",
            tag=RECORDED,
        ),
    )
