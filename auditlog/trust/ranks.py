"""Runs of several processes: one log per rank, bound together by the seal of rank 0.

Rank 0's log is the run. Every other rank keeps a complete log of its own under the same run id, data and sketch;
rank 0's seal names the final checkpoint of each.
"""

from __future__ import annotations

import re
from typing import Any

from auditlog.format.canonical import whole
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import LogCheckpoint
from auditlog.trust.verdict import Finding

CUSTODY_SUFFIX = "/custody"

_RANK = re.compile(r"/rank/[0-9]+$")


def rank_origin(origin: str, rank: int) -> str:
    """Return the origin of one rank's log of the run ``origin``; that of rank 0 is the run's own."""
    return f"{origin}/rank/{rank}" if rank else origin


def run_origin(origin: str) -> str:
    """Return the origin of the run that a log belongs to: its custody log, one of its ranks, or itself."""
    return _RANK.sub("", origin.removesuffix(CUSTODY_SUFFIX))


def named_ranks(seal: dict[str, Any] | None) -> dict[int, tuple[str, int, str]]:
    """Return ``rank -> (origin, size, root in hex)`` as rank 0's seal names them; malformed members name nothing."""
    named = {}
    try:
        for member in (seal or {}).get("ranks", ()):
            named[whole(member, "rank")] = (str(member["origin"]), whole(member, "size"), str(member["root"]))
    except (KeyError, TypeError, ValueError):
        return {}
    return named


def check_rank(run: RunManifest, manifest: RunManifest, rank: int) -> list[Finding]:
    """Compare the manifest of one rank with that of rank 0."""
    pairs = (
        ("run id", manifest.run_id, run.run_id),
        ("origin", manifest.origin, rank_origin(run.origin, rank)),
        ("rank", manifest.rank, rank),
        ("number of ranks", manifest.world_size, run.world_size),
    )
    findings = [
        Finding("E_BIND", f"its {name} is {found}, expected {expected}", "manifest.json")
        for name, found, expected in pairs
        if found != expected
    ]
    for name in ("data", "sketch"):
        if getattr(manifest, name) != getattr(run, name):
            findings.append(Finding("E_BIND", f"its {name} block is not that of rank 0", "manifest.json"))
    return findings


def check_final(final: LogCheckpoint | None, entries: int, named: tuple[str, int, str] | None) -> list[Finding]:
    """Compare how a rank's log ends with what rank 0's seal says about it.

    Args:
        final: The checkpoint that closes the rank's log; ``None`` if it is not closed.
        entries: How many entries it holds.
        named: What the seal names: origin, size and root in hex.
    """
    if named is None:
        return [Finding("E_LOST", "the seal of rank 0 does not name its final checkpoint", "table events")]
    origin, size, root = named
    if final is None:
        message = f"it has {entries:,} entries and no end; rank 0 sealed it with {size:,}"
        return [Finding("E_TRUNC", message, "tables records and events", entries)]
    if (final.origin, final.size, final.root.hex()) == named:
        return []
    message = (
        f"its final checkpoint is of {final.origin}, {final.size:,} entries, root {final.root.hex()[:16]}…; rank 0 "
        f"sealed {origin}, {size:,} entries, root {root[:16]}…: this is another log"
    )
    return [Finding("E_BIND", message, "table checkpoints")]
