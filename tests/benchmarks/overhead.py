"""What audit mode adds to a training step, measured beside the same step without it, in one run.

In each round the same step is taken plainly, in each capture mode, and with a stopwatch around the products that mode
``fused`` replaces; rounds begin at another kind in turn, so that a machine that grows slower favours none.

    gross     all time in our code: hooks (in ``fused`` the weight gradients themselves too), the work at the optimizer
              step, and waiting for the writer
    dispatch  what hooks and custom functions cost outside of their own clocks, by passes on two tokens
    replaced  the plain weight gradients that ``fused`` computes instead
    net       gross + dispatch - replaced, round by round (``observe`` replaces nothing)
    added     the whole step's wall time, audited minus plain, round by round: it has everything in it, and the noise

All are shares of the median plain step. ``cpu`` names are the same in CPU seconds: of the training thread for net (in
every other round, as a share of that thread's own seconds), of the whole process with its writer for added. On a GPU
the host's clock says nothing of the device's time, so there ``net`` is the whole step's difference.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks import medians, workloads
from benchmarks.audited import Audited, Seconds
from benchmarks.replaced import Clock
from benchmarks.workloads import Batch, Build

from attribution.capture.hooks import Mode
from attribution.demo.quiet import quiet

ROUNDS, QUICK_ROUNDS = 12, 4
DISPATCH_ROUNDS, QUICK_DISPATCH_ROUNDS = 40, 12
PLAIN, STOPWATCH = "plain", "stopwatch"


@dataclass(frozen=True, slots=True)
class SetUp:
    """One row of the table.

    Attributes:
        name: Figures are called ``overhead.<name>`` with the mode after ``model``.
        model: First part of their names.
        size: Last part, may be empty.
        build: Makes the workload.
        modes: Which are measured.
    """

    model: str
    size: str
    build: Build
    modes: tuple[Mode, ...]

    def figure(self, mode: Mode) -> str:
        """Return the name its figures share; a set-up of one figure has no mode in it."""
        middle = () if self.model == "gpt2_full" else (mode,)
        return ".".join(part for part in ("overhead", self.model, *middle, self.size) if part)


CPU = (
    SetUp("gpt2", "t128", lambda folder: workloads.gpt2_lora(folder, 8, 128), ("fused", "observe")),
    SetUp("gpt2", "t512", lambda folder: workloads.gpt2_lora(folder, 2, 512), ("fused", "observe")),
    SetUp("smollm2", "", workloads.smollm2, ("fused",)),
    SetUp("pythia160m", "t256", lambda folder: workloads.pythia_lora(folder, 4, 256), ("fused",)),
    SetUp("gpt2_full", "t256", lambda folder: workloads.gpt2_full(folder, 4, 256), ("observe",)),
)


def cuda(rows: int = 8, tokens: int = 512, device: str = "cuda", sizes: Sequence[str] = ("1b", "2.8b")) -> list[SetUp]:
    """Return the set-ups for a GPU: Pythia shapes in bfloat16."""

    def build(size: str) -> Build:
        return lambda folder: workloads.pythia_lora(folder, rows, tokens, size, device, torch.bfloat16)

    return [SetUp(f"pythia{size.replace('.', '_')}", f"t{tokens}", build(size), ("fused", "observe")) for size in sizes]


@dataclass(slots=True)
class Rounds:
    """Steps of all kinds, side by side.

    Attributes:
        steps: By kind of step, one for each round.
        dispatch: By mode, seconds per step outside of all clocks.
        has_cpu_clock: Of each round, whether time in our code is CPU time.
    """

    steps: dict[str, list[Seconds]] = field(default_factory=lambda: defaultdict(list))
    dispatch: dict[str, medians.Median] = field(default_factory=dict)
    has_cpu_clock: list[bool] = field(default_factory=list)

    @property
    def plain_s(self) -> float:
        """Seconds of the median plain step."""
        return medians.of([step.wall for step in self.steps[PLAIN]]).value

    @property
    def plain_cpu_s(self) -> float:
        """CPU seconds of the training thread in the median plain step."""
        return medians.of([step.thread for step in self.steps[PLAIN]]).value

    def inside(self, kind: str, cpu: bool = False) -> list[float]:
        """Return the seconds in our code, or in the replaced products, of the rounds with this clock."""
        return [s.inside for s, is_cpu in zip(self.steps[kind], self.has_cpu_clock, strict=True) if is_cpu == cpu]


def measure(device: str) -> dict[str, Any]:
    """Measure every set-up for this device; returns entries for ``results.json``."""
    found: dict[str, Any] = {}
    for set_up in CPU if device == "cpu" else cuda():
        found |= figures(set_up)
    return found


def figures(set_up: SetUp) -> dict[str, Any]:
    """Measure one set-up."""
    is_quick = bool(os.environ.get("BENCH_QUICK"))
    with tempfile.TemporaryDirectory() as name, quiet():
        workload = set_up.build(Path(name) / "data")
        with Audited.open(workload, Path(name) / "runs", set_up.modes) as audited:
            rounds = take(audited, QUICK_ROUNDS if is_quick else ROUNDS)
            for mode in set_up.modes:
                rounds.dispatch[mode] = dispatch(audited, mode, QUICK_DISPATCH_ROUNDS if is_quick else DISPATCH_ROUNDS)
    on_gpu = workload.parameters[0].is_cuda
    found: dict[str, Any] = {}
    for mode in set_up.modes:
        found |= shares(set_up, mode, rounds, workload.what, on_gpu)
    return found


def take(audited: Audited, rounds: int) -> Rounds:
    """Take steps of all kinds, round by round, after one of each to warm up."""
    kinds = _kinds(audited)
    batches = audited.workload.batches
    found = Rounds()
    for step in kinds.values():
        step(batches[0], time.perf_counter)
    for number in range(rounds):
        batch, turn = batches[number % len(batches)], number % len(kinds)
        is_cpu = number % 2 == 1
        found.has_cpu_clock.append(is_cpu)
        for kind in [*list(kinds)[turn:], *list(kinds)[:turn]]:
            found.steps[kind].append(kinds[kind](batch, time.thread_time if is_cpu else time.perf_counter))
    return found


def _kinds(audited: Audited) -> dict[str, Callable[[Batch, Clock], Seconds]]:
    kinds: dict[str, Callable[[Batch, Clock], Seconds]] = {PLAIN: lambda batch, clock: audited.plain(batch)}
    for mode in audited.audits:
        kinds[mode] = lambda batch, clock, mode=mode: audited.audited(mode, batch, clock)  # type: ignore[misc]
    if audited.fused:
        kinds[STOPWATCH] = audited.with_stopwatch
    return kinds


def dispatch(audited: Audited, mode: Mode, rounds: int) -> medians.Median:
    """Return the seconds a step that hooks and custom functions take outside of their own clocks.

    Forward and backward passes on two tokens of one row have the same modules, calls and cold caches and next to no
    arithmetic. What an audited one takes longer than a plain one, beyond the time in our code and but for the products
    replaced, is that. In CPU time and in one thread, as that work is: so a busy machine adds little to it.
    """
    first = audited.workload.batches[0]
    batch = {name: (t[:1, -2:] if t.ndim == 2 else t[:1]).contiguous() for name, t in first.items()}
    kinds: dict[str, Callable[[], Seconds]] = {
        PLAIN: lambda: audited.plain_passes(batch),
        mode: lambda: audited.audited_passes(mode, batch),
    }
    if mode == "fused":
        kinds[STOPWATCH] = lambda: audited.passes_with_stopwatch(batch)
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(rounds + 1):
            turn = number % len(kinds)
            took = {kind: kinds[kind]() for kind in [*list(kinds)[turn:], *list(kinds)[:turn]]}
            replaced = took[STOPWATCH].inside if STOPWATCH in took else 0.0
            found.append((took[mode].thread - took[mode].inside) - (took[PLAIN].thread - replaced))
    finally:
        torch.set_num_threads(threads)
    return medians.of(found[1:])  # the first one warms up


def shares(set_up: SetUp, mode: Mode, rounds: Rounds, what: str, on_gpu: bool) -> dict[str, Any]:
    """Return the figures of one mode, as shares of the median plain step, and its line in the table."""
    plain, steps = rounds.steps[PLAIN], rounds.steps[mode]
    wall, cpu = (_inside(rounds, mode, is_cpu) for is_cpu in (False, True))
    added = medians.of([a.wall / p.wall - 1.0 for a, p in zip(steps, plain, strict=True)])
    cpu_added = medians.of([a.cpu / p.cpu - 1.0 for a, p in zip(steps, plain, strict=True)])
    net = added if on_gpu else wall["net"]
    name = set_up.figure(mode)
    found: dict[str, Any] = {
        **net.figures(f"{name}.net" if mode == "fused" else name),
        **added.figures(f"{name}.added"),
        f"{name}.gross": wall["gross"].value,
        f"{name}.replaced": wall["replaced"].value,
        f"{name}.dispatch": rounds.dispatch[mode].value / rounds.plain_s,
        f"{name}.net_cpu": cpu["net"].value,
        f"{name}.cpu_added": cpu_added.value,
        f"{name}.writer_cpu": medians.of([step.writer for step in steps]).value / rounds.plain_s,
    }
    found[f"tables.{name}"] = {
        "what": what,
        "mode": mode,
        "rounds": len(plain),
        "threads": torch.get_num_threads(),
        "plain_step_s": rounds.plain_s,
        "net_ms": 1e3 * net.value * rounds.plain_s,
        "gross_ms": 1e3 * wall["gross"].value * rounds.plain_s,
        "dispatch_ms": [1e3 * x for x in astuple(rounds.dispatch[mode])],
        "steps": {kind: [asdict(step) for step in taken] for kind, taken in rounds.steps.items()},
    }
    return found


def _inside(rounds: Rounds, mode: Mode, cpu: bool) -> dict[str, medians.Median]:
    """Return gross, replaced and net by one of the clocks."""
    gross = rounds.inside(mode, cpu)
    replaced = rounds.inside(STOPWATCH, cpu) if mode == "fused" else [0.0] * len(gross)
    net = [g + rounds.dispatch[mode].value - r for g, r in zip(gross, replaced, strict=True)]
    whole = rounds.plain_cpu_s if cpu else rounds.plain_s
    parts = {"gross": gross, "replaced": replaced, "net": net}
    return {name: medians.of([s / whole for s in seconds]) for name, seconds in parts.items()}
