"""The check before the first step: what it confirms, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from setups import models
from setups import training as loops
from setups.measure import Audited
from setups.training import Batch
from tiny import make_batch, tiny_llama, tiny_lora
from torch import Tensor, nn

from attribution.capture import self_check
from attribution.capture.batch import Announced, read_batch
from attribution.capture.formulas import Linear
from attribution.capture.hooks import HookSet
from attribution.capture.modules import find_tracked
from attribution.capture.self_check import SAMPLES, SelfCheck, check
from attribution.errors import SelfCheckError, UnsupportedSetupError
from attribution.sketch.layout import SketchLayout
from auditlog import DataManifest, RunReader, Signer
from auditlog.format.records import EventKind


def run_check(model: nn.Module, batch: Batch, attach: bool = True, mode: Any = "observe") -> SelfCheck:
    """Run the self-check on a model as audit mode does."""
    tracking = find_tracked(model)
    layout = SketchLayout({n: tuple(p.shape) for n, p in tracking.parameters.items()}, 256)
    hooks = HookSet(model, tracking, layout, mode=mode)
    if attach:
        hooks.attach()
    inputs = {key: value for key, value in batch.items() if key != "labels" or "input_ids" in batch}
    read = read_batch((), inputs, Announced())
    _, segments = read.layout(1)
    try:
        return check(model, hooks, tracking, layout, read, segments)
    finally:
        hooks.detach()


@pytest.mark.parametrize("mode", ["observe", "fused"])
@pytest.mark.parametrize("make", [tiny_lora, tiny_llama, models.mixtral])
def test_it_confirms_a_model_that_is_captured_as_it_should(make: Callable[[], nn.Module], mode: str) -> None:
    found = run_check(make().train(), make_batch(), mode=mode)
    assert found.confirmed
    assert found.samples == SAMPLES
    assert found.modules[0] == found.modules[1] > 0
    assert max(found.oracle_error, found.sum_error) < 1e-5


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (models.relu_in_place, loops.tensors(6)),
        (models.attention, loops.tensors(5, 8)),
        (lambda: models.blocks(True), loops.tensors(5, 8)),
        (models.sequence_classifier, lambda: loops.labelled_texts()),
    ],
)
def test_it_takes_any_model_that_returns_a_tensor_per_sample(make: Any, batch: Any) -> None:
    found = run_check(make().train(), batch()[0])
    assert found.confirmed
    assert max(found.oracle_error, found.sum_error) < 1e-5


def test_it_switches_dropout_off_and_leaves_gradients_modes_and_random_numbers_alone() -> None:
    model = tiny_lora(dropout=0.5).train()
    model.get_base_model().model.norm.eval()
    first = next(p for p in model.parameters() if p.requires_grad)
    first.grad = torch.ones_like(first)
    modes = [module.training for module in model.modules()]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    assert run_check(model, make_batch()).oracle_error < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert [p is first for p in model.parameters() if p.grad is not None] == [True]
    assert first.grad.eq(1).all()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_reentrant_checkpointing_keeps_the_gradients_that_were_there() -> None:
    """Autograd allows it only backward passes that write into ``.grad``."""
    model = models.blocks(True).train()
    first = next(iter(model.parameters()))
    first.grad = torch.ones_like(first)
    run_check(model, loops.tensors(5, 8)()[0])
    assert [p is first for p in model.parameters() if p.grad is not None] == [True]
    assert first.grad.eq(1).all()


def test_half_precision_is_said_to_be_confirmed_within_its_own_tolerance() -> None:
    found = run_check(tiny_lora().to(torch.bfloat16).train(), make_batch())
    assert found.confirmed
    assert 1e-4 < max(found.oracle_error, found.sum_error) < self_check.TOLERANCE_HALF


# --- what it refuses ----------------------------------------------------------------------------------------------


def test_hooks_that_never_fire_are_refused() -> None:
    with pytest.raises(SelfCheckError, match="captured 0 of 28 modules"):
        run_check(tiny_lora().train(), make_batch(), attach=False)


class ReadsDirectly(nn.Module):
    """Uses a tracked weight once through its module and once past it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.inner(x) @ self.inner.weight).mean(1))


