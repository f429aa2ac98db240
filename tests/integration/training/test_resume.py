"""Going on with an interrupted run: nothing is lost or counted twice silently, and the log claims only what is so."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import PLAIN_TRAINER
from peft import LoraConfig, get_peft_model
from tiny import make_batch, tiny_llama, tiny_lora, write_rows
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from attribution import AuditMode, dataset
from attribution.errors import SketchMismatchError, UnsupportedSetupError
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run
from auditlog.errors import DataError, StoreError, UsageError
from auditlog.format.records import EventKind
from auditlog.ledger.conservation import recompute

EXACT = 1e-4
SAME = ["step", "micro", "slot", "epoch", "source_id", "row", "loss", "n_tokens", "weight", "grad_norm", "flags"]


class PowerCutError(Exception):
    """What breaks training off."""


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return make_batch(seed=step) | {"sample_index": (torch.arange(4) + 4 * step) % 20}


class Loop:
    """A plain loop with one model and optimizer, whose state can be kept and brought back."""

    def __init__(self, folder: Path, data: DataManifest, signer: Signer) -> None:
        self.folder, self.data, self.signer = folder, data, signer
        self.start_anew()

    def start_anew(self) -> None:
        self.model = tiny_lora().train()
        self.optimizer = optimizer_of(self.model)

    def audit(self, **options: Any) -> AuditMode:
        places = {"run": self.folder / "run", "on_head": self.folder / "auditor", "signer": self.signer}
        return AuditMode(self.model, self.optimizer, self.data, **(places | options))

    def train(self, steps: range) -> None:
        for step in steps:
            self.model(**batch_of(step)).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def break_off(self, steps: int, **options: Any) -> None:
        with pytest.raises(PowerCutError), self.audit(**options):
            self.train(range(steps))
            self.model(**batch_of(steps)).loss.backward()  # a step that is never taken
            raise PowerCutError

    def verify(self) -> None:
        verdict = verify_run(self.folder / "run", Trust.load([str(self.signer.vkey)], [], None))
        assert (verdict.status, verdict.exit_code) == ("VERIFIED", 0), verdict.findings
        with RunReader.open(self.folder / "run") as run:
            assert all(check.ok for check in recompute(run))
            assert max(e.json()["residual"] for e in run.events(EventKind.STEP)) < EXACT


@pytest.fixture
def loop(tmp_path: Path, data: DataManifest, signer: Signer) -> Loop:
    return Loop(tmp_path, data, signer)


def lineage(run: Path) -> list[tuple[int, int, int]]:
    with RunReader.open(run) as reader:
        return [(a.number, a.from_attempt, a.from_step) for a in reader.attempts]


def live(run: Path) -> np.ndarray:
    with RunReader.open(run) as reader:
        return reader.live_records()


def bodies(run: Path, kind: EventKind) -> list[dict[str, Any]]:
    with RunReader.open(run) as reader:
        return [event.json() for event in reader.events(kind)]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- plain loops ----------------------------------------------------------------------------------------------


def test_a_broken_off_run_goes_on_where_it_was(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.break_off(7)
    assert "resume=True" in caplog.text
    with loop.audit(resume=True) as audit:
        assert audit.attempt == 2
        loop.train(range(7, 10))
    loop.verify()
    run = loop.folder / "run"
    assert lineage(run) == [(1, 0, 0), (2, 1, 7)]
    assert "attempt 2 goes on from step 7 of attempt 1" in caplog.text
    records = live(run)
    assert records["step"].tolist() == np.repeat(np.arange(1, 11), 4).tolist()
    assert records["epoch"].tolist() == [0] * 20 + [1] * 20  # counting of uses goes on
    certificates = bodies(run, EventKind.SESSION)
    assert len({json.dumps(c) for c in certificates}) == 2
    (resume,) = bodies(run, EventKind.RESUME)
    assert resume["superseded_steps"] == 0
    assert resume["environment"]["python"]
    assert bodies(run, EventKind.SEAL)[0]["attempts"] == 2


def test_N03_steps_that_are_trained_again_supersede_the_first(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PowerCutError), loop.audit():
        loop.train(range(4))
        kept = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
        loop.train(range(4, 7))
        raise PowerCutError
    with torch.no_grad():
        for name, parameter in loop.model.named_parameters():
            parameter.copy_(kept[name])
    with loop.audit(resume=True, from_step=4):
        loop.train(range(4, 6))
    loop.verify()
    run = loop.folder / "run"
    assert lineage(run) == [(1, 0, 0), (2, 1, 4)]
    assert "3 later steps no longer count" in caplog.text
    records = live(run)
    assert records["step"].tolist() == np.repeat(np.arange(1, 7), 4).tolist()
    assert records["attempt"].tolist() == [1] * 16 + [2] * 8
    assert records["epoch"].tolist() == [0] * 20 + [1] * 4  # superseded uses do not count
    assert bodies(run, EventKind.RESUME)[0]["superseded_records"] == 12


def test_N03_an_interrupted_run_may_go_on_again_and_again(loop: Loop) -> None:
    loop.break_off(2)
    for first in (2, 3, 4):
        with pytest.raises(PowerCutError), loop.audit(resume=True):
            loop.train(range(first, first + 1))
            raise PowerCutError
    with loop.audit(resume=True, from_step=4):
        loop.train(range(4, 6))
    loop.verify()
    assert lineage(loop.folder / "run") == [(1, 0, 0), (2, 1, 2), (3, 2, 3), (4, 3, 4), (5, 4, 4)]
    assert live(loop.folder / "run")["step"].tolist() == np.repeat(np.arange(1, 7), 4).tolist()


def test_a_loop_that_starts_again_in_the_same_context_says_so(loop: Loop) -> None:
    with loop.audit() as audit:
        loop.train(range(3))
        loop.model(**batch_of(3)).loss.backward()  # left behind
        loop.optimizer.zero_grad()
        audit.begin(2)
        loop.train(range(2, 4))
    loop.verify()
    records = live(loop.folder / "run")
    assert [(int(a), int(s)) for a, s in records[["attempt", "step"]][::4]] == [(1, 1), (1, 2), (2, 3), (2, 4)]


def test_resume_without_a_run_starts_one(loop: Loop) -> None:
    with loop.audit(resume=True) as audit:
        assert audit.attempt == 1
        loop.train(range(2))
    loop.verify()
    assert lineage(loop.folder / "run") == [(1, 0, 0)]


def test_without_resume_a_run_folder_is_not_touched(loop: Loop) -> None:
    loop.break_off(2)
    before = content(loop.folder)
    with pytest.raises(UsageError, match="exists"):
        loop.audit().__enter__()
    assert content(loop.folder) == before


def another_model() -> torch.nn.Module:
    return get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear")).train()


def another_base() -> torch.nn.Module:
    model = tiny_lora().train()
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).add_(1)
    return model


def other_data(loop: Loop) -> DataManifest:
    write_rows(loop.folder / "other", rows=9)
    return DataManifest.build(loop.folder / "other" / "*.jsonl")


@pytest.mark.parametrize("what", ["adapter", "base", "sketch", "data", "key", "sealed", "future"])
def test_another_run_is_refused_before_anything_is_written(loop: Loop, what: str) -> None:
    loop.break_off(3)
    if what == "sealed":
        with loop.audit(resume=True):
            pass
    run = loop.folder / "run"
    before = content(run)
    options: dict[str, Any] = {"resume": True}
    expected: tuple[type[Exception], str] = (SketchMismatchError, "sketches other parameters")
    if what == "adapter":
        loop.model = another_model()
        loop.optimizer = optimizer_of(loop.model)
    elif what == "base":
        loop.model = another_base()
        loop.optimizer = optimizer_of(loop.model)
        expected = (SketchMismatchError, "another base model: frozen_sha256")
    elif what == "sketch":
        options["sketch_seed"] = "1"
    elif what == "data":
        loop.data = other_data(loop)
        expected = (DataError, "not what the run recorded")
    elif what == "key":
        loop.signer = Signer.generate("bank.example/other")
        expected = (UsageError, "names the key")
    elif what == "sealed":
        expected = (UsageError, "is sealed")
    else:
        options["from_step"] = 9
        expected = (StoreError, "logged up to step 3")
    kind, match = expected
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in loop.model.modules())
    with pytest.raises(kind, match=match):
        loop.audit(**options).__enter__()
    assert content(run) == before
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in loop.model.modules()) == hooks
    assert not loop.optimizer._optimizer_step_pre_hooks


def test_after_a_refusal_the_run_can_still_go_on(loop: Loop) -> None:
    loop.break_off(3)
    for options in ({"sketch_seed": "1"}, {"from_step": 9}):
        with pytest.raises((SketchMismatchError, StoreError)):
            loop.audit(resume=True, **options).__enter__()
    with loop.audit(resume=True):
        loop.train(range(3, 4))
    loop.verify()


@pytest.mark.slow
def test_N02_a_killed_run_goes_on_from_what_was_acknowledged(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("killed_run.py")
    done = subprocess.run([sys.executable, str(worker), str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    signer = Signer.load(tmp_path / "key.p12", passphrase="correct horse")
    loop = Loop(tmp_path, DataManifest.build(tmp_path / "data" / "*.jsonl"), signer)
    with loop.audit(resume=True) as audit:
        last = audit.recorder.steps
        assert 40 >= last >= 30  # every tenth step was acknowledged
        loop.train(range(last, last + 3))
    loop.verify()
    assert sorted(set(live(tmp_path / "run")["step"].tolist())) == list(range(1, last + 4))


# --- the Trainer ----------------------------------------------------------------------------------------------


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    ids = [1 + ord(c) % 60 for c in row["text"]]
    return {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


class Breaking(TrainerCallback):
    """Cuts the power after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise PowerCutError


