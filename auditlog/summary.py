"""What a run folder holds, as plain JSON values: the content of ``gradtrail show`` before it is printed.

Everything here is *stored*, not verified.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import UsageError
from auditlog.format.canonical import finite
from auditlog.format.manifest import DataBlock
from auditlog.format.notices import SelfCheck, parse_notice
from auditlog.format.records import RECORD, Event, EventKind, Flag
from auditlog.ledger.attempt_steps import attempt_steps
from auditlog.ledger.conservation import StepCheck
from auditlog.ledger.custody import read_custody
from auditlog.ledger.reader import RunReader
from auditlog.ledger.sample_use import MAX_NAMED, Fate, Samples, places, sample_use


def run(reader: RunReader) -> dict[str, Any]:
    """Return the whole run in one page: manifest, counts, sources with their uses, heads, later acts.

    ``records`` and ``steps`` count what was logged; samples, uses and flags only what led to the final weights.
    """
    manifest, heads, events = reader.manifest, reader.heads(), reader.events()
    logged = sum(len(rank.records()) for rank in reader.ranks)
    records, steps = reader.live_records(), sum(event.kind == EventKind.STEP for event in events)
    final = reader.final_note
    seal = next((event.json() for event in events if event.kind == EventKind.SEAL), None)
    return {
        "schema": "gradtrail/run-summary",
        "path": str(reader.path),
        "origin": manifest.origin,
        "run_id": manifest.run_id,
        "created_us": manifest.created_us,
        "vkey": manifest.vkey,
        "model": manifest.model,
        "purpose": manifest.purpose,
        "tracking": manifest.tracking,
        "sketch": {"dim": manifest.sketch.dim, "forms": list(manifest.sketch.forms), "kind": manifest.sketch.kind},
        "entries": len(reader.records()) + len(events),
        "ranks": len(reader.ranks),
        "attempts": [asdict(attempt) for attempt in attempt_steps(reader)],
        "records": logged,
        "superseded_records": logged - len(records),
        "samples": len(np.unique(reader.sample_index(records))) if len(records) else 0,
        "samples_in_manifest": manifest.data.rows,
        "steps": steps,
        "superseded_steps": steps - len(reader.live_steps()),
        "flags": _flag_counts(records),
        "sealed": final is not None,
        "seal": seal,
        "root": final.checkpoint().root.hex() if final else "",
        "heads": sorted(heads),
        "sources": _sources(manifest.data, records),
        "sample_use": [_samples(reader, fate, samples) for fate, samples in sample_use(reader).items()],
        "model_checkpoints": [event.json() for event in events if event.kind == EventKind.MODEL_CHECKPOINT],
        "self_checks": _self_checks(reader),
        "notices": _said(reader, EventKind.NOTICE),
        "losses": _said(reader, EventKind.LOSS_ACCEPTED),
        "custody": [_act(event) for event in read_custody(reader.path)],
    }


def _sources(data: DataBlock, records: NDArray[np.void]) -> list[dict[str, Any]]:
    """Return each source file with its version and how often it was used."""
    uses = np.bincount(records["source_id"].astype(np.int64), minlength=len(data.sources))
    versions = {version.data_version_id: version for version in data.versions}
    return [
        {
            "source_id": source.source_id,
            "path": source.path,
            "format": source.format,
            "rows": source.rows,
            "sha256": source.sha256,
            "data_version": versions[source.data_version_id].revision,
            "data_version_kind": versions[source.data_version_id].kind,
            "dirty": versions[source.data_version_id].dirty,
            "uses": int(uses[source.source_id]),
        }
        for source in data.sources
    ]


def _samples(reader: RunReader, fate: Fate, samples: Samples) -> dict[str, Any]:
    """Return one list of samples: how many, how many of each source file, and the first of them."""
    paths = [source.path for source in reader.manifest.data.sources]
    first = samples.named[:MAX_NAMED]
    return {
        "fate": fate.value,
        "reason": fate.reason,
        "count": samples.count,
        "by_source": None if samples.by_source is None else list(samples.by_source),
        "first": [
            {"sample_index": int(index), "source": paths[source_id], "row": row}
            for index, (source_id, row) in zip(first, places(reader, first), strict=True)
        ],
    }


def _self_checks(reader: RunReader) -> list[dict[str, Any]]:
    """Return what the self-checks of all ranks and attempts found."""
    notices = [
        (rank.manifest.rank, event.seq, parse_notice(event))
        for rank in reader.ranks
        for event in rank.events(EventKind.NOTICE)
    ]
    return [
        {"rank": rank, "seq": seq, **asdict(notice), "sentence": notice.sentence()}
        for rank, seq, notice in notices
        if isinstance(notice, SelfCheck)
    ]


def _said(reader: RunReader, kind: EventKind) -> list[dict[str, Any]]:
    """Return the bodies of all events of one kind, of every rank."""
    return [
        {"rank": rank.manifest.rank, "seq": event.seq, **event.json()}
        for rank in reader.ranks
        for event in rank.events(kind)
    ]


def steps(reader: RunReader) -> dict[str, Any]:
    """Return the body of every step event, and whether the step led to the final weights."""
    live = {event.seq for event in reader.live_steps()}
    return {
        "schema": "gradtrail/steps",
        "steps": [
            {"seq": event.seq, "ts_us": event.ts_us, "live": event.seq in live, **event.json()}
            for event in reader.events(EventKind.STEP)
        ],
    }


def step(reader: RunReader, number: int) -> dict[str, Any]:
    """Return which samples one optimizer step was taken on, in every attempt that took it and on every rank.

    Raises:
        UsageError: If no attempt took that step.
    """
    events = [event for event in reader.events(EventKind.STEP) if event.json()["step"] == number]
    if not events:
        raise UsageError(f"{reader.path} has no step {number}")
    live = {event.seq for event in reader.live_steps()}
    bodies = [event.json() for event in events]
    return {
        "schema": "gradtrail/step",
        "step": number,
        "attempts": [
            {
                "attempt": body["attempt"],
                "live": event.seq in live,
                "seq": event.seq,
                "ts_us": event.ts_us,
                "samples": [use for rank in reader.ranks for use in _uses(rank, body["attempt"], number)],
            }
            for event, body in zip(events, bodies, strict=True)
        ],
    }


def _uses(reader: RunReader, attempt: int, step: int) -> list[dict[str, Any]]:
    """Return the sample uses of one step of one attempt on one rank: which row of which file, where in the batch."""
    records = reader.records()
    records = records[(records["attempt"] == attempt) & (records["step"] == step)]
    spans = _spans(reader, attempt, step)
    sources = {source.source_id: source.path for source in reader.manifest.data.sources}
    return [
        {
            "rank": reader.manifest.rank,
            "seq": int(record["seq"]),
            **{name: int(record[name]) for name in ("micro", "slot", "part", "epoch")},
            "sample_index": int(index),
            "source": sources[int(record["source_id"])],
            "row": int(record["row"]),
            "n_tokens": int(record["n_tokens"]),
            "loss": finite(record["loss"]),
            "flags": _flag_names(int(record["flags"])),
            "sample_commit": record["sample_commit"].tobytes().hex(),
            "spans": spans.get((int(record["micro"]), place)),
        }
        for record, place, index in zip(records, _places(records["micro"]), reader.sample_index(records), strict=True)
    ]


def _places(micro: NDArray[np.uint32]) -> list[int]:
    """Return each record's place among those of its micro-batch, which they follow one another in."""
    seen: Counter[int] = Counter()
    found = []
    for number in micro.tolist():
        found.append(seen[number])
        seen[number] += 1
    return found