def test_a_weight_that_is_read_past_its_module_is_refused() -> None:
    with pytest.raises(SelfCheckError, match="do not add up to the batch's"):
        run_check(models.Classifier(ReadsDirectly()).train(), loops.tensors(5, 8)()[0])


class Centres(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, models.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x - x.mean(0, keepdim=True)).mean(1))


def test_samples_that_influence_each_other_are_refused() -> None:
    with pytest.raises(SelfCheckError, match="samples of one batch influence each other"):
        run_check(models.Classifier(Centres()).train(), loops.tensors(5, 8)()[0])


def test_packed_documents_that_see_each_other_are_refused() -> None:
    """GPT-2 does not look at positions when it builds its mask, so packed rows attend across documents."""
    ids = make_batch()["input_ids"][:2]
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    model = models.gpt2(attn_implementation="eager").train()
    blind = {"input_ids": ids, "position_ids": places, "sample_index": torch.arange(4)}
    model.transformer.register_forward_pre_hook(_with_full_mask, with_kwargs=True)
    with pytest.raises(SelfCheckError, match="documents of one row see each other"):
        run_check(model, blind)


def _with_full_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"attention_mask": torch.ones_like(kwargs["position_ids"])}


def test_batch_normalisation_is_refused_even_where_it_has_no_weights() -> None:
    model = models.mlp(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, models.CLASSES)).train()
    batch = loops.tensors(6)()[0]
    with pytest.raises(UnsupportedSetupError, match="normalises over the batch"):
        run_check(model, batch)
    model.body[1].eval()
    assert run_check(model, batch).confirmed


# --- what it writes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_its_result_or_its_absence_is_an_event(tmp_path: Path, data: DataManifest, signer: Signer, on: bool) -> None:
    model = tiny_lora().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with Audited(tmp_path, data, signer, self_check=on).around(model, optimizer):
        model(**make_batch()).loss.backward()
        optimizer.step()
    with RunReader.open(tmp_path / "run") as run:
        found = [e.json() for e in run.events(EventKind.NOTICE) if e.json().get("notice") == "self-check"]
    if on:
        (body,) = found
        assert body["confirmed"] is True
        assert body["modules"] == [28, 28]
        assert body["oracle_error"] < 1e-5
    else:
        assert found == [{"notice": "self-check", "skipped": True}]


# --- checks broken on purpose must not pass -----------------------------------------------------------------------


def exchange_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every sample get its neighbour's gradient; their sum is right."""
    right = Linear.gradients

    def wrong(self: Linear, work: Any) -> Any:
        for part in right(self, work):
            yield part._replace(values=part.values.roll(1, 0))

    monkeypatch.setattr(Linear, "gradients", wrong)


def test_samples_that_are_exchanged_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange_samples(monkeypatch)
    with pytest.raises(SelfCheckError, match="samples of one batch influence each other"):
        run_check(tiny_lora().train(), make_batch())


def test_an_oracle_compared_with_itself_would_not_find_them(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange_samples(monkeypatch)
    right = self_check._Rig.compare

    def blind(self: Any, **mode: bool) -> Any:
        return dataclasses.replace(right(self, **mode), oracle_error=0.0)

    monkeypatch.setattr(self_check._Rig, "compare", blind)
    assert run_check(tiny_lora().train(), make_batch()).confirmed


def test_a_module_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.gradients
    monkeypatch.setattr(
        Linear, "gradients", lambda self, work: iter(()) if "0.mlp.up_proj.lora_A" in self.name else right(self, work)
    )
    with pytest.raises(SelfCheckError, match="do not add up to the batch's"):
        run_check(tiny_lora().train(), make_batch())
