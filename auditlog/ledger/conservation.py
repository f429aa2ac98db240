"""Gradient conservation from stored rows: do a step's samples add up to the gradient that was consumed?

Sketching is linear, so ``a = sum(weight_i * z_i)`` over the samples of a step and the sketch ``b`` of the
gradient that the optimizer consumed must agree up to the clip factor ``f``. The recorder checks this in
float32; here it is repeated from the int8 rows on disk, by anybody, without a model. It finds omitted samples,
wrong accumulation and scale errors between samples. It cannot find a factor common to all, or exchanged ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.format.records import EventKind, Flag
from auditlog.ledger.reader import RunReader

SIGMAS = 3.0
"""The tolerance is this many times the error that rounding to int8 predicts."""


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One step's sum, recomputed.

    Attributes:
        attempt: The attempt in which the step was taken.
        step: Optimizer step.
        f: ``<a, b> / <a, a>``: 1, or the clip factor.
        residual: ``|b - f a| / |b|``.
        tolerance: What rounding to int8 allows the residual to be.
        ok: Whether the residual is within the tolerance.
    """

    attempt: int
    step: int
    f: float
    residual: float
    tolerance: float
    ok: bool


def recompute(reader: RunReader) -> list[StepCheck]:
    """Return the check of every step whose consumed gradient is stored, over the samples of all ranks.

    Steps of attempts that no longer count are checked too, if every process has logged them. Steps with a record that
    is not finite are left out: their samples cannot add up to a finite gradient. Compare the length with the number of
    step events.

    Raises:
        StoreError: If a sketch row is missing.
    """
    return list(_steps(reader))


def _steps(reader: RunReader) -> Iterator[StepCheck]:
    dim = reader.manifest.sketch.dim
    ranks = [(rank, _records_by_step(rank)) for rank in reader.ranks]
    live = {event.seq for event in reader.live_steps()}
    for event in reader.events(EventKind.STEP):
        body = event.json()
        found = [(rank, records(body["attempt"], body["step"])) for rank, records in ranks]
        own = [(rank, rows) for rank, rows in found if rows is not None]
        if len(own) < len(found) and event.seq not in live:
            continue  # a process was killed before it could log this step, and training went back behind it
        is_finite = not any(np.any(rows["flags"] & Flag.NOT_FINITE) for _, rows in own)
        if body["gradient"] is not None and is_finite:
            yield _check(body, own, dim)


def _records_by_step(reader: RunReader) -> Callable[[int, int], NDArray[np.void] | None]:
    """Return a function from attempt and step to one rank's records ``(n,)``; ``None`` if it logged no such step."""
    records = reader.records()
    bodies = [event.json() for event in reader.events(EventKind.STEP)]
    places = {(body["attempt"], body["step"]): (body["first_seq"], body["records"]) for body in bodies}

    def of_step(attempt: int, step: int) -> NDArray[np.void] | None:
        if (attempt, step) not in places:
            return None
        first_seq, count = places[attempt, step]
        first = int(np.searchsorted(records["seq"], first_seq))
        return records[first : first + count]

    return of_step


def _check(body: dict[str, Any], own: list[tuple[RunReader, NDArray[np.void]]], dim: int) -> StepCheck:
    """Compare the consumed gradient with the sum over ``own``, the records of each rank; rank 0 stores the gradient."""
    gradient = body["gradient"]
    place = np.array([gradient["shard"]], np.uint32), np.array([gradient["row"]], np.uint32)
    consumed = float(gradient["scale_raw"]) * own[0][0].sketch_rows(*place)[0, :dim].astype(np.float64)  # (dim,)
    rows = np.concatenate([rows for _, rows in own])
    factors = rows["weight"].astype(np.float64) * rows["scale_raw"].astype(np.float64)  # (n,)
    stored = np.concatenate([rank.sketch_rows(r["shard"], r["shard_row"])[:, :dim] for rank, r in own])  # (n, dim)
    summed = factors @ stored.astype(np.float64)  # (dim,)

    energy = float(summed @ summed)
    f = float(summed @ consumed) / energy if energy else 0.0
    size = float(np.linalg.norm(consumed)) or 1.0
    residual = float(np.linalg.norm(consumed - f * summed)) / size
    # An entry rounded to a multiple of s is off by a uniform error of variance s^2 / 12.
    variance = dim / 12 * (f**2 * float(factors @ factors) + float(gradient["scale_raw"]) ** 2)
    tolerance = SIGMAS * variance**0.5 / size
    return StepCheck(int(body["attempt"]), int(body["step"]), f, residual, tolerance, residual <= tolerance)
