"""Mode ``fused``: a linear map whose weight gradient is the sum of the per-sample gradients that are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from setups import models
from tiny import make_batch, tiny_gpt2, tiny_llama, tiny_lora
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from attribution.capture import hooks as hooks_module
from attribution.capture.fused import fused_linear
from attribution.capture.hooks import HookSet
from attribution.capture.modules import find_tracked
from attribution.sketch.layout import SketchLayout

RTOL = 1e-5  # float32, the same sums in another order


def gradients(model: nn.Module, batch: dict[str, Tensor], mode: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a step's loss and gradients, with hooks of a mode or without any."""
    model.zero_grad()
    if mode is None:
        loss = model(**{key: value for key, value in batch.items() if key != "sample_index"}).loss
        loss.backward()
    else:
        tracking = find_tracked(model)
        layout = SketchLayout({n: tuple(p.shape) for n, p in tracking.parameters.items()}, 64)
        hooks = HookSet(model, tracking, layout, mode=mode)
        hooks.attach()
        loss = model(**batch).loss
        loss.backward()
        hooks.take()
        hooks.detach()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Every parameter's gradient agrees, measured against the largest one."""
    assert found.keys() == want.keys()
    for name, reference in want.items():
        assert (found[name] - reference).norm() <= RTOL * reference.norm() + 1e-7, name


@pytest.mark.parametrize("make", [tiny_lora, tiny_gpt2, tiny_llama, models.gpt2, models.mixtral])
def test_gradients_are_the_plain_ones_but_for_rounding_and_the_forward_pass_is_bit_identical(make: Any) -> None:
    batch = make_batch()
    plain_loss, want = gradients(make().train(), batch)
    loss, found = gradients(make().train(), batch, "fused")
    assert torch.equal(loss, plain_loss)
    assert_close(found, want)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 2, 5, 6)])
def test_the_function_itself_is_torchs_linear_map(shape: tuple[int, ...], transposed: bool, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(6, 3) if transposed else torch.randn(3, 6)
    b = torch.randn(3) if bias else None
    seen: list[tuple[Tensor, Tensor]] = []

    def consume(inputs: Tensor, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        seen.append((inputs, grad))
        return None, None

    out = fused_linear(x, weight, b, transposed, consume)
    want = functional.linear(x, weight.t() if transposed else weight, b)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    (of_x,) = torch.autograd.grad(out, x, grad)
    (wanted,) = torch.autograd.grad(want, x, grad)
    torch.testing.assert_close(of_x, wanted)
    ((inputs, arrived),) = seen
    assert torch.equal(inputs, x)
    assert torch.equal(arrived, grad)


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 3), lambda: Conv1D(3, 6)])
def test_autocast_casts_as_it_does_for_torchs_own(make: Any) -> None:
    torch.manual_seed(0)
    module, x = make(), torch.randn(4, 5, 6)
    transposed = isinstance(module, Conv1D)
    with torch.autocast("cpu", torch.bfloat16):
        out = fused_linear(x, module.weight, module.bias, transposed, lambda inputs, grad: (None, None))
        want = module(x)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(3, 6)
    out = fused_linear(x, weight, None, False, lambda inputs, grad: (None, None))
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_weight_that_is_frozen_next_to_a_trained_bias_stays_frozen() -> None:
    model = tiny_gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    batch = make_batch()
    _, want = gradients(model.train(), batch)
    _, found = gradients(model, batch, "fused")
    assert_close(found, want)


def test_leaving_gives_every_module_its_own_forward_back() -> None:
    model = tiny_lora().train()
    patched = dict.fromkeys(name for name, module in model.named_modules() if "forward" in vars(module))
    gradients(model, make_batch(), "fused")
    assert dict.fromkeys(n for n, module in model.named_modules() if "forward" in vars(module)) == patched


# --- implementations broken on purpose must fail ----------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the fused modules return other gradients than they should."""
    right = HookSet._consume

    def wrong(self: HookSet, *arguments: Any) -> tuple[Tensor | None, Tensor | None]:
        return change(*right(self, *arguments))

    monkeypatch.setattr(hooks_module.HookSet, "_consume", wrong)


def not_turned_back(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The sum as it is formed, short side first, in the shape of the weight."""
    return weight.t().reshape(weight.shape), bias


@pytest.mark.parametrize(
    "change",
    [
        not_turned_back,
        lambda weight, bias: (weight, None if bias is None else bias * 1.01),
        lambda weight, bias: (weight * 1.001, bias),
    ],
    ids=["a weight not turned back", "a bias off by 1 %", "a weight off by 0.1 %"],
)
def test_a_wrong_gradient_of_a_fused_module_shows(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    batch = make_batch()
    _, want = gradients(tiny_gpt2().train(), batch)
    broken(monkeypatch, change)
    _, found = gradients(tiny_gpt2().train(), batch, "fused")
    with pytest.raises(AssertionError):
        assert_close(found, want)
