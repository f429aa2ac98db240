"""How well stored sketches keep inner products of gradients: SmolLM2-135M with LoRA, two kinds of real text.

The documents are 96 passages of the Python language reference that comes with the interpreter, each token with loss.
The applications are 96 of the demo's loan rows, loss on the answer: two possible answers after one template, so their
gradients are much alike and any sketch keeps such products. The figure is the lowest over both texts and two points of
a fine-tuning run, so the documents decide it.

At each point the samples go through audit mode in mode ``fused`` (rate 0), and their raw sketches are read back from
the run as stored, in int8. The reference is autograd, one sample at a time: each sample's own summed loss, all
adapters. Compared are the inner products of all pairs of different samples.

The correlation law: over a population of pairs, sketches of size D give a Pearson correlation of ``1 / sqrt(1 + κ/D)``
with ``κ = mean(|x|² |y|² + <x,y>²) / var(<x,y>)``, since that is D times the variance of one sketched inner product
(Rademacher signs, generic vectors) over the variance of what is estimated.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from benchmarks.audited import Audited
from benchmarks.workloads import Batch, Workload
from numpy.typing import NDArray
from torch import Tensor, nn

from attribution.demo import data as demo_data
from attribution.demo import recipe
from attribution.demo.quiet import quiet
from attribution.training.recipe import Recipe
from auditlog.datamanifest import DataManifest
from auditlog.ledger.reader import RunReader

SAMPLES, DIM = 96, 4096
POINTS, QUICK_POINTS = (12, 300), (12,)
PASSAGE_TOKENS = 64
# Two passages of half the length a step, none of those that are compared: so 300 steps stay short.
TRAINED_ROWS, TRAINED_TOKENS, RATE = 2, 32, 1e-3

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What one point of the run gave.

    Attributes:
        pearson: Of sketched with exact inner products.
        kappa: ``κ`` of the exact ones.
        predicted: Pearson by the correlation law.
        share_a: LoRA A's share of the samples' squared gradient norm; B has the rest.
    """

    pearson: float
    kappa: float
    predicted: float
    share_a: float


def measure(device: str) -> dict[str, Any]:
    """Measure both texts at both points; returns entries for ``results.json``."""
    points = QUICK_POINTS if os.environ.get("BENCH_QUICK") else POINTS
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        manifest = DataManifest.build(demo_data.prepare(folder / "data").train_pattern)
        built = recipe.build(manifest)
        built.model.to(device).train()
        texts = passages(built.tokenizer)
        workloads = {
            "documents": documents(built.model, texts[:SAMPLES], folder / "documents", device),
            "applications": applications(built, manifest, device),
        }
        trained = itertools.cycle(
            _whole([text[:TRAINED_TOKENS] for text in texts[first : first + TRAINED_ROWS]], device)
            for first in range(SAMPLES, len(texts) - TRAINED_ROWS, TRAINED_ROWS)
        )
        found = {
            f"{text}.after_{step}": point(workload, folder / f"{text}-{step}")
            for step in trained_to(workloads["documents"], trained, points)
            for text, workload in workloads.items()
        }
    entries: dict[str, Any] = {"fidelity.smollm2.pearson": min(each.pearson for each in found.values())}
    for name, each in found.items():
        entries |= {f"fidelity.smollm2.{name}.{key}": value for key, value in asdict(each).items()}
    entries["tables.fidelity.smollm2"] = {
        "what": f"SmolLM2-135M, LoRA r=8 on all linear layers; raw form, D={DIM}, int8 as stored, fused; {SAMPLES} "
        f"passages of {PASSAGE_TOKENS} tokens and {SAMPLES} loan applications, all pairs",
        "trained": f"AdamW, rate {RATE}, {TRAINED_ROWS} other passages a step, {TRAINED_TOKENS} tokens of each",
        "points": {name: asdict(each) for name, each in found.items()},
    }
    return entries


def passages(tokenizer: Any) -> list[list[int]]:
    """Return passages of the Python reference as token ids: each topic's first, each topic's second, and so on."""
    by_topic = [tokenizer(topics[name])["input_ids"] for name in sorted(topics)]
    longest = max(len(ids) for ids in by_topic)
    starts = range(0, longest, PASSAGE_TOKENS)
    cut = (ids[first : first + PASSAGE_TOKENS] for first in starts for ids in by_topic)
    return [passage for passage in cut if len(passage) == PASSAGE_TOKENS]


