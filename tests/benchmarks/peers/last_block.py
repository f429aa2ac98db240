"""A baseline of our own making: the exact gradient of the last transformer block, nothing of the others."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.peers.rows import Row
from benchmarks.peers.trial import Recorder, Trial
from benchmarks.workloads import Batch
from torch import Tensor, nn

_BLOCK = re.compile(r"\.(\d+)\.")


class LastBlock:
    """Hooks on the trained linear layers of the last block, and a file that grows by one row per sample.

    Args:
        model: The model; a block is what has a number in its layers' names.
        file: Where rows go, float32; ``None`` writes nothing.

    Attributes:
        seconds: Time in hooks and in ``write``.
    """

    def __init__(self, model: nn.Module, file: Path | None = None) -> None:
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
        numbers = {name: int(found[1]) for name in layers if (found := _BLOCK.search(name))}
        self.layers = {name: layers[name] for name, number in numbers.items() if number == max(numbers.values())}
        self.seconds = 0.0
        self._gradients: dict[str, Tensor] = {}
        self._file = file
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Register the hooks."""
        for name, layer in self.layers.items():
            self._handles.append(layer.register_forward_hook(partial(self._on_forward, name)))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def rows(self) -> Tensor:
        """Return the step's gradients, one flat row per sample, layers in the model's order."""
        return torch.cat([self._gradients[name].flatten(1) for name in self.layers], 1)

    def write(self) -> None:
        """Append the step's rows."""
        started = perf_counter()
        if self._file is not None:
            with self._file.open("ab") as file:
                file.write(self.rows().cpu().numpy().data)
        self.seconds += perf_counter() - started

    def _on_forward(self, name: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        started = perf_counter()
        x = args[0].detach()
        output.register_hook(lambda g: self._on_gradient(name, x, g))
        self.seconds += perf_counter() - started

    def _on_gradient(self, name: str, x: Tensor, g: Tensor) -> None:
        started = perf_counter()
        with torch.no_grad():
            self._gradients[name] = torch.bmm(g.transpose(1, 2), x)
        self.seconds += perf_counter() - started


def measure(trial: Trial) -> list[Row]:
    """Time it against the plain step."""
    recorder = LastBlock(trial.workload.model, trial.folder / "gradients.bin")

    def step(batch: Batch) -> None:
        trial.step(batch)
        recorder.write()

    found = trial.compare(Recorder(step, recorder.attach, recorder.detach, lambda: recorder.seconds))
    entries = sum(layer.weight.numel() for layer in recorder.layers.values())
    return [
        Row(
            "last block, exact",
            f"the {entries:,} gradient entries of the model's last block, float32",
            bytes_per_sample=4 * entries,
            note="written for this comparison; blind to all blocks but one",
            **found,
        )
    ]
