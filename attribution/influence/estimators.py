r"""Scores of recorded samples from their stored sketches. Pure functions over arrays; one scan per block of samples.

A plain gradient step on sample ``i`` moves the weights by ``-lr_t f_t w_it g_it``: learning rate, measured clip
factor, and the factor with which the sample's own gradient entered the step. To first order it moves a quantity
``F`` by ``-lr_t f_t w_it <g_it, ∇F>``. Summed over a sample's uses, with sketches ``z`` for gradients:

    u_i     = Σ_t lr_t f_t w_it z_it
    score_i = -<u_i, z_F>             score > 0  <=>  training on the record pushed F up
    cosine_i = score_i / (|u_i| |z_F|)

Source: TracIn (Pruthi et al. 2020, arXiv:2002.08484), with the query's gradient at the final weights only. Under
Adam the step is not the gradient, so a score is relative, not in units of ``F``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attribution.errors import AttributionError

SAMPLES_AT_ONCE = 65_536  # one gigabyte of sums at 4,096 numbers each

Blocks = Iterable[tuple[NDArray[np.void], NDArray[np.int8]]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of every used sample for each query.

    Attributes:
        sample: ``(n,)`` int64, sample indices in rising order; only samples that were used.
        uses: ``(n,)`` int64, records per sample.
        norm: ``(n,)`` float64, ``|u_i|``.
        dot: ``(n, Q)`` float64, the score; positive pushed the query's quantity up.
        source_sums: ``(S, D)`` float64, ``Σ u_i`` per source file.
        queries: ``(Q, D)`` float64, the queries' sketches.
    """

    sample: NDArray[np.int64]
    uses: NDArray[np.int64]
    norm: NDArray[np.float64]
    dot: NDArray[np.float64]
    source_sums: NDArray[np.float64]
    queries: NDArray[np.float64]

    @property
    def cosine(self) -> NDArray[np.float64]:
        """``(n, Q)`` float64 in [-1, 1]; 0 where a norm is 0."""
        return cosines(self.dot, self.norm, np.linalg.norm(self.queries, axis=1))

    @property
    def source_dot(self) -> NDArray[np.float64]:
        """``(S, Q)`` float64, total score per source file."""
        return -self.source_sums @ self.queries.T


def cosines(
    dot: NDArray[np.float64], norm: NDArray[np.float64], query_norm: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return ``dot / (norm x query_norm)``, ``(n, Q)``; 0 where either norm is 0."""
    scale = norm[:, None] * query_norm[None, :]
    return np.divide(dot, scale, out=np.zeros_like(dot), where=scale > 0)


def step_factors(steps: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return ``lr x f`` of each optimizer step from the step events' bodies.

    A skipped step moved nothing: factor 0. So does one whose ``f`` is not finite (``null``); ``unmeasured`` counts it.

    Raises:
        AttributionError: If a step's parameter groups have different learning rates: one sketch covers them all.
    """
    factors = {}
    for body in steps:
        rates = set(body["lr"])
        if len(rates) != 1:
            raise AttributionError(
                f"step {body['step']}: parameter groups have different learning rates {sorted(rates)}",
                "The inline dot score needs one rate per step; groups of their own rates need sketches of their own.",
            )
        moved = not body.get("skipped") and body["f"] is not None
        factors[int(body["step"])] = float(rates.pop()) * float(body["f"]) if moved else 0.0
    return factors


def unmeasured(steps: Iterable[Mapping[str, Any]]) -> int:
    """Return how many steps were taken without a finite ``f``; their records count as zero."""
    return sum(body["f"] is None and not body.get("skipped") for body in steps)


def coefficients(records: NDArray[np.void], factors: Mapping[int, float]) -> NDArray[np.float64]:
    """Return ``lr_t f_t w_it`` of each record, ``(n,)`` float64; a record whose step has no event counts as zero."""
    per_step = np.array([factors.get(int(step), 0.0) for step in records["step"]], dtype=np.float64)
    return per_step * records["weight"]


def score(
    blocks: Callable[[range], Blocks],
    queries: NDArray[np.floating[Any]],
    factors: Mapping[int, float],
    first_index: NDArray[np.int64],
    rows: int,
    samples_at_once: int = SAMPLES_AT_ONCE,
) -> Scores:
    """Score every used sample for every query.

    Args:
        blocks: Gives ``(records, raw int8 sketches (n, D))`` of a range of sample indices, and of others where that is
            simpler; called once per ``samples_at_once`` samples.
        queries: ``(Q, D)``, the sketch of ``∇F`` for each query.
        factors: ``lr x f`` by step.
        first_index: ``(S,)`` int64, sample index of each source file's row 0.
        rows: Samples in the data manifest.
        samples_at_once: Bounds the memory: one float32 sum of ``D`` numbers per sample.
    """
    z = np.asarray(queries, dtype=np.float64)
    parts = []
    source_sums = np.zeros((len(first_index), z.shape[1]))
    for start in range(0, rows, samples_at_once):
        stop = min(start + samples_at_once, rows)
        sums, uses = aggregate(blocks(range(start, stop)), factors, first_index, start, stop, z.shape[1])
        used = np.flatnonzero(uses)
        u = sums[used].astype(np.float64)  # (m, D)
        sample = used + start
        source = np.searchsorted(first_index, sample, side="right") - 1
        for s in np.unique(source):
            source_sums[s] += u[source == s].sum(0)
        parts.append((sample, uses[used], np.linalg.norm(u, axis=1), -u @ z.T))
    sample, uses, norm, dot = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Scores(sample, uses, norm, dot, source_sums, z)


def aggregate(
    blocks: Blocks, factors: Mapping[int, float], first_index: NDArray[np.int64], start: int, stop: int, dim: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return ``u_i`` and the number of uses of samples ``start`` to ``stop``.

    Returns:
        ``(stop - start, dim)`` float32 and ``(stop - start,)`` int64.
    """
    sums = np.zeros((stop - start, dim), dtype=np.float32)
    uses = np.zeros(stop - start, dtype=np.int64)
    for records, q in blocks:
        place = first_index[records["source_id"]] + records["row"].astype(np.int64) - start
        inside = np.flatnonzero((place >= 0) & (place < stop - start))
        inside = inside[np.argsort(place[inside], kind="stable")]
        if not inside.size:
            continue
        rows = records[inside]
        scale = (coefficients(rows, factors) * rows["scale_raw"]).astype(np.float32)
        contributions = q[inside].astype(np.float32) * scale[:, None]
        samples, first, count = np.unique(place[inside], return_index=True, return_counts=True)
        sums[samples] += np.add.reduceat(contributions, first, axis=0)
        uses[samples] += count
    return sums, uses