def _spans(reader: RunReader, attempt: int, step: int) -> dict[tuple[int, int], list[dict[str, int]]]:
    """Return by micro-batch and place the token spans that the step event of a packed run gives, ``end`` not in it."""
    bodies = [event.json() for event in reader.events(EventKind.STEP)]
    body = next((body for body in bodies if (body["attempt"], body["step"]) == (attempt, step)), {})
    return {
        (number, place): [dict(zip(("row", "start", "end", "place"), span, strict=True)) for span in spans]
        for number, micro in enumerate(body.get("micro_batches", ()))
        for place, spans in enumerate(micro.get("spans", ()))
    }


def step_count(reader: RunReader) -> int:
    """Return how many optimizer steps the log holds."""
    return len(reader.events(EventKind.STEP))


def conservation(checks: Sequence[StepCheck], steps: int) -> dict[str, Any]:
    """Return the recomputed sums, and how many of the ``steps`` could not be compared at all."""
    return {
        "schema": "gradtrail/conservation",
        "steps": [
            {
                "attempt": c.attempt,
                "step": c.step,
                "f": c.f,
                "residual": c.residual,
                "tolerance": c.tolerance,
                "ok": c.ok,
            }
            for c in checks
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
        "flags": _flag_names(fields["flags"]),
        "fields": fields,
    }


def _flag_names(flags: int) -> list[str]:
    return [flag.name.lower().replace("_", " ") for flag in Flag if flag.name and flags & flag]


def _flag_counts(records: NDArray[np.void]) -> dict[str, int]:
    counts = {flag.name or "": int(np.count_nonzero(records["flags"] & flag)) for flag in Flag}
    return {name.lower().replace("_", " "): count for name, count in counts.items() if count}


def _act(event: Event) -> dict[str, Any]:
    is_note = event.kind == EventKind.CUSTODY_OPENED
    body: Any = {"note": base64.b64encode(event.body).decode()} if is_note else event.json()
    return {"seq": event.seq, "kind": kind_name(event.kind), "ts_us": event.ts_us, "body": body}
