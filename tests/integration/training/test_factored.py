"""Full fine-tuning on the factored route: folded first and contracted after, against whole gradients by autograd."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import EXACT, keep_captured
from setups import models, packing
from setups import training as loops
from setups.measure import HALF, SetUp, measure
from setups.registry import autocast, checkpointed
from tiny import make_batch, sample_loss, tiny_llama, tiny_lora
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from attribution import AuditMode
from attribution.capture.hooks import Mode
from attribution.sketch import routes
from attribution.sketch.layout import SketchLayout
from attribution.sketch.quantize import dequantize
from attribution.sketch.two_sided import TwoSidedFold
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run


@pytest.fixture(autouse=True)
def small_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix takes the factored route, with sides too short for it to be kept as it is."""
    monkeypatch.setattr(routes, "WORTH_OF_EXACTNESS", 0)
    monkeypatch.setattr(routes, "BUCKETS", 8)
    monkeypatch.setattr(routes, "TABLE_BUCKETS", 16)
    monkeypatch.setattr(routes, "TABLE_RATIO", 2)  # 61 words of 24 features


SETUPS = {
    "GPT-2: Conv1D, positions, tied head": SetUp("", "", models.gpt2),
    "Llama, head of its own": SetUp("", "", tiny_llama),
    "Llama, tied head": SetUp("", "", models.tied_llama),
    "Gemma 3, scaled embedding": SetUp("", "", models.gemma3),
    "Mixtral: run again": SetUp("", "", models.mixtral),
    "LoRA": SetUp("", "", models.adapted),
    "one module used three times": SetUp(
        "", "", models.thrice, loops.tensors(5, 8), loss=loops.class_loss, loss_of=loops.class_loss_of
    ),
    "packed documents": SetUp(
        "",
        "",
        functools.partial(models.attending, models.gpt2, "sdpa"),
        packing.packed,
        loss_of=packing.packed_loss_of,
    ),
    "checkpointing": SetUp("", "", checkpointed(models.gpt2, False), oracle=models.gpt2),
    "checkpointing, reentrant": SetUp("", "", checkpointed(tiny_llama, True), oracle=tiny_llama),
    "autocast bf16": SetUp("", "", models.gpt2, context=autocast(torch.bfloat16), limit=HALF),
    "accumulation": SetUp("", "", models.gpt2, functools.partial(loops.texts, 4), loop=loops.accumulating),
    "TRL, a head that is used but never called": SetUp("", "", tiny_llama, loop=packing.sft(optim="sgd")),
}


