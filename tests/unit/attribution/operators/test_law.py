"""The correlation law on gradients of a small trained transformer, plain and with outlier features in all layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from benchmarks.small_gpt import Gradients, gradients, linear_weights, trained

from attribution.sketch.operators import OPERATORS, Chunked, Operator, RolledFold, law, operator
from attribution.sketch.operators.kronecker import Weight, concatenated, summed

TOLERANCE = 0.03
SEEDS = 5

# Left out: the dense maps (tens of megabytes each), AFFD (the inner products of FastAFFD), and QK and HaarAFJL: their
# few random numbers give all pairs of one draw nearly the same error, which a correlation does not see.
COVERED = [name for name in OPERATORS if name not in ("gaussian", "rademacher", "affd", "qk", "afjl_q")]


@cache
def population(outliers: int) -> Gradients:
    return gradients(trained(width=32, layers=2, steps=25, outliers=outliers), rows=40)


def mean_pearson(build: Callable[[str], Operator], x: torch.Tensor) -> float:
    return sum(law.pearson(build(str(seed)), x) for seed in range(SEEDS)) / SEEDS


def builder(name: str, found: Gradients, D: int) -> Callable[[str], Operator]:
    if name == "rolled_fold":  # the product's own use: one roll per parameter
        sizes = {parameter: shape.numel() for parameter, shape in found.shapes.items()}
        return lambda seed: Chunked([RolledFold(n, D, f"{seed}/{parameter}") for parameter, n in sizes.items()])
    return lambda seed: operator(name, found.rows.shape[1], D, seed)


@pytest.mark.parametrize("outliers", [0, 2])
@pytest.mark.parametrize("name", COVERED)
def test_correlation_is_what_the_law_says(name: str, outliers: int) -> None:
    found = population(outliers)
    build = builder(name, found, 512)
    predicted = law.predicted_pearson(law.kappa(build("0"), found.rows, sample=32), 512)
    assert mean_pearson(build, found.rows) == pytest.approx(predicted, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["count_sketch", "rolled_fold", "plain_fold", "srht", "affd_fast"])
def test_without_outliers_one_kappa_serves_all(name: str) -> None:
    """The dense map's κ, measured on the exact gradients alone."""
    found = population(0)
    predicted = law.predicted_pearson(law.dense_kappa(found.rows), 256)
    assert mean_pearson(builder(name, found, 256), found.rows) == pytest.approx(predicted, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["count_sketch", "affd_fast"])
def test_maps_that_mix_everything_do_not_mind_shared_outliers(name: str) -> None:
    found = population(2)
    predicted = law.predicted_pearson(law.dense_kappa(found.rows), 256)
    assert mean_pearson(builder(name, found, 256), found.rows) == pytest.approx(predicted, abs=TOLERANCE)


def test_shared_outliers_pile_up_without_a_roll_and_in_srht() -> None:
    """Width 32 divides D, so an outlier feature meets itself again in D/32 buckets: over all layers without a roll,
    within one weight with it. A D that has no divisor in common with the width spreads it."""
    found = population(2)
    dense = law.predicted_pearson(law.dense_kappa(found.rows), 256)
    for name in ("plain_fold", "srht"):
        assert mean_pearson(builder(name, found, 256), found.rows) < dense - 0.08
    plain, rolled = (law.kappa(builder(n, found, 256)("0"), found.rows, 32) for n in ("plain_fold", "rolled_fold"))
    assert rolled < 0.9 * plain
    assert mean_pearson(builder("rolled_fold", found, 255), found.rows) > dense - TOLERANCE


@pytest.mark.parametrize("outliers", [0, 2])
def test_concatenated_kronecker_blocks_fall_far_below_the_law(outliers: int) -> None:
    """Summed into half as many numbers they keep nearly the same: what is lost, is lost in the blocks."""
    found = population(outliers)
    names = linear_weights(found)
    x, weights = found.part(*names), [Weight(*found.shapes[name]) for name in names]
    side_by_side = mean_pearson(lambda seed: concatenated(weights, 8, 8, seed), x)
    added_up = mean_pearson(lambda seed: summed(weights, 8, 8, 256, seed), x)
    assert side_by_side < law.predicted_pearson(law.dense_kappa(x), 8 * 8 * len(weights)) - 0.1
    assert added_up > side_by_side - 0.08
    blocks = concatenated(weights, 8, 8)
    assert side_by_side > law.predicted_pearson(law.kappa(blocks, x, sample=32), blocks.D) - TOLERANCE


def test_qk_needs_many_times_the_size_of_affd() -> None:
    found = population(0)
    qk = sum(law.pearson(operator("qk", found.rows.shape[1], 1024, str(seed)), found.rows) for seed in range(6)) / 6
    assert qk < mean_pearson(builder("affd_fast", found, 256), found.rows)


def test_the_size_for_a_correlation_is_the_law_read_backwards() -> None:
    assert law.size_for(100, 0.98) == pytest.approx(100 * 24.25, rel=1e-3)
    assert law.predicted_pearson(100, int(law.size_for(100, 0.95))) == pytest.approx(0.95, abs=1e-3)


def test_kappa_of_a_dense_map_is_the_plain_ratio() -> None:
    """Numerator and denominator over all pairs, by hand."""
    x = torch.randn(10, 40, generator=torch.Generator().manual_seed(0))
    pairs = [(a.double(), b.double()) for i, a in enumerate(x) for b in x[i + 1 :]]
    inner = torch.stack([a @ b for a, b in pairs])
    size = torch.stack([(a @ a) * (b @ b) + (a @ b) ** 2 for a, b in pairs]).mean()
    expected = float(size / inner.var(correction=0))
    assert law.dense_kappa(x) == pytest.approx(expected, rel=1e-6)
    assert law.kappa(operator("gaussian", 40, 8), x) == pytest.approx(expected, rel=1e-6)
