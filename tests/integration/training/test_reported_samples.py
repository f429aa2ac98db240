"""From a trainer that drops rows and stops early to the report's three lists, over an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loops import collate, tokenized
from tiny import tiny_lora
from transformers import Trainer, TrainerCallback, TrainingArguments

from attribution import AuditMode
from auditlog import DataManifest, Signer
from auditlog.trust.anchors import Trust
from reports.art26 import assemble
from reports.declarations import Declarations
from reports.evidence import Evidence
from reports.gather import gather
from reports.obligations import load_register
from reports.sections.subject import Subject

DROPPED = (3, 4, 15)  # of 20 rows in two files


class InterruptionError(Exception):
    """Somebody pulled the plug."""


class _Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise InterruptionError


def make_trainer(folder: Path, data: DataManifest) -> Trainer:
    rows = tokenized(data)
    return Trainer(
        model=tiny_lora().train(),
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=2,
            max_steps=4,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows.select([index for index in range(len(rows)) if index not in DROPPED]),
        data_collator=collate,
    )


def ids(evidence: Evidence, fate: str) -> set[int]:
    """Return a list's rows by sample index: both files have ten rows."""
    (found,) = (samples for samples in evidence.samples if samples.fate.name == fate)
    assert len(found.first) == found.count
    return {10 * source + row for source, row in found.first}


def test_e09_used_dropped_and_not_reached(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    """Step 3 is trained twice; both times with the same two rows, so that nothing is left to the first time only."""
    options: dict[str, Any] = {"run": tmp_path / "run", "signer": signer}
    first = make_trainer(tmp_path, data)
    first.add_callback(_Interrupt())
    with pytest.raises(InterruptionError), AuditMode.attach(first, data, **options):
        first.train()
    second = make_trainer(tmp_path, data)
    seen: list[int] = []
    with AuditMode.attach(second, data, resume=True, **options) as audit:
        audit.hooks._check_index = lambda index: seen.extend(index.tolist())
        second.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    evidence = gather(tmp_path / "run", Trust.load([str(signer.vkey)], [], None))
    used = ids(evidence, "USED")
    assert len(used) == evidence.records.samples == 8
    assert len(seen) == 4  # the resumed half
    assert set(seen) < used
    assert ids(evidence, "DROPPED") == set(DROPPED)
    assert ids(evidence, "SUPERSEDED") == set()
    assert ids(evidence, "NOT_REACHED") == set(range(20)) - used - set(DROPPED)
    assert [(a.steps.number, a.steps.from_step, a.steps.live_steps) for a in evidence.attempts] == [
        (1, 0, 2),
        (2, 2, 2),
    ]
    assert all(check.found.confirmed for check in evidence.self_checks)
    assert len(evidence.self_checks) == 2
    assert evidence.notices == ()
    assert assemble(Subject(evidence, Declarations(), load_register(), "r-1", "0" * 64, 0)).sections[10].number == "11"
