"""Sketch operators measured: what they cost, what they keep, and whether the correlation law holds.

Three tables. *Operators*: time, CPU time and peak memory of each operator at several ``D``, explicit against implicit
(the design-choice table of Schioppa, NeurIPS 2024, arXiv:2402.03994, at the size of this machine). *Layer selection*:
correlation of one layer's exact gradients with the whole gradient's, beside sketches of the whole. *Law*: Pearson
correlation as measured and as ``1/√(1 + κ/D)`` says, plain and with outlier features that all layers share.

Run ``PYTHONPATH=tests python -m benchmarks.sketches [cpu|cuda]``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from benchmarks.small_gpt import Gradients, gradients, linear_weights, trained
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attribution.sketch.operators import OPERATORS, Chunked, Operator, RolledFold, law, operator
from attribution.sketch.operators.implicit import explicit_gradient, implicit_gradient
from attribution.sketch.operators.kronecker import Weight, concatenated, summed

Rows = list[dict[str, Any]]

SIZES = (1 << 10, 1 << 12, 1 << 14)
LENGTHS = {1 << 20: SIZES, 1 << 22: (1 << 12,)}
DENSE_LENGTH, DENSE_SIZES = 1 << 16, (1 << 10, 1 << 12)  # its matrix is D N numbers
REPEATS = 3

LAW_SIZES = (256, 1024, 4096)
DRAWS = 5
# Without the dense maps (their matrices take gigabytes), SJLT (CountSketch's second moments) and AFFD (FastAFFD's inner
# products).
LAW_OPERATORS = [name for name in OPERATORS if name not in ("gaussian", "rademacher", "sjlt", "affd")]
LAW_OPERATORS += ["concatenated", "summed"]
# Errors of one draw are nearly the same for all pairs where an operator has few random numbers. A correlation does not
# see a common error, so their law is a lower bound.
FEW_RANDOM_NUMBERS = ("qk", "afjl_q", "concatenated", "summed")


def measure(device: str = "cpu") -> dict[str, Any]:
    """Return the figures and tables, by name."""
    laws = [row for outliers in (0, 2) for row in law_table(outliers, device)]

    def largest(law_name: str, covered: bool) -> float:
        found = [abs(row["r"] - row[law_name]) for row in laws if row["covered"] == covered]
        return round(max(found), 4)

    return {
        # Each operator's own variance; the same against one κ for all; and operators whose law is a lower bound.
        "fidelity.law.max_dev": largest("law", covered=True),
        "fidelity.law.max_dev_dense_kappa": largest("dense", covered=True),
        "fidelity.law.max_dev_few_random_numbers": largest("law", covered=False),
        "fidelity.law.kappa_dense": round(law.dense_kappa(population(0, device).rows), 1),
        "fidelity.law.kappa_dense_outliers": round(law.dense_kappa(population(2, device).rows), 1),
        "tables.sketch_operators": cost_table(device),
        "tables.layer_selection": layer_table(device),
        "tables.law": laws,
    }


@cache
def population(outliers: int, device: str) -> Gradients:
    """Return gradients of 64 samples of a model of three blocks, width 32."""
    found = gradients(trained(width=32, layers=3, steps=40, outliers=outliers), rows=64)
    return Gradients(found.rows.to(device), found.shapes)


# What operators cost.


def cases() -> list[tuple[str, int, int]]:
    """Return operator, ``N`` and ``D`` of each row of the table of costs."""
    names = [name for name in OPERATORS if name not in ("gaussian", "rademacher", "plain_fold")]
    fast = [(name, N, D) for name in names for N, sizes in LENGTHS.items() for D in sizes]
    return [("rademacher", DENSE_LENGTH, D) for D in DENSE_SIZES] + fast


def cost_table(device: str) -> Rows:
    """Return time and memory of each operator on one vector, explicit and implicit."""
    peaks = peaks_in_own_process(device)
    return [times(*case, device) | peak for case, peak in zip(cases(), peaks, strict=True)]


def runs(name: str, N: int, D: int, device: str) -> tuple[float, dict[str, Callable[[], Tensor]]]:
    """Return what it took to make an operator, in seconds, and what is measured of it.

    Explicit and implicit sketch the gradient of ``½ ‖θ − t‖²``, which costs one read by itself.
    """
    begin = time.perf_counter()
    S = operator(name, N, D)
    made_s = time.perf_counter() - begin
    target, theta = torch.ones(N, device=device), torch.randn(N, device=device)

    def loss(at: Tensor) -> Tensor:
        return 0.5 * (at - target).square().sum()

    measured: dict[str, Callable[[], Tensor]] = {
        "sketch": lambda: S @ theta,
        "explicit": lambda: explicit_gradient(loss, theta, S),
        "implicit": lambda: implicit_gradient(loss, theta, S),
    }
    for run in measured.values():
        run()  # tables move to the device and the dtype once
    return made_s, measured


def times(name: str, N: int, D: int, device: str) -> dict[str, Any]:
    """Return medians of wall and CPU time."""
    made_s, measured = runs(name, N, D, device)
    row: dict[str, Any] = {"operator": name, "N": N, "D": D, "made_s": round(made_s, 2)}
    for what, run in measured.items():
        wall, cpu = zip(*(timed(run, device) for _ in range(REPEATS)), strict=True)
        row |= {f"{what}_ms": round(statistics.median(wall), 2), f"{what}_cpu_ms": round(statistics.median(cpu), 2)}
    return row


def peaks_in_own_process(device: str) -> Rows:
    """Return the peaks of memory, measured where freed blocks leave the process at once."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-m", "benchmarks.sketches", device, "peaks"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    rows: Rows = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def peaks(name: str, N: int, D: int, device: str) -> dict[str, Any]:
    """Return the most memory that each way of sketching holds beyond vector and tables."""
    _, measured = runs(name, N, D, device)
    return {f"{what}_peak_mb": round(peak_mb(run, device), 1) for what, run in measured.items()}


