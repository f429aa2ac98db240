"""Audit mode in a loop of one's own on accelerate: prepared loaders, accumulation, mixed precision, streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from loops import EXACT, Oracle, assert_exact, collate, keep_captured, relative_error, texts_of, tokenized
from tiny import tiny_lora
from torch.utils.data import DataLoader, IterableDataset

from attribution import AuditMode
from attribution.errors import SampleIdentityError
from auditlog import DataManifest, Signer

BF16 = 2e-2


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


def train(
    folder: Path, data: DataManifest, signer: Signer, accelerator: Accelerator, rows: Any, **loading: Any
) -> tuple[AuditMode, Any]:
    """One epoch with weights that stay; audit mode and what it captured."""
    model = tiny_lora().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    loader = DataLoader(rows, batch_size=3, collate_fn=collate, **loading)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with AuditMode(model, optimizer, data, run=folder / "run", signer=signer, on_head=folder / "auditor") as audit:
        captured = keep_captured(audit)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    return audit, captured


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", ["rows", "workers", "stream", "dispatched stream"])
def test_prepared_loops_match_autograd(
    tmp_path: Path, data: DataManifest, signer: Signer, accumulation: int, shape: str
) -> None:
    rows = tokenized(data)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True if shape == "dispatched stream" else None),
    )
    source = Stream(list(rows)) if "stream" in shape else rows
    loading = {"num_workers": 2} if shape == "workers" else {}
    if "stream" not in shape:
        loading["shuffle"] = True
    audit, captured = train(tmp_path, data, signer, accelerator, source, **loading)
    assert assert_exact(audit, captured, Oracle(tiny_lora()), texts_of(rows)) == 20
    assert audit.recorder.worst_residual < EXACT
    assert audit.recorder.steps == len(captured) == {1: 7, 3: 3}[accumulation]
    assert [len(step) for step in captured] == ([1] * 7 if accumulation == 1 else [3, 3, 1])
    for micro in captured[0]:  # each micro-batch's mean, divided by the number of them
        expected = 1 / (int(micro.n_tokens.sum()) * accumulation)
        assert micro.weight.tolist() == pytest.approx([expected] * 3, rel=1e-4)


def test_bf16_matches_autograd_in_the_same_precision(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    rows = tokenized(data)
    audit, captured = train(tmp_path, data, signer, accelerator, rows)
    assert audit.recorder.worst_residual < BF16
    oracle, texts = Oracle(tiny_lora()), texts_of(rows)
    for micro in (m for step in captured for m in step):
        assert not micro.flags.any()
        for slot, index in enumerate(micro.sample_index.tolist()):
            with torch.autocast("cpu", torch.bfloat16):
                loss = oracle.loss(*texts[index])
            expected = audit._layout.sketch(oracle.gradients(loss))
            assert relative_error(micro.sketch[slot], expected) < BF16


def test_A14_string_ids_are_explained(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    def with_names(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(rows) | {"sample_index": [f"row-{row['sample_index']}" for row in rows]}

    accelerator = Accelerator(cpu=True)
    model = tiny_lora().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    loader = DataLoader(Stream(list(tokenized(data))), batch_size=3, collate_fn=with_names)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with (
        pytest.raises(SampleIdentityError, match="not a tensor of integers") as caught,
        AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"),
    ):
        model(**next(iter(loader)))
    assert "attribution.dataset(manifest)" in caught.value.advice()
