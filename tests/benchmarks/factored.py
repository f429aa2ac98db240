"""The factored route: which fold, how large, and how good its whitened form is. ``python -m benchmarks.factored``.

A small GPT-2 is fully fine-tuned on real text, the Python language reference that comes with the interpreter. At some
steps each sample's exact gradient is taken by autograd, one sample at a time, and inner products of what the engine
records, with sides of several sizes, are compared with those of the gradients.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from attribution.capture.hooks import HookSet
from attribution.capture.modules import find_tracked
from attribution.sketch import rng
from attribution.sketch.layout import SketchLayout
from attribution.sketch.two_sided import SideFold, fold_all
from attribution.training.second_moments import SecondMoments

WIDTH, LAYERS, VOCABULARY, ROWS, TOKENS, DIM = 256, 4, 4000, 24, 64, 4096
STEPS = (1, 2, 10, 100)
SEEDS = 2
BETA, EPSILON = 0.999, 1e-8
SQUARES = ((16, 16), (32, 32), (64, 64), (64, 128), (128, 64), (128, 128))
TABLES = (64, 256, 1024, 2048)

Gradients = dict[str, Tensor]  # (S, *shape) by parameter


@dataclass(slots=True)
class Step:
    """One step of training, before the weights move.

    Attributes:
        number: From 1.
        model: At the step's weights.
        optimizer: Its moments are those from before the step.
        ids: The batch, ``(ROWS, TOKENS)``.
        gradients: Each sample's own, of its mean token loss.
    """

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ids: Tensor
    gradients: Gradients

    def roots(self) -> Gradients:
        """Return the exact ``D^(1/2)``, the step's own gradient folded in."""
        found = {}
        for name, p in self.model.named_parameters():
            before = self.optimizer.state.get(p, {}).get("exp_avg_sq", torch.zeros_like(p))
            after = BETA * before + (1 - BETA) * self.gradients[name].mean(0).square()
            found[name] = ((after / (1 - BETA**self.number)).sqrt() + EPSILON).rsqrt()
        return found


def measure(device: str = "cpu", steps: Sequence[int] = STEPS) -> dict[str, Any]:
    """Return every figure: by step, Pearson and Spearman of every size and both forms; and times."""
    found: dict[str, Any] = {"cpu_ms": times(torch.device(device))}
    for step in train(torch.device(device), steps):
        exact = gram(step.gradients), gram(step.gradients, step.roots())
        found[f"step {step.number}"] = {
            "raw against whitened": alike(exact[1], exact[0]),
            "recorded": {what: recorded(step, exact, sides) for what, sides in cases()},
            "instead": instead(step.gradients),
        }
    return found


def cases() -> Iterator[tuple[str, Callable[[torch.Size], tuple[int, int] | None]]]:
    """Yield what to compare, and the buckets of both sides by a matrix's shape."""
    yield "exact", lambda shape: None
    for k in SQUARES:
        yield f"{k[0]} x {k[1]}", lambda shape, k=k: k  # type: ignore[misc]
    for table in TABLES:
        yield f"64 x 64, tables {table} x 64", lambda shape, t=table: (t, 64) if shape[0] == VOCABULARY else (64, 64)  # type: ignore[misc]


# --- model, text, exact gradients ---------------------------------------------------------------------------


def text() -> Tensor:
    """Return the reference as word numbers, ``(N, TOKENS)``: the most frequent words and signs, 0 for the others."""
    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)))
    numbers = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    ids = torch.tensor([numbers.get(word, 0) for word in words])
    return ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)


def train(device: torch.device, steps: Sequence[int]) -> Iterator[Step]:
    """Train, and yield what is to be compared at each of ``steps``."""
    torch.manual_seed(0)
    rows = text()
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ends)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, BETA), eps=EPSILON)
    for number in range(1, max(steps) + 1):
        ids = rows[torch.randint(0, len(rows), (ROWS,))].to(device)
        if number in steps:
            yield Step(number, model, optimizer, ids, each_alone(model, ids))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def each_alone(model: nn.Module, ids: Tensor) -> Gradients:
    """Return the gradient of each row's own loss."""
    parameters = dict(model.named_parameters())
    found = {name: p.new_empty(len(ids), *p.shape) for name, p in parameters.items()}
    for row in range(len(ids)):
        loss = model(input_ids=ids[row : row + 1], labels=ids[row : row + 1]).loss
        for out, gradient in zip(found.values(), torch.autograd.grad(loss, list(parameters.values())), strict=True):
            out[row] = gradient
    return found


# --- sketches ------------------------------------------------------------------------------------------------


def recorded(
    step: Step, exact: tuple[Tensor, Tensor], sides: Callable[[torch.Size], tuple[int, int] | None]
) -> dict[str, dict[str, float]]:
    """Return how well what the engine records keeps inner products, raw and whitened, over seeds."""
    seen: dict[str, list[dict[str, float]]] = {"raw": [], "whitened": []}
    for seed in range(SEEDS):
        sketches = capture(step, seed, sides)
        for form, reference, rows in zip(seen, exact, sketches, strict=True):
            seen[form].append(alike(reference, rows @ rows.t()))
    return {form: {key: _mean(one[key] for one in each) for key in each[0]} for form, each in seen.items()}


