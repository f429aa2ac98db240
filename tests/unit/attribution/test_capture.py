"""Captured sketches against autograd, one sample at a time, and implementations broken on purpose."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from setups import models
from tiny import make_batch, sample_loss, tiny_llama, tiny_lora

from attribution.capture import formulas, per_sample, units
from attribution.capture import hooks as hooks_module
from attribution.capture.batch import Announced
from attribution.capture.conservation import conserve
from attribution.capture.hooks import HookSet
from attribution.capture.micro_batch import Captured
from attribution.capture.modules import find_tracked
from attribution.capture.oracle import gradient, sketch_each
from attribution.errors import CaptureError, SampleIdentityError
from attribution.sketch.layout import SketchLayout
from attribution.sketch.quantize import dequantize, quantize
from attribution.sketch.sign_fold import SignFold
from auditlog.format.records import Flag

RTOL = 1e-4  # fp32, the project's bar


class Rig:
    """A model with hooks on it, and its oracle."""

    def __init__(self, model: torch.nn.Module, dim: int = 1024) -> None:
        self.model = model
        self.tracking = find_tracked(model)
        self.layout = SketchLayout({n: tuple(p.shape) for n, p in self.tracking.parameters.items()}, dim)
        self.hooks = HookSet(model, self.tracking, self.layout)
        self.hooks.attach()

    def step(self, *batches: dict, scale: float = 1.0) -> list[Captured]:
        self.model.zero_grad()
        for batch in batches:
            (scale * self.model(**batch).loss).backward()
        captured, _ = self.hooks.take()
        return captured

    def oracle(self, batch: dict) -> torch.Tensor:
        with self.unhooked():
            rows = len(batch["input_ids"])
            loss_of = functools.partial(sample_loss, self.model, batch)
            return sketch_each(rows, loss_of, self.tracking.parameters, self.layout)

    def flat_gradient(self, batch: dict, row: int) -> torch.Tensor:
        parts = gradient(sample_loss(self.model, batch, row), self.tracking.parameters)
        return torch.cat([part.reshape(-1) for part in parts.values()])

    @contextlib.contextmanager
    def unhooked(self):
        self.hooks.detach()
        yield
        self.hooks.attach()

    def consumed(self) -> torch.Tensor:
        return self.layout.sketch({n: p.grad for n, p in self.tracking.parameters.items()})

    def check(self, captured: Captured, batch: dict) -> None:
        """Everything that is recorded of a micro-batch equals the reference."""
        want = self.oracle(batch)
        worst = (captured.sketch - want).norm(dim=1) / want.norm(dim=1)
        assert worst.max() < RTOL, f"sketches differ by {worst.tolist()}"
        with self.unhooked():
            losses = torch.stack([sample_loss(self.model, batch, i).detach() for i in range(len(want))])
        torch.testing.assert_close(captured.loss, losses, rtol=1e-5, atol=1e-5)
        tokens = (batch["labels"][:, 1:] != -100).sum(1)
        assert captured.n_tokens.tolist() == tokens.tolist()
        torch.testing.assert_close(
            captured.weight, torch.full((len(want),), 1 / float(tokens.sum())), rtol=1e-5, atol=0
        )
        assert captured.sample_index.tolist() == batch["sample_index"].tolist()
        assert captured.flags.eq(0).all()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("answer_only", [False, True])
def test_sketches_are_those_of_each_sample_alone(model: torch.nn.Module, answer_only: bool, left: bool) -> None:
    rig = Rig(model)
    batch = make_batch(answer_only=answer_only, left=left)
    (captured,) = rig.step(batch)
    rig.check(captured, batch)


def test_samples_are_distinct_so_that_exchanging_them_would_show(model: torch.nn.Module) -> None:
    want = Rig(model).oracle(make_batch())
    unit = want / want.norm(dim=1, keepdim=True)
    assert (unit @ unit.T - torch.eye(4)).abs().max() < 0.9


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(model: torch.nn.Module, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    rig = Rig(model)
    batch = make_batch()
    (captured,) = rig.step(batch)
    model.gradient_checkpointing_disable()  # the oracle asks for gradients in a way that reentrant mode refuses
    rig.check(captured, batch)


def test_each_micro_batch_keeps_its_own_samples(model: torch.nn.Module) -> None:
    rig = Rig(model)
    batches = [make_batch(seed=1), make_batch(seed=2, rows=3)]
    captured = rig.step(*batches)
    for found, batch in zip(captured, batches, strict=True):
        rig.check(found, batch)
    closing = conserve(torch.stack([c.expected for c in captured]).sum(0), rig.consumed())
    assert closing.factor == pytest.approx(1, abs=1e-4)
    assert closing.residual < 1e-4


def test_a_scaled_loss_moves_the_weight_and_not_the_sketch() -> None:
    rig = Rig(tiny_lora().train())
    batch = make_batch()
    (plain,) = rig.step(batch)
    (scaled,) = rig.step(batch, scale=0.37)
    torch.testing.assert_close(scaled.sketch, plain.sketch, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled.weight, 0.37 * plain.weight, rtol=1e-5, atol=0)


def test_training_is_bit_identical_with_hooks_attached(model: torch.nn.Module) -> None:
    batch = make_batch()
    without_id = {key: value for key, value in batch.items() if key != "sample_index"}
    model.zero_grad()
    model(**without_id).loss.backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    rig = Rig(model)
    rig.step(batch)
    for name, parameter in model.named_parameters():
        if name in plain:
            assert torch.equal(parameter.grad, plain[name]), name


def test_labels_kept_from_the_model_are_supplied_or_read_off_the_gradient() -> None:
    rig = Rig(tiny_lora().train())
    batch = make_batch()
    labels = batch["labels"]
    for supplied in (True, False):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        rig.hooks.announced = Announced(labels=labels if supplied else None)
        logits = rig.model(**inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        loss.backward()
        (captured,), _ = rig.hooks.take()
        rig.check(captured, batch)


def test_a_sample_without_loss_tokens_is_flagged_and_weighs_nothing() -> None:
    rig = Rig(tiny_lora().train())
    batch = make_batch()
    batch["labels"][2] = -100
    (captured,) = rig.step(batch)
    assert captured.flags.tolist() == [0, 0, Flag.NO_LOSS_TOKEN, 0]
    assert captured.weight[2] == 0
    assert captured.sketch[2].eq(0).all()


def test_a_loss_that_is_not_finite_is_flagged_and_stored_as_zeros() -> None:
    rig = Rig(tiny_lora().train())
    (captured,) = rig.step(make_batch(), scale=float("nan"))
    assert (captured.flags & Flag.NOT_FINITE).ne(0).all()
    assert captured.sketch.eq(0).all()


def test_evaluation_and_generation_record_nothing() -> None:
    rig = Rig(tiny_lora())
    rig.model.eval()
    rig.model(**make_batch())
    rig.model.train()
    with torch.no_grad():
        rig.model(**make_batch())
        rig.model.generate(make_batch()["input_ids"], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert rig.hooks.take() == ([], 0)


def test_a_forward_pass_without_backward_is_counted_and_not_recorded() -> None:
    rig = Rig(tiny_lora().train())
    rig.model(**make_batch())
    captured, without = rig.hooks.take()
    assert (captured, without) == ([], 1)


def test_detaching_leaves_no_hook_behind(model: torch.nn.Module) -> None:
    rig = Rig(model)
    rig.hooks.detach()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


# --- what cannot be captured is refused -----------------------------------------------------------------------


def test_a_batch_without_ids_is_refused_with_the_corrected_call() -> None:
    rig = Rig(tiny_lora().train())
    batch = make_batch()
    del batch["sample_index"]
    with pytest.raises(SampleIdentityError, match="carries no sample_index") as caught:
        rig.model(**batch)
    assert "dataset(manifest)" in caught.value.advice()


@pytest.mark.parametrize("ids", [torch.arange(3), torch.zeros(4, 1, dtype=torch.long)])
def test_one_id_per_row_or_none_at_all(ids: torch.Tensor) -> None:
    rig = Rig(tiny_lora().train())
    with pytest.raises(SampleIdentityError, match="one id per row"):
        rig.model(**(make_batch() | {"sample_index": ids}))


@pytest.mark.parametrize("ids", [torch.tensor([0.5, 1, 2, 3]), torch.tensor([True] * 4), ["a", "b", "c", "d"]])
def test_ids_are_integers_and_never_rounded(ids: Any) -> None:
    rig = Rig(tiny_lora().train())
    with pytest.raises(SampleIdentityError, match="integers"):
        rig.model(**(make_batch() | {"sample_index": ids}))


def test_a_list_of_integers_will_do() -> None:
    rig = Rig(tiny_lora().train())
    batch = make_batch()
    (captured,) = rig.step(batch | {"sample_index": [0, 1, 2, 3]})
    rig.check(captured, batch)


def test_a_second_backward_pass_on_one_forward_pass_is_refused() -> None:
    rig = Rig(tiny_lora().train())
    loss = rig.model(**make_batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(CaptureError, match="second backward pass"):
        loss.backward()


def test_training_in_evaluation_mode_is_captured_too() -> None:
    rig = Rig(tiny_lora().eval())
    batch = make_batch()
    (captured,) = rig.step(batch)
    rig.check(captured, batch)


def test_a_gradient_after_its_micro_batch_is_refused() -> None:
    rig = Rig(tiny_lora().train())
    first = rig.model(**make_batch()).loss
    rig.model(**make_batch(seed=1))
    with pytest.raises(CaptureError, match="after its micro-batch was closed"):
        first.backward()


def test_every_parameter_of_a_model_is_captured_and_only_a_frozen_one_is_not() -> None:
    rig = Rig(tiny_llama().train())
    assert rig.tracking.coverage == 1
    batch = make_batch()
    (captured,) = rig.step(batch)
    rig.check(captured, batch)
    frozen = tiny_llama().train()
    frozen.model.embed_tokens.requires_grad_(False)
    rig = Rig(frozen)
    assert not any("embed_tokens" in name for name in rig.tracking.parameters)
    (captured,) = rig.step(batch)
    rig.check(captured, batch)


def test_a_weight_shared_by_embedding_and_head_is_captured_at_both() -> None:
    rig = Rig(models.gpt2().train())  # lm_head.weight is the embedding's
    batch = make_batch()
    (captured,) = rig.step(batch)
    rig.check(captured, batch)
    assert conserve(captured.expected, rig.consumed()).residual < RTOL


# --- implementations broken on purpose must fail --------------------------------------------------------------


def broken_run(monkeypatch: pytest.MonkeyPatch, target: object, name: str, wrong: object) -> Rig:
    monkeypatch.setattr(target, name, wrong)
    return Rig(tiny_lora().train())


def test_a_factor_wrong_by_ten_fails_the_units_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = units.measure

    def wrong(*arguments: Any) -> units.Units:
        found = right(*arguments)
        return units.Units(10 * found.factor, found.loss, found.n_tokens, found.known)

    rig = broken_run(monkeypatch, units, "measure", wrong)
    batch = make_batch()
    (captured,) = rig.step(batch)
    with pytest.raises(AssertionError):
        rig.check(captured, batch)


def test_two_exchanged_ids_fail_the_oracle() -> None:
    rig = Rig(tiny_lora().train())
    batch = make_batch()
    exchanged = batch | {"sample_index": torch.tensor([1, 0, 2, 3])}
    (captured,) = rig.step(exchanged)
    by_index = captured.sketch[captured.sample_index.argsort()]
    want = rig.oracle(batch)
    assert ((by_index - want).norm(dim=1) / want.norm(dim=1) > RTOL).tolist() == [True, True, False, False]


def test_a_tokens_gradient_given_to_the_neighbour_fails_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    right = per_sample.linear_weight

    def wrong(x: torch.Tensor, g: torch.Tensor, *rest: Any) -> Any:
        leaked = g.clone()
        leaked[0, 2], leaked[1, 2] = g[1, 2], g[0, 2]
        moved = x.clone()
        moved[0, 2], moved[1, 2] = x[1, 2], x[0, 2]
        return right(moved, leaked, *rest)

    rig = broken_run(monkeypatch, per_sample, "linear_weight", wrong)
    batch = make_batch()
    (captured,) = rig.step(batch)
    closing = conserve(captured.expected, rig.consumed())
    assert closing.residual < 1e-4  # conservation cannot see it …
    with pytest.raises(AssertionError):  # … the oracle does
        rig.check(captured, batch)


def test_an_omitted_module_fails_conservation(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tiny_lora().train())
    skipped = rig.layout.maps[rig.tracking.formulas[3].parameters["weight"]]
    right = SignFold.add_products

    def wrong(self: SignFold, sums: torch.Tensor, values: torch.Tensor, factors: torch.Tensor, start: int = 0) -> None:
        if not (self is skipped and len(values) > 1):
            right(self, sums, values, factors, start)

    monkeypatch.setattr(SignFold, "add_products", wrong)
    (captured,) = rig.step(make_batch())
    assert conserve(captured.expected, rig.consumed()).residual > 1e-3


def test_one_use_of_a_shared_weight_that_is_omitted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = formulas.Embedding.gradients
    wrong = lambda self, work: iter(()) if "wte" in self.name else right(self, work)  # noqa: E731
    monkeypatch.setattr(formulas.Embedding, "gradients", wrong)
    rig = Rig(models.gpt2().train())
    batch = make_batch()
    (captured,) = rig.step(batch)
    assert conserve(captured.expected, rig.consumed()).residual > 1e-3
    with pytest.raises(AssertionError):
        rig.check(captured, batch)


def test_positions_that_all_rows_share_are_an_error_if_no_row_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """No module's formula."""

    monkeypatch.setattr(hooks_module, "Embedding", Other)
    rig = Rig(models.gpt2().train())
    with pytest.raises(CaptureError, match=r"wpe: its batch has 1 rows"):
        rig.step(make_batch())


