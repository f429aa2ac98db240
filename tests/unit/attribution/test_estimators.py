"""Scores against brute force over every record, written out one by one."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from attribution.errors import AttributionError
from attribution.influence import estimators
from auditlog.format.records import RECORD

DIM, ROWS, STEPS = 64, 23, 9
FIRST = np.array([0, 10, 17], dtype=np.int64)  # three source files


def make_log(seed: int = 0) -> tuple[NDArray[np.void], NDArray[np.int8], dict[int, float]]:
    """Random records: samples return, some never appear, and one step moved nothing."""
    rng = np.random.default_rng(seed)
    n = 120
    records = np.zeros(n, RECORD)
    index = rng.integers(0, ROWS - 2, n)  # the last two samples are never used
    records["source_id"] = np.searchsorted(FIRST, index, side="right") - 1
    records["row"] = index - FIRST[records["source_id"]]
    records["step"] = rng.integers(1, STEPS + 1, n)
    records["weight"] = rng.uniform(0.01, 0.3, n)
    records["scale_raw"] = rng.uniform(0.001, 0.1, n)
    q = rng.integers(-127, 128, (n, DIM)).astype(np.int8)
    factors = {step: 0.0 if step == 4 else float(rng.uniform(1e-4, 1e-3)) for step in range(1, STEPS + 1)}
    return records, q, factors


def blocks_of(records, q, size):
    return lambda samples: ((records[i : i + size], q[i : i + size]) for i in range(0, len(records), size))


def brute_force(records, q, factors) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """``u_i`` and uses, one record at a time in float64."""
    u, uses = np.zeros((ROWS, DIM)), np.zeros(ROWS, dtype=np.int64)
    for record, row in zip(records, q, strict=True):
        sample = FIRST[record["source_id"]] + int(record["row"])
        scale = factors[int(record["step"])] * float(record["weight"]) * float(record["scale_raw"])
        u[sample] += scale * row.astype(np.float64)
        uses[sample] += 1
    return u, uses


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("samples_at_once", [4, 1000])
def test_scores_are_the_sum_over_a_samples_uses(block: int, samples_at_once: int) -> None:
    records, q, factors = make_log()
    queries = np.random.default_rng(1).normal(size=(3, DIM))
    found = estimators.score(blocks_of(records, q, block), queries, factors, FIRST, ROWS, samples_at_once)
    u, uses = brute_force(records, q, factors)
    used = np.flatnonzero(uses)
    assert found.sample.tolist() == used.tolist()
    assert found.uses.tolist() == uses[used].tolist()
    np.testing.assert_allclose(found.dot, -u[used] @ queries.T, rtol=1e-4, atol=1e-7)
    expected = -(u[used] @ queries.T) / np.outer(np.linalg.norm(u[used], axis=1), np.linalg.norm(queries, axis=1))
    np.testing.assert_allclose(found.cosine, expected, rtol=1e-4, atol=1e-6)


def test_a_range_of_samples_without_records_adds_nothing() -> None:
    records, q, factors = make_log()
    index = FIRST[records["source_id"]] + records["row"].astype(np.int64)
    records, q = records[index >= 4], q[index >= 4]
    queries = np.random.default_rng(1).normal(size=(2, DIM))
    index = FIRST[records["source_id"]] + records["row"].astype(np.int64)

    def of_range(samples: range):
        hit = (index >= samples.start) & (index < samples.stop)
        return [(records[hit], q[hit])] if hit.any() else []

    narrow = estimators.score(of_range, queries, factors, FIRST, ROWS, 4)
    every = estimators.score(blocks_of(records, q, 1000), queries, factors, FIRST, ROWS, 1000)
    assert narrow.sample.tolist() == every.sample.tolist()
    np.testing.assert_allclose(narrow.dot, every.dot, rtol=1e-5, atol=1e-8)


def test_source_totals_are_the_sums_of_their_samples_scores() -> None:
    records, q, factors = make_log()
    queries = np.random.default_rng(1).normal(size=(2, DIM))
    found = estimators.score(blocks_of(records, q, 16), queries, factors, FIRST, ROWS, 8)
    source = np.searchsorted(FIRST, found.sample, side="right") - 1
    for s in range(len(FIRST)):
        np.testing.assert_allclose(found.source_dot[s], found.dot[source == s].sum(0), rtol=1e-6)


def test_a_sample_that_moved_nothing_has_cosine_zero() -> None:
    records, q, factors = make_log()
    found = estimators.score(blocks_of(records, q, 16), np.ones((1, DIM)), dict.fromkeys(factors, 0.0), FIRST, ROWS)
    assert not found.dot.any()
    assert not found.cosine.any()


def test_step_factors_leave_out_what_moved_nothing() -> None:
    bodies = [
        {"step": 1, "lr": [0.1, 0.1], "f": 0.5, "skipped": False},
        {"step": 2, "lr": [0.1], "f": 1.0, "skipped": True},
        {"step": 3, "lr": [0.1], "f": None, "skipped": False},
    ]
    assert estimators.step_factors(bodies) == {1: pytest.approx(0.05), 2: 0.0, 3: 0.0}
    assert estimators.unmeasured(bodies) == 1


def test_two_learning_rates_in_one_step_are_refused_by_name() -> None:
    with pytest.raises(AttributionError, match="step 7"):
        estimators.step_factors([{"step": 7, "lr": [0.1, 0.2], "f": 1.0}])
