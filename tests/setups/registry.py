"""The set-ups of the table, in its order. To add one, add a ``SetUp``; tests and table follow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import schedulefree
import torch
from setups import models, packing, pairs
from setups import training as loops
from setups.measure import HALF, SetUp
from tiny import tiny_gpt2, tiny_llama
from torch import nn
from transformers.optimization import Adafactor

from auditlog.format.records import Flag

_Optimizer = torch.optim.Optimizer


def autocast(dtype: torch.dtype) -> Callable[[], Any]:
    return functools.partial(torch.autocast, "cpu", dtype=dtype)


def adamw(parameters: list[nn.Parameter], **options: Any) -> _Optimizer:
    return torch.optim.AdamW(parameters, **({"lr": 1e-3} | options))


def adafactor(parameters: list[nn.Parameter]) -> _Optimizer:
    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


def schedule_free(parameters: list[nn.Parameter]) -> _Optimizer:
    optimizer = schedulefree.AdamWScheduleFree(parameters, lr=1e-3)
    optimizer.train()
    return optimizer


def two_groups(parameters: list[nn.Parameter]) -> _Optimizer:
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], "lr": 1e-2}, {"params": parameters[half:], "lr": 1e-3}]
    return torch.optim.SGD(groups, momentum=0.9)


def in_bf16(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(torch.bfloat16)


def checkpointed(make: Callable[[], nn.Module], reentrant: bool) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    return made


def spread_gpt2() -> nn.Module:
    """Return GPT-2 with logits that differ, as a trained model's do; else smoothed labels hardly change the loss."""
    model = models.gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(10)
    return model


_lora = models.adapted
_targets = {"target_modules": ["q_proj", "down_proj"]}
_small = functools.partial(models.adapted, **_targets)
_classes = {"loss": loops.class_loss, "loss_of": loops.class_loss_of}
_unknown = {"flags": int(Flag.UNIT_UNKNOWN)}
_observe = {"modes": ("observe",)}
_fused_adamw = functools.partial(adamw, fused=True)

