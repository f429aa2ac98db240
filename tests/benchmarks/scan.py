"""Top-10 of a million int8 sketches for one query, against the speed at which this machine reads the same bytes.

Both run with as many threads as there are processors, over the same memory maps, in turns, on a warm page cache;
compared round by round. Reading is a sum over 64-bit words: the cheapest reduction here that touches every byte. Where
memory is short the store is smaller, and ``scan.gigabytes`` says how large it was.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import medians
from rich.console import Console
from rich.table import Table

from attribution.influence.scan import top_k
from auditlog.format.records import RECORD
from auditlog.ledger.shards import SHARD_ROWS, ShardReader, ShardWriter
from auditlog.ledger.sketch_reader import LogSketches, SketchReader
from auditlog.trust.keys import Signer
from tests.support import Plan, make_manifest, write_sources

ROWS, QUICK_ROWS, DIM, ROUNDS = 1_000_000, 100_000, 8_192, 9
SPARED = 2e9  # bytes of available memory that are left to others


def measure(device: str = "cpu") -> dict[str, Any]:
    """Return the scan's figures. It reads host memory whatever ``device`` is."""
    rows = QUICK_ROWS if os.environ.get("BENCH_QUICK") else ROWS
    rows = min(rows, int((_available_bytes() - SPARED) / DIM))
    with tempfile.TemporaryDirectory(prefix="gradtrail-scan-") as folder:
        sketches = store(Path(folder), rows)
        query = np.random.default_rng(1).standard_normal((1, DIM))
        words = [block.span.view(np.int64) for block in sketches.blocks()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            acts: dict[str, Callable[[], object]] = {
                "read": lambda: list(pool.map(np.sum, words)),
                "scan": lambda: top_k(sketches, query, 10),
                "planes": lambda: top_k(sketches, query, 10, planes=2),
            }
            first, _ = _seconds(acts["scan"])
            wall, cpu = _rounds(acts)
    size = rows * DIM / 1e9
    share = medians.of([read / scan for read, scan in zip(wall["read"], wall["scan"], strict=True)])
    return share.figures("scan.bandwidth_share") | {
        "scan.bandwidth_share.cpu": medians.of([r / s for r, s in zip(cpu["read"], cpu["scan"], strict=True)]).value,
        "scan.two_planes_share": medians.of([r / s for r, s in zip(wall["read"], wall["planes"], strict=True)]).value,
        "scan.read_gb_per_s": size / medians.of(wall["read"]).value,
        "scan.gb_per_s": size / medians.of(wall["scan"]).value,
        "scan.first_gb_per_s": size / first,  # pages not mapped into the process yet
        "scan.gigabytes": size,
    }


def store(folder: Path, rows: int) -> SketchReader:
    """Write ``rows`` random sketches into shards and return a reader of them, as a run's would be."""
    writer, rng = ShardWriter(folder, DIM), np.random.default_rng(0)
    records = np.zeros(rows, RECORD)
    records["scale_raw"] = rng.uniform(0.001, 0.01, rows)
    values = rng.integers(-127, 128, (SHARD_ROWS + DIM, DIM), np.int8)
    for first in range(0, rows, SHARD_ROWS):
        n = min(SHARD_ROWS, rows - first)
        start = int(rng.integers(DIM))  # each shard a window of its own on the same random rows: random bytes are slow
        places = writer.append(values[start : start + n])
        records["shard"][first : first + n], records["shard_row"][first : first + n] = places
    writer.close(cut=True)
    data = write_sources(folder / "data", (1,))
    manifest = make_manifest(data, Signer.generate("bank.example/audit"), Plan(dim=DIM, forms=("raw",)))
    return SketchReader(manifest, [LogSketches(records, ShardReader(folder, DIM))])


def _rounds(acts: dict[str, Callable[[], object]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall and CPU seconds of each act, round by round; every other round runs them in reverse order."""
    wall: dict[str, list[float]] = {name: [] for name in acts}
    cpu: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(ROUNDS + 1):
        for name in sorted(acts, reverse=bool(number % 2)):
            seconds = _seconds(acts[name])
            if number:  # the first round warms up
                wall[name].append(seconds[0])
                cpu[name].append(seconds[1])
    return wall, cpu


def _seconds(act: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def main() -> None:
    """Measure and print a table."""
    table = Table("figure", "value")
    for name, value in measure().items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else " to ".join(f"{v:.3f}" for v in value))
    Console().print(table)


if __name__ == "__main__":
    main()
