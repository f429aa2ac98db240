"""Peak memory that audit mode adds to a training step: GPT-2 with LoRA, 8 rows of 512 tokens.

A plain step is taken, audit mode is opened in fused mode, and the same step is taken under it; both peaks are of the
whole process. So everything is in it: random tables, buffers, queue, records, database. Only what stays of a first run
of two short steps is in both, the code that it loads above all; that is given beside the figure. The step's own peak is
at the logits, which hides what the backward pass of the blocks holds; so the peak is also taken from there on, and the
larger of the two differences is the figure. With gradient checkpointing likewise, in a process of its own.

On a CPU the peak is the resident set's high-water mark; large blocks are mapped one by one
(``MALLOC_MMAP_THRESHOLD_``), so that freed memory leaves it at once. On a GPU it is the allocator's.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import workloads
from benchmarks.audited import Audited
from benchmarks.workloads import Workload
from torch import Tensor

from attribution.demo.quiet import quiet

ROWS, TOKENS = 8, 512
WARM_UP_TOKENS = 16
FIGURES = {"plain": "memory.extra_mb", "checkpointed": "memory.extra_checkpointed_mb"}
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes in use at most, in one step and in the backward pass of its blocks."""

    step: int
    blocks: int

    def beyond(self, other: Peaks) -> float:
        """Return by how many MB these peaks pass others, the larger of the two differences."""
        return max(self.step - other.step, self.blocks - other.blocks) / 2**20


def measure(device: str) -> dict[str, Any]:
    """Measure both kinds of step, each in a process of its own; returns entries for ``results.json``."""
    found: dict[str, Any] = {}
    for kind in FIGURES:
        command = [sys.executable, "-m", "benchmarks.memory", kind, device]
        done = subprocess.run(command, env=os.environ | MAPPED, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise RuntimeError(f"memory of {kind} steps: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        found |= json.loads(done.stdout.strip().splitlines()[-1])
    return found


def figures(kind: str, workload: Workload, folder: Path) -> dict[str, Any]:
    """Measure one kind of step in this process."""
    if kind == "checkpointed":
        workload.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    batch = workload.batches[0]
    short = {name: t[:, :WARM_UP_TOKENS].contiguous() if t.ndim == 2 else t for name, t in batch.items()}
    before = _in_use(workload)
    with Audited.open(workload, folder / "first", ("fused",)) as audited:  # loads code, makes the optimizer's state
        audited.plain(short)
        audited.audited("fused", short)
    gc.collect()
    stays = _in_use(workload) - before
    plain = peaks(workload, lambda: audited.plain(batch))
    with Audited.open(workload, folder / "second", ("fused",)) as audited:
        audited.audited("fused", short)
        under = peaks(workload, lambda: audited.audited("fused", batch))
    name = FIGURES[kind]
    return {
        name: round(under.beyond(plain), 1),
        f"tables.{name}": {
            "what": f"{workload.what}, {kind}, fused",
            "plain_peak_mb": [round(plain.step / 2**20, 1), round(plain.blocks / 2**20, 1)],
            "audited_peak_mb": [round(under.step / 2**20, 1), round(under.blocks / 2**20, 1)],
            "which": "of the step, and of the backward pass of its blocks",
            "stays_of_first_run_mb": round(stays / 2**20, 1),
        },
    }


def peaks(workload: Workload, step: Callable[[], Any]) -> Peaks:
    """Return the peaks of one step; the second part begins when the gradient reaches the last block's output."""
    on_gpu, before_blocks = workload.parameters[0].is_cuda, list[int]()

    def at_blocks(gradient: Tensor) -> None:
        before_blocks.append(_peak(on_gpu))
        _reset(on_gpu)

    def on_head(module: Any, args: tuple[Tensor, ...]) -> None:
        args[0].register_hook(at_blocks)  # type: ignore[no-untyped-call]

    head = workload.model.get_output_embeddings()  # type: ignore[operator]
    handle = head.register_forward_pre_hook(on_head)
    gc.collect()
    _reset(on_gpu)
    try:
        step()
    finally:
        handle.remove()
    after = _peak(on_gpu)
    return Peaks(max(*before_blocks, after), after)


def _reset(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(on_gpu: bool) -> int:
    return torch.cuda.max_memory_allocated() if on_gpu else _status("VmHWM")


def _in_use(workload: Workload) -> int:
    return torch.cuda.memory_allocated() if workload.parameters[0].is_cuda else _status("VmRSS")


def _status(name: str) -> int:
    """Return the bytes that the system says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def main(kind: str, device: str) -> None:
    """Measure one kind of step and print one line of JSON."""
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        if device == "cuda":
            workload = workloads.pythia_lora(folder / "data", ROWS, TOKENS, "1b", "cuda", torch.bfloat16)
        else:
            workload = workloads.gpt2_lora(folder / "data", ROWS, TOKENS)
        print(json.dumps(figures(kind, workload, folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
