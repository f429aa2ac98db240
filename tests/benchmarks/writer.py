"""How many samples a second the ledger's writer sustains: 8 KB sketches, sealed and signed, every batch synced.

A training loop without training: steps of eight samples are queued as fast as the writer takes them. The clock runs
from the first step to the seal, so every database transaction, signature and fsync is inside. What one step costs the
writer's thread is what training loses where it shares a processor with it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import medians
from rich.console import Console
from rich.table import Table

from auditlog.datamanifest import DataManifest
from auditlog.ledger.ledger import RunLedger, StepEntry
from auditlog.ledger.writer import LedgerWriter
from auditlog.trust.keys import Signer
from tests.support import Plan, make_manifest, simulated_steps, write_sources

PLAN = Plan(steps=1, per_step=8, rows_per_file=(5_000, 5_000), dim=4_096)
SAMPLES, QUICK_SAMPLES, ROUNDS = 40_000, 8_000, 5


def measure(device: str = "cpu") -> dict[str, Any]:
    """Return the writer's figures. It runs on the host whatever ``device`` is."""
    steps = (QUICK_SAMPLES if os.environ.get("BENCH_QUICK") else SAMPLES) // PLAN.per_step
    with tempfile.TemporaryDirectory(prefix="gradtrail-writer-") as name:
        data = write_sources(Path(name) / "data", PLAN.rows_per_file)
        signer = Signer.generate("bank.example/audit")
        ledgers = [
            RunLedger.create(Path(name) / f"run-{i}", make_manifest(data, signer, PLAN), data, signer)
            for i in range(ROUNDS)
        ]
        wall, cpu = zip(*(_sustained(ledger, data, steps) for ledger in ledgers), strict=True)
        step_ms = _step_ms(RunLedger.create(Path(name) / "one", make_manifest(data, signer, PLAN), data, signer), data)
    samples = steps * PLAN.per_step
    return medians.of([samples / seconds for seconds in wall]).figures("writer.samples_per_s") | {
        "writer.samples_per_cpu_s": statistics.median(samples / seconds for seconds in cpu),
        "writer.step_cpu_ms": step_ms,
    }


def entries(data: DataManifest, steps: int) -> Iterator[StepEntry]:
    """Yield steps of eight samples as a recorder makes them; the sketches repeat, samples and step numbers do not."""
    (first,) = simulated_steps(data, PLAN)
    rng = np.random.default_rng(0)
    digest = {"token_ids_sha256": "ab" * 32}
    body = first.body | {"weight_decay": [0.0], "num_items": 512, "clip": None, "micro_batches": [digest]}
    for step in range(1, steps + 1):
        records, index = first.records.copy(), rng.integers(0, data.rows, PLAN.per_step)
        records["step"] = step
        records["source_id"], records["row"], records["data_version_id"] = data.locate(index)
        yield StepEntry(records, index, first.sketches, first.gradient, first.gradient_scales, body | {"step": step})


def _sustained(ledger: RunLedger, data: DataManifest, steps: int) -> tuple[float, float]:
    """Return wall and CPU seconds from the first step to the seal."""
    made = list(entries(data, steps))
    wall, cpu = time.perf_counter(), time.process_time()
    with LedgerWriter(ledger) as writer:
        for entry in made:
            writer.step(entry)
        writer.seal({})
    return time.perf_counter() - wall, time.process_time() - cpu


def _step_ms(ledger: RunLedger, data: DataManifest) -> float:
    """Return the CPU milliseconds of one step on the thread that writes, its share of the flushes included."""
    made = list(entries(data, 1_000))
    began = time.thread_time()
    for entry in made:
        ledger.append_step(entry)
    ledger.flush()
    spent = time.thread_time() - began
    ledger.close_unsealed()
    return 1e3 * spent / len(made)


def main() -> None:
    """Measure and print a table."""
    table = Table("figure", "value")
    for name, value in measure().items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else " to ".join(f"{v:,.0f}" for v in value))
    Console().print(table)


if __name__ == "__main__":
    main()