def test_a_routers_inner_path_that_is_counted_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are made from its logits, and both are outputs."""
    monkeypatch.setattr(hooks_module, "_view", lambda leaf: leaf)
    rig = Rig(models.mixtral().train())
    batch = make_batch()
    (captured,) = rig.step(batch)
    assert conserve(captured.expected, rig.consumed()).residual > 1e-4
    with pytest.raises(AssertionError):
        rig.check(captured, batch)


def test_a_wrong_weight_of_one_sample_fails_conservation() -> None:
    rig = Rig(tiny_lora().train())
    (captured,) = rig.step(make_batch())
    weight = captured.weight.clone()
    weight[1] *= 1.1
    wrong = (weight[:, None] * captured.sketch).sum(0)
    assert conserve(wrong, rig.consumed()).residual > 1e-3


# --- what the sketch and int8 keep ------------------------------------------------------------------------------


def test_int8_keeps_the_inner_products_of_real_gradients() -> None:
    """Pearson with the exact inner products falls by at most 0.002 from float32 sketches to int8 ones."""
    rig = Rig(tiny_lora().train(), dim=4096)
    captured = [rig.step(make_batch(seed=seed))[0].sketch for seed in range(12)]
    sketches = torch.cat(captured)  # (48, D)
    q, scale = quantize(sketches)
    rounded = torch.from_numpy(dequantize(q, scale))
    with rig.unhooked():
        exact = torch.stack([rig.flat_gradient(make_batch(seed=seed), row) for seed in range(12) for row in range(4)])
    upper = torch.triu_indices(48, 48, 1)
    truth, float32, int8 = ((m @ m.T)[*upper] for m in (exact, sketches, rounded))

    def pearson(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack([a, b]))[0, 1])

    assert pearson(float32, truth) > 0.95
    assert pearson(float32, truth) - pearson(int8, truth) < 0.002
    assert ((rounded - sketches).norm(dim=1) / sketches.norm(dim=1)).max() < 0.04
