"""A hand-built evidence set of the size and shape of a small credit run, and declarations that go with it."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

from auditlog.format.notices import SelfCheck
from auditlog.format.tracking import Tracking
from auditlog.ledger.attempt_steps import AttemptSteps
from auditlog.ledger.sample_use import Fate
from reports.declarations import Classification, Declarations, System
from reports.evidence import (
    AttemptFacts,
    CheckFacts,
    CheckpointFacts,
    CustodyFacts,
    Evidence,
    EvidenceRef,
    FileFacts,
    Influence,
    RecordFacts,
    SampleFacts,
    SelfCheckFacts,
    SessionFacts,
    Settings,
    SourceFacts,
    StepFacts,
    TrackingFacts,
    Verification,
)
from reports.obligations import load_register
from reports.sections.subject import Subject

T0_US = 1_796_083_200_000_000  # 2026-12-01 00:00:00 UTC


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def influence_document(*, specific: bool = False, path: str = "denied.jsonl") -> dict[str, Any]:
    """A result document as a query writes it into ``custody/results/``."""

    def row(rank: int, sign: int) -> dict[str, Any]:
        cosine = sign * (0.34 - 0.032 * rank)
        return {
            "rank": rank,
            "sample_index": 17 * rank,
            "source_id": 0 if sign > 0 else 1,
            "path": path if sign > 0 else "approved_1.jsonl",
            "row": 17 * rank + 3,
            "data_version_id": 0,
            "data_version": digest("data")[:12],
            "uses": 2,
            "cosine": cosine,
            "cosine_se": 0.0146,
            "score": 0.0021 * cosine,
            "score_se": 0.00004,
            "loss_first": 1.92 - 0.07 * rank,
            "loss_last": 0.61,
            "above_floor": abs(cosine) > 0.066,
            "preview": "Applicant 4711: debt ratio 0.31, secret remark",
        }

    agreement = {"spearman_mean": 0.87, "spearman_min": 0.71, "spearman_max": 0.96, "top10_overlap_mean": 0.74}
    centred = {"spearman_mean": 0.12, "spearman_min": -0.31, "spearman_max": 0.44, "top10_overlap_mean": 0.19}
    return {
        "schema": "gradtrail/influence-result",
        "created_us": T0_US + 500_000_000,
        "question": {
            "prompt": "Applicant 815: secret prompt",
            "target": " deny",
            "contrast": " approve",
            "case_label": "held-out row 212",
            "answered": " deny",
            "log_odds": 1.274,
            "p_target": 0.741,
            "p_contrast": 0.207,
        },
        "estimator": {
            "name": "inline-cosine",
            "ranking": "cosine",
            "score": "inline dot",
            "sketch_dim": 4096,
            "forms": ["raw"],
            "n_records": 480,
            "n_samples": 456,
            "uses_per_sample": 1.05,
            "sign": "score > 0: pushed the log-odds up",
            "uncertainty": "sketch only",
        },
        "noise_floor": {"cosine": 0.0662, "alpha": 0.05, "n": 456},
        "top": {"for": [row(k, 1) for k in range(1, 11)], "against": [row(k, -1) for k in range(1, 11)]},
        "sources": [
            {
                "source_id": 0,
                "path": path,
                "samples": 228,
                "total": 0.0413,
                "se": 0.0021,
                "mean": 0.00018,
                "positive": 0.052,
                "negative": -0.0107,
            },
            {
                "source_id": 1,
                "path": "approved_1.jsonl",
                "samples": 114,
                "total": -0.0182,
                "se": 0.0017,
                "mean": -0.00016,
                "positive": 0.004,
                "negative": -0.0222,
            },
            {
                "source_id": 2,
                "path": "approved_2.jsonl",
                "samples": 114,
                "total": -0.0009,
                "se": 0.0016,
                "mean": -0.00001,
                "positive": 0.008,
                "negative": -0.0089,
            },
        ],
        "specificity": {
            "cases": 8,
            **agreement,
            "centred": centred,
            "specific": specific,
            "statement": "These records would be named for almost any applicant: rankings of 8 other cases agree with "
            "this one (rank correlation 0.87 on average, 15 of 20 in common). They say more about the answer word "
            "than about this applicant.",
        },
        "limits": [
            "Standard errors cover the sketch only: not training noise and not the error of the method.",
            "Under Adam a dot product is relative, not in units of loss.",
            "Gradients were taken at the time of training, the query's gradient at the final weights.",
        ],
        "scores_histogram": {"edges": [-0.4, 0.0, 0.4], "counts": [240, 216]},
    }


def _run(seq: int | None = None, last: int | None = None) -> EvidenceRef:
    return EvidenceRef(log="run log", seq=seq, last_seq=last)


MANIFEST = EvidenceRef(log="manifest")
VERIFIED = EvidenceRef(log="verification")
CUSTODY = EvidenceRef(log="custody log", seq=1)


def make_influence(**changes: Any) -> Influence:
    return Influence.from_document(influence_document(**changes), ref=CUSTODY, commitment=digest("result"), queries=1)


def make_sources() -> tuple[SourceFacts, ...]:
    sizes = (("denied.jsonl", 228), ("approved_1.jsonl", 114), ("approved_2.jsonl", 114))
    return tuple(
        SourceFacts(
            ref=MANIFEST,
            source_id=i,
            path=path,
            format="jsonl",
            sha256=digest(path),
            rows=rows,
            version_kind="files",
            version="sha256:" + digest("data")[:16],
            dirty=None,
            uses=rows + 8,
            tokens=2 * (rows + 8),
        )
        for i, (path, rows) in enumerate(sizes)
    )


def make_samples(**counts: tuple[int, ...]) -> tuple[SampleFacts, ...]:
    """What became of the 456 rows, by fate's name and source; by default all were used, and the dataset is known."""
    by_fate = {Fate[name]: count for name, count in counts.items()}
    by_fate = {Fate.USED: (228, 114, 114), Fate.DROPPED: (0, 0, 0), Fate.NOT_REACHED: (0, 0, 0)} | by_fate
    return tuple(
        SampleFacts(
            ref=_run(),
            fate=fate,
            count=sum(counts),
            by_source=counts,
            first=tuple((source, row) for source, count in enumerate(counts) for row in range(count)),
        )
        for fate, counts in by_fate.items()
    )


