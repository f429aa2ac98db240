"""Models that do what most do not: each is recorded as autograd says, and trains as it would without audit mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from adversities import Enter, batch, bodies, records, sgd, steps, train, without_ids
from loops import EXACT, keep_captured, relative_error
from tiny import VOCABULARY, tiny_llama, tiny_lora
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import BatchEncoding, BertConfig, BertForMaskedLM, set_seed
from transformers.modeling_outputs import CausalLMOutput

from attribution import AuditMode
from attribution.errors import CaptureError, SelfCheckError
from attribution.training.collators import IdCollator
from auditlog import DataManifest, Signer
from auditlog.format.records import EventKind, Flag


@pytest.fixture
def audit(tmp_path: Path, data: DataManifest, signer: Signer) -> Enter:
    def make(model: nn.Module, optimizer: Any, folder: str = "run", **options: Any) -> AuditMode:
        return AuditMode(model, optimizer, data, run=tmp_path / folder, signer=signer, sketch_dim=1024, **options)

    return make


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Next-token cross-entropy, ``(R, T, V)`` and ``(R, T)``."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


class Small(nn.Module):
    """An embedding, one layer and a head."""

    def __init__(self, middle: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        set_seed(1)
        self.embed, self.middle, self.head = nn.Embedding(VOCABULARY, 8), middle(), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        logits = self.head(self.hidden(input_ids))
        return CausalLMOutput(loss=token_loss(logits, labels), logits=logits)

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self.middle(self.embed(input_ids))


def assert_sketches(
    run: AuditMode, captured: list[Any], model: nn.Module, loss_of: Callable[[int, int], Tensor]
) -> None:
    """Compare every sample with autograd on it alone; the weights have not moved."""
    for number, (micro,) in enumerate(captured):
        for slot in range(4):
            model.zero_grad()
            loss_of(number, slot).backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            assert relative_error(micro.sketch[slot], run._layout.sketch(grads)) < EXACT, (number, slot)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    wanted = right.state_dict()
    for name, value in left.state_dict().items():
        assert torch.equal(value, wanted[name]), name


class _AddsPlaces(nn.Module):
    """Recomputed; its second argument belongs to no row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.2)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x + torch.einsum("btd,de->bte", x + (places if places.ndim > 1 else places[:, None]), self.weight)


class _Placed(Small):
    def __init__(self, width: int | None) -> None:
        super().__init__(_AddsPlaces)
        self.register_buffer("places", torch.randn(64) if width is None else torch.randn(64, width))

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self.middle(self.embed(input_ids), self.places[: input_ids.shape[1]])


def test_a_table_that_may_be_one_of_rows_or_of_tokens_is_refused(audit: Enter) -> None:
    model = _Placed(8).train()
    with pytest.raises(CaptureError, match="as many rows as tokens"), audit(model, sgd(model, lr=0.0)) as run:
        train(model, run._optimizer, 2, lambda i: batch(i, (7, 4)[i]))


# A multiple of the four rows, and their number.
@pytest.mark.parametrize(("length", "width"), [(8, None), (8, 8), (4, None)])
def test_positions_that_belong_to_no_row_are_not_cut(audit: Enter, length: int, width: int | None) -> None:
    lengths = (7, length)
    model = _Placed(width).train()
    with audit(model, sgd(model, lr=0.0)) as run:
        captured = keep_captured(run)
        train(model, run._optimizer, 2, lambda i: batch(i, lengths[i]))

    def alone(number: int, slot: int) -> Tensor:
        one = {name: tensor[slot : slot + 1] for name, tensor in batch(number, lengths[number]).items()}
        logits = model(one["input_ids"], one["labels"]).logits
        return token_loss(logits, one["labels"], "sum")

    assert_sketches(run, captured, model, alone)


def test_a_masked_language_model_with_a_tied_head_is_sketched_as_autograd_says(audit: Enter) -> None:
    set_seed(2)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **off)).train()
    assert model.cls.predictions.bias is model.cls.predictions.decoder.bias
    with audit(model, sgd(model, lr=0.0)) as run:
        captured = keep_captured(run)
        train(model, run._optimizer, 1)

    def alone(number: int, slot: int) -> Tensor:
        one = {name: tensor[slot : slot + 1] for name, tensor in without_ids(number).items()}
        return cross_entropy(model(**one).logits[0], one["labels"][0], reduction="sum")

    assert_sketches(run, captured, model, alone)


