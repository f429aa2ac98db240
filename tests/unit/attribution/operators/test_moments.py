"""Means and variances of inner products over 400 seeds, against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from operator_cases import WEIGHTS
from torch import Tensor

from attribution.sketch.operators import FFD, OPERATORS, Chunked, Composed, CountSketch, Operator, TwoSided, Weight
from attribution.sketch.operators import operator as named
from attribution.sketch.operators.hadamard import sylvester
from attribution.sketch.operators.kronecker import concatenated, summed

SEEDS = 400
N, D = 512, 32
COSINES = (1.0, 0.3, 0.0)
SPARSE = ("count_sketch", "sjlt", "rolled_fold", "plain_fold")
SAME = ("gaussian", "rademacher", *SPARSE, "srht", "ffd", "affd", "affd_fast")

# D · Var[<Sx, Sy>] for unit vectors with cosine ρ and no large entries, up to terms of order D/N: a + b ρ².
GENERIC = dict.fromkeys(SAME, (1, 1)) | {
    "fjl": (1 + 2 / 48, 1 + 4 / 48),  # 48 nonzeros per row
    "afjl": (3, 5),
    "afjl_fft": (3, 5),
}


def unit_pairs(n: int, seed: int = 0) -> Tensor:
    """One unit vector and three more, at the cosines above, ``(4, n)`` float64."""
    generator = torch.Generator().manual_seed(seed)
    x, z = torch.linalg.qr(torch.randn(n, 2, generator=generator, dtype=torch.float64))[0].T
    return torch.stack([x, *(c * x + (1 - c * c) ** 0.5 * z for c in COSINES)])


def products(build: Callable[[str], Operator], vectors: Tensor) -> Tensor:
    """Inner products of the first vector's sketch with the others', ``(SEEDS, 3)``."""
    found = []
    for seed in range(SEEDS):
        first, *others = build(str(seed)) @ vectors
        found.append(torch.stack([first @ other for other in others]))
    return torch.stack(found)


@cache
def measured(name: str) -> Tensor:
    return products(lambda seed: named(name, N, D, seed), unit_pairs(N))


def assert_unbiased(found: Tensor) -> None:
    standard_error = found.std(0) / SEEDS**0.5
    assert ((found.mean(0) - torch.tensor(COSINES)).abs() < 4 * standard_error).all()


@pytest.mark.parametrize("name", OPERATORS)
def test_inner_products_are_unbiased(name: str) -> None:
    assert_unbiased(measured(name))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_variance_is_the_operators_own_closed_form(name: str) -> None:
    vectors = unit_pairs(N)
    closed = named(name, N, D).variance(vectors[:1].expand(3, N), vectors[1:])
    torch.testing.assert_close(measured(name).var(0), closed, rtol=0.25, atol=0)


@pytest.mark.parametrize("name", GENERIC)
def test_the_closed_form_is_the_textbook_one_for_generic_vectors(name: str) -> None:
    """With D far below N, and no entry that stands out: a + b ρ²."""
    vectors = unit_pairs(1 << 14)
    constant, slope = GENERIC[name]
    closed = 64 * named(name, 1 << 14, 64).variance(vectors[:1].expand(3, -1), vectors[1:])
    expected = torch.tensor([constant + slope * c**2 for c in COSINES], dtype=torch.float64)
    torch.testing.assert_close(closed, expected, rtol=0.04, atol=0)


@pytest.mark.parametrize("name", ["gaussian", "rademacher", "count_sketch", "sjlt"])
def test_coincident_entries_count_as_the_entries_kurtosis_says(name: str) -> None:
    """For one entry: a Gaussian's square varies by 2, a sign's not at all."""
    spike = torch.zeros(64, dtype=torch.float64)
    spike[5] = 1
    exact = 2 / 16 if name == "gaussian" else 0.0
    assert float(named(name, 64, 16).variance(spike, spike)) == pytest.approx(exact, abs=1e-12)
    norms = torch.stack([(named(name, 64, 16, str(s)) @ spike).square().sum() for s in range(SEEDS)])
    assert float(norms.var()) == pytest.approx(exact, rel=0.25, abs=1e-12)


SPIKES = {
    "rolled_fold": "the fold",
    "plain_fold": "the fold",
    "srht": "its signs and shuffles",
    "afjl": "its signs, shuffles and gains",
}


@pytest.mark.parametrize("name", SPIKES)
def test_entries_that_share_a_bucket_are_in_the_closed_form(name: str) -> None:
    """Eight large entries a multiple of D apart: the generic formula would be several times too small."""
    vectors = 0.02 * unit_pairs(N)
    vectors[:, 7 :: 2 * D] += torch.tensor([1.0, -1, 1, 1, -1, 1, 1, 1])
    found = products(lambda seed: named(name, N, D, seed), vectors)[:, 0]
    closed = float(named(name, N, D).variance(vectors[0], vectors[1]))
    generic = 2 * float(vectors[0] @ vectors[1]) ** 2 / D
    assert closed > 5 * generic
    assert float(found.var()) == pytest.approx(closed, rel=0.5)  # three times the standard error, tails are heavy


@pytest.mark.parametrize("name", ["affd", "affd_fast"])
def test_where_nothing_is_folded_only_affds_gains_vary(name: str) -> None:
    vectors = unit_pairs(64)
    found = products(lambda seed: named(name, 64, 64, seed), vectors)
    closed = named(name, 64, 64).variance(vectors[:1].expand(3, 64), vectors[1:])
    assert float(closed[0]) == pytest.approx(2 / 64 * (3 - 2 * float((vectors[0] ** 4).sum())), rel=1e-9)
    torch.testing.assert_close(found.var(0), closed, rtol=0.25, atol=0)


@pytest.mark.parametrize(("name", "blocks"), [("count_sketch", 1), ("sjlt", 4)])
def test_every_bucket_is_used_once_per_block(name: str, blocks: int) -> None:
    matrix = named(name, 2000, 32) @ torch.eye(2000, dtype=torch.float64)  # (N, D)
    nonzero = (matrix != 0).view(2000, blocks, 32 // blocks)
    assert (nonzero.sum(2) == 1).all()
    assert nonzero.any(0).all()
    torch.testing.assert_close(matrix.square().sum(1), torch.ones(2000, dtype=torch.float64))


def bad_input(dim: int) -> Tensor:
    """The first block is a row of the Hadamard matrix, all others are zero."""
    x = torch.zeros(512, dtype=torch.float64)
    x[:dim] = torch.from_numpy(sylvester(dim)[0]) / dim**0.5
    return x


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_fastfood_has_the_flaw_that_was_proven_and_affd_has_not(dim: int) -> None:
    """On its bad input ‖S x‖² is one squared Gaussian, whatever D: variance 2."""
    x = bad_input(dim)
    gain = FFD(512, dim).tables.get("gains", x)[0, 0]
    assert float((FFD(512, dim) @ x).square().sum()) == pytest.approx(float(gain**2), rel=1e-12)
    flawed = torch.stack([(FFD(512, dim, str(s)) @ x).square().sum() for s in range(SEEDS)])
    assert float(flawed.var()) == pytest.approx(2, rel=0.57)  # three times the standard error of such a variance
    assert float(FFD(512, dim).variance(x, x)) == pytest.approx(2, rel=1e-9)
    sound = torch.stack([(named("affd_fast", 512, dim, str(s)) @ x).square().sum() for s in range(SEEDS)])
    assert float(sound.var()) < 6 / dim


# Two-sided maps: equation (K).


def equation_k(X: Tensor, Y: Tensor, out: float, inn: float) -> float:
    """The variance for Gaussian sides, written out; ``out`` and ``inn`` are 1/k, or 0 for the identity."""
    left, right = X @ Y.T, X.T @ Y
    trace, ip = torch.trace(left @ left), (X * Y).sum()
    a, b = left.square().sum(), right.square().sum()
    both = ip**2 + b + a + X.square().sum() * Y.square().sum()
    return float(out * (trace + a) + inn * (trace + b) + out * inn * both)


SIDES = {"both": (4, 6, 1 / 4, 1 / 6), "in only": (12, 6, 0, 1 / 6), "out only": (4, 20, 1 / 4, 0)}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("rank", [1, 12])
def test_two_sided_maps_have_the_variance_of_equation_k(side: str, rank: int) -> None:
    k_out, k_in, out, inn = SIDES[side]
    generator = torch.Generator().manual_seed(3)
    factors = torch.randn(2, 12 + 20, rank, generator=generator, dtype=torch.float64)
    X, Y = factors[:, :12] @ factors[:, 12:].mT
    Y = Y + 0.5 * X
    pair = torch.stack([X.flatten(), Y.flatten()])
    expected = equation_k(X, Y, out, inn)
    weight = Weight(12, 20)
    assert float(TwoSided(weight, k_out, k_in).variance(*pair)) == pytest.approx(expected, rel=1e-9)
    found = products(lambda seed: TwoSided(weight, k_out, k_in, seed), pair.repeat(2, 1)[:2])[:, 0]
    seeds_of_heavy_tails = 0.35 if rank == 1 else 0.25  # the variance's own standard error is 8 and 6 %
    assert float(found.var()) == pytest.approx(expected, rel=seeds_of_heavy_tails)
    assert abs(float(found.mean() - (X * Y).sum())) < 4 * float(found.std()) / SEEDS**0.5


def test_a_side_that_needs_no_projection_has_no_noise() -> None:
    X, Y = torch.randn(2, 8 * 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S = TwoSided(Weight(8, 5), 8, 64)
    assert S.D == 40
    assert float((S @ X) @ (S @ Y)) == pytest.approx(float(X @ Y), rel=1e-12)
    assert float(S.variance(X, Y)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("k_out", "k_in"), [(3, 4), (8, 4), (3, 50)])
def test_factors_are_projected_before_they_meet(k_out: int, k_in: int) -> None:
    S = TwoSided(Weight(8, 15), k_out, k_in)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 15, generator=generator, dtype=torch.float64)
    g = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    whole = torch.einsum("bto,bti->boi", g, x).flatten(1)
    torch.testing.assert_close(S.contract(x, g), S @ whole, rtol=1e-12, atol=1e-12)
    P, Q = S.tables.get("out", x) / 3**0.5 if k_out == 3 else torch.eye(8).double(), torch.eye(15).double()
    if k_in == 4:
        Q = S.tables.get("in", x) / 2
    torch.testing.assert_close((S @ whole[0]).view(S.k_out, S.k_in), P @ whole[0].view(8, 15) @ Q.T)


COMPOSITES: dict[str, tuple[int, Callable[[str], Operator]]] = {
    "concatenated": (405, lambda seed: concatenated(WEIGHTS, 3, 4, seed)),
    "summed": (405, lambda seed: summed(WEIGHTS, 3, 4, 8, seed)),
    "chunks of hadamard": (405, lambda seed: Chunked.of(OPERATORS["srht"], 405, D, seed, chunk=100)),
    "chunks of folds": (405, lambda seed: Chunked.of(OPERATORS["rolled_fold"], 405, D, seed, chunk=100)),
    "composed": (405, lambda seed: Composed(CountSketch(64, 32, seed), CountSketch(405, 64, f"{seed}/first"))),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_operators_of_operators_are_unbiased_with_the_variance_that_they_state(name: str) -> None:
    length, build = COMPOSITES[name]
    vectors = unit_pairs(length)
    found = products(build, vectors)
    assert_unbiased(found)
    closed = build("0").variance(vectors[:1].expand(3, length), vectors[1:])
    torch.testing.assert_close(found.var(0), closed, rtol=0.25, atol=0)
