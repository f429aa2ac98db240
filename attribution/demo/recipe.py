"""The demo's recipe: model, data and training arguments in one file, whose digest is signed into the run.

``build`` is what ``gradtrail query`` calls later to have the same model again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, set_seed

from attribution.demo.model import cached_base, load_base
from attribution.training.data import dataset
from attribution.training.recipe import Recipe
from auditlog.datamanifest import DataManifest

NAME = "attribution.demo.recipe:build"
SEED = 1990
BATCH = 8
COLUMNS = ("input_ids", "attention_mask", "labels", "sample_index")
IGNORED = -100


def build(manifest: DataManifest | None = None) -> Recipe:
    """Return the model with fresh adapters, its tokenizer, and the tokenised training data if there is any."""
    base, tokenizer = load_base(cached_base())
    return assemble(base, tokenizer, manifest)


def assemble(base: Any, tokenizer: Any, manifest: DataManifest | None) -> Recipe:
    """Put adapters on ``base`` (rank 8, every linear layer but the output head) and tokenise the data."""
    set_seed(SEED)
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    data = None
    if manifest is not None:
        rows = dataset(manifest)
        unused = [name for name in rows.column_names if name not in COLUMNS]
        data = rows.map(lambda row: encode(tokenizer, row), remove_columns=unused)
    return Recipe(model=model, tokenizer=tokenizer, dataset=data, collator=collator(tokenizer.pad_token_id))


def encode(tokenizer: Any, row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return one row's token ids; only the answer carries loss, because only the answer is asked for later."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = tokenizer(f" {row['decision']}", add_special_tokens=False)["input_ids"]
    return {
        "input_ids": prompt + answer,
        "attention_mask": [1] * (len(prompt) + len(answer)),
        "labels": [IGNORED] * len(prompt) + answer,
    }


def collator(pad_token_id: int) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]:
    """Return a function that pads rows on the right and stacks them, their ``sample_index`` included."""
    fill = {"input_ids": pad_token_id, "attention_mask": 0, "labels": IGNORED}

    def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        batch = {
            name: torch.tensor([[*row[name], *[value] * (length - len(row[name]))] for row in rows])
            for name, value in fill.items()
        }
        return {**batch, "sample_index": torch.tensor([row["sample_index"] for row in rows])}

    return collate


def arguments(output: Path, **changes: Any) -> TrainingArguments:
    """Return the training arguments; ``changes`` are for tests."""
    return TrainingArguments(
        **{
            "output_dir": str(output),
            "per_device_train_batch_size": BATCH,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "warmup_steps": 5,
            "max_grad_norm": 1.0,
            "seed": SEED,
            "use_cpu": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            **changes,
        }
    )


def trainer(recipe: Recipe, args: TrainingArguments) -> Trainer:
    """Return an ordinary Hugging Face Trainer."""
    return Trainer(model=recipe.model, args=args, train_dataset=recipe.dataset, data_collator=recipe.collator)
