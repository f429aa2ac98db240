"""Audit mode itself, both modes, and the plain second pass that it spares; all in one process, in one round.

Everything is on: ids, units, both forms, sketching, the comparison with the consumed gradient, hashing, signing and
writing. Steps and clocks are those of ``benchmarks.overhead``.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import medians, overhead
from benchmarks.audited import Audited, Seconds
from benchmarks.peers.rows import OBSERVE, OURS, POST_HOC, Row, Span
from benchmarks.peers.trial import Took, Trial, figures, own_time
from benchmarks.workloads import Batch, without_ids

from attribution.capture.hooks import Mode
from auditlog.ledger.store import MANIFEST

MODES: dict[Mode, str] = {"fused": OURS, "observe": OBSERVE}


def measure(trial: Trial) -> list[Row]:
    """Time plain, fused and observed steps, replaced weight gradients and the second pass in turns."""
    with Audited.open(trial.workload, trial.folder, list(MODES)) as audited:
        taken = trial.turns(
            {
                "fused": lambda batch: _took(audited.audited("fused", batch)),
                "observe": lambda batch: _took(audited.audited("observe", batch)),
                "plain": lambda batch: _took(audited.plain(batch)),
                "weights": lambda batch: _took(audited.with_stopwatch(batch)),
                "second": lambda batch: _second_pass(trial, batch),
            }
        )
        outside = {mode: overhead.dispatch(audited, mode, overhead.QUICK_DISPATCH_ROUNDS) for mode in MODES}
    rows = [_row(trial, mode, taken, _span(outside[mode])) for mode in MODES]
    second = Row(
        POST_HOC,
        "nothing: forward and backward over the samples of a step once more, the least that post-hoc methods need",
        plain=Span.of([s.wall for s in taken["plain"]]),
        second_pass=Span.of([s.wall for s in taken["second"]]),
        rounds=trial.rounds,
        samples=trial.samples,
    )
    return [*rows, second]


def _took(seconds: Seconds) -> Took:
    return Took(seconds.wall, seconds.cpu, seconds.inside)


def _second_pass(trial: Trial, batch: Batch) -> Took:
    wall = trial.timed(lambda: trial.workload.model(**without_ids(batch)).loss.backward())
    trial.optimizer.zero_grad()
    return Took(wall, 0.0)


def _row(trial: Trial, mode: Mode, taken: dict[str, list[Took]], outside: Span) -> Row:
    found = figures(taken["plain"], taken[mode], trial.samples)
    replaced = [s.inside for s in taken["weights"]] if mode == "fused" else None
    found |= own_time([s.inside for s in taken[mode]], outside, replaced)
    if trial.device.type == "cuda":  # the host's clock says nothing of the device's time
        found["net"] = found["added"]
    return Row(
        MODES[mode],
        "sketches of all trained layers, loss, tokens, weight, ids and commitments per sample; hashed, chained, signed",
        bytes_per_sample=_sketch_bytes(trial.folder / mode),
        note="bytes: the sketches' int8 values; a record has 156 more",
        **found,
    )


def _span(seconds: medians.Median) -> Span:
    return Span(1e3 * seconds.value, 1e3 * seconds.low, 1e3 * seconds.high)


def _sketch_bytes(run: Path) -> int:
    sketch = json.loads((run / MANIFEST).read_text())["sketch"]
    return int(sketch["dim"]) * len(sketch["forms"])
