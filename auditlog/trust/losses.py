"""Accepted losses: entries that were signed, are gone, and that the operator went on without, saying so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from auditlog.trust.facts import LossFact
from auditlog.trust.verdict import Finding

AcceptedHeads = Mapping[tuple[int, bytes], int]
"""``(size, root)`` of each head whose entries are gone, to the entry that accepts the loss."""


def accepted_heads(losses: Iterable[LossFact]) -> dict[tuple[int, bytes], int]:
    """Return the heads that LOSS_ACCEPTED events explain. A head of entries that are still there is not one."""
    return {head: loss.seq for loss in losses if _is_placed(loss) for head in loss.heads if head[0] > loss.size}


def check_losses(losses: Iterable[LossFact]) -> list[Finding]:
    """Report each accepted loss of entries: it explains a gap, it does not fill it."""
    findings = []
    for loss in losses:
        if not _is_placed(loss):
            message = f"LOSS_ACCEPTED event {loss.seq} says that {loss.size} entries were left; it stands elsewhere"
            findings.append(Finding("E_EVENT", message, "table events", loss.seq))
        elif loss.heads:
            end = max(size for size, _ in loss.heads)
            entries = f"entry {loss.size} was" if end == loss.size + 1 else f"entries {loss.size} to {end - 1} were"
            message = f"{entries} signed and then lost; the loss was accepted at entry {loss.seq}"
            findings.append(Finding("E_LOSS_ACCEPTED", message, "heads/lost/", loss.seq))
    return findings


def _is_placed(loss: LossFact) -> bool:
    """It is the first thing said after the loss: behind the session certificate, or before an abandoned run's seal."""
    return loss.size in (loss.seq, loss.seq - 1)
