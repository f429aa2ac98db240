"""A baseline of our own making: a two-sided Kronecker sketch per layer, blocks side by side (LoGRA style).

A linear layer's per-sample gradient ``G = Σ_t g_t x_tᵀ`` is stored as ``P G Qᵀ = Σ_t (P g_t)(Q x_t)ᵀ``, tokens first,
so ``G`` is never formed (Choe et al. 2024, arXiv:2405.13954). Where a side is no longer than its sketch it is kept as
it is, since a random matrix would only add noise. ``Q x`` is taken in the forward pass, while ``x`` is in the cache.
Hooks and a flat file, no ids, no log: no more than the method needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.peers.rows import LOGRA, Row
from benchmarks.peers.trial import Recorder, Trial
from benchmarks.workloads import Batch
from torch import Tensor, nn

BYTES_PER_SAMPLE = 2 * 4096  # what we store: two forms of 4,096 int8 values


def choose_widths(shapes: Sequence[tuple[int, int]], budget: int) -> list[tuple[int, int]]:
    """Choose each layer's sketch so that all blocks together have at most, and nearly, ``budget`` entries.

    Every layer gets the same share, spent on a square block as far as its short side reaches and on the long side
    beyond that; what is left over widens the first layers by one.

    Args:
        shapes: ``(d_out, d_in)`` of each layer.
        budget: Entries per sample.

    Returns:
        ``(k_out, k_in)`` of each layer.
    """
    share = budget // len(shapes)
    short = [min(min(shape), math.isqrt(share)) for shape in shapes]
    long = [min(max(shape), share // few) for shape, few in zip(shapes, short, strict=True)]
    left = budget - sum(a * b for a, b in zip(short, long, strict=True))
    for i, shape in enumerate(shapes):
        if short[i] <= left and long[i] < max(shape):
            long[i] += 1
            left -= short[i]
    return [(a, b) if shape[0] <= shape[1] else (b, a) for shape, a, b in zip(shapes, short, long, strict=True)]


class Block:
    """One layer's sketch: two projections and, during a step, what the forward pass left."""

    def __init__(self, width: tuple[int, int], layer: nn.Linear, generator: torch.Generator) -> None:
        self.left = _projection(width[0], layer.out_features, generator).to(layer.weight.device)
        self.right = _projection(width[1], layer.in_features, generator).to(layer.weight.device)
        self.size = width[0] * width[1]
        self.inputs = self.gradient = torch.empty(0)

    def take_input(self, x: Tensor) -> None:
        """Keep ``Q x``, ``(B, T, k_in)``."""
        self.inputs = _projected(x, self.right)

    def take_gradient(self, g: Tensor) -> None:
        """Form the block, ``(B, k_out, k_in)``."""
        self.gradient = torch.bmm(_projected(g, self.left).transpose(1, 2), self.inputs)


class LograStyle:
    """Hooks on every trained linear layer, and a file that grows by one row per sample.

    Args:
        model: The model.
        file: Where rows go: int8 values, then one float32 scale.
        budget: Entries per sample.

    Attributes:
        seconds: Time in hooks and in ``write``.
        blocks: By layer name, in the model's order.
    """

    def __init__(self, model: nn.Module, file: Path, budget: int = BYTES_PER_SAMPLE) -> None:
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
        generator = torch.Generator().manual_seed(0)
        widths = choose_widths([(layer.out_features, layer.in_features) for layer in layers.values()], budget)
        self.blocks = {
            name: Block(width, layer, generator) for (name, layer), width in zip(layers.items(), widths, strict=True)
        }
        self.seconds = 0.0
        self._layers: Mapping[str, nn.Linear] = layers
        self._file = file
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Register the hooks."""
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(partial(self._on_forward, self.blocks[name])))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def sketches(self) -> Tensor:
        """Return the step's rows, ``(B, budget)`` float32."""
        return torch.cat([block.gradient.flatten(1) for block in self.blocks.values()], 1)

    def write(self) -> None:
        """Append the step's rows."""
        started = perf_counter()
        rows = self.sketches()
        scale = rows.abs().amax(1, keepdim=True) / 127
        q = (rows / scale.clamp_min(1e-30)).round_().to(torch.int8)
        with self._file.open("ab") as file:
            file.write(q.cpu().numpy().tobytes() + scale.cpu().numpy().tobytes())
        self.seconds += perf_counter() - started

    def _on_forward(self, block: Block, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        started = perf_counter()
        with torch.no_grad():
            block.take_input(args[0])
        output.register_hook(lambda g: self._on_gradient(block, g))
        self.seconds += perf_counter() - started

    def _on_gradient(self, block: Block, g: Tensor) -> None:
        started = perf_counter()
        with torch.no_grad():
            block.take_gradient(g)
        self.seconds += perf_counter() - started


def measure(trial: Trial) -> list[Row]:
    """Time it against the plain step."""
    recorder = LograStyle(trial.workload.model, trial.folder / "sketches.bin")

    def step(batch: Batch) -> None:
        trial.step(batch)
        recorder.write()

    found = trial.compare(Recorder(step, recorder.attach, recorder.detach, lambda: recorder.seconds))
    widths = [(len(b.left), len(b.right)) for b in recorder.blocks.values()]
    return [
        Row(
            LOGRA,
            f"P G Qᵀ of {len(widths)} layers side by side, int8, one scale per sample; P, Q of {min(widths)} to "
            f"{max(widths)} rows",
            bytes_per_sample=sum(block.size for block in recorder.blocks.values()) + 4,
            note="written for this comparison; no ids, no log, no signature",
            **found,
        )
    ]


def _projected(x: Tensor, matrix: Tensor) -> Tensor:
    """Return ``matrix`` times each token, ``(B, T, d)`` to ``(B, T, k)``.

    With few rows a CPU is up to twice as fast with the tokens as columns than with ``x @ matrix.T``.
    """
    if len(matrix) == x.shape[2]:
        return x
    columns = torch.mm(matrix, x.flatten(0, 1).t())
    return columns.view(-1, *x.shape[:2]).permute(1, 2, 0)


def _projection(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return random signs with ``E[PᵀP] = I``, or the identity where nothing is saved."""
    if rows >= columns:
        return torch.eye(columns)
    return (torch.randint(0, 2, (rows, columns), generator=generator).float() * 2 - 1) / rows**0.5
