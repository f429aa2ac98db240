"""Tiny models and data: small enough to check every number against autograd, one sample at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed

VOCABULARY = 61


def tiny_llama() -> LlamaForCausalLM:
    set_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def tiny_lora(dropout: float = 0.0) -> torch.nn.Module:
    """LoRA on every linear layer; B is made non-zero, so that A has a gradient from the first step."""
    model = get_peft_model(
        tiny_llama(), LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear")
    )
    set_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def tiny_gpt2() -> torch.nn.Module:
    """GPT-2 with its Conv1D weights and biases trainable and the rest frozen."""
    set_seed(9)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=24, n_layer=2, n_head=4, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    )
    model = GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = any(part in name for part in ("c_attn", "c_proj", "c_fc"))
    return model


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"llama-lora": tiny_lora, "gpt2-conv1d": tiny_gpt2}


def make_batch(rows: int = 4, length: int = 9, seed: int = 0, answer_only: bool = False, left: bool = False):
    """Distinct random rows of different lengths, padded; labels of the whole text or of its last tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, length, dtype=torch.long)
    mask = torch.zeros(rows, length, dtype=torch.long)
    labels = torch.full((rows, length), -100)
    for row in range(rows):
        n = length - row % 4
        span = slice(length - n, length) if left else slice(0, n)
        ids[row, span] = torch.randint(1, VOCABULARY, (n,), generator=generator)
        mask[row, span] = 1
        wanted = slice(span.stop - 3, span.stop) if answer_only else span
        labels[row, wanted] = ids[row, wanted]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "sample_index": torch.arange(rows)}


def sample_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """Summed token loss of one row, alone in its batch, by torch's own cross-entropy."""
    one = {key: batch[key][row : row + 1] for key in ("input_ids", "attention_mask")}
    logits = model(**one).logits[:, :-1].float()
    targets = batch["labels"][row : row + 1, 1:]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100, reduction="sum"
    )


def write_rows(folder: Path, files: int = 2, rows: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = [json.dumps({"text": f"file {number} row {row} {'x' * (row % 5)}"}) for row in range(rows)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
