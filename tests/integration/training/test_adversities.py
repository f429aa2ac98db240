"""What goes wrong in real training loops: it is recorded rightly, or refused and named; never recorded wrongly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adversities import Enter, batch, bodies, records, sgd, steps, train, trained, without_ids
from loops import EXACT, collate, tokenized
from tiny import tiny_lora
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import Trainer, TrainingArguments

from attribution import AuditMode
from attribution.errors import CaptureError, UnsupportedSetupError
from auditlog import DataManifest, Signer
from auditlog.format.records import EventKind, Flag

MODES = pytest.mark.parametrize("mode", ["observe", "fused"])


@pytest.fixture
def audit(tmp_path: Path, data: DataManifest, signer: Signer) -> Enter:
    def make(model: nn.Module, optimizer: Any, folder: str = "run", **options: Any) -> AuditMode:
        return AuditMode(model, optimizer, data, run=tmp_path / folder, signer=signer, sketch_dim=1024, **options)

    return make


# --- optimizers ---------------------------------------------------------------------------------------------------


def test_an_optimizer_exchanged_in_mid_run_is_refused_by_name_before_it_moves_anything(audit: Enter) -> None:
    model = tiny_lora().train()
    with pytest.raises(CaptureError, match=r"another optimizer \(AdamW\).*under SGD"), audit(model, sgd(model)) as run:
        train(model, run._optimizer, 1)
        before = copy.deepcopy(model.state_dict())
        train(model, torch.optim.AdamW(trained(model)), 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_exchanged_optimizer_that_is_announced_is_followed(audit: Enter) -> None:
    model = tiny_lora().train()
    with audit(model, sgd(model)) as run:
        train(model, run._optimizer, 1)
        run.follow(torch.optim.AdamW(trained(model), lr=0.01))
        train(model, run._optimizer, 2)
    assert [s["lr"] for s in steps(run)] == [[0.05], [0.01], [0.01]]
    assert len(records(run)) == 12
    assert max(s["residual"] for s in steps(run)) < EXACT


def test_optimizers_that_step_inside_backward_are_refused(audit: Enter) -> None:
    model = tiny_lora().train()
    inner = {p: torch.optim.SGD([p], lr=0.1) for p in trained(model)}
    for parameter in inner:
        parameter.register_post_accumulate_grad_hook(lambda p: inner[p].step())
    with pytest.raises(CaptureError, match="another optimizer"), audit(model, torch.optim.AdamW(trained(model))) as run:
        train(model, run._optimizer, 1)


def test_gradients_that_are_gone_before_the_step_are_warned_about(
    audit: Enter, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_lora().train()
    with audit(model, sgd(model)) as run:
        model(**batch()).loss.backward()
        run._optimizer.zero_grad()
        run._optimizer.step()
    assert "the gradients were gone before optimizer.step()" in caplog.text
    assert bodies(run, EventKind.SEAL)[0]["open_steps"] == 1


def test_trainable_parameters_outside_of_the_optimizer_are_refused_by_name(audit: Enter) -> None:
    model = tiny_lora().train()
    first = next(name for name, p in model.named_parameters() if p.requires_grad)
    half = torch.optim.SGD(trained(model)[14:], lr=0.1)
    with (
        pytest.raises(UnsupportedSetupError, match=rf"14 trainable parameters are in no group of SGD: {first}"),
        audit(model, half),
    ):
        raise AssertionError("the context must not be entered")


# --- gradients that no step consumes ------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_samples_whose_gradients_are_thrown_away_are_counted_and_get_no_record(audit: Enter, set_to_none: bool) -> None:
    model = tiny_lora().train()
    with audit(model, sgd(model)) as run:
        for number in range(4):
            model(**batch(number)).loss.backward()
            if number == 1:
                run._optimizer.zero_grad(set_to_none=set_to_none)
                if not set_to_none:
                    run.discard()
                continue
            run._optimizer.step()
            run._optimizer.zero_grad()
    assert [s["discarded"] for s in steps(run)] == [0, 4, 0]
    assert max(s["residual"] for s in steps(run)) < EXACT
    _, row, _ = run.data.locate(np.r_[0:4, 8:16])
    assert records(run)["row"].tolist() == row.tolist()


def test_samples_left_over_at_the_end_are_named_in_the_log(audit: Enter, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_lora().train()
    with audit(model, sgd(model)) as run:
        train(model, run._optimizer, 1)
        model(**batch(1)).loss.backward()
    assert {"notice": "unconsumed", "samples": 4} in bodies(run, EventKind.NOTICE)
    assert "gradients of the last 4 samples were never consumed" in caplog.text
    assert len(records(run)) == 4


# --- copies, other passes, other audits ---------------------------------------------------------------------------


def _saved_and_loaded(model: nn.Module, folder: Path) -> nn.Module:
    torch.save(model, folder / "model.pt")
    loaded: nn.Module = torch.load(folder / "model.pt", weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "AveragedModel": lambda model, folder: AveragedModel(model).module,
    "torch.save": _saved_and_loaded,
}


@MODES
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_the_audited_model_is_a_plain_model(audit: Enter, tmp_path: Path, mode: str, way: str) -> None:
    model = tiny_lora().train()
    with audit(model, sgd(model), mode=mode) as run:
        train(model, run._optimizer, 1)
        other = COPIES[way](model, tmp_path)
        plain = tiny_lora().train()
        plain.load_state_dict(model.state_dict())
        train(model, run._optimizer, 2)  # the original moves on
        plain(**without_ids()).loss.backward()
        other(**without_ids()).loss.backward()  # while the audit goes on; no ids are asked for
        assert all(p.grad is None for p in trained(model))
    for one, wanted in zip(trained(other), trained(plain), strict=True):
        assert torch.equal(one, wanted)
        assert torch.equal(one.grad, wanted.grad)
    assert [type(m) for m in other.modules()] == [type(m) for m in plain.modules()]
    for trip in (other, _saved_and_loaded(other, tmp_path)):  # after the audit
        assert torch.equal(trip(**without_ids(1)).loss, plain(**without_ids(1)).loss)
    assert len(records(run)) == 12


def _apart(model: Any) -> None:
    model(**batch()).loss.backward()
    model.get_base_model()(**without_ids(1)).loss.backward()


def _joint(model: Any) -> None:
    (model(**batch()).loss + model.get_base_model()(**without_ids(1)).loss).backward()


@MODES
@pytest.mark.parametrize("passes", [_apart, _joint])
def test_the_inner_model_called_on_other_rows_is_refused_or_marked(
    audit: Enter, mode: str, passes: Callable[[nn.Module], None]
) -> None:
    model = tiny_lora().train()
    with (
        pytest.raises(CaptureError, match="called outside of the audited model's"),
        audit(model, sgd(model), mode=mode),
    ):
        passes(model)
    model = tiny_lora().train()
    with audit(model, sgd(model), "marked", on_crossing="mark", mode=mode) as run:
        passes(model)
        run._optimizer.step()
    assert (records(run)["flags"] & Flag.NOT_SEPARABLE).all()


def test_a_second_audit_of_the_same_model_is_refused_and_the_first_goes_on(audit: Enter) -> None:
    model = tiny_lora().train()
    with audit(model, sgd(model)) as run:
        with pytest.raises(UnsupportedSetupError, match="audited already"), audit(model, sgd(model), "second"):
            raise AssertionError("the context must not be entered")
        train(model, run._optimizer)
    assert len(records(run)) == 12
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _trainer(folder: Path, data: DataManifest, kind: type[Trainer] = Trainer) -> Trainer:
    chosen = {"max_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(folder / "out"), **chosen, dataloader_pin_memory=False)
    return kind(tiny_lora(), arguments, train_dataset=tokenized(data), data_collator=collate)


def test_a_second_forward_pass_in_a_trainer_step_is_named(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    class Twice(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return model(**inputs).loss + model(**inputs).loss

    trainer = _trainer(tmp_path, data, Twice)
    with (
        pytest.raises(CaptureError, match="a second forward pass in one training step"),
        AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer),
    ):
        trainer.train()


def test_a_trainer_that_generates_what_it_trains_on_is_refused(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    trainer = _trainer(tmp_path, data)
    with (
        pytest.raises(UnsupportedSetupError, match="trains on what it generates itself"),
        AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer),
    ):
        trainer.training_step(trainer.model, [{"prompt": "ab"}])
