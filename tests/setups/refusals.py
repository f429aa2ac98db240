"""Set-ups that cannot be recorded faithfully, and the error that refuses each. To add one, add a ``Refusal``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from setups import models, packing
from setups import training as loops
from setups.training import Auditor, Batch
from tiny import tiny_llama, tiny_lora
from torch import nn

from attribution.errors import (
    AttributionError,
    CaptureError,
    CoverageGapError,
    SampleIdentityError,
    SelfCheckError,
    UnsupportedSetupError,
)


@dataclass(frozen=True)
class Refusal:
    """One such set-up.

    Attributes:
        name: What the table calls it.
        error: The error's class.
        match: What its message says, as a regular expression.
        act: Does it.
        when: When it is refused.
    """

    name: str
    error: type[AttributionError]
    match: str
    act: Callable[[Auditor], None]
    when: str = "when attached"


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _prompt_tuning() -> nn.Module:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return get_peft_model(tiny_llama(), config).train()


def _attach(model: nn.Module, auditor: Auditor) -> None:
    with auditor.around(model, _sgd(model)):
        raise AssertionError("the context must not be entered")


def _in_between(change: Callable[[nn.Module], object]) -> Callable[[Auditor], None]:
    """Return a loop that changes the model after its first step; something else still carries the graph."""

    def act(auditor: Auditor) -> None:
        model = tiny_lora().train()
        model.enable_input_require_grads()
        optimizer = _sgd(model)
        with auditor.around(model, optimizer):
            for step, batch in enumerate(loops.texts(2)):
                if step:
                    change(model)
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return act


def _another_adapter(model: nn.Module) -> None:
    model.add_adapter("other", LoraConfig(r=4, target_modules="all-linear"))
    model.set_adapter("other")


def _late_parameter(model: nn.Module) -> None:
    model.get_base_model().model.embed_tokens.weight.requires_grad_(True)


def _batch_norm(affine: bool) -> nn.Module:
    return models.mlp(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.Linear(8, models.CLASSES)).train()


def _weight_norm() -> nn.Module:
    return models.pooled(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))


def _first_batch(model: nn.Module, batch: Batch, auditor: Auditor) -> None:
    """Begin to train with a batch, as far as the forward pass."""
    model.train()
    with auditor.around(model, _sgd(model)):
        model(**(batch if "input_ids" in batch else {"x": batch["x"], "sample_index": batch["sample_index"]}))


def _masked(batch: Batch) -> Batch:
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def _compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _lbfgs(auditor: Auditor) -> None:
    model = tiny_lora()
    with auditor.around(model, torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])):
        raise AssertionError("the context must not be entered")


def _compiled_before(auditor: Auditor) -> None:
    """Train with a compiled function that closed over the model before audit mode came: no attribute shows it."""
    torch._dynamo.reset()
    model = models.thrice().train()
    batch = loops.tensors(5, 8)()[0]
    step = torch.compile(lambda x: model(x), backend="eager")
    step(batch["x"])
    optimizer = _sgd(model)
    try:
        with auditor.around(model, optimizer):
            step(batch["x"]).sum().backward()
            optimizer.step()
    finally:
        torch._dynamo.reset()


_first, _step = "with the first batch", "at the step, before it moves a weight"
REFUSALS = [
    Refusal(
        "torch.compile before attaching (A07)",
        UnsupportedSetupError,
        "compiled already",
        lambda auditor: _attach(torch.compile(tiny_lora(), backend="eager"), auditor),
    ),
    Refusal(
        "model.compile() before attaching (A07)",
        UnsupportedSetupError,
        "compiled already",
        lambda auditor: _attach(_compile_in_place(tiny_lora()), auditor),
    ),
    Refusal(
        "a function compiled over the model before attaching (A07)",
        CaptureError,
        "captured 0 of 2 modules",
        _compiled_before,
        _step,
    ),
    Refusal(
        "DataParallel",
        UnsupportedSetupError,
        "DataParallel",
        lambda auditor: _attach(nn.DataParallel(tiny_lora()), auditor),
    ),
    Refusal("LBFGS", UnsupportedSetupError, "LBFGS", _lbfgs),
    Refusal(
        "nothing trainable",
        CoverageGapError,
        "no trainable parameter",
        lambda auditor: _attach(tiny_llama().requires_grad_(False), auditor),
    ),
    Refusal(
        "BatchNorm with trained weights",
        CoverageGapError,
        "batch normalisation mixes samples",
        lambda auditor: _attach(_batch_norm(affine=True), auditor),
    ),
    Refusal(
        "a weight that is computed from others (weight_norm)",
        CaptureError,
        "belongs to no sample",
        lambda auditor: _first_batch(_weight_norm(), loops.tensors(5, 8)()[0], auditor),
        _first,
    ),
    Refusal(
        "weights that are read past their module (Mamba)",
        SelfCheckError,
        "conv1d.* have a gradient that no hook saw",
        lambda auditor: _first_batch(models.mamba(), loops.texts(1)[0], auditor),
        _first,
    ),
    Refusal(
        "a prompt that is looked up once and repeated for the batch (prompt tuning)",
        UnsupportedSetupError,
        "as soon as audit mode looks at it",
        lambda auditor: _first_batch(_prompt_tuning(), loops.texts(1)[0], auditor),
        _first,
    ),
    Refusal(
        "T5's relative positions, looked up once for all samples",
        CaptureError,
        "relative_attention_bias: its batch has 9 rows",
        lambda auditor: _first_batch(models.t5(), loops.texts(1)[0], auditor),
        _first,
    ),
    Refusal(
        "packed documents that see each other: an attention mask is given (A19)",
        SampleIdentityError,
        "see each other",
        lambda auditor: _first_batch(tiny_lora(), _masked(packing.packed()[0]), auditor),
        _first,
    ),
    Refusal(
        "packed documents that see each other: use_cache=True (A19)",
        SampleIdentityError,
        "see each other",
        lambda auditor: _first_batch(tiny_lora(), packing.packed()[0] | {"use_cache": True}, auditor),
        _first,
    ),
    Refusal(
        "BatchNorm without",
        UnsupportedSetupError,
        "normalises over the batch",
        lambda auditor: _first_batch(_batch_norm(affine=False), loops.tensors(6)()[0], auditor),
        _first,
    ),
    Refusal(
        "adapters disabled (A23)",
        CaptureError,
        "captured 0 of 28",
        _in_between(lambda model: model.base_model.disable_adapter_layers()),
        _step,
    ),
    Refusal(
        "adapters merged (A23)",
        CaptureError,
        "captured 0 of 28",
        _in_between(lambda model: model.merge_adapter()),
        _step,
    ),
    Refusal("another adapter active (A23)", CaptureError, "captured 0 of 28", _in_between(_another_adapter), _step),
    Refusal(
        "a parameter that becomes trainable later",
        CaptureError,
        "1 parameters that audit mode does not know",
        _in_between(_late_parameter),
        _step,
    ),
]