class _Caching(nn.Module):
    """Overwrites, in evaluation mode, what its own backward pass needs."""

    config = SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor) -> Tensor:
        state = x.sigmoid()
        if self.config.use_cache and not self.training:
            state.detach().add_(1)
        return state


def test_a_model_that_writes_into_its_cache_in_evaluation_mode_passes_the_self_check(audit: Enter) -> None:
    model = Small(_Caching).train()
    with audit(model, sgd(model)) as run:
        train(model, run._optimizer)
    assert max(s["residual"] for s in steps(run)) < EXACT
    assert _Caching.config.use_cache


@pytest.mark.parametrize("loss_of", [binary_cross_entropy_with_logits, mse_loss])
def test_two_scores_under_another_loss_keep_their_sketch_and_claim_no_unit(
    audit: Enter, loss_of: Callable[..., Tensor]
) -> None:
    class Scores(Small):
        def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
            logits = self.head(self.embed(input_ids).mean(1))[:, :2]
            return CausalLMOutput(loss=loss_of(logits, labels), logits=logits)

    model = Scores().train()
    with audit(model, sgd(model)) as run:
        wanted = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        ids = {name: batch()[name] for name in ("input_ids", "sample_index")}
        model(**ids, labels=wanted).loss.backward()
        run._optimizer.step()
    found = records(run)
    assert (found["flags"] == Flag.UNIT_UNKNOWN).all()
    assert (found["grad_norm"] > 0).all()
    assert np.isnan(found["loss"]).all()


def test_a_cross_entropy_with_a_loss_on_the_normaliser_claims_no_unit(audit: Enter) -> None:
    model = tiny_llama().train()
    with audit(model, sgd(model)) as run:
        output = model(**batch())
        (output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()).backward()
        run._optimizer.step()
    assert (records(run)["flags"] & Flag.UNIT_UNKNOWN).all()


@pytest.mark.parametrize("self_check", [True, False])
def test_a_batch_passed_as_one_mapping_keeps_its_type(audit: Enter, self_check: bool) -> None:
    class Whole(Small):
        def forward(self, batch: BatchEncoding) -> CausalLMOutput:
            assert "sample_index" not in batch
            return super().forward(batch.input_ids, batch.labels)

    model = Whole().train()
    with audit(model, sgd(model), self_check=self_check) as run:
        given = BatchEncoding(batch())
        model(given).loss.backward()
        run._optimizer.step()
    assert "sample_index" in given
    assert len(records(run)) == 4
    assert steps(run)[0]["residual"] < EXACT


