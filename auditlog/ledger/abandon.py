"""Closing a run that nobody will resume, such as after a crash: ``gradtrail seal RUN --abandon``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from auditlog.errors import StoreError, UsageError
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger.appender import Appender
from auditlog.ledger.heads import OnHead, check_on_head
from auditlog.ledger.reader import RunReader, verify_run
from auditlog.ledger.shards import SHARD_ROWS, cut_shards
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer

# What a run that was interrupted may lack. Anything else must be looked at before a key is put to it.
_INCOMPLETE = {"E_UNSEALED", "E_GAP_STEP", "E_ERASED"}


def seal_abandoned(run: Path, signer: Signer, *, on_head: OnHead | None = None) -> Note:
    """Seal a run as it stands, as abandoned. Only the long-lived key signs: the session key is gone.

    Entries that were stored after the last signed checkpoint are covered by the seal; sketches whose entries
    never reached the database are cut off.

    Args:
        run: The run folder.
        signer: The long-lived key that the manifest names.
        on_head: Where the final head is handed to.

    Raises:
        UsageError: If the run is sealed already.
        StoreError: If it does not verify up to where it ends: entries are missing or differ.
        ReadError: If it cannot be read.
    """
    run = Path(run)
    check_on_head(on_head, run)
    verdict = verify_run(run, Trust(vkeys=(signer.vkey,)))
    if verdict.sealed:
        raise UsageError(f"{run} is sealed already")
    for finding in verdict.findings:
        if finding.level == "error" and finding.code not in _INCOMPLETE:
            raise StoreError(
                f"{run} cannot be sealed: {finding.code}: {finding.message}",
                f"Keep all files as they are and look at: gradtrail verify {run} --trust KEY.vkey",
            )
    with RunReader.open(run) as reader:
        manifest, records, steps = reader.manifest, reader.records(), reader.events(EventKind.STEP)
        has_seal = bool(reader.events(EventKind.SEAL))
    gradients = [body["gradient"] for body in (step.json() for step in steps) if body["gradient"] is not None]
    ends = [int(place) for place in records["shard"].astype(np.int64) * SHARD_ROWS + records["shard_row"] + 1]
    ends += [gradient["shard"] * SHARD_ROWS + gradient["row"] + 1 for gradient in gradients]
    cut_shards(run, manifest.sketch.dim * len(manifest.sketch.forms), max(ends, default=0))

    log = Appender.resume(run, manifest.origin, manifest.to_bytes(), on_head=on_head)
    try:
        if not has_seal:  # a seal that was stored and never signed needs only its signature
            log.add_event(EventKind.SEAL, {"reason": "abandoned", "records": len(records), "steps": len(steps)})
        log.flush(signer)
    finally:
        log.close()
    assert log.note is not None  # flush has just signed one
    return log.note