def documents(model: nn.Module, texts: list[list[int]], folder: Path, device: str) -> Workload:
    """Return passages as a workload; every token has loss."""
    folder.mkdir()
    lines = [json.dumps({"text": " ".join(map(str, text))}) + "\n" for text in texts]
    (folder / "passages.jsonl").write_text("".join(lines))
    batches = []
    for first in range(0, len(texts), recipe.BATCH):
        part = texts[first : first + recipe.BATCH]
        batches.append(_whole(part, device) | {"sample_index": torch.arange(first, first + len(part))})
    return Workload("passages", model, batches, DataManifest.build(str(folder / "passages.jsonl")))


def applications(built: Recipe, manifest: DataManifest, device: str) -> Workload:
    """Return loan applications as a workload, as the demo trains on them."""
    rows = np.random.default_rng(recipe.SEED).permutation(len(built.dataset))[:SAMPLES].tolist()
    parts = [
        [built.dataset[i] for i in rows[first : first + recipe.BATCH]] for first in range(0, SAMPLES, recipe.BATCH)
    ]
    return Workload("applications", built.model, [_on(built.collator(part), device) for part in parts], manifest)


def trained_to(workload: Workload, batches: Iterator[Batch], points: tuple[int, ...]) -> Iterator[int]:
    """Train, and stop after each of these numbers of steps."""
    optimizer = workload.optimizer(RATE)
    for step in range(1, points[-1] + 1):
        batch = {name: t for name, t in next(batches).items() if name != "sample_index"}
        workload.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(workload.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in points:
            yield step


def point(workload: Workload, folder: Path) -> Fidelity:
    """Compare stored sketches with exact gradients at the present weights."""
    with Audited.open(workload, folder, ("fused",), sketch_dim=DIM) as audited:
        for batch in workload.batches:
            audited.audited("fused", batch)
    index = torch.cat([batch["sample_index"] for batch in workload.batches]).tolist()
    sketches = stored_sketches(folder / "fused", index)
    gram, share_a = exact_products(workload)
    return compare(gram, sketches @ sketches.T, share_a, DIM)


def compare(exact: Matrix, sketched: Matrix, share_a: float, dim: int) -> Fidelity:
    """Compare two ``(n, n)`` matrices of inner products over all pairs of different samples."""
    pairs = np.triu_indices(len(exact), 1)
    norms = np.diag(exact)
    kappa = float((np.outer(norms, norms)[pairs] + exact[pairs] ** 2).mean() / exact[pairs].var())
    pearson = float(np.corrcoef(exact[pairs], sketched[pairs])[0, 1])
    return Fidelity(pearson, kappa, (1 + kappa / dim) ** -0.5, share_a)


def stored_sketches(run: Path, index: list[int]) -> Matrix:
    """Return the raw sketches of these samples as they are stored, ``(n, D)``."""
    with RunReader.open(run) as reader:
        by_sample: dict[int, Matrix] = {}
        for block in reader.sketches().blocks():
            raw = block.raw.astype(np.float64) * block.records["scale_raw"][:, None]
            by_sample |= dict(zip(reader.sample_index(block.records).tolist(), raw, strict=True))
    return np.stack([by_sample[i] for i in index])


def exact_products(workload: Workload) -> tuple[Matrix, float]:
    """Return all inner products of the samples' own gradients by autograd, ``(n, n)``, and LoRA A's share."""
    names, parameters = zip(*_trained(workload.model), strict=True)
    rows = [_row(batch, i) for batch in workload.batches for i in range(len(batch["sample_index"]))]
    gradients = [torch.empty(len(rows), p.numel(), device=p.device) for p in parameters]
    for number, row in enumerate(rows):
        own_loss = workload.model(**row).loss * (row["labels"][:, 1:] != recipe.IGNORED).sum()
        for kept, gradient in zip(gradients, torch.autograd.grad(own_loss, parameters), strict=True):
            kept[number] = gradient.flatten()
    gram = np.zeros((len(rows), len(rows)))
    of_a = 0.0
    for name, own in zip(names, gradients, strict=True):
        part = (own @ own.T).double().cpu().numpy()
        gram += part
        of_a += float(np.trace(part)) if "lora_A" in name else 0.0
    return gram, of_a / float(np.trace(gram))


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _row(batch: Batch, number: int) -> Batch:
    """Return one row of a batch without its padding."""
    length = int(batch["attention_mask"][number].sum())
    return {name: t[number : number + 1, :length] for name, t in batch.items() if t.ndim == 2}


def _whole(texts: list[list[int]], device: str) -> Batch:
    """Return texts of one length as a batch in which every token has loss."""
    ids = torch.tensor(texts, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _on(batch: Mapping[str, Tensor], device: str) -> Batch:
    return {name: t if name == "sample_index" else t.to(device) for name, t in batch.items()}
