"""What the tests of adverse loops and odd models share: batches with and without ids, a loop, and what a run says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny import make_batch
from torch import Tensor, nn

from attribution import AuditMode
from auditlog import RunReader
from auditlog.format.records import EventKind

Enter = Callable[..., AuditMode]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=lr)


def batch(number: int = 0, length: int = 9) -> dict[str, Tensor]:
    return make_batch(seed=number, length=length) | {"sample_index": torch.arange(4) + 4 * number}


def without_ids(number: int = 0) -> dict[str, Tensor]:
    """Return the same batch without ids."""
    return {name: tensor for name, tensor in batch(number).items() if name != "sample_index"}


def steps(audit: AuditMode) -> list[dict[str, Any]]:
    """Return what the log says about each optimizer step."""
    return bodies(audit, EventKind.STEP)


def bodies(audit: AuditMode, kind: EventKind) -> list[dict[str, Any]]:
    with RunReader.open(audit.run) as run:
        return [event.json() for event in run.events(kind)]


def records(audit: AuditMode) -> Any:
    with RunReader.open(audit.run) as run:
        return run.records()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 3, of: Any = batch) -> None:
    for i in range(number):
        model(**of(i)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
