"""Where audit mode's time goes, function by function: ``python -m benchmarks.run --profile gpt2.t128.fused``.

Python's own profiler, over whole audited steps, so it survives any rearrangement of the code. Each function of ours is
given with its own time, that of the torch operations it calls directly included. The profiler itself adds about a
microsecond to each call, so small functions look dearer than they are; the sum is not the figure that bars ask about.
"""

from __future__ import annotations

import cProfile
import pstats
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import thread_time
from typing import get_args

from benchmarks import overhead
from benchmarks.audited import Audited

from attribution.capture.hooks import Mode
from attribution.demo.quiet import quiet

_OURS = ("/attribution/", "/auditlog/")
_Function = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Cost:
    """One function's share of a step.

    Attributes:
        where: Its file and name.
        calls: Per step.
        own_s: Per step, with the built-in operations that it calls itself.
        operations: The dearest of those, seconds per step by name.
    """

    where: str
    calls: float
    own_s: float
    operations: dict[str, float]


def report(name: str, steps: int = 5) -> str:
    """Return a table for one set-up and mode, ``gpt2.t128.fused`` for example.

    Raises:
        ValueError: If there is no such set-up or mode.
    """
    wanted, _, last = name.rpartition(".")
    mode = next((known for known in get_args(Mode) if known == last), None)
    set_up = next((s for s in overhead.CPU if wanted == ".".join(filter(None, (s.model, s.size)))), None)
    if set_up is None or mode is None:
        names = ", ".join(f"{each.model}.{each.size}".strip(".") for each in overhead.CPU)
        raise ValueError(f"no such set-up: {name}; there are {names}, each with .fused or .observe")
    with tempfile.TemporaryDirectory() as folder, quiet():
        workload = set_up.build(Path(folder) / "data")
        with Audited.open(workload, Path(folder) / "runs", [mode]) as audited:
            return f"{workload.what}, {mode}\n\n{as_markdown(*profile(audited, mode, steps))}"


def profile(audited: Audited, mode: Mode, steps: int = 5) -> tuple[list[Cost], float]:
    """Return the costs, dearest first, and the CPU seconds of a median plain step, all of the training thread."""
    batches = audited.workload.batches
    audited.audited(mode, batches[0])
    audited.plain(batches[0])
    profiler, plain = cProfile.Profile(timer=thread_time), []
    for number in range(steps):
        batch = batches[number % len(batches)]
        began = thread_time()
        audited.plain(batch)
        plain.append(thread_time() - began)
        audited.audited(mode, batch, around=profiler.runcall)
    return costs(pstats.Stats(profiler), steps), median(plain)


def costs(stats: pstats.Stats, steps: int) -> list[Cost]:
    """Give the time of built-in operations to those of our functions that call them."""
    entries = stats.stats  # type: ignore[attr-defined]
    operations: dict[_Function, dict[str, float]] = defaultdict(dict)
    own: dict[_Function, float] = {}
    calls: dict[_Function, float] = {}
    for function, (_, count, own_s, _, callers) in entries.items():
        if _is_ours(function):
            own[function], calls[function] = own_s / steps, count / steps
        elif function[0] == "~":
            for caller, (_, _, _, inside) in callers.items():
                if _is_ours(caller):
                    operations[caller][function[2]] = inside / steps
    found = [
        Cost(_name(each), calls[each], own[each] + sum(operations[each].values()), dict(operations[each]))
        for each in own
    ]
    return sorted(found, key=lambda cost: -cost.own_s)


def as_markdown(found: list[Cost], plain_s: float, top: int = 25) -> str:
    """Return a table of the dearest functions."""
    lines = ["| function | calls | ms | share of plain step | of which |", "|---|---:|---:|---:|---|"]
    for cost in found[:top]:
        inside = sorted(cost.operations.items(), key=lambda item: -item[1])[:3]
        what = ", ".join(f"{name.strip('{}<>')} {1e3 * seconds:.2f}" for name, seconds in inside)
        share = f"{cost.own_s / plain_s:.3%}"
        lines.append(f"| {cost.where} | {cost.calls:.0f} | {1e3 * cost.own_s:.2f} | {share} | {what} |")
    total = sum(cost.own_s for cost in found)
    lines.append(f"| all | | {1e3 * total:.1f} | {total / plain_s:.3%} | plain step {1e3 * plain_s:.0f} ms |")
    return "\n".join(lines)


def _is_ours(function: _Function) -> bool:
    return any(part in function[0] for part in _OURS)


def _name(function: _Function) -> str:
    return f"{'/'.join(Path(function[0]).parts[-2:])}:{function[1]} {function[2]}"
