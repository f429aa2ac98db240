"""What audit mode costs, on the demo's model and data, paired in one run. Rewrites ``results.json``.

Three views of the same thing, since machines are noisy: the share of a step spent inside hooks (and waiting for the
writer), the whole step with and without audit mode in pairs of alternating order, and CPU seconds of the same pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from attribution.capture.hooks import Mode
from attribution.demo import data as demo_data
from attribution.demo import overhead, recipe
from attribution.demo.quiet import quiet
from auditlog.datamanifest import DataManifest

RESULTS = Path("results.json")
MODES: tuple[Mode, ...] = ("observe", "fused")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=30)
    pairs = options.parse_args().pairs
    RESULTS.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        data = demo_data.prepare(folder / "data")
        manifest = DataManifest.build(data.train_pattern)
        built = recipe.build(manifest)
        rows = [built.dataset[i] for i in range(8 * recipe.BATCH)]
        batches = [built.collator(rows[i : i + recipe.BATCH]) for i in range(0, len(rows), recipe.BATCH)]
        found = {
            mode: overhead.measure(
                built.model, batches, manifest, folder / mode, mode=mode, budget_s=1e9, max_pairs=pairs
            )
            for mode in MODES
        }
    result = {
        "what": "audit mode, exact route; SmolLM2-135M, LoRA r=8 on all linear layers, B=8, loss on answers",
        "rows_tokens": [min(len(r["input_ids"]) for r in rows), max(len(r["input_ids"]) for r in rows)],
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "torch": {"version": torch.__version__, "threads": torch.get_num_threads()},
        "method": "pairs of the same step, order alternating, learning rate 0; medians; ± is the standard error",
        "modes": {
            mode: {
                "pairs": each.pairs,
                "step_s": each.plain_s,
                "whole_step_added": each.added,
                "whole_step_added_se": each.added_se,
                "cpu_added": each.cpu_added,
                "in_hooks_and_writer": each.in_hooks,
            }
            for mode, each in found.items()
        },
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    table = Table(title="audit mode against a plain step")
    table.add_column("view")
    for mode in MODES:
        table.add_column(mode, justify="right")
    each = [found[mode] for mode in MODES]
    table.add_row("in hooks and waiting for the writer (median)*", *(f"{f.in_hooks:.2%}" for f in each))
    table.add_row(f"whole step, wall, {pairs} pairs", *(f"{f.added:+.2%} ± {f.added_se:.2%}" for f in each))
    table.add_row("whole step, CPU seconds, same pairs", *(f"{f.cpu_added:+.2%}" for f in each))
    table.add_row("plain step", *(f"{f.plain_s:.3f} s" for f in each))
    table.caption = "* fused: includes the weight gradients themselves, which the plain backward pass forms elsewhere"
    console = Console()
    console.print(table)
    console.print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