def make_tracking(**changes: Any) -> TrackingFacts:
    fields: dict[str, Any] = {
        "mode": "observe",
        "trainable_entries": 2_442_240,
        "tracked_entries": 2_442_240,
        "coverage": 1.0,
        "routes": (("linear, exact", 420),),
    }
    return TrackingFacts(ref=MANIFEST, found=Tracking(**{**fields, **changes}))


def make_self_check(**changes: Any) -> SelfCheckFacts:
    fields: dict[str, Any] = {
        "samples": 3,
        "modules_seen": 420,
        "modules": 420,
        "oracle_error": 1.2e-7,
        "sum_error": 4e-8,
        "confirmed": True,
    }
    return SelfCheckFacts(ref=_run(2), found=SelfCheck(**{**fields, **changes}))


def make_evidence(**changes: Any) -> Evidence:
    """A sealed, verified run of 60 steps of 8; ``changes`` replaces top-level fields."""
    root = digest("root")
    fields: dict[str, Any] = {
        "verification": Verification(
            ref=VERIFIED,
            origin="example.org/credit",
            run_id="credit-2026-12-0f3a",
            entries=545,
            records=480,
            steps=60,
            attempts=1,
            sealed=True,
            abandoned=False,
            root=root,
            trust="pinned key example-bank (9f2c41aa03d1b7e5) and kept head of 512 entries",
            pinned_keys=("example-bank+5a0e1c77+ATLk0s1gP9ZkqJvXcW2m7fQdT4yRbUoE8hNa6xKp3LsV",),
            kept_heads=(512,),
            checks=(
                CheckFacts(name="chain", status="passed", detail="545 leaves recomputed from the stored rows"),
                CheckFacts(name="tree", status="passed", detail="root recomputed, 5 signed log checkpoints agree"),
                CheckFacts(name="signatures", status="passed", detail="session certificate and seal by the pinned key"),
                CheckFacts(name="sketches", status="passed", detail="480 payloads open their commitments"),
                CheckFacts(name="sample commitments", status="not run", detail="needs the source files (--data)"),
            ),
            notes=(),
            not_checked=("That the source rows are those that were committed: the data were not given.",),
        ),
        "created_us": T0_US,
        "manifest_sha256": digest("manifest"),
        "vkey": "example-bank+5a0e1c77+ATLk0s1gP9ZkqJvXcW2m7fQdT4yRbUoE8hNa6xKp3LsV",
        "data_description": "Mortgage applications, Boston 1990 (HMDA): all denials of the training split and equally "
        "many approvals.",
        "purpose": Settings(ref=MANIFEST, values=()),
        "sources": make_sources(),
        "samples": make_samples(),
        "records": RecordFacts(
            ref=_run(1, 543),
            records=480,
            samples=456,
            tokens=960,
            epochs=2,
            first_us=T0_US + 60_000_000,
            last_us=T0_US + 240_000_000,
            flags={},
        ),
        "steps": StepFacts(
            ref=_run(9, 541),
            steps=60,
            skipped=0,
            loss_first=1.93,
            loss_last=0.58,
            residual_median=3.1e-7,
            residual_max=8.8e-7,
            residual_max_step=14,
            factor_min=0.2174,
            factor_max=1.0,
            clipped=41,
            tracked_share_min=1.0,
        ),
        "model": Settings(
            ref=MANIFEST,
            values=(
                ("adapter", "PeftModelForCausalLM"),
                ("class", "LlamaForCausalLM"),
                ("frozen_entries", "134515008"),
                ("frozen_sha256", digest("base")),
                ("name", "SmolLM2-135M-Instruct"),
                ("trainable_entries", "2442240"),
            ),
        ),
        "tracking": make_tracking(),
        "training": Settings(
            ref=MANIFEST,
            values=(
                ("learning_rate", "0.001"),
                ("max_grad_norm", "1"),
                ("max_steps", "60"),
                ("optimizer", "AdamW"),
                ("per_device_train_batch_size", "8"),
                ("seed", "0"),
                ("warmup_steps", "6"),
            ),
        ),
        "environment": Settings(
            ref=MANIFEST,
            values=(
                ("packages.peft", "0.18.0"),
                ("packages.torch", "2.13.0"),
                ("platform", "Linux-6.1"),
                ("python", "3.11.7"),
            ),
        ),
        "sketch": Settings(ref=MANIFEST, values=(("dim", "4096"), ("forms", "raw"), ("kind", "rolled-sign-fold"))),
        "recipe_sha256": digest("recipe"),
        "checkpoints": (
            CheckpointFacts(
                ref=_run(543),
                path="snapshots/final",
                step=60,
                files=(
                    FileFacts(name="optimizer.safetensors", sha256=digest("optimizer"), size_bytes=19_538_000),
                    FileFacts(name="state.json", sha256=digest("state"), size_bytes=311),
                    FileFacts(name="trainable.safetensors", sha256=digest("trainable"), size_bytes=9_808_000),
                ),
            ),
        ),
        "sessions": (SessionFacts(ref=_run(0), attempt=0, ts_us=T0_US),),
        "attempts": (
            AttemptFacts(
                ref=_run(),
                steps=AttemptSteps(number=1, from_attempt=0, from_step=0, steps=60, live_steps=60, last_step=60),
            ),
        ),
        "processes": 1,
        "self_checks": (make_self_check(),),
        "losses": (),
        "notices": (),
        "final_note": f"example.org/credit\n545\n{root[:43]}=\n\n— example-bank Wg4cdyZa6mPq0s\n",
        "custody": (
            CustodyFacts(ref=EvidenceRef(log="custody log", seq=0), kind="CUSTODY_OPENED", ts_us=T0_US + 400_000_000),
            CustodyFacts(ref=CUSTODY, kind="QUERY", ts_us=T0_US + 500_000_000),
        ),
        "custody_head": f"example.org/credit/custody\n2\n{digest('c')[:43]}=\n\n— example-bank Wg4cdyZb7nQr1t\n",
        "influence": make_influence(),
    }
    return Evidence(**{**fields, **changes})


def make_declarations(**changes: Any) -> Declarations:
    fields: dict[str, Any] = {
        "declared_by": "Credit Models, Example Bank",
        "declared_on": datetime.date(2026, 12, 1),
        "system": System(
            name="Mortgage pre-screening assistant",
            version="0.1",
            intended_purpose="Suggests a decision to a loan officer",
        ),
        "provider": "Example Bank",
        "deployer": "Example Bank",
        "roles": ("provider", "deployer"),
        "classification": Classification(
            basis="Annex III point 5(b), creditworthiness of natural persons",
            decided_by="Legal, Example Bank",
            decided_on=datetime.date(2026, 11, 20),
        ),
        "statements": {
            "original_purpose": "Statistical reporting of mortgage lending (HMDA, 1990)",
            "instructions_for_use": "Draft 0.1",
        },
    }
    return Declarations(**{**fields, **changes})


def make_subject(evidence: Evidence | None = None, declarations: Declarations | None = None) -> Subject:
    return Subject(
        evidence=evidence or make_evidence(),
        declarations=declarations or make_declarations(),
        register=load_register(),
        report_id="art26-3f0c9a7be142",
        evidence_sha256=digest("evidence"),
        created_us=T0_US + 600_000_000,
    )