def timed(run: Callable[[], Tensor], device: str) -> tuple[float, float]:
    """Return milliseconds of wall and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def peak_mb(run: Callable[[], Tensor], device: str) -> float:
    """Return the most memory that is held beyond what was there before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


# What operators keep.


def builder(name: str, found: Gradients, D: int) -> Callable[[str], Operator]:
    """Return how to draw an operator for all parameters, or for the blocks' weights."""
    weights = [Weight(*found.shapes[each]) for each in linear_weights(found)]
    sizes = {parameter: shape.numel() for parameter, shape in found.shapes.items()}
    if name == "rolled_fold":  # as training uses it: one roll per parameter
        return lambda seed: Chunked([RolledFold(n, D, f"{seed}/{each}") for each, n in sizes.items()])
    if name == "concatenated":
        side = round((D / len(weights)) ** 0.5)
        return lambda seed: concatenated(weights, side, side, seed)
    if name == "summed":
        return lambda seed: summed(weights, 16, 16, D, seed)
    return lambda seed: operator(name, sum(sizes.values()), D, seed)


def vectors(name: str, found: Gradients) -> Tensor:
    """Return the gradients that an operator is for: two-sided maps take matrices only."""
    return found.part(*linear_weights(found)) if name in ("concatenated", "summed") else found.rows


def mean_pearson(build: Callable[[str], Operator], x: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation of the correlation over draws of the operator."""
    drawn = [law.pearson(build(str(seed)), x) for seed in range(DRAWS)]
    return statistics.mean(drawn), statistics.stdev(drawn)


def law_table(outliers: int, device: str) -> Rows:
    """Return measured and predicted correlation of each operator at each ``D``."""
    found = population(outliers, device)
    rows = []
    for name in LAW_OPERATORS:
        x = vectors(name, found)
        for D in LAW_SIZES:
            build = builder(name, found, D)
            S = build("0")
            r, spread = mean_pearson(build, x)
            # The closed form of rotations of the whole space takes a second per pair.
            kappa = law.kappa(S, x, sample=8 if name in ("qk", "afjl_q") else 48)
            rows.append(
                {
                    "operator": name,
                    "outliers": outliers,
                    "D": S.D,
                    "r": round(r, 4),
                    "sd": round(spread, 4),
                    "kappa": round(kappa, 1),
                    "law": round(law.predicted_pearson(kappa, S.D), 4),
                    "dense": round(law.predicted_pearson(law.dense_kappa(x), S.D), 4),
                    "covered": name not in FEW_RANDOM_NUMBERS,
                }
            )
    return rows


def layer_table(device: str) -> Rows:
    """Return how well one layer's exact gradient stands for the whole, beside sketches of the whole."""
    found = population(0, device)
    i, j = law.all_pairs(found.rows)
    exact = (found.rows.double() @ found.rows.double().T)[i, j]
    layers: dict[str, list[str]] = {}
    for name in found.shapes:
        layers.setdefault(".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]), []).append(name)
    rows: Rows = []
    for layer, names in layers.items():
        part = found.part(*names).double()
        r = float(torch.corrcoef(torch.stack([exact, (part @ part.T)[i, j]]))[0, 1])
        rows.append({"what": f"only {layer}, exact", "numbers": part.shape[1], "r": round(r, 4)})
    for name in ("rolled_fold", "affd_fast", "srht", "afjl", "qk"):
        for D in LAW_SIZES:
            r, _ = mean_pearson(builder(name, found, D), found.rows)
            rows.append({"what": f"{name} of the whole", "numbers": D, "r": round(r, 4)})
    return rows


def print_table(console: Console, title: str, rows: Rows) -> None:
    """Print one table."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    """Measure and print; or, in a process of its own, print the peaks of memory as JSON."""
    device, *rest = sys.argv[1:] or ["cpu"]
    if rest == ["peaks"]:
        print(json.dumps([peaks(*case, device) for case in cases()]))
        return
    console = Console(width=160)
    for name, value in measure(device).items():
        if isinstance(value, list):
            print_table(console, name, value)
        else:
            console.print(f"{name}: {value}")


if __name__ == "__main__":
    main()
