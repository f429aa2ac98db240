"""Each formula against autograd on one sample at a time, and how modules are recognised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from attribution.capture import formulas, per_sample
from attribution.capture.formulas import Elementwise, Embedding, Formula, Linear, Recomputed, Work, formula_for
from attribution.capture.per_sample import Entries
from attribution.capture.recompute import output_tensors
from attribution.capture.segments import Segments
from attribution.sketch.layout import is_tall

RTOL = 1e-5  # float32, sums of a few hundred terms
SAMPLES = 4


class OwnNorm(nn.Module):
    """A normalisation that nobody has heard of: root mean square, with a bias, and ``1 + w``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        normal = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
        return (normal * (1 + self.weight.double())).to(x.dtype) + self.bias


class Squared(nn.Module):
    """Looks like a normalisation and is not affine in its weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight**2


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.5


class ShiftedEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.weight.mean(0)


class Router(nn.Module):
    """Bare parameters, several outputs, of which one is made from another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor, *, power: int = 1) -> dict[str, Any]:
        logits = (x @ self.gate.t()) ** power
        return {"logits": logits, "scores": logits.softmax(-1), "name": "router"}


def filled(module: nn.Module) -> nn.Module:
    """Return the module with random parameters, so that nothing is one or zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def features(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(6))


def ids() -> Tensor:
    return torch.randint(0, 7, (SAMPLES, 5), generator=torch.Generator().manual_seed(7))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], type[Formula]]
CASES: dict[str, Case] = {
    "Linear": (lambda: nn.Linear(6, 3), lambda: features(5, 6), Linear),
    "Linear, wide": (lambda: nn.Linear(3, 6, bias=False), lambda: features(5, 3), Linear),
    "Linear on single vectors": (lambda: nn.Linear(6, 3), lambda: features(6), Linear),
    "Linear on four dimensions": (lambda: nn.Linear(6, 3), lambda: features(2, 5, 6), Linear),
    "Conv1D": (lambda: Conv1D(3, 6), lambda: features(5, 6), Linear),
    "Linear, square": (lambda: nn.Linear(6, 6), lambda: features(5, 6), Linear),
    "Conv1D, square": (lambda: Conv1D(6, 6), lambda: features(5, 6), Linear),
    "Conv1D, wide": (lambda: Conv1D(6, 3), lambda: features(5, 3), Linear),
    "Embedding": (lambda: nn.Embedding(7, 4), ids, Embedding),
    "Embedding, wide": (lambda: nn.Embedding(7, 9), ids, Embedding),
    "Embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), ids, Embedding),
    "Embedding times a constant": (lambda: ScaledEmbedding(7, 4), ids, Embedding),
    "Embedding and something else": (lambda: ShiftedEmbedding(7, 4), ids, Recomputed),
    "LayerNorm": (lambda: nn.LayerNorm(6), lambda: features(5, 6), Elementwise),
    "LayerNorm without bias": (lambda: nn.LayerNorm(6, bias=False), lambda: features(5, 6), Elementwise),
    "RMSNorm": (lambda: nn.RMSNorm(6), lambda: features(5, 6), Elementwise),
    "RMSNorm over heads": (lambda: LlamaRMSNorm(6), lambda: features(5, 2, 6), Elementwise),
    "RMSNorm of Gemma": (lambda: GemmaRMSNorm(6), lambda: features(5, 6), Elementwise),
    "RMSNorm of nobody": (lambda: OwnNorm(6), lambda: features(5, 6), Elementwise),
    "a square": (lambda: Squared(6), lambda: features(5, 6), Recomputed),
    "PReLU": (lambda: nn.PReLU(6), lambda: features(6), Recomputed),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), lambda: features(6, 4, 4), Recomputed),
    "Conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=2, groups=2), lambda: features(6, 7, 7), Recomputed),
    "Conv1d": (lambda: nn.Conv1d(6, 4, 3), lambda: features(6, 7), Recomputed),
    "MultiheadAttention": (lambda: Attends(), lambda: features(5, 6), Recomputed),
    "a router": (Router, lambda: features(5, 6), Recomputed),
}


class Attends(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


def output_grads(module: nn.Module, inputs: Tensor) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(8)
    outputs = output_tensors(module(inputs))
    return [None if o is None else torch.randn(o.shape, generator=generator) for o in outputs]


def autograd(module: nn.Module, inputs: Tensor, grads: list[Tensor | None], samples: list[int]) -> dict[str, Tensor]:
    """One sample's gradients: the rows of that sample alone, in a module of its own."""
    alone = copy.deepcopy(module)
    pairs = [
        (out, grad[samples])
        for out, grad in zip(output_tensors(alone(inputs[samples])), grads, strict=True)
        if out is not None and grad is not None and out.requires_grad
    ]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    return {name: p.grad for name, p in alone.named_parameters()}


