"""Preference pairs: two answers to one prompt are one sample."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from loops import character_tokenizer
from setups import models
from setups import training as loops
from setups.packing import trl_arguments
from setups.training import Auditor, Training
from torch import Tensor, nn

BETA = 0.5
PAIRS = 4  # in a batch


def pairs() -> list[dict[str, Any]]:
    """Return two batches of prompts, each with an answer that was chosen and one that was rejected."""
    return [
        {
            "prompt": ["a" * (3 + 2 * number) + ":" for number in numbers],
            "chosen": [f" yes {number}" for number in numbers],
            "rejected": [f" no {'x' * (number % 4)}" for number in numbers],
            "sample_index": torch.tensor(numbers),
        }
        for numbers in ([0, 1, 2, 3], [4, 5, 6, 7])
    ]


def dpo(**adapter: Any) -> loops.Loop:
    """Return TRL's trainer for preference pairs; the reference is the model without the adapter that it adds."""

    def loop(training: Training, auditor: Auditor) -> None:
        from trl import DPOConfig, DPOTrainer

        columns = {key: [v for b in training.batches for v in b[key]] for key in training.batches[0]}
        made = DPOTrainer(
            model=training.model,
            args=DPOConfig(**trl_arguments(auditor, beta=BETA, per_device_train_batch_size=PAIRS)),
            train_dataset=Dataset.from_dict(columns),
            processing_class=character_tokenizer(),
            peft_config=models.lora(**adapter),
        )
        training.model = models.with_values(made.model)
        loops.run(made, auditor)

    return loop


def pair_share_of(model: nn.Module, batch: dict[str, Any], row: int) -> Tensor:
    """One pair's share of its batch's loss: Rafailov et al. 2023, equation 7, over the number of pairs."""
    margin = torch.zeros(())
    for sign, answer in ((1, batch["chosen"][row]), (-1, batch["rejected"][row])):
        with model.disable_adapter(), torch.no_grad():
            before = _log_likelihood(model, batch["prompt"][row], answer)
        margin = margin + sign * (_log_likelihood(model, batch["prompt"][row], answer) - before)
    return -torch.nn.functional.logsigmoid(BETA * margin) / PAIRS


def _log_likelihood(model: nn.Module, prompt: str, answer: str) -> Tensor:
    tokenizer = character_tokenizer()
    first, tokens = len(tokenizer(prompt)["input_ids"]), tokenizer(prompt + answer + "<eos>")["input_ids"]
    logits = model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(tokens) - first), tokens[first:]].sum()
