"""Closing a run that nobody will resume, such as after a crash: ``gradtrail seal RUN --abandon``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from auditlog.errors import StoreError, UsageError
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger.appender import Appender
from auditlog.ledger.heads import OnHead, check_on_head, set_aside
from auditlog.ledger.ranks import rank_folder, rank_head
from auditlog.ledger.resume import read_standing
from auditlog.ledger.shards import cut_shards
from auditlog.ledger.verify_run import verify_log_folder
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import Verdict

# What a run that was interrupted may lack. Anything else must be looked at before a key is put to it.
_INCOMPLETE = {"E_UNSEALED", "E_GAP_STEP", "E_ERASED", "E_LOSS_ACCEPTED"}


def seal_abandoned(run: Path, signer: Signer, *, on_head: OnHead | None = None, accept_loss: bool = False) -> Note:
    """Seal a run as it stands, as abandoned. Only the long-lived key signs: the session key is gone.

    Entries that were stored after the last signed checkpoint are covered by the seal; sketches whose entries
    never reached the database are cut off. Of a run of several processes the other ranks are closed first.

    Args:
        run: The run folder.
        signer: The long-lived key that the manifest names.
        on_head: Where the final head is handed to.
        accept_loss: Seal although the run is shorter than its heads, and have the log say so.

    Raises:
        UsageError: If the run is sealed already.
        StoreError: If it does not verify up to where it ends: entries are missing or differ.
        ReadError: If it cannot be read.
    """
    run = Path(run)
    check_on_head(on_head, run)
    own = verify_log_folder(run, Trust(vkeys=(signer.vkey,)))
    if own.verdict.sealed:
        raise UsageError(f"{run} is sealed already")
    _insist_incomplete(run, own.verdict, {"E_TRUNC"} if accept_loss else set())
    others = range(1, own.manifest.world_size) if own.manifest.rank == 0 else range(0)
    ranks = [_closed_rank(run, rank, signer, on_head, accept_loss) for rank in others]
    return _seal(run, signer, on_head, accept_loss, {"ranks": ranks} if ranks else {})


def _insist_incomplete(run: Path, verdict: Verdict, allowed: set[str]) -> None:
    for finding in verdict.findings:
        if finding.level == "error" and finding.code not in _INCOMPLETE | allowed:
            raise StoreError(
                f"{run} cannot be sealed: {finding.code}: {finding.message}",
                f"Keep all files as they are and look at: gradtrail verify {run} --trust KEY.vkey",
            )


def _closed_rank(run: Path, rank: int, signer: Signer, on_head: OnHead | None, accept_loss: bool) -> dict[str, Any]:
    """Return how a rank's log ends, after closing it if it is still open."""
    try:
        return rank_head(run, rank)
    except StoreError:
        seal_abandoned(rank_folder(run, rank), signer, on_head=on_head, accept_loss=accept_loss)
        return rank_head(run, rank)


def _seal(run: Path, signer: Signer, on_head: OnHead | None, accept_loss: bool, body: dict[str, Any]) -> Note:
    standing = read_standing(run, on_head)
    if not accept_loss:
        standing.insist_complete()
    manifest = standing.manifest
    cut_shards(run, manifest.sketch.dim * len(manifest.sketch.forms), standing.rows)
    log = Appender.resume(
        run, manifest.origin, standing.manifest_bytes, on_head=on_head, lost_sizes=standing.lost_sizes
    )
    try:
        set_aside(run, standing.orphans)
        loss = standing.loss(log.size)
        if loss is not None:
            log.add_event(EventKind.LOSS_ACCEPTED, loss)
        if not standing.has_seal:  # a seal that was stored and never signed needs only its signature
            log.add_event(EventKind.SEAL, {"reason": "abandoned"} | body | standing.account.totals())
        log.flush(signer)
    finally:
        log.close()
    assert log.note is not None  # flush has just signed one
    return log.note
