"""Opening a run's ledgers, one per process: a new run, or one that was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from attribution.sketch.layout import SketchLayout
from attribution.training.ranks import Ranks
from attribution.training.resume import refuse_other_run
from attribution.training.uses import Uses, read_uses
from auditlog.datamanifest import DataManifest
from auditlog.format.manifest import RunManifest
from auditlog.ledger.heads import OnHead
from auditlog.ledger.ledger import RunLedger
from auditlog.trust.keys import Signer


def create_ledger(
    run: Path, manifest: RunManifest, data: DataManifest, signer: Signer, ranks: Ranks, *, on_head: OnHead | None
) -> RunLedger:
    """Create this process's ledger; rank 0 goes first, since the others' folders lie in its own.

    Args:
        run: This process's folder.
        manifest: What the run declares; id and time become those of rank 0.
        data: The data manifest.
        signer: The long-lived key.
        ranks: The processes of the run.
        on_head: Where heads are handed to.

    Raises:
        UsageError: If the folder exists.
        RankError: If another process could not create its own.
    """
    run_id, created_us = ranks.from_first((manifest.run_id, manifest.created_us))
    manifest = manifest.model_copy(update={"run_id": run_id, "created_us": created_us})

    def create() -> list[RunLedger]:
        return [RunLedger.create(run, manifest, data, signer, on_head=on_head)]

    is_first = ranks.rank == 0
    return _open(ranks, [create if is_first else _not_yet, _not_yet if is_first else create])


def reopen_ledger(
    run: Path,
    data: DataManifest,
    signer: Signer,
    ranks: Ranks,
    *,
    on_head: OnHead | None,
    accept_loss: bool,
    layout: SketchLayout,
    model: nn.Module,
) -> tuple[RunLedger, Uses]:
    """Open this process's ledger of an interrupted run; nothing is written yet.

    Args:
        run: This process's folder.
        data: The data manifest.
        signer: The long-lived key.
        ranks: The processes that go on with the run.
        on_head: Where heads are handed to.
        accept_loss: Go on although signed entries are missing.
        layout: The sketch that the model would get now.
        model: The model, loaded or not: only its class, sizes and frozen weights are compared.

    Returns:
        The ledger, and what all processes used so far.

    Raises:
        Error: If the run is another one, sealed, incomplete, or open elsewhere.
        RankError: If another process could not open its own.
    """
    attempts, uses = ranks.together(lambda: read_uses(run))

    def reopen() -> list[RunLedger]:
        ledger = RunLedger.resume(run, data, signer, on_head=on_head, accept_loss=accept_loss)
        try:
            refuse_other_run(ledger.manifest, layout, model, ranks)
        except BaseException:
            ledger.close_unsealed()
            raise
        return [ledger]

    ledger = _open(ranks, [reopen])
    return ledger, Uses.resumed(data.rows, attempts, ranks.gather(uses))


def _open(ranks: Ranks, turns: list[Callable[[], list[RunLedger]]]) -> RunLedger:
    """Take each turn on all processes together, and close what was opened here if one of them fails."""
    opened: list[RunLedger] = []
    try:
        for turn in turns:
            ranks.together(partial(_take, turn, opened))
    except BaseException:
        for ledger in opened:
            ledger.close_unsealed()
        raise
    (only,) = opened
    return only


def _take(turn: Callable[[], list[RunLedger]], opened: list[RunLedger]) -> None:
    opened.extend(turn())


def _not_yet() -> list[RunLedger]:
    return []
