"""Put an answer on record: the document into the custody log's results, a salted commitment into the log itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attribution.influence.query import FINAL, OBJECTIVE
from attribution.influence.result import ESTIMATOR, InfluenceResult
from auditlog.errors import UsageError
from auditlog.format.records import Event, EventKind
from auditlog.ledger.custody import CustodyLog, read_custody
from auditlog.ledger.reader import RunReader
from auditlog.trust.keys import Signer


def log_answer(run: Path, result: InfluenceResult, signer: Signer) -> tuple[str, Event]:
    """Log one answer in the run's custody log.

    Args:
        run: The run that was asked; sealed, and not open in a reader: the engine opens a file once per process.
        result: The answer.
        signer: The long-lived key of whoever asked.

    Returns:
        The result's file below ``custody/``, and the entry.

    Raises:
        UsageError: If the run is not sealed.
    """
    with RunReader.open(run) as reader:
        body = query_event(reader, result)
    custody = CustodyLog.open(run, signer)
    earlier = sum(event.kind == EventKind.QUERY for event in read_custody(run))
    written = custody.write_result(f"query-{earlier + 1}", result.to_document())
    return written["file"], custody.append(EventKind.QUERY, {"result": written, **body})


def query_event(reader: RunReader, result: InfluenceResult) -> dict[str, Any]:
    """Return what the QUERY event says beside the result's commitment: how, and where the run stood. No text.

    Args:
        reader: The run that was asked; sealed.
        result: The answer.

    Raises:
        UsageError: If the run is not sealed.
    """
    if reader.final_note is None:
        raise UsageError(f"{reader.path} is not sealed, so no custody log can refer to it")
    head = reader.final_note.checkpoint()
    snapshots = [e.seq for e in reader.events(EventKind.MODEL_CHECKPOINT) if e.json()["path"] == FINAL]
    return {
        "estimator": ESTIMATOR,
        "objective": OBJECTIVE,
        "records": result.n_records,
        "samples": result.n_samples,
        "tree_size": head.size,
        "root": head.root.hex(),
        "sketch_tables_sha256": reader.manifest.sketch.tables_sha256,
        "model_checkpoint_seq": snapshots[-1],
        "specific": result.specificity.specific,
    }