@pytest.mark.parametrize("mode", ["observe", "fused"])
def test_double_precision_as_the_default_works(audit: Enter, mode: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_lora().train()
        with audit(model, sgd(model), mode=mode) as run:
            train(model, run._optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert max(s["residual"] for s in steps(run)) < EXACT
    assert len(records(run)) == 12


class _CountsPasses(Small):
    """Counts all its passes in a buffer, and trains on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def hidden(self, input_ids: Tensor) -> Tensor:
        self.passes += 1
        return self.embed(input_ids) / (1 + self.passes * self.training)


class _CountsLoad(nn.Module):
    """Recomputed; counts how much each of four experts is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x @ self.weight).softmax(-1)
        self.load += chosen.detach().sum((0, 1))
        return x * (1 + chosen.amax(-1, keepdim=True))


class _DrawsElsewhere(Small):
    """Draws random numbers that are not torch's in every pass, and trains on them."""

    def hidden(self, input_ids: Tensor) -> Tensor:
        drawn = np.random.rand() + random.random()
        return self.embed(input_ids) * (1 + drawn * self.training)


@pytest.mark.parametrize("build", [_CountsPasses, lambda: Small(_CountsLoad), _DrawsElsewhere])
def test_buffers_and_foreign_random_numbers_are_as_in_the_plain_run(audit: Enter, build: Callable[[], Small]) -> None:
    plain, audited = build().train(), build().train()
    np.random.seed(3)
    random.seed(3)
    train(plain, sgd(plain), of=without_ids)
    np.random.seed(3)
    random.seed(3)
    with audit(audited, sgd(audited)) as run:
        train(audited, run._optimizer)
    assert_same(audited, plain)
    assert max(s["residual"] for s in steps(run)) < EXACT


def test_a_model_whose_forward_names_the_ids_gets_them(audit: Enter) -> None:
    seen = []

    class Remembers(Small):
        def forward(self, *args: Any, sample_index: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
            seen.append(sample_index)
            return super().forward(*args, **kwargs)

    model = Remembers().train()
    with audit(model, sgd(model)) as run:
        train(model, run._optimizer, 1)
    assert torch.equal(seen[-1], torch.arange(4))
    assert len(records(run)) == 4


# --- what only the training pass, or only a later batch, would show -------------------------------------------


class _Unpadded(Small):
    """Drops the padding before a layer and puts it back behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        x = self.embed(input_ids)
        kept = input_ids != 0
        y = torch.zeros_like(x)
        y[kept] = self.layer(x[kept])
        logits = self.head(x + y)
        return CausalLMOutput(loss=token_loss(logits, labels), logits=logits)


@pytest.mark.parametrize("mode", ["observe", "fused"])
def test_tokens_that_were_dropped_before_a_layer_are_not_shared_out_among_the_rows(audit: Enter, mode: str) -> None:
    full, ragged = batch(0), batch(1)  # the second has tokens for a whole number per row
    full["input_ids"] = full["input_ids"].clamp(min=1)
    ragged["input_ids"] = torch.ones_like(ragged["input_ids"])
    ragged["input_ids"][0, 5:] = 0
    model = _Unpadded().train()
    with pytest.raises(CaptureError, match="layer: its batch has 32 rows"), audit(model, sgd(model), mode=mode) as run:
        train(model, run._optimizer, 2, lambda i: (full, ragged)[i])


class _Mixes(Small):
    """Takes the batch's mean off, always or in training only."""

    always = True

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return x - 0.5 * x.mean(0, keepdim=True) if self.always or self.training else x


def test_a_first_batch_of_one_sample_does_not_settle_how_samples_mix(audit: Enter) -> None:
    single = {name: tensor[:1] for name, tensor in batch(0).items()}
    model = _Mixes().train()
    with pytest.raises(SelfCheckError, match="influence each other"), audit(model, sgd(model)) as run:
        train(model, run._optimizer, 2, lambda i: (single, batch(1))[i])
    assert len(records(run)) == 1


def test_a_mixture_that_only_training_has_is_not_confirmed_and_its_size_is_logged(audit: Enter) -> None:
    model = _Mixes().train()
    model.always = False
    with audit(model, sgd(model)) as run:
        train(model, run._optimizer, 1)
    (check,) = [body for body in bodies(run, EventKind.NOTICE) if body["notice"] == "self-check"]
    assert (check["confirmed"], check["mode"]) == (False, "training")
    assert check["oracle_error"] > 0.01


class _Helped(Small):
    """Has a second head, for a loss that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        hidden = self.hidden(input_ids)
        logits = self.head(hidden)
        return CausalLMOutput(loss=token_loss(logits, labels) + self.second(hidden).square().mean(), logits=logits)


def test_a_module_that_the_self_check_did_not_see_is_named_once(audit: Enter, caplog: pytest.LogCaptureFixture) -> None:
    model = _Helped().train()
    with audit(model, sgd(model)) as run:
        train(model, run._optimizer, 3)
    assert [b["modules"] for b in bodies(run, EventKind.NOTICE) if b["notice"] == "unchecked modules"] == [["second"]]
    assert caplog.text.count("the self-check did not see") == 1


def test_a_collator_that_copies_its_examples_type_gives_a_usable_batch() -> None:
    rows = [{"input_ids": torch.tensor([1 + i, 2]), "sample_index": i} for i in range(3)]
    made = IdCollator(torch.utils.data.default_collate)(rows)
    moved = type(made)({name: tensor.clone() for name, tensor in made.items()})  # as trainers move a batch
    assert moved["sample_index"].tolist() == [0, 1, 2]
    assert moved.get("labels") is None
