"""From a run folder to evidence: verify first, read afterwards, and read only what verified.

A run that does not verify against trust from outside yields no evidence at all. Every value keeps the entry it
stands in. Numbers are counts and extremes of logged values; nothing is estimated here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import ReadError
from auditlog.format.digests import sha256
from auditlog.format.manifest import DataBlock, Source
from auditlog.format.records import Event, EventKind, Flag
from auditlog.format.tracking import Tracking
from auditlog.ledger.attempt_steps import AttemptSteps, attempt_steps
from auditlog.ledger.custody import custody_head, read_custody, read_result
from auditlog.ledger.reader import RunReader
from auditlog.ledger.sample_use import MAX_NAMED, Fate, Samples, places, sample_use
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.sessions import claimed_keys
from auditlog.trust.verdict import UNANCHORED, Verdict
from reports.errors import UnverifiedEvidenceError
from reports.evidence import (
    AttemptFacts,
    CheckFacts,
    CheckpointFacts,
    CustodyFacts,
    Evidence,
    EvidenceRef,
    FileFacts,
    Influence,
    Log,
    RecordFacts,
    SampleFacts,
    SessionFacts,
    Settings,
    SourceFacts,
    StepFacts,
    TrackingFacts,
    Verification,
    flatten,
)
from reports.said import Said

_MANIFEST, _RUN_LOG = EvidenceRef(log="manifest"), EvidenceRef(log="run log")
_CLIPPED_BELOW = 1 - 1e-4  # what the measured factor of an unclipped step stays above


def gather(run: Path, trust: Trust) -> Evidence:
    """Verify a run folder and return what may be reported from it.

    Args:
        run: The run folder, sealed.
        trust: Pinned keys and kept heads from outside the run.

    Raises:
        UnverifiedEvidenceError: If the run does not verify, or there was nothing from outside to compare with.
        ReadError: If it cannot be read.
    """
    verdict = verify_run(run, trust)
    _insist(run, verdict)
    with RunReader.open(run) as reader:
        note, events, steps = reader.final_note, reader.events(), reader.live_steps()
        logged, records = [rank.records() for rank in reader.ranks], reader.live_records()
        samples, attempts = reader.sample_index(records), attempt_steps(reader)
        superseded = sum(map(len, logged)) - len(records)
        said = Said.read(reader)
        fates = tuple(_fate(reader, fate, found) for fate, found in sample_use(reader).items())
        manifest, manifest_bytes = reader.manifest, reader.manifest_bytes
    if note is None or note.checkpoint().root.hex() != verdict.root:
        raise UnverifiedEvidenceError(f"{run} changed while it was read", "Make the report again.")
    by_kind = {kind: [event for event in events if event.kind == kind] for kind in EventKind}
    acts = read_custody(run)
    head = custody_head(run)
    return Evidence(
        verification=_verification(verdict, trust.naming(claimed_keys(manifest))),
        created_us=manifest.created_us,
        manifest_sha256=sha256(manifest_bytes).hex(),
        vkey=manifest.vkey,
        data_description=manifest.data.description,
        purpose=_settings(manifest.purpose),
        sources=tuple(_source(source, manifest.data, records) for source in manifest.data.sources),
        samples=fates,
        records=_records(records, samples).model_copy(
            update={"superseded": superseded, "ref": _range(logged[0]["seq"])}  # entries of rank 0, whose log is cited
        ),
        steps=_steps(steps),
        model=_settings(manifest.model),
        tracking=TrackingFacts(ref=_MANIFEST, found=Tracking.read(manifest.tracking)),
        training=_settings(manifest.training),
        environment=_settings(manifest.environment),
        sketch=_settings(manifest.sketch.model_dump(mode="json", exclude={"parameters"})),
        recipe_sha256=(manifest.recipe or {}).get("sha256"),
        checkpoints=tuple(_saved_weights(event) for event in by_kind[EventKind.MODEL_CHECKPOINT]),
        sessions=tuple(
            SessionFacts(ref=_entry(event), attempt=event.json()["certificate"]["attempt"], ts_us=event.ts_us)
            for event in by_kind[EventKind.SESSION]
        ),
        attempts=tuple(_attempt(attempt, events) for attempt in attempts),
        processes=manifest.world_size,
        self_checks=said.self_checks,
        losses=said.losses,
        notices=said.notices,
        final_note=note.to_bytes().decode(),
        custody=tuple(_act(event) for event in acts),
        custody_head=None if head is None else head.to_bytes().decode(),
        influence=_influence(run, acts),
    )


def _insist(run: Path, verdict: Verdict) -> None:
    """Let a verified run pass and nothing else."""
    if verdict.exit_code == UNANCHORED:
        raise UnverifiedEvidenceError(
            f"{run}: nothing from outside the run to verify it against",
            "Give the pinned public key with --trust, or a kept head with --head, or both.",
        )
    if not verdict.ok:
        first = next(finding for finding in verdict.findings if finding.exit_code == verdict.exit_code)
        raise UnverifiedEvidenceError(
            f"{run} does not verify ({verdict.status}): {first.message}",
            f"No report is made from it. See all findings: gradtrail verify {run}",
        )


def _verification(verdict: Verdict, trust: Trust) -> Verification:
    kept = sorted({note.checkpoint().size for note in trust.heads if note.checkpoint().origin == verdict.origin})
    open_points = (*verdict.not_checked, *filter(None, [trust.leaves_open()]))
    return Verification(
        ref=EvidenceRef(log="verification"),
        **{name: getattr(verdict, name) for name in ("origin", "run_id", "entries", "records", "steps", "attempts")},
        sealed=verdict.sealed,
        abandoned=verdict.abandoned,
        root=verdict.root,
        trust=verdict.trust,
        pinned_keys=tuple(str(vkey) for vkey in trust.vkeys),
        kept_heads=tuple(kept),
        checks=tuple(CheckFacts(name=c.name, status=c.status, detail=c.detail) for c in verdict.checks),
        notes=tuple(finding.message for finding in verdict.findings if finding.level == "note"),
        not_checked=tuple(dict.fromkeys(_sentence(point) for point in open_points)),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _entry(event: Event, log: Log = "run log") -> EvidenceRef:
    return EvidenceRef(log=log, seq=event.seq)


def _range(seqs: NDArray[np.int64] | list[int]) -> EvidenceRef:
    if not len(seqs):
        return EvidenceRef(log="run log")
    return EvidenceRef(log="run log", seq=int(min(seqs)), last_seq=int(max(seqs)))


def _settings(block: dict[str, Any]) -> Settings:
    return Settings(ref=_MANIFEST, values=flatten(block))


def _source(source: Source, data: DataBlock, records: NDArray[np.void]) -> SourceFacts:
    version = next(v for v in data.versions if v.data_version_id == source.data_version_id)
    mine = records[records["source_id"] == source.source_id]
    return SourceFacts(
        ref=_MANIFEST,
        source_id=source.source_id,
        path=source.path,
        format=source.format,
        sha256=source.sha256,
        rows=source.rows,
        version_kind=version.kind,
        version=version.revision,
        dirty=version.dirty,
        uses=len(mine),
        tokens=int(mine["n_tokens"].sum(dtype=np.int64)),
    )


def _records(records: NDArray[np.void], samples: NDArray[np.int64]) -> RecordFacts:
    """Count over the records that led to the final weights; a run without any has no evidence of training."""
    if not len(records):
        raise UnverifiedEvidenceError("the run holds no record, so there is nothing to report")
    flags = {flag.name or str(flag): int((records["flags"] & flag > 0).sum()) for flag in Flag}
    return RecordFacts(
        ref=_range(records["seq"]),
        records=len(records),
        samples=len(np.unique(samples)),
        tokens=int(records["n_tokens"].sum(dtype=np.int64)),
        epochs=len(np.unique(records["epoch"])),
        first_us=int(records["ts_us"].min()),
        last_us=int(records["ts_us"].max()),
        flags={name: number for name, number in flags.items() if number},
    )


def _fate(reader: RunReader, fate: Fate, found: Samples) -> SampleFacts:
    first = tuple(places(reader, found.named[:MAX_NAMED]))
    return SampleFacts(ref=_RUN_LOG, fate=fate, count=found.count, by_source=found.by_source, first=first)


def _attempt(attempt: AttemptSteps, events: list[Event]) -> AttemptFacts:
    """Cite where an attempt says from where it went on; the first one needs not."""
    said = (event for event in events if event.kind == EventKind.RESUME and event.json()["attempt"] == attempt.number)
    resume = next(said, None)
    return AttemptFacts(ref=_RUN_LOG if resume is None else _entry(resume), steps=attempt)


def _steps(events: list[Event]) -> StepFacts:
    bodies = [event.json() for event in events]

    def logged(name: str) -> list[float]:
        return [float(body[name]) for body in bodies if body.get(name) is not None]

    residual, factor, loss = logged("residual"), logged("f"), logged("loss")
    measured = [(float(body["residual"]), int(body["step"])) for body in bodies if body.get("residual") is not None]
    return StepFacts(
        ref=_range([event.seq for event in events]),
        steps=len(bodies),
        skipped=sum(bool(body.get("skipped")) for body in bodies),
        loss_first=loss[0] if loss else None,
        loss_last=loss[-1] if loss else None,
        residual_median=float(np.median(residual)) if residual else None,
        residual_max=max(residual, default=None),
        residual_max_step=max(measured)[1] if measured else None,
        factor_min=min(factor, default=None),
        factor_max=max(factor, default=None),
        clipped=sum(value < _CLIPPED_BELOW for value in factor),
        tracked_share_min=min(logged("tracked_share"), default=None),
    )


def _saved_weights(event: Event) -> CheckpointFacts:
    body = event.json()
    files = tuple(FileFacts(name=f["name"], sha256=f["sha256"], size_bytes=f.get("size_bytes")) for f in body["files"])
    return CheckpointFacts(ref=_entry(event), path=body["path"], step=body["step"], files=files)


def _act(event: Event) -> CustodyFacts:
    known = {kind.value: kind.name for kind in EventKind}
    kind = known.get(event.kind, f"kind {event.kind}")
    return CustodyFacts(ref=_entry(event, "custody log"), kind=kind, ts_us=event.ts_us)


def _influence(run: Path, acts: list[Event]) -> Influence | None:
    """Return the latest query whose result is still there; an erased one is named by its custody entry only."""
    queries = [event for event in acts if event.kind == EventKind.QUERY]
    if not queries:
        return None
    latest = queries[-1]
    result = latest.json()["result"]
    try:
        document = read_result(run, Path(result["file"]).stem)
    except ReadError as error:
        raise UnverifiedEvidenceError(f"the result of {result['file']} cannot be reported: {error}") from error
    reference = _entry(latest, "custody log")
    return Influence.from_document(document, ref=reference, commitment=result["commitment"], queries=len(queries))