class Training:
    """Audited trainings of the same fourteen steps, saved at every third, in one folder."""

    def __init__(self, folder: Path, data: DataManifest, signer: Signer) -> None:
        self.folder, self.data, self.signer = folder, data, signer
        self.rows = dataset(data).map(tokenize)

    def trainer(self, break_after: int | None = None, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
        chosen = {
            "output_dir": str(self.folder / "out"),
            "per_device_train_batch_size": 3,
            "num_train_epochs": 2,
            **PLAIN_TRAINER,
            "save_strategy": "steps",
            "save_steps": 3,
        }
        set_seed(5)
        trainer = kind(
            model=tiny_lora(dropout=0.1).train(),
            args=TrainingArguments(**(chosen | changes)),
            train_dataset=self.rows,
            data_collator=collate,
        )
        trainer.add_callback(Breaking(break_after))
        return trainer

    def attach(self, trainer: Trainer, **options: Any) -> AuditMode:
        places = {"run": self.folder / "run", "on_head": self.folder / "auditor", "signer": self.signer}
        return AuditMode.attach(trainer, self.data, **(places | options))

    def broken_off(self, step: int, checkpoint: int | None = None, **options: Any) -> None:
        trainer = self.trainer(break_after=step)
        with pytest.raises(PowerCutError), self.attach(trainer, **options):
            trainer.train(resume_from_checkpoint=checkpoint and str(self.checkpoint(checkpoint)))

    def checkpoint(self, step: int) -> Path:
        return self.folder / "out" / f"checkpoint-{step}"

    def finished(self, checkpoint: int | bool | None = True, verdict: str = "VERIFIED", **options: Any) -> Trainer:
        trainer = self.trainer()
        with self.attach(trainer, resume=True, **options):
            path = str(self.checkpoint(checkpoint)) if type(checkpoint) is int else checkpoint
            trainer.train(resume_from_checkpoint=path)
        found = verify_run(self.folder / "run", Trust.load([str(self.signer.vkey)], [], None))
        assert found.status == verdict, found.findings
        return trainer


@pytest.fixture
def training(tmp_path: Path, data: DataManifest, signer: Signer) -> Training:
    return Training(tmp_path, data, signer)


@pytest.fixture
def uninterrupted(tmp_path: Path, data: DataManifest, signer: Signer) -> tuple[Trainer, np.ndarray]:
    whole = Training(tmp_path / "whole", data, signer)
    trainer = whole.trainer()
    with whole.attach(trainer):
        trainer.train()
    return trainer, live(whole.folder / "run")


def assert_same(training: Training, trainer: Trainer, uninterrupted: tuple[Trainer, np.ndarray]) -> None:
    """Adapter and live records are those of the run that nothing interrupted, bit for bit."""
    other, records = uninterrupted
    for (name, left), (_, right) in zip(trainer.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert np.array_equal(live(training.folder / "run")[SAME], records[SAME])


def test_the_last_checkpoint_goes_on_and_nothing_differs(
    training: Training, uninterrupted: tuple[Trainer, np.ndarray]
) -> None:
    training.broken_off(8)
    trainer = training.finished()
    assert lineage(training.folder / "run") == [(1, 0, 0), (2, 1, 6)]
    assert_same(training, trainer, uninterrupted)
    (resume,) = bodies(training.folder / "run", EventKind.RESUME)
    assert (resume["superseded_steps"], resume["superseded_records"]) == (2, 5)
    assert resume["training"]["train_batch_size"] == 3


@pytest.mark.slow
def test_N02_a_killed_trainer_goes_on_and_nothing_differs(
    training: Training, uninterrupted: tuple[Trainer, np.ndarray]
) -> None:
    training.signer.save(training.folder / "key.p12", "correct horse")
    worker = [sys.executable, str(Path(__file__).with_name("killed_trainer.py")), str(training.folder)]
    done = subprocess.run(worker, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    trainer = training.finished()
    assert lineage(training.folder / "run") == [(1, 0, 0), (2, 1, 6)]
    assert_same(training, trainer, uninterrupted)


def test_N03_an_older_checkpoint_supersedes_what_came_after_it(
    training: Training, uninterrupted: tuple[Trainer, np.ndarray]
) -> None:
    training.broken_off(8)
    trainer = training.finished(checkpoint=3)
    assert lineage(training.folder / "run") == [(1, 0, 0), (2, 1, 3)]
    assert_same(training, trainer, uninterrupted)


def test_N03_a_checkpoint_of_an_attempt_that_was_given_up_may_be_taken(
    training: Training, uninterrupted: tuple[Trainer, np.ndarray]
) -> None:
    training.broken_off(8)  # leaves checkpoints 3 and 6 of attempt 1
    training.broken_off(5, checkpoint=3, resume=True)  # attempt 2 goes on from step 3
    trainer = training.finished(checkpoint=6)
    assert lineage(training.folder / "run") == [(1, 0, 0), (2, 1, 3), (3, 1, 6)]
    assert set(live(training.folder / "run")["attempt"].tolist()) == {1, 3}
    assert_same(training, trainer, uninterrupted)


def test_from_scratch_after_a_break_nothing_of_the_first_attempt_counts(
    training: Training, uninterrupted: tuple[Trainer, np.ndarray]
) -> None:
    training.broken_off(2)
    trainer = training.finished(checkpoint=None)
    assert lineage(training.folder / "run") == [(1, 0, 0), (2, 1, 0)]
    assert_same(training, trainer, uninterrupted)


def test_a_checkpoint_of_another_run_is_refused(training: Training, data: DataManifest, signer: Signer) -> None:
    training.broken_off(4)
    other = Training(training.folder / "other", data, signer)
    other.broken_off(4)
    before = content(training.folder / "run")
    trainer = training.trainer()
    with pytest.raises(UsageError, match="belongs to run"), training.attach(trainer, resume=True):
        trainer.train(resume_from_checkpoint=str(other.checkpoint(3)))
    assert content(training.folder / "run") == before


def test_a_checkpoint_that_was_not_audited_is_refused(training: Training) -> None:
    training.trainer(max_steps=3).train()
    trainer = training.trainer()
    with pytest.raises(UsageError, match="not made in audit mode"), training.attach(trainer):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_that_training_without_audit_mode_went_on_from_is_refused(training: Training) -> None:
    """Its state still holds what the audited checkpoint said, but the step is another one."""
    training.broken_off(4)
    training.trainer(max_steps=6).train(resume_from_checkpoint=True)
    trainer = training.trainer()
    with pytest.raises(UsageError, match="not made in audit mode"), training.attach(trainer, resume=True):
        trainer.train(resume_from_checkpoint=str(training.checkpoint(6)))


def test_a_checkpoint_newer_than_the_log_is_refused_unless_the_loss_is_accepted(training: Training) -> None:
    """The run folder was brought back from an old copy; the checkpoint and the handed-over heads were not."""
    training.broken_off(4)
    shutil.copytree(training.folder / "run", training.folder / "copy")
    training.broken_off(8, checkpoint=3, resume=True)
    shutil.rmtree(training.folder / "run")
    shutil.copytree(training.folder / "copy", training.folder / "run")
    trainer = training.trainer()
    with pytest.raises(StoreError, match="head was signed over"):
        training.attach(trainer, resume=True).__enter__()
    cut = training.attach(trainer, resume=True, on_head=training.folder / "elsewhere")  # as if no head had left
    with pytest.raises(StoreError, match="trained and not logged"), cut:
        trainer.train(resume_from_checkpoint=str(training.checkpoint(6)))
    training.finished(checkpoint=6, accept_loss=True, verdict="INCOMPLETE")  # for ever: the entries are gone
    (loss,) = bodies(training.folder / "run", EventKind.LOSS_ACCEPTED)
    assert loss["missing_steps"] == {"first": 5, "last": 6}
    assert lineage(training.folder / "run") == [(1, 0, 0), (2, 1, 6)]
    assert sorted(set(live(training.folder / "run")["step"].tolist())) == [1, 2, 3, 4, *range(7, 15)]


def test_a_second_train_goes_on_with_the_weights_as_they_are(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """The Trainer counts from zero again, but does not reset the model: the first steps still count."""
    trainer = training.trainer(max_steps=4, save_strategy="no")
    with training.attach(trainer):
        trainer.train()
        trainer.train()
    run = training.folder / "run"
    assert lineage(run) == [(1, 0, 0), (2, 1, 4)]
    assert "attempt 2 goes on from step 4 of attempt 1" in caplog.text
    assert sorted(set(live(run)["step"].tolist())) == list(range(1, 9))
    assert verify_run(run, Trust.load([str(training.signer.vkey)], [], None)).exit_code == 0


@pytest.mark.parametrize("how", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_a_trainer_that_will_shard_the_model_is_refused(training: Training, how: str) -> None:
    trainer = training.trainer()
    setattr(trainer, how, True)
    with pytest.raises(UnsupportedSetupError, match="FSDP or DeepSpeed"):
        training.attach(trainer)
    assert not (training.folder / "run").exists()


# --- A22 ------------------------------------------------------------------------------------------------------


class ShortOfMemory(Trainer):
    """Runs out of memory once, in the middle of the backward pass of step 3."""

    is_short = True

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, **options)
        if self.state.global_step == 2 and self.is_short:
            next(p for n, p in model.named_parameters() if "layers.1" in n and "lora_B" in n).register_hook(self.fail)
        return loss

    def fail(self, gradient: torch.Tensor) -> None:
        if self.is_short:
            self.is_short = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_A22_a_smaller_batch_after_running_out_of_memory_is_a_new_attempt(training: Training) -> None:
    trainer = training.trainer(
        kind=ShortOfMemory, auto_find_batch_size=True, per_device_train_batch_size=4, save_strategy="no"
    )
    with training.attach(trainer):
        trainer.train()
    run = training.folder / "run"
    verdict = verify_run(run, Trust.load([str(training.signer.vkey)], [], None))
    assert verdict.exit_code == 0, verdict.findings
    # The Trainer starts again at step 0, yet keeps the weights: steps 1 and 2 are part of them, and count.
    assert lineage(run) == [(1, 0, 0), (2, 1, 2)]
    (resume,) = bodies(run, EventKind.RESUME)
    smaller = trainer._train_batch_size
    assert smaller < 4
    assert resume["training"]["train_batch_size"] == smaller
    with RunReader.open(run) as reader:
        records, counted = reader.records(), reader.live_records()
        assert all(check.ok for check in recompute(reader))
    assert len(counted) == len(records) == 2 * 4 + 2 * 20
    keys = counted[["attempt", "step", "micro", "slot", "part"]]
    assert len(np.unique(keys)) == len(keys)
    assert max(step["residual"] for step in bodies(run, EventKind.STEP)) < EXACT


def test_A22_weights_that_are_put_back_start_from_scratch(training: Training) -> None:
    """Where the loop does reset the model, the steps before no longer count."""
    trainer = training.trainer(max_steps=3, save_strategy="no")
    first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with training.attach(trainer):
        trainer.train()
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(first[name])
        trainer.train()
    assert lineage(training.folder / "run") == [(1, 0, 0), (2, 1, 0)]
    assert set(live(training.folder / "run")["attempt"].tolist()) == {2}
