"""Documents that share rows, with our collator, with Hugging Face's and inside TRL."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import huggingface_hub.constants
import torch
from loops import character_tokenizer
from setups import training as loops
from setups.training import Auditor, Batch, Loop, Training
from torch import Tensor, nn

from attribution import PackingCollator, keep_ids

huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # TRL's trainers report that they were made


def documents(batches: list[Batch]) -> list[dict[str, Any]]:
    """Return the rows of batches without their padding."""
    found = []
    for batch in batches:
        for row, seen in enumerate(batch["attention_mask"].bool()):
            one = {key: batch[key][row][seen].tolist() for key in ("input_ids", "labels")}
            found.append(one | ({"sample_index": int(batch["sample_index"][row])} if "sample_index" in batch else {}))
    return found


def packed() -> list[Batch]:
    """Return batches of one row, which four documents of different lengths share."""
    return [PackingCollator()(documents([batch])) for batch in loops.texts()]


def packed_loss_of(model: nn.Module, batch: Batch, document: int) -> Tensor:
    """One document's summed loss, cut out where positions begin anew and alone in its row."""
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    span = slice(starts[document], [*starts, None][document + 1])
    logits = model(input_ids=batch["input_ids"][:, span]).logits[0, :-1].float()
    targets = batch["labels"][0, span][1:]
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def flattening(training: Training, auditor: Auditor) -> None:
    """Hugging Face's Trainer with its own collator for rows without padding."""
    from datasets import Dataset
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    made = Trainer(
        model=training.model,
        args=TrainingArguments(**unclipped(auditor)),
        train_dataset=Dataset.from_list(documents(training.batches)),
        data_collator=DataCollatorWithFlattening(),
    )
    loops.run(made, auditor)


def unclipped(auditor: Auditor) -> dict[str, Any]:
    """Return a trainer's arguments, so that the samples must add up to the gradient itself."""
    return loops.arguments(auditor.folder) | {"max_grad_norm": 0.0}


def trl_arguments(auditor: Auditor, **options: Any) -> dict[str, Any]:
    """Return arguments of TRL's trainers, which differ from their base class's in some defaults."""
    return unclipped(auditor) | {"bf16": False, "gradient_checkpointing": False} | options


def sft(**options: Any) -> Loop:
    """Return TRL's trainer for supervised fine-tuning; it packs in its constructor."""

    def loop(training: Training, auditor: Auditor) -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        with keep_ids() if options.get("packing") else nullcontext():
            made = SFTTrainer(
                model=training.model,
                args=SFTConfig(**trl_arguments(auditor, **options)),
                train_dataset=Dataset.from_list(documents(training.batches)),
                processing_class=character_tokenizer(),
            )
        loops.run(made, auditor)

    return loop
