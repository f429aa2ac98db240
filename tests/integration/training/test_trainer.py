"""Audit mode on the Hugging Face Trainer, with its defaults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, sample_loss, tiny_lora
from transformers import Trainer, TrainingArguments

from attribution import AuditMode, dataset
from attribution.errors import SampleIdentityError
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run
from auditlog.format.records import EventKind


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    ids = [1 + ord(c) % (VOCABULARY - 1) for c in row["text"]]
    return {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    batch = {
        "input_ids": pad("input_ids", 0),
        "labels": pad("labels", -100),
        "attention_mask": pad("attention_mask", 0),
    }
    if "sample_index" in rows[0]:
        batch["sample_index"] = torch.tensor([row["sample_index"] for row in rows])
    return batch


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    chosen = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 3,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 100,
        "save_strategy": "no",
        "report_to": [],
        "seed": 5,
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(chosen | changes))


def make_trainer(folder: Path, data: DataManifest, **changes: Any) -> Trainer:
    rows = dataset(data).map(tokenize)
    return Trainer(
        model=tiny_lora(dropout=0.1).train(),
        args=arguments(folder, **changes),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        data_collator=collate,
    )


def audited(folder: Path, data: DataManifest, signer: Signer, trainer: Trainer) -> tuple[Any, list[dict[str, Any]]]:
    with AuditMode.attach(trainer, data, run=folder / "run", signer=signer, on_head=folder / "auditor"):
        trainer.train()
    verdict = verify_run(folder / "run", Trust.load([str(signer.vkey)], [], None), data=folder / "data")
    assert verdict.exit_code == 0, verdict.findings
    with RunReader.open(folder / "run") as run:
        return run.records(), [event.json() for event in run.events(EventKind.STEP)]


def test_defaults_record_every_row_of_every_epoch_once(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    trainer = make_trainer(tmp_path, data)
    assert trainer.args.remove_unused_columns
    assert trainer.args.max_grad_norm == 1.0
    records, steps = audited(tmp_path, data, signer, trainer)
    assert len(steps) == 14  # 20 rows in batches of 3: the last of each epoch has 2
    assert sorted({s["records"] for s in steps}) == [2, 3]
    for epoch in (0, 1):
        rows = records[records["epoch"] == epoch]
        assert sorted(zip(rows["source_id"].tolist(), rows["row"].tolist(), strict=True)) == [
            (s, r) for s in range(2) for r in range(10)
        ]
    assert max(s["residual"] for s in steps) < 1e-4
    assert all(s["clip_max_norm"] == 1.0 and 0 < s["f"] <= 1 + 1e-4 for s in steps)
    # num_items_in_batch: the weight is one over the step's target tokens
    for step in steps:
        of_step = records[records["step"] == step["step"]]
        assert of_step["weight"] == pytest.approx(1 / step["num_items"], rel=1e-5)
        assert of_step["n_tokens"].sum() == step["num_items"]


def test_gradient_accumulation_counts_every_micro_batch(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    trainer = make_trainer(tmp_path, data, gradient_accumulation_steps=3, max_grad_norm=0.0)
    records, steps = audited(tmp_path, data, signer, trainer)
    assert len(records) == 40
    assert {len(s["micro_batches"]) for s in steps} == {3, 1}  # 7 micro-batches an epoch
    assert sorted({int(m) for m in records["micro"]}) == [0, 1, 2]
    for step in steps:
        assert step["f"] == pytest.approx(1, abs=1e-4)
        assert step["residual"] < 1e-4


def test_evaluation_in_between_records_nothing(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    trainer = make_trainer(tmp_path, data, eval_strategy="steps", eval_steps=2)
    records, steps = audited(tmp_path, data, signer, trainer)
    assert (len(records), len(steps)) == (40, 14)
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


def test_the_adapter_is_bit_identical_to_a_trainer_without_audit_mode(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    plain = make_trainer(tmp_path, data)
    plain.train()
    trainer = make_trainer(tmp_path, data)
    audited(tmp_path, data, signer, trainer)
    for (name, left), (_, right) in zip(plain.model.named_parameters(), trainer.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_label_smoothing_is_said_to_be_an_unknown_unit_and_still_conserved(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    trainer = make_trainer(tmp_path, data, label_smoothing_factor=0.1, num_train_epochs=1)
    records, steps = audited(tmp_path, data, signer, trainer)
    assert (records["flags"] & 16).all()
    assert (records["weight"] == 1).all()
    assert max(s["residual"] for s in steps) < 1e-4


def test_the_trainer_is_left_as_it_was(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    trainer = make_trainer(tmp_path, data, num_train_epochs=1)
    columns, callbacks = trainer._signature_columns, list(trainer.callback_handler.callbacks)
    audited(tmp_path, data, signer, trainer)
    assert trainer._signature_columns == columns
    assert trainer.callback_handler.callbacks == callbacks
    assert "training_step" not in vars(trainer)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())


def test_a_head_travels_with_every_saved_model(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    trainer = make_trainer(tmp_path, data, save_strategy="steps", save_steps=7, num_train_epochs=1)
    audited(tmp_path, data, signer, trainer)
    kept = (tmp_path / "out" / "checkpoint-7" / "audit_head.note").read_bytes()
    assert kept in {p.read_bytes() for p in (tmp_path / "run" / "heads").glob("*.note")}


def test_a_map_that_dropped_the_id_is_refused_with_the_corrected_call(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    trainer = make_trainer(tmp_path, data)
    rows = dataset(data)
    trainer.train_dataset = rows.map(tokenize, remove_columns=rows.column_names)
    with pytest.raises(SampleIdentityError, match="no sample_index column") as caught:
        AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer)
    assert "dataset(manifest).map(tokenize" in caught.value.advice()
    assert not (tmp_path / "run").exists()


def test_recorded_losses_are_those_of_the_rows(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    """The ids that arrive are the ids of the rows: each loss of step 1 is that row's loss at the first weights."""
    trainer = make_trainer(tmp_path, data, num_train_epochs=1, max_steps=1)
    trainer.model.peft_config["default"].lora_dropout = 0.0
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    first = tiny_lora().train()
    records, _ = audited(tmp_path, data, signer, trainer)
    for record in records:
        index = int(record["source_id"]) * 10 + int(record["row"])
        batch = collate([tokenize(data.read_row(index))])
        assert float(record["loss"]) == pytest.approx(float(sample_loss(first, batch, 0).detach()), rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_is_incomplete_keeps_what_it_acknowledged_and_can_be_closed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_run.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    acknowledged = int(done.stdout.strip().splitlines()[-1])
    assert acknowledged > 0
    signer = Signer.load(tmp_path / "key.p12", passphrase="correct horse")
    trust = Trust.load([str(signer.vkey)], sorted((tmp_path / "auditor").rglob("*.note")), None)
    verdict = verify_run(tmp_path / "run", trust)
    assert (verdict.exit_code, verdict.status) == (5, "INCOMPLETE"), verdict.findings
    assert verdict.entries >= acknowledged
    from auditlog.ledger.abandon import seal_abandoned

    seal_abandoned(tmp_path / "run", signer)
    verdict = verify_run(tmp_path / "run", trust)
    assert (verdict.exit_code, verdict.abandoned) == (0, True), verdict.findings