def found_by(formula: Formula, inputs: Tensor, grads: list[Tensor | None], segments: Segments) -> dict[str, Tensor]:
    """Every parameter's per-sample gradients, ``(S, *shape)``, put together from what the formula yields."""
    kept = formula.keep((inputs,), {})
    whole = {
        name: torch.zeros(segments.samples, formula.module.get_parameter(own).numel())
        for own, name in formula.parameters.items()
    }
    with torch.no_grad():
        for part in formula.gradients(Work(kept, grads, segments)):
            if isinstance(part, Entries):
                whole[part.parameter].scatter_add_(1, part.numbers, part.values)
            else:
                rows = slice(part.first, part.first + len(part.values))
                whole[part.parameter][rows, part.start : part.start + part.values.shape[1]] += part.values
    shaped = {}
    for own, name in formula.parameters.items():
        shape = formula.module.get_parameter(own).shape
        flat = whole[name]
        shaped[name] = flat.view(-1, *shape[::-1]).transpose(1, 2) if is_tall(shape) else flat.view(-1, *shape)
    return shaped


def check(name: str, blocks: int = 1) -> None:
    """Compare a case's formula with autograd; with ``blocks`` rows per sample."""
    make, inputs_of, expected_kind = CASES[name]
    module, inputs = filled(make()), inputs_of()
    formula = formula_for("m", module, {own: own for own, _ in module.named_parameters()})
    assert type(formula) is expected_kind, formula
    grads = output_grads(module, inputs)
    samples = SAMPLES // blocks
    found = found_by(formula, inputs, grads, Segments.whole_rows(samples, SAMPLES))
    for sample in range(samples):
        want = autograd(module, inputs, grads, list(range(sample, SAMPLES, samples)))
        for parameter, gradient in want.items():
            distance = (found[parameter][sample] - gradient).norm()
            assert distance <= RTOL * gradient.norm(), (parameter, sample)


@pytest.mark.parametrize("blocks", [1, 2], ids=["one row per sample", "two rows per sample"])
@pytest.mark.parametrize("name", CASES)
def test_every_formula_gives_each_samples_own_gradient(name: str, blocks: int) -> None:
    check(name, blocks)


@pytest.mark.parametrize("name", ["Linear", "Conv1D", "LayerNorm"])
@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_part_of_a_module_that_is_frozen_is_left_alone(name: str, trained: str) -> None:
    module = filled(CASES[name][0]())
    formula = formula_for("m", module, {trained: trained})
    inputs = CASES[name][1]()
    grads = output_grads(module, inputs)
    found = found_by(formula, inputs, grads, Segments.whole_rows(SAMPLES, SAMPLES))
    want = torch.stack([autograd(module, inputs, grads, [i])[trained] for i in range(SAMPLES)])
    assert found.keys() == {trained}
    torch.testing.assert_close(found[trained], want, rtol=RTOL, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.BatchNorm1d(6), "batch normalisation mixes samples"),
        (nn.LSTM(6, 4), "batch_first=True"),
        (nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True), "dropout=0"),
        (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), "dropout"),
        (nn.Embedding(7, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_run_again_alone_says_why(module: nn.Module, reason: str) -> None:
    found = formula_for("m", module, {own: own for own, _ in module.named_parameters()})
    assert isinstance(found, str)
    assert reason in found


def test_recognition_does_not_depend_on_a_class_name_or_on_the_weights_at_hand() -> None:
    class Linear(nn.Module):  # not torch's
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.rms_norm(x, (6,), self.weight)

    module = Linear()
    with torch.no_grad():
        module.weight.zero_()
    formula = formula_for("m", module, {"weight": "weight"})
    assert isinstance(formula, Elementwise)
    assert formula.unit == 1.0


# --- implementations broken on purpose must fail ----------------------------------------------------------------


def test_an_elementwise_formula_without_h_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elementwise, "_at", lambda self, work, value: torch.ones_like(work.output_grads[0]))
    with pytest.raises(AssertionError):
        check("LayerNorm")


def test_a_norm_of_the_wrong_unit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "elementwise_unit", lambda module: 1.0)
    check("RMSNorm")
    with pytest.raises(AssertionError):
        check("RMSNorm of Gemma")


def test_a_padding_row_that_is_not_masked_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = per_sample.embedding_weight
    monkeypatch.setattr(per_sample, "embedding_weight", lambda ids, g, rows, padding: right(ids, g, rows, None))
    check("Embedding")
    with pytest.raises(AssertionError):
        check("Embedding with padding")


def test_a_scale_of_an_embedding_that_is_forgotten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas, "_embedding_scale", lambda module: 1.0)
    with pytest.raises(AssertionError):
        check("Embedding times a constant")


def test_a_stored_orientation_that_is_ignored_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a square weight shows it: the others are flattened along their long side in either orientation."""
    monkeypatch.setattr(Linear, "transposed", property(lambda self: False))
    check("Linear, square")
    with pytest.raises(AssertionError):
        check("Conv1D, square")


def test_a_module_that_is_recomputed_with_its_neighbours_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = formulas.gradient_of

    def wrong(module: nn.Module, *rest: Any) -> dict[str, Tensor]:
        *before, segments, sample = rest
        return right(module, *before, segments, (sample + 1) % segments.samples)

    monkeypatch.setattr(formulas, "gradient_of", wrong)
    with pytest.raises(AssertionError):
        check("Conv2d")


@pytest.mark.parametrize("lines", [1, 2])
def test_a_large_weight_is_formed_in_stretches(monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    monkeypatch.setattr(per_sample, "STRETCH_ENTRIES", SAMPLES * 6 * lines)
    for name in ("Linear", "Linear, wide", "Conv1D"):
        check(name)
