"""What audit mode adds to a whole training step: the same step with and without it, in pairs, on the same model.

Time inside hooks misses what they do to the rest of a step (caches, allocations, the writer thread on a shared core),
so whole steps are timed. Order alternates within pairs, so that a machine that grows slower favours neither side. The
writer thread is waited for after each audited step, so none of its work falls into a plain one: wall time has what it
took while the step ran, CPU time has all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attribution.capture.hooks import Mode
from attribution.training.audit_mode import AuditMode
from auditlog.datamanifest import DataManifest
from auditlog.trust.keys import Signer

MAX_PAIRS = 12
TELLING_SE = 0.02  # a figure of a few per cent means nothing beside a larger standard error

_Seconds = tuple[float, float]  # wall, CPU


@dataclass(frozen=True, slots=True)
class Overhead:
    """Paired step times.

    Attributes:
        plain_s: Median seconds of a step without audit mode.
        added: Median of the pairs' ``(audited - plain) / plain``.
        added_se: Standard error of that median, from the pairs' own spread.
        cpu_added: The same median over CPU seconds of the process, all threads, the writer's work in full.
        in_hooks: Median share of a step in hooks and waiting for the writer.
        pairs: How many.
    """

    plain_s: float
    added: float
    added_se: float
    cpu_added: float
    in_hooks: float
    pairs: int


def measure(
    model: Any,
    batches: Sequence[Mapping[str, torch.Tensor]],
    manifest: DataManifest,
    folder: Path,
    *,
    mode: Mode = "observe",
    max_pairs: int,
    budget_s: float = 36.0,
    progress: Callable[[], None] = lambda: None,
) -> Overhead:
    """Time steps in pairs, until the budget is spent.

    The learning rate is 0 and both optimizers are new, so the model's weights stay as they are.

    Args:
        model: The trained model.
        batches: Training batches with their ``sample_index``.
        manifest: The data they come from.
        folder: For a throw-away run.
        mode: Audit mode's capture mode.
        max_pairs: Stop after this many pairs.
        budget_s: Stop after this many seconds, but not before four pairs.
        progress: Called after each pair.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    audited, plain = (torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0) for _ in range(2))
    signer = Signer.generate("throw-away")
    began, times = perf_counter(), list[tuple[_Seconds, _Seconds]]()
    model.train()
    options: dict[str, Any] = {"run": folder, "signer": signer, "on_head": lambda name, note: None, "mode": mode}
    with AuditMode(model, audited, manifest, **options) as audit:
        audit.hooks.detach()
        audit.unfollow()

        def with_audit(batch: Mapping[str, torch.Tensor]) -> _Seconds:
            audit.hooks.attach()
            audit.follow(audited)
            try:
                return _timed_step(model, audited, parameters, batch, audit.writer.flush)
            finally:
                audit.hooks.detach()
                audit.unfollow()

        def without(batch: Mapping[str, torch.Tensor]) -> _Seconds:
            batch = {name: tensor for name, tensor in batch.items() if name != "sample_index"}
            return _timed_step(model, plain, parameters, batch)

        for warm_up in (with_audit, without):
            warm_up(batches[0])
        for pair, batch in enumerate(itertools.islice(itertools.cycle(batches), max_pairs)):
            if pair >= 4 and perf_counter() - began > budget_s:
                break
            if pair % 2:
                times.append((without(batch), with_audit(batch)))
            else:
                second = with_audit(batch)
                times.append((without(batch), second))
            progress()
    return summarise(np.array(times), audit.time.median_share)


def summarise(times: NDArray[np.float64], in_hooks: float = 0.0) -> Overhead:
    """Summarise ``(pairs, 2, 2)`` seconds: plain and audited, each wall and CPU."""
    ratio = times[:, 1, 0] / times[:, 0, 0] - 1.0
    median = float(np.median(ratio))
    spread = 1.4826 * float(np.median(np.abs(ratio - median)))  # equals the SD for normal errors
    return Overhead(
        plain_s=float(np.median(times[:, 0, 0])),
        added=median,
        added_se=1.2533 * spread / len(ratio) ** 0.5,  # a median is that much noisier than a mean
        cpu_added=float(np.median(times[:, 1, 1] / times[:, 0, 1] - 1.0)),
        in_hooks=in_hooks,
        pairs=len(ratio),
    )


def _timed_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    batch: Mapping[str, torch.Tensor],
    finish: Callable[[], None] = lambda: None,
) -> _Seconds:
    began, cpu = perf_counter(), process_time()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    wall = perf_counter() - began
    finish()
    return wall, process_time() - cpu
