"""What the examples train: a random two-layer model, a tokenizer of bytes, and a handful of rows. No download."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from attribution import Recipe, dataset


class ByteTokenizer:
    """One token per byte: the whole interface that the examples and ``gradtrail query`` need."""

    pad_token_id, eos_token_id = 0, 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [2 + byte for byte in text.encode()]}

    def decode(self, ids: list[int]) -> str:
        return bytes(i - 2 for i in ids if i >= 2).decode(errors="replace")


def write_data(folder: Path) -> None:
    """Two source files: one says yes, the other says no."""
    folder.mkdir(parents=True)
    for name, answer in (("branch-a.jsonl", "yes"), ("branch-b.jsonl", "no")):
        rows = [{"text": f"income {20 + 5 * i}, answer: {answer}"} for i in range(12)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenize(row: dict) -> dict:
    ids = ByteTokenizer()(row["text"])["input_ids"]
    return {"input_ids": ids, "labels": ids}


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Pad on the right and stack. ``sample_index`` travels in the batch: that is all audit mode asks for."""
    length = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])

    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": (padded("input_ids", 0) != 0).long(),
        "sample_index": torch.tensor([row["sample_index"] for row in rows]),
    }


def build(manifest=None) -> Recipe:
    """The recipe: model, tokenizer and data, built the same way every time."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    data = None if manifest is None else dataset(manifest).map(tokenize, remove_columns=["text"])
    return Recipe(model=model, tokenizer=ByteTokenizer(), dataset=data, collator=collate)
