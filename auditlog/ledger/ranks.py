"""Runs of several processes on disk: rank 0 is the run folder, every other rank a complete one in ``ranks/<rank>/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from auditlog.errors import StoreError, UsageError
from auditlog.format.manifest import RunManifest
from auditlog.ledger.heads import RANKS
from auditlog.ledger.store import DATABASE, StoredLog
from auditlog.ledger.view import final_note


def rank_folder(run: Path, rank: int) -> Path:
    """Return where one rank of a run keeps its log."""
    return Path(run) / RANKS / str(rank) if rank else Path(run)


def rank_head(run: Path, rank: int) -> dict[str, Any]:
    """Return how a sealed rank's log ends, as rank 0's seal names it: ``rank``, ``origin``, ``size``, ``root``.

    Raises:
        StoreError: If that rank is not there, or not sealed.
    """
    folder = rank_folder(run, rank)
    if not (folder / DATABASE).is_file():
        raise StoreError(f"{folder / DATABASE} is missing: rank {rank} has left no log")
    with StoredLog(folder / DATABASE) as log:
        note = final_note(log)
    if note is None:
        raise StoreError(
            f"{folder} is not sealed, so rank 0 cannot be sealed over it",
            "Seal the other ranks first. If one of them crashed: gradtrail seal RUN --abandon closes them all.",
        )
    statement = note.checkpoint()
    return {"rank": rank, "origin": statement.origin, "size": statement.size, "root": statement.root.hex()}


def insist_ranks(manifest: RunManifest, seal: dict[str, Any]) -> None:
    """Refuse to seal rank 0 of several without the heads of the others.

    Raises:
        UsageError: If ``ranks`` is not there for each other rank in order.
    """
    expected = list(range(1, manifest.world_size)) if manifest.rank == 0 else []
    named = [member["rank"] for member in seal.get("ranks", [])]
    if named != expected:
        raise UsageError(
            f"rank {manifest.rank} of {manifest.world_size} is sealed over ranks {expected}, given were {named}",
            "Seal the other ranks, then pass ranks=[rank_head(run, r) for r in range(1, world_size)].",
        )