_model = functools.partial(SetUp, "Models")
MODELS = [
    _model("GPT-2, all parameters (tied head, positions, LayerNorm)", models.gpt2),
    _model("GPT-2, all parameters, wide (factored)", models.wide_gpt2),
    _model("GPT-2, Conv1D only", tiny_gpt2),
    _model("Llama, all parameters", tiny_llama),
    _model("Llama, all parameters, wide (factored)", models.wide_llama),
    _model("Llama, LoRA", _lora),
    _model("Llama, rsLoRA", functools.partial(_lora, use_rslora=True), **_observe),
    _model("Llama, DoRA", functools.partial(_lora, use_dora=True)),
    _model(
        "Llama, LoRA with dropout (the same masks)",
        functools.partial(_lora, lora_dropout=0.2),
        loop=loops.seeded,
        loss_of=loops.seeded_loss_of,
    ),
    _model(
        "Llama, LoRA on the embedding", functools.partial(_lora, target_modules=["embed_tokens", "q_proj"]), **_observe
    ),
    _model("Llama, IA3", models.ia3, **_observe),
    _model(
        "Llama, LoRA, embedding and head in modules_to_save",
        functools.partial(_lora, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
        **_observe,
    ),
    _model("GPT-NeoX (Pythia), all parameters", models.neox),
    _model("Gemma, all parameters", models.gemma, **_observe),
    _model("Gemma 3, all parameters (scaled embedding)", models.gemma3),
    _model("Mixtral, all parameters", models.mixtral),
    _model("Mixtral, one expert idle", functools.partial(models.mixtral, idle_expert=True)),
    _model("gpt-oss style (fused experts with biases, sinks)", models.gpt_oss),
    _model("DeepSeek-V3, all parameters", models.deepseek, **_observe),
    _model("Qwen 2, all parameters (biases)", models.qwen2, **_observe),
    _model("Qwen 3, all parameters (norms per head)", models.qwen3),
    _model("BERT, text classification", models.bert, loops.labelled_texts, loss_of=loops.class_loss_of, **_observe),
    _model("vision transformer (class token)", models.vision, loops.tensors(2, 8, 8), **_classes, **_observe),
    _model("Conv2d with groups, Conv1d, GroupNorm", models.convolutions, loops.tensors(2, 8, 8), **_classes),
    _model("nn.MultiheadAttention", models.attention, loops.tensors(5, 8), **_classes),
    *(
        _model(name, functools.partial(models.pooled, make), loops.tensors(5, 8), **_classes, **_observe)
        for name, make in (
            ("nn.TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
            ("nn.LSTM", lambda: nn.LSTM(8, 8, batch_first=True)),
        )
    ),
    _model("one module used three times", models.thrice, loops.tensors(5, 8), **_classes),
    _model("two modules with one weight", models.tied, loops.tensors(5, 8), **_classes),
    _model("Linear, ReLU(inplace=True)", models.relu_in_place, loops.tensors(6), **_classes),
    _model(
        "text classification, LoRA and modules_to_save",
        models.sequence_classifier,
        loops.labelled_texts,
        loss_of=loops.class_loss_of,
    ),
]

_loop = functools.partial(SetUp, "Loops")
LOOPS = [
    _loop("accumulation by hand", _small, functools.partial(loops.texts, 4), loop=loops.accumulating),
    _loop("clipping", _small, loop=loops.clipped, clips=True),
    _loop("HF Trainer", _small, loop=loops.trainer(), clips=True),
    _loop(
        "HF Trainer, accumulation",
        _small,
        functools.partial(loops.texts, 3),
        loop=loops.trainer(gradient_accumulation_steps=2, max_grad_norm=0.0),
    ),
    _loop("accelerate, accumulation", _small, functools.partial(loops.texts, 4), loop=loops.accelerated, clips=True),
    _loop("checkpointing", checkpointed(_small, False), oracle=_small),
    _loop("checkpointing, reentrant", checkpointed(_small, True), oracle=_small),
    _loop("checkpointing, GPT-2 all parameters", checkpointed(models.gpt2, False), oracle=models.gpt2),
    *(
        _loop(
            f"checkpointing{kind}, a weight used inside and outside",
            functools.partial(models.blocks, reentrant),
            loops.tensors(5, 8),
            oracle=functools.partial(models.blocks, None),
            **_classes,
        )
        for kind, reentrant in (("", False), (", reentrant", True))
    ),
    _loop("padding left", models.gpt2, loops.left_padded, **_observe),
    _loop("loss on the answer only", _small, functools.partial(loops.texts, answer_only=True), **_observe),
    _loop("batch of one, short last batch", _small, loops.short_last_batch, **_observe),
    _loop(
        "label smoothing (unit unknown)",
        spread_gpt2,
        loss=loops.smoothed_loss,
        loss_of=loops.smoothed_share_of,
        **_unknown,
        **_observe,
    ),
    _loop(
        "squared outputs (unit unknown)",
        models.thrice,
        loops.tensors(5, 8),
        loss=loops.squared_loss,
        loss_of=loops.squared_share_of,
        **_unknown,
    ),
    _loop(
        "squared outputs, GradScaler (unit unknown)",
        models.thrice,
        loops.tensors(5, 8),
        loss=loops.squared_loss,
        loss_of=loops.squared_share_of,
        loop=loops.scaled(),
        **_unknown,
        **_observe,
    ),
    *(
        _loop(
            f"torch.compile after attaching, {what}",
            make,
            loops.tensors(5, 8),
            loop=loops.compiled_after,
            identical=False,
            slow=True,
            **_classes,
        )
        for what, make in (("one module three times", models.thrice), ("attention and LayerNorm", models.attention))
    ),
]

_packing = functools.partial(SetUp, "Packing and preference pairs")
_packed = {"batches": packing.packed, "loss_of": packing.packed_loss_of}
PACKING = [
    *(
        _packing(
            f"packed documents, {name} ({attention})", functools.partial(models.attending, make, attention), **_packed
        )
        for name, make in (("Llama, LoRA", _lora), ("GPT-2, all parameters", models.gpt2))
        for attention in ("sdpa", "eager")
    ),
    _packing("packed documents, HF Trainer and its collator", _small, loop=packing.flattening),
    _packing("TRL SFT, padding", _lora, loop=packing.sft()),
    _packing("TRL SFT, without padding", _lora, loop=packing.sft(padding_free=True, max_length=None)),
    _packing("TRL SFT, packing (bfd)", _lora, loop=packing.sft(packing=True, max_length=24)),
    _packing(
        "TRL SFT, all parameters, the head used but never called",
        tiny_llama,
        loop=packing.sft(optim="sgd"),
    ),
    _packing(
        "TRL SFT, all parameters, packing, tied head",
        models.tied_llama,
        loop=packing.sft(packing=True, max_length=24, optim="sgd"),
    ),
    _packing(
        "TRL DPO, one sample per pair (unit unknown)",
        tiny_llama,
        pairs.pairs,
        loop=pairs.dpo(**_targets),
        loss_of=pairs.pair_share_of,
        oracle=_small,
        **_unknown,
    ),
]

_optimizer = functools.partial(SetUp, "Optimizers")
OPTIMIZERS = [
    _optimizer("AdamW", _small, optimizer=adamw),
    _optimizer("SGD with momentum, two groups", _small, optimizer=two_groups, **_observe),
    _optimizer("Adafactor", models.gpt2, optimizer=adafactor, **_observe),
    _optimizer("schedule-free AdamW", _small, optimizer=schedule_free, **_observe),
    _optimizer("step(closure)", _small, loop=loops.with_closure, **_observe),
    _optimizer("GradScaler, fused AdamW", _small, loop=loops.scaled(), optimizer=_fused_adamw, **_observe),
    _optimizer(
        "GradScaler, fused AdamW, clipping",
        _small,
        loop=loops.scaled(clip=0.05),
        optimizer=_fused_adamw,
        clips=True,
        **_observe,
    ),
]

_half = functools.partial(SetUp, "Half precision", limit=HALF)
_bf16, _fp16 = autocast(torch.bfloat16), autocast(torch.float16)
HALF_PRECISION = [
    _half("autocast bf16, LoRA", _lora, context=_bf16),
    _half("autocast bf16, GPT-2 all parameters", models.gpt2, context=_bf16),
    _half("autocast fp16, GradScaler", _lora, context=_fp16, loop=loops.scaled()),
    _half(
        "autocast fp16, GradScaler, clipping",
        _lora,
        context=_fp16,
        loop=loops.scaled(clip=0.05),
        clips=True,
        **_observe,
    ),
    _half("HF Trainer, bf16", _lora, context=_bf16, loop=loops.trainer(bf16=True), clips=True, **_observe),
    _half("bf16 weights, LoRA", in_bf16(_lora)),
    _half("bf16 weights, Llama all parameters", in_bf16(tiny_llama)),
]

_ranks = functools.partial(SetUp, "Several processes", processes=2, slow=True)
PROCESSES = [
    _ranks(
        "DistributedDataParallel, uneven batches",
        _small,
        functools.partial(loops.texts, rows=3),
        loop=loops.data_parallel,
    ),
    _ranks("HF Trainer, two processes", _small, loop=loops.trainer(per_device_train_batch_size=2, max_grad_norm=0.0)),
]

SETUPS = [*MODELS, *LOOPS, *PACKING, *OPTIMIZERS, *HALF_PRECISION, *PROCESSES]
