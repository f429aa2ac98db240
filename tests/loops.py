"""What the tests of training loops share: the captured batches before they are rounded, and autograd as the oracle."""

from __future__ import annotations

import copy
from typing import Any

import torch
from datasets import Dataset
from tiny import VOCABULARY
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from attribution import AuditMode, dataset
from attribution.capture.micro_batch import Captured
from auditlog import DataManifest

EXACT = 1e-4  # relative, float32: sketches against autograd, and conservation
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :?.\n"


# What every trainer of the tests is told: where to train, and to keep quiet and leave nothing behind.
PLAIN_TRAINER: dict[str, Any] = {
    "learning_rate": 1e-2,
    "logging_steps": 100,
    "save_strategy": "no",
    "report_to": [],
    "seed": 5,
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a chat template that marks what the assistant says."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="right"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}<eos>{% endgeneration %}"
        "{% else %}{{ message['content'] }}:{% endif %}{% endfor %}"
    )
    return tokenizer


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    """One token per character, all of them targets."""
    ids = [1 + ord(c) % (VOCABULARY - 1) for c in row["text"]]
    return {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad on the right; keeps the ids if there are any."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    batch = {
        "input_ids": pad("input_ids", 0),
        "labels": pad("labels", -100),
        "attention_mask": pad("attention_mask", 0),
    }
    if "sample_index" in rows[0]:
        batch["sample_index"] = torch.tensor([row["sample_index"] for row in rows])
    return batch


def tokenized(data: DataManifest) -> Dataset:
    return dataset(data).map(tokenize)


def texts_of(rows: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Sample id -> tokens and labels."""
    return {row["sample_index"]: (row["input_ids"], row.get("labels", row["input_ids"])) for row in rows}


def keep_captured(audit: AuditMode) -> list[list[Captured]]:
    """Return a list that gains, at every optimizer step, the step's captured micro-batches."""
    kept: list[list[Captured]] = []
    take = audit.hooks.take

    def keeping() -> Any:
        captured, rest = take()
        kept.append(captured)
        return captured, rest

    audit.hooks.take = keeping
    return kept


class Oracle:
    """Autograd on one sample at a time, on a copy of the model as it was before anybody touched it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).train()

    def loss(self, ids: list[int], labels: list[int]) -> Tensor:
        """Return one document's summed loss, by torch's own cross-entropy."""
        logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        return torch.nn.functional.cross_entropy(
            logits, torch.tensor(labels[1:], dtype=torch.long), ignore_index=-100, reduction="sum"
        )

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad()
        loss.backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Return the distance over the norm of the reference; the distance itself where that is zero."""
    norm = float(reference.norm())
    return float((value - reference).norm()) / (norm or 1.0)


def assert_exact(
    audit: AuditMode, captured: list[list[Captured]], oracle: Oracle, texts: dict[int, tuple[list[int], list[int]]]
) -> int:
    """Compare every captured sample with autograd on that sample alone; return how many there were.

    The weights must not have changed since the oracle was made.

    Args:
        audit: Gives the sketch.
        captured: From ``keep_captured``.
        oracle: The model.
        texts: Sample id -> its tokens and labels.
    """
    seen = 0
    for micro in (m for step in captured for m in step):
        for slot, index in enumerate(micro.sample_index.tolist()):
            ids, labels = texts[index]
            loss = oracle.loss(ids, labels)
            expected = audit._layout.sketch(oracle.gradients(loss))
            n_tokens = sum(label != -100 for label in labels[1:])
            assert int(micro.n_tokens[slot]) == n_tokens, index
            assert relative_error(micro.sketch[slot], expected) < EXACT, index
            assert abs(float(micro.loss[slot]) - float(loss.detach())) <= EXACT * float(loss.detach()), index
            seen += 1
    return seen
