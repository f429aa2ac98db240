"""What a run folder holds, as plain JSON values: the content of ``gradtrail show`` before it is printed.

Everything here is *stored*, not verified.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import UsageError
from auditlog.format.records import RECORD, Event, EventKind, Flag
from auditlog.ledger.conservation import StepCheck
from auditlog.ledger.custody import read_custody
from auditlog.ledger.reader import RunReader


def run(reader: RunReader) -> dict[str, Any]:
    """Return the whole run in one page: manifest, counts, sources with their uses, heads, later acts."""
    manifest, records, heads = reader.manifest, reader.records(), reader.heads()
    events = reader.events()
    uses = np.bincount(records["source_id"].astype(np.int64), minlength=len(manifest.data.sources))
    final = reader.final_note
    seal = next((event.json() for event in events if event.kind == EventKind.SEAL), None)
    versions = {version.data_version_id: version for version in manifest.data.versions}
    return {
        "schema": "gradtrail/run-summary",
        "path": str(reader.path),
        "origin": manifest.origin,
        "run_id": manifest.run_id,
        "created_us": manifest.created_us,
        "vkey": manifest.vkey,
        "model": manifest.model,
        "purpose": manifest.purpose,
        "sketch": {"dim": manifest.sketch.dim, "forms": list(manifest.sketch.forms), "kind": manifest.sketch.kind},
        "entries": len(records) + len(events),
        "records": len(records),
        "samples": len(np.unique(reader.sample_index(records))) if len(records) else 0,
        "samples_in_manifest": manifest.data.rows,
        "steps": sum(event.kind == EventKind.STEP for event in events),
        "flags": _flag_counts(records),
        "sealed": final is not None,
        "seal": seal,
        "root": final.checkpoint().root.hex() if final else "",
        "heads": sorted(heads),
        "sources": [
            {
                "source_id": source.source_id,
                "path": source.path,
                "rows": source.rows,
                "sha256": source.sha256,
                "data_version": versions[source.data_version_id].revision,
                "uses": int(uses[source.source_id]),
            }
            for source in manifest.data.sources
        ],
        "model_checkpoints": [event.json() for event in events if event.kind == EventKind.MODEL_CHECKPOINT],
        "notices": [event.json() for event in events if event.kind == EventKind.NOTICE],
        "custody": [_act(event) for event in read_custody(reader.path)],
    }


def steps(reader: RunReader) -> dict[str, Any]:
    """Return the body of every step event."""
    return {
        "schema": "gradtrail/steps",
        "steps": [{"seq": event.seq, "ts_us": event.ts_us, **event.json()} for event in reader.events(EventKind.STEP)],
    }


def step_count(reader: RunReader) -> int:
    """Return how many optimizer steps the log holds."""
    return len(reader.events(EventKind.STEP))


def conservation(checks: Sequence[StepCheck], steps: int) -> dict[str, Any]:
    """Return the recomputed sums, and how many of the ``steps`` could not be compared at all."""
    return {
        "schema": "gradtrail/conservation",
        "steps": [
            {"step": c.step, "f": c.f, "residual": c.residual, "tolerance": c.tolerance, "ok": c.ok} for c in checks
        ],
        "not_compared": steps - len(checks),
        "ok": len(checks) == steps and all(check.ok for check in checks),
    }


def entry(reader: RunReader, seq: int) -> dict[str, Any]:
    """Return one entry in full.

    Raises:
        UsageError: If the log has no such entry.
    """
    records = reader.records()
    found = records[records["seq"] == seq]
    if len(found):
        return _record(reader, found[:1])
    for event in reader.events():
        if event.seq == seq:
            return {
                "schema": "gradtrail/entry",
                "seq": seq,
                "kind": kind_name(event.kind),
                "ts_us": event.ts_us,
                "leaf": event.leaf().hex(),
                "body": event.json(),
            }
    raise UsageError(f"{reader.path} has no entry {seq}")


def kind_name(kind: int) -> str:
    """Return an event kind in words, such as ``model checkpoint``."""
    try:
        return EventKind(kind).name.lower().replace("_", " ")
    except ValueError:
        return f"unknown kind {kind}"


def _record(reader: RunReader, row: NDArray[np.void]) -> dict[str, Any]:
    source = next((s for s in reader.manifest.data.sources if s.source_id == row["source_id"][0]), None)
    fields: dict[str, Any] = {}
    for name in RECORD.names or ():
        value = row[name][0]
        if isinstance(value, np.void):
            fields[name] = value.tobytes().hex()
        elif isinstance(value, np.floating):
            fields[name] = float(value) if math.isfinite(value) else None
        else:
            fields[name] = int(value)
    return {
        "schema": "gradtrail/entry",
        "seq": fields["seq"],
        "kind": "record",
        "ts_us": fields["ts_us"],
        "source": source.path if source else None,
        "flags": [flag.name.lower().replace("_", " ") for flag in Flag if flag.name and fields["flags"] & flag],
        "fields": fields,
    }


def _flag_counts(records: NDArray[np.void]) -> dict[str, int]:
    counts = {flag.name or "": int(np.count_nonzero(records["flags"] & flag)) for flag in Flag}
    return {name.lower().replace("_", " "): count for name, count in counts.items() if count}


def _act(event: Event) -> dict[str, Any]:
    is_note = event.kind == EventKind.CUSTODY_OPENED
    body: Any = {"note": base64.b64encode(event.body).decode()} if is_note else event.json()
    return {"seq": event.seq, "kind": kind_name(event.kind), "ts_us": event.ts_us, "body": body}