@pytest.mark.parametrize("mode", ["observe", "fused"])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_what_is_folded_first_is_what_folding_the_gradient_gives(
    setup: SetUp, mode: Mode, tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    found = measure(setup, mode, tmp_path, data, signer)
    assert found.samples >= 4
    assert found.error < setup.limit
    assert found.residual < setup.limit
    assert found.factor_error < setup.limit
    assert found.drift == 0.0  # weight gradients are torch's own in either mode
    assert any(route.endswith("factored") for route in found.routes), found.routes


def test_a_run_verifies_and_its_map_is_rebuilt_from_its_manifest(
    tmp_path: Path, data: DataManifest, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer) as audit:
        model(**make_batch()).loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    assert not isinstance(audit._layout.maps["transformer.ln_f.weight"], TwoSidedFold)
    assert verify_run(tmp_path / "run", Trust.load([str(signer.vkey)], [], None)).exit_code == 0
    monkeypatch.undo()
    with RunReader.open(tmp_path / "run") as reader:
        layout = SketchLayout.from_block(reader.manifest.sketch)
        records = reader.records()
        q = reader.sketch_rows(records["shard"], records["shard_row"])
        assert reader.manifest.tracking["routes"]["linear, factored"] == 9
    rows = dequantize(q[:, :4096], records["scale_raw"]) * records["weight"][:, None]
    expected = layout.sketch(gradients).numpy()
    assert np.linalg.norm(rows.sum(0) - expected) < 0.05 * np.linalg.norm(expected)


# --- whitened ------------------------------------------------------------------------------------------------

Uses = dict[str, list[tuple[Tensor, Tensor]]]  # of each parameter: vectors of its rows and columns, (S, T, d)


@contextmanager
def uses_of(model: nn.Module) -> Iterator[Uses]:
    """Note what every use of a matrix sees in one pass over the batch, without any code of ours."""
    found, undo = Uses(), []
    names = {id(p): name for name, p in model.named_parameters()}

    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        name, rows = names[id(module.weight)], len(output) if len(output) > 1 else 4
        output = output.expand(rows, *output.shape[1:]) if len(output) == 1 else output
        x = args[0].detach().expand(rows, *args[0].shape[1:])
        if not x.is_floating_point():
            x = torch.nn.functional.one_hot(x, len(module.weight)).float()
        is_rows = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
        output.register_hook(lambda g: found.setdefault(name, []).append((x, g) if is_rows else (g, x)))
        return output

    for module in model.modules():
        if not list(module.children()) and getattr(module, "weight", torch.empty(0)).ndim == 2:
            undo.append(module.register_forward_hook(watch))
    try:
        yield found
    finally:
        for handle in undo:
            handle.remove()


def rank_one_root(v: Tensor, eps: float) -> Tensor:
    """``D^(1/2)`` from row and column means, no row or column below 1e-4 of the mean."""
    least = 1e-4 * v.mean()
    rows, columns = v.mean(1).clamp(min=least) + eps**2, v.mean(0).clamp(min=least) + eps**2
    return (torch.outer(rows, columns) / (v.mean() + eps**2)).pow(-0.25)


def expected_sketches(
    model: nn.Module, before: dict[str, Tensor], step: int, batch: dict, layout: SketchLayout, group: dict[str, Any]
) -> Tensor:
    """Whiten each use of each matrix by its definition, everything else entry by entry, and sketch the sum.

    Args:
        model: A copy without any hook, at the weights of the step.
        before: The moments as the optimizer holds them before it.
        step: Its number, from 1.
        batch: The batch, whose mean token loss was trained on.
        layout: The map.
        group: The optimizer's settings.
    """
    beta, eps = group["betas"][1], group["eps"]
    correction = 1 - beta**step
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    model.zero_grad()
    with uses_of(model) as uses:
        model(**{k: v for k, v in batch.items() if k != "sample_index"}).loss.backward()
    vectors = {name: p.grad for name, p in model.named_parameters() if p.ndim == 1}
    roots = {
        name: ((beta * before.get(name, torch.zeros_like(g)) + (1 - beta) * g**2) / correction).sqrt().add(eps).rsqrt()
        for name, g in vectors.items()
    }
    rows = []
    for row in range(len(batch["input_ids"])):
        model.zero_grad()
        sample_loss(model, batch, row).backward()
        whitened = {name: model.get_parameter(name).grad * root for name, root in roots.items()}
        for name, seen in uses.items():
            whitened[name] = sum(
                tokens * (a[row].T @ b[row]) * _root_of_use(a, b, before.get(name), step, beta, eps) for a, b in seen
            )
        rows.append(layout.sketch(whitened))
    return torch.stack(rows)


def _root_of_use(a: Tensor, b: Tensor, before: Tensor | None, step: int, beta: float, eps: float) -> Tensor:
    own = torch.einsum("sti,stj->ij", a**2, b**2)
    if before is None:
        return rank_one_root(own, eps)
    earlier = before / (1 - beta ** (step - 1))
    if max(own.shape) <= routes.TABLE_RATIO * min(own.shape):
        return rank_one_root(earlier, eps)
    share = (1 - beta) / (1 - beta**step)
    return rank_one_root((1 - share) * earlier + share * own, eps)


@pytest.mark.parametrize("mode", ["observe", "fused"])
@pytest.mark.parametrize("make", [models.gpt2, tiny_llama], ids=["GPT-2, tied", "Llama"])
def test_the_whitened_form_is_that_of_the_rank_one_moment(
    make: Callable[[], nn.Module], mode: Mode, tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    model = make().train()
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    oracle = copy.deepcopy(model)
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, mode=mode, self_check=False) as audit:
        kept = keep_captured(audit)
        for step in (1, 2, 3):
            batch = make_batch(seed=step) | {"sample_index": torch.arange(4) + 4 * step}
            oracle.load_state_dict(model.state_dict())
            states = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
            before = {name: state["exp_avg_sq"].clone() for name, state in states.items() if state}
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            (captured,) = kept[-1]
            expected = expected_sketches(oracle, before, step, batch, audit._layout, optimizer.param_groups[0])
            error = (captured.whitened - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.max() < 1e-3, f"step {step}"
            assert (captured.whitened - captured.sketch).norm() > 0.5 * captured.whitened.norm()


def test_adapters_of_a_real_size_are_exact_in_spite_of_this_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layout = SketchLayout({name: tuple(p.shape) for name, p in tiny_lora().named_parameters() if p.requires_grad})
    assert layout.block().route == "exact"
    assert not layout.buckets


def test_a_model_of_a_real_size_is_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with torch.device("meta"):
        model = GPT2LMHeadModel(models.transformers.GPT2Config())
    chosen = {name: routes.buckets_of(p.shape) for name, p in model.named_parameters()}
    assert {name for name, sides in chosen.items() if sides is None} == {
        name for name, p in model.named_parameters() if p.ndim == 1
    }
    assert EXACT < HALF
