"""Audit mode on the Hugging Face Trainer, with its defaults."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import concatenate_datasets, interleave_datasets
from loops import (
    EXACT,
    PLAIN_TRAINER,
    Oracle,
    assert_exact,
    character_tokenizer,
    collate,
    keep_captured,
    relative_error,
    texts_of,
    tokenize,
    tokenized,
)
from peft import LoraConfig, get_peft_model
from tiny import sample_loss, tiny_llama, tiny_lora
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from attribution import AuditMode, dataset
from attribution.errors import SampleIdentityError
from attribution.training.hf import describe_dataset
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run
from auditlog.format.records import EventKind, Flag


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    chosen = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 3,
        "num_train_epochs": 2,
        **PLAIN_TRAINER,
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
    assert not {"training_step", "get_train_dataloader"} & vars(trainer).keys()
    assert trainer.data_collator is collate
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


# --- ids on their way from the dataset into the step ---------------------------------------------------------


def train_exactly(
    folder: Path, data: DataManifest, signer: Signer, rows: Any, collator: Any = None, **changes: Any
) -> list[int]:
    """Train on rows with weights that stay, compare each captured sample with autograd, return the ids in order."""
    settings = {"learning_rate": 0.0, "num_train_epochs": 1} | changes
    trainer = Trainer(
        model=tiny_lora().train(),
        args=arguments(folder, **settings),
        train_dataset=rows,
        data_collator=collator or collate,
    )
    oracle = Oracle(tiny_lora())
    with AuditMode.attach(trainer, data, run=folder / "run", signer=signer, on_head=folder / "auditor") as audit:
        captured = keep_captured(audit)
        trainer.train()
    assert assert_exact(audit, captured, oracle, texts_of(rows)) == audit.recorder.records
    assert audit.recorder.worst_residual < EXACT
    return [index for step in captured for micro in step for index in micro.sample_index.tolist()]


LOADING: dict[str, dict[str, Any]] = {
    "all columns": {"remove_unused_columns": False},
    "workers": {"dataloader_num_workers": 2},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "in order": {"train_sampling_strategy": "sequential"},
    "balanced": {"train_sampling_strategy": "batch_rebalance"},
}


@pytest.mark.parametrize("loading", LOADING)
def test_ids_survive_every_way_of_loading(tmp_path: Path, data: DataManifest, signer: Signer, loading: str) -> None:
    seen = train_exactly(tmp_path, data, signer, tokenized(data), **LOADING[loading])
    assert sorted(seen) == list(range(20))


def test_a_short_last_batch_that_is_dropped_is_not_recorded(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    seen = train_exactly(tmp_path, data, signer, tokenized(data), dataloader_drop_last=True)
    assert len(set(seen)) == len(seen) == 18


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("all_columns", [False, True])
def test_ids_survive_streaming(
    tmp_path: Path, data: DataManifest, signer: Signer, workers: int, all_columns: bool
) -> None:
    rows = tokenized(data).to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=8)
    loading = {"dataloader_num_workers": workers, "remove_unused_columns": not all_columns}
    seen = train_exactly(tmp_path, data, signer, rows, max_steps=5, **loading)
    assert len(set(seen)) == len(seen) == 15


def test_ids_survive_what_datasets_does_to_rows(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    rows = tokenized(data)
    even = rows.filter(lambda row: row["sample_index"] % 2 == 0).shuffle(seed=3)
    mixed = interleave_datasets([even, rows.select(range(5))])
    both = concatenate_datasets([mixed, rows.select([19, 3])])
    both = both.map(lambda batch: {"length": [len(ids) for ids in batch["input_ids"]]}, batched=True)
    expected = Counter(both["sample_index"])
    assert max(expected.values()) > 1  # some rows come twice
    assert Counter(train_exactly(tmp_path, data, signer, both)) == expected
    trainer = make_trainer(tmp_path, data)
    trainer.train_dataset = both
    assert describe_dataset(trainer, data) == {
        "rows": len(both),
        "distinct": len(expected),
        "absent": 20 - len(expected),
        "absent_first": sorted(set(range(20)) - set(expected)),
    }


def test_describing_a_stream_says_nothing(tmp_path: Path, data: DataManifest) -> None:
    trainer = make_trainer(tmp_path, data)
    trainer.train_dataset = tokenized(data).to_iterable_dataset()
    assert describe_dataset(trainer, data) is None


def test_a_collator_that_drops_or_chokes_on_ids_keeps_them(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    def strict(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        assert all(set(row) == {"input_ids", "labels", "attention_mask"} for row in rows)
        return collate(rows)

    seen = train_exactly(tmp_path / "strict", data, signer, tokenized(data), strict)
    language = DataCollatorForLanguageModeling(character_tokenizer(), mlm=False)
    seen += train_exactly(tmp_path / "language", data, signer, tokenized(data).remove_columns("labels"), language)
    assert Counter(seen) == Counter(dict.fromkeys(range(20), 2))


# --- losses and heads -----------------------------------------------------------------------------------------


def test_a_loss_function_of_the_user_is_measured_on_its_logits(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    def doubled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return 2 * torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

    trainer = Trainer(
        model=tiny_lora().train(),
        args=arguments(tmp_path, num_train_epochs=1),
        train_dataset=tokenized(data),
        data_collator=collate,
        compute_loss_func=doubled,
    )
    records, steps = audited(tmp_path, data, signer, trainer)
    assert records["weight"] == pytest.approx(2, rel=1e-4)
    assert not records["flags"].any()
    assert max(s["residual"] for s in steps) < EXACT


def classifier() -> torch.nn.Module:
    set_seed(11)
    config = tiny_llama().config
    config.num_labels, config.pad_token_id = 3, 0
    model = LlamaForSequenceClassification(config)
    return get_peft_model(model, LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"]))


def test_a_classification_head_beside_an_adapter(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    """PEFT trains a copy of the head (``modules_to_save``); labels are classes, not shifted tokens."""
    rows = tokenized(data).map(lambda row: {"labels": len(row["text"]) % 3})
    trainer = Trainer(
        model=classifier().train(),
        args=arguments(tmp_path, learning_rate=0.0, num_train_epochs=1),
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(character_tokenizer()),
    )
    oracle = Oracle(classifier())
    with AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor") as audit:
        captured = keep_captured(audit)
        trainer.train()
    assert any("score" in name for name in audit._tracking.parameters)
    assert audit.recorder.worst_residual < EXACT
    for micro in (m for step in captured for m in step):
        assert not micro.flags.any()
        for slot, index in enumerate(micro.sample_index.tolist()):
            logits = oracle.model(input_ids=torch.tensor([rows[index]["input_ids"]])).logits
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor([rows[index]["labels"]]))
            expected = audit._layout.sketch(oracle.gradients(loss))
            assert relative_error(micro.sketch[slot], expected) < EXACT
            assert float(micro.loss[slot]) == pytest.approx(float(loss.detach()), rel=EXACT)


# --- what must leave no trace --------------------------------------------------------------------------------


class GeneratingTrainer(Trainer):
    """Looks at what the model says now, between forward and backward pass."""

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, **options)
        self.model.generate(input_ids=inputs["input_ids"][:1, :3], max_new_tokens=2, do_sample=False, pad_token_id=0)
        return loss


class Watching(TrainerCallback):
    """Counts, after every optimizer step, what capture still holds on to."""

    def __init__(self, audit: AuditMode) -> None:
        self.audit, self.tensors = audit, list[int]()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.audit.hooks._open is None
        assert not self.audit.hooks._queue

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        self.tensors.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))


@pytest.mark.filterwarnings("ignore:.*generation flags.*")
@pytest.mark.parametrize("mode", ["observe", "fused"])
def test_A20_evaluation_and_generation_leave_no_record_and_nothing_in_memory(
    tmp_path: Path, data: DataManifest, signer: Signer, mode: str
) -> None:
    rows = tokenized(data)
    trainer = GeneratingTrainer(
        model=tiny_lora().train(),
        args=arguments(tmp_path, num_train_epochs=4, eval_strategy="steps", eval_steps=2),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        data_collator=collate,
    )
    with AuditMode.attach(
        trainer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor", mode=mode
    ) as audit:
        watching = Watching(audit)
        trainer.add_callback(watching)
        trainer.train()
        predicted = trainer.predict(rows.select(range(4)))
    assert predicted.metrics
    assert (audit.recorder.records, audit.recorder.steps) == (80, 28)
    assert audit.recorder.worst_residual < EXACT
    assert len(watching.tensors) == 14
    assert watching.tensors[-1] <= max(watching.tensors[:4])  # flat, once optimizer state and caches are there


def test_A16_batches_that_were_fetched_but_not_trained_are_not_recorded(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    """Two workers fetch ahead; training breaks off in the middle of an epoch."""
    trained: list[list[int]] = []

    class Breaking(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            if len(trained) == 4:
                raise RuntimeError("the power went out")
            trained.append(inputs["input_ids"][:, :16].tolist())
            return super().compute_loss(model, inputs, **options)

    trainer = Breaking(
        model=tiny_lora().train(),
        args=arguments(tmp_path, dataloader_num_workers=2),
        train_dataset=tokenized(data),
        data_collator=collate,
    )
    with (
        pytest.raises(RuntimeError, match="power"),
        AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"),
    ):
        trainer.train()
    tokens = {row["sample_index"]: row["input_ids"][:16] for row in tokenized(data)}
    with RunReader.open(tmp_path / "run") as run:
        records = run.records()
    assert len(records) == 12
    for step, rows in enumerate(trained, start=1):
        of_step = records[records["step"] == step]
        index = (of_step["source_id"].astype(int) * 10 + of_step["row"].astype(int)).tolist()
        assert [(tokens[i] + [0] * 16)[: len(row)] for i, row in zip(index, rows, strict=True)] == rows


def test_A22_a_restart_with_smaller_batches_is_announced_and_starts_clean(
    tmp_path: Path, data: DataManifest, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the middle of a backward pass; what arrived until then is in no record."""
    begun: list[int] = []
    begin = AuditMode.begin
    monkeypatch.setattr(AuditMode, "begin", lambda audit, step, *rest: (begun.append(step), begin(audit, step, *rest)))

    def run_out(gradient: torch.Tensor) -> None:
        raise RuntimeError("CUDA out of memory.")

    class ShortOfMemory(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            first = next(p for p in model.parameters() if p.requires_grad)  # the last one that backward reaches
            is_short = len(inputs["input_ids"]) > 3 and self.state.global_step == 2
            handle = first.register_hook(run_out) if is_short else None
            try:
                return super().training_step(model, inputs, *args)
            finally:
                if handle is not None:
                    handle.remove()

    trainer = ShortOfMemory(
        model=tiny_lora().train(),
        args=arguments(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=4, num_train_epochs=1),
        train_dataset=tokenized(data),
        data_collator=collate,
    )
    with AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor") as audit:
        trainer.train()
    assert begun == [0, 2]  # the weights have been through two steps
    assert trainer.state.global_step == 7  # a whole epoch, with batches of three
    assert audit.recorder.worst_residual < EXACT
    with RunReader.open(tmp_path / "run") as run:
        counts = [event.json()["records"] for event in run.events(EventKind.STEP)]
    assert counts == [4, 4, 3, 3, 3, 3, 3, 3, 2]


def test_a_training_step_with_a_signature_of_its_own_is_followed(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            assert "sample_index" not in args[1]
            return super().training_step(*args, **kwargs)

    trainer = Own(
        model=tiny_lora().train(), args=arguments(tmp_path), train_dataset=tokenized(data), data_collator=collate
    )
    records, steps = audited(tmp_path, data, signer, trainer)
    assert (len(records), len(steps)) == (40, 14)
    assert all(step["num_items"] for step in steps)
    assert not (records["flags"] & Flag.UNIT_UNKNOWN).any()


@pytest.mark.parametrize("wrong", ["row-17", 1.5, None])
def test_ids_that_are_no_integers_are_explained(tmp_path: Path, data: DataManifest, signer: Signer, wrong: Any) -> None:
    rows = tokenized(data).remove_columns("sample_index").add_column("sample_index", [wrong] * 20)
    trainer = Trainer(model=tiny_lora().train(), args=arguments(tmp_path), train_dataset=rows, data_collator=collate)
    with (
        pytest.raises(SampleIdentityError, match="an integer"),
        AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"),
    ):
        trainer.train()
