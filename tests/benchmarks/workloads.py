"""What the benchmarks train: models with random weights and real sizes, and the demo's own set-up.

A step's time depends on shapes, not on what the weights say, so most models have random weights and random tokens.
LoRA's B is made non-zero, so that A's gradient is not all zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from attribution.demo import data as demo_data
from attribution.demo import recipe
from auditlog.datamanifest import DataManifest

SEED = 1990
BATCHES = 4  # different ones, taken in turns

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """One training set-up.

    Attributes:
        what: Model, adapters, rows and tokens, in words.
        model: In training mode, on its device.
        batches: With their ``sample_index``.
        manifest: The data they come from.
    """

    what: str
    model: nn.Module
    batches: Sequence[Batch]
    manifest: DataManifest

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def optimizer(self, rate: float = 0.0) -> torch.optim.Optimizer:
        """Return a new AdamW; at rate 0 its state moves and the weights stay."""
        return torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)


def gpt2_lora(folder: Path, rows: int, tokens: int, config: GPT2Config | None = None) -> Workload:
    """GPT-2 (124M parameters) with LoRA of rank 8 on every linear layer but the output head."""
    torch.manual_seed(SEED)
    model = with_lora(GPT2LMHeadModel(config or GPT2Config()))
    return random_tokens(
        f"GPT-2 124M, LoRA r=8 on all linear layers, B={rows}, T={tokens}", model, folder, rows, tokens
    )


def gpt2_full(folder: Path, rows: int, tokens: int, config: GPT2Config | None = None) -> Workload:
    """GPT-2 (124M parameters), everything trained."""
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(config or GPT2Config())
    return random_tokens(f"GPT-2 124M, everything trained, B={rows}, T={tokens}", model, folder, rows, tokens)


def pythia_lora(
    folder: Path, rows: int, tokens: int, size: str = "160m", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Workload:
    """A Pythia (Biderman et al. 2023, arXiv:2304.01373) with LoRA of rank 8 on every linear layer but the head."""
    torch.manual_seed(SEED)
    with torch.device(device):
        base: nn.Module = GPTNeoXForCausalLM(pythia_config(size))
    what = f"Pythia-{size.upper()} shape, LoRA r=8 on all linear layers, B={rows}, T={tokens}, {str(dtype)[6:]}"
    return random_tokens(what, with_lora(base.to(dtype)), folder, rows, tokens)


_PYTHIA = {  # hidden, layers, heads, intermediate, vocabulary
    "tiny": (32, 2, 2, 64, 97),
    "160m": (768, 12, 12, 3072, 50304),
    "1b": (2048, 16, 8, 8192, 50304),
    "2.8b": (2560, 32, 32, 10240, 50304),
}


def pythia_config(size: str) -> GPTNeoXConfig:
    """Return the published shape of a Pythia model."""
    hidden, layers, heads, inner, vocabulary = _PYTHIA[size]
    return GPTNeoXConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
    )


def smollm2(folder: Path) -> Workload:
    """The demo's own: SmolLM2-135M-Instruct, LoRA of rank 8 on all linear layers, real loan applications."""
    manifest = DataManifest.build(demo_data.prepare(folder / "data").train_pattern)
    built = recipe.build(manifest)
    rows = [built.dataset[i] for i in range(BATCHES * recipe.BATCH)]
    batches = [built.collator(rows[i : i + recipe.BATCH]) for i in range(0, len(rows), recipe.BATCH)]
    lengths = [b["input_ids"].shape[1] for b in batches]
    what = f"SmolLM2-135M, LoRA r=8 on all linear layers, B={recipe.BATCH}, T={min(lengths)} to {max(lengths)}, answers"
    return Workload(what, fill(built.model).train(), batches, manifest)


def with_lora(model: nn.Module) -> nn.Module:
    """Put adapters of rank 8 on every linear layer but the output head."""
    return fill(get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")))


def fill(model: nn.Module) -> nn.Module:
    """Make LoRA's B non-zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return model


def random_tokens(what: str, model: Any, folder: Path, rows: int, tokens: int) -> Workload:
    """Return a workload of random tokens, each with loss, from a source file written for it."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(BATCHES * rows)))
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for first in range(0, BATCHES * rows, rows):
        ids = torch.randint(0, model.config.vocab_size, (rows, tokens), generator=generator).to(device)
        batches.append({"input_ids": ids, "labels": ids, "sample_index": torch.arange(first, first + rows)})
    return Workload(what, model.train(), batches, DataManifest.build(str(source)))


def without_ids(batch: Mapping[str, Tensor]) -> Batch:
    """Return the batch as a run without audit mode has it."""
    return {name: tensor for name, tensor in batch.items() if name != "sample_index"}


Build = Callable[[Path], Workload]