def capture(step: Step, seed: int, sides: Callable[[torch.Size], tuple[int, int] | None]) -> tuple[Tensor, Tensor]:
    """Let the engine record the step's batch; returns both forms, ``(ROWS, DIM)``."""
    tracking = find_tracked(step.model)
    shapes = {name: p.shape for name, p in tracking.parameters.items()}
    buckets = {name: sides(shape) if len(shape) == 2 else None for name, shape in shapes.items()}
    layout = SketchLayout(shapes, DIM, str(seed), buckets).to(step.ids.device)
    hooks = HookSet(step.model, tracking, layout)
    hooks.whitening = SecondMoments(step.optimizer, tracking.parameters).whitening
    hooks.attach()
    step.model(input_ids=step.ids, labels=step.ids, sample_index=torch.arange(ROWS)).loss.backward()
    ((captured,), _) = hooks.take()
    hooks.detach()
    step.model.zero_grad()
    assert captured.whitened is not None
    return captured.sketch, captured.whitened


def instead(gradients: Gradients) -> dict[str, float]:
    """Return Pearson of the raw form of what could be done instead, over the matrices alone."""
    matrices = {name: g for name, g in gradients.items() if g.ndim == 3}
    exact, k = gram(matrices), int((DIM / len(matrices)) ** 0.5)
    found = {f"dense signs, {k} x {k} a matrix, concatenated": (k, False)}
    found |= {f"dense signs, {k} x {k}, folded and summed": (k, True) for k in (64, 128)}
    return {
        what: _mean(alike(exact, _dense(matrices, k, folds, seed))["pearson"] for seed in range(SEEDS))
        for what, (k, folds) in found.items()
    }


def _dense(matrices: Gradients, k: int, folds: bool, seed: int) -> Tensor:
    """Return inner products of ``P G Qᵀ`` with dense random signs; folded into one vector, or side by side."""
    source, blocks = torch.Generator().manual_seed(seed), []
    for g in matrices.values():
        p, q = (torch.randint(0, 2, (k, n), generator=source) * 2.0 - 1.0 for n in g.shape[1:])
        small = (p @ (g @ q.t())).flatten(1) / k
        if folds:
            signs = torch.randint(0, 2, (k * k,), generator=source) * 2.0 - 1.0
            shift = int(torch.randint(0, DIM, (1,), generator=source))
            small = (small * signs).view(len(g), -1, DIM).sum(1).roll(shift, 1)
        blocks.append(small)
    rows = sum(blocks[1:], blocks[0]) if folds else torch.cat(blocks, 1)
    return rows @ rows.t()


# --- figures -------------------------------------------------------------------------------------------------


def times(device: torch.device) -> dict[str, dict[str, float]]:
    """Return CPU milliseconds of folding a module's activations, (1024, d), by size and by way."""
    found: dict[str, dict[str, float]] = {}
    for d, k in ((768, 64), (768, 128), (3072, 64), (3072, 128), (50257, 64), (50257, 2048)):
        x = torch.randn(1024, d, device=device)
        side = SideFold(torch.from_numpy(rng.signs("x", d)).float().to(device), k)
        pair = [side, side.scaled(torch.rand(d, device=device))]
        dense = torch.randn(d, k, device=device)
        u, v = torch.randn(4, 256, k, device=device), torch.randn(4, 256, 64, device=device)
        found[f"{d} to {k}"] = {
            "fold": _cpu_ms(lambda: side.fold(x)),  # noqa: B023
            "fold, both forms": _cpu_ms(lambda: fold_all(x, pair)),  # noqa: B023
            "dense product": _cpu_ms(lambda: x @ dense),  # noqa: B023
            "contract with 64": _cpu_ms(lambda: torch.bmm(u.transpose(1, 2), v)),  # noqa: B023
        }
    return found


def _cpu_ms(work: Callable[[], object], repeats: int = 11) -> float:
    work()
    spent = []
    for _ in range(repeats):
        began = process_time()
        work()
        spent.append(process_time() - began)
    return 1e3 * float(np.median(spent))


def gram(gradients: Gradients, scale: Gradients | None = None) -> Tensor:
    """Return all inner products, ``(S, S)``, of the gradients times ``scale``."""
    flat = ((g if scale is None else g * scale[name]).flatten(1) for name, g in gradients.items())
    return torch.stack([rows @ rows.t() for rows in flat]).sum(0)


def alike(exact: Tensor, found: Tensor) -> dict[str, float]:
    """Return the correlations over all pairs of different samples."""
    i, j = np.triu_indices(len(exact), 1)
    pairs = [m.double().cpu().numpy()[i, j] for m in (exact, found)]
    ranks = [np.argsort(np.argsort(p)) for p in pairs]
    return {"pearson": float(np.corrcoef(*pairs)[0, 1]), "spearman": float(np.corrcoef(*ranks)[0, 1])}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def main() -> None:
    """Print everything as JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    print(json.dumps(measure(options.parse_args().device), indent=1))


if __name__ == "__main__":
    main()
