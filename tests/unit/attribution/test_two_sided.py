"""The two-sided fold against its matrices written out, and against what it promises over seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attribution.sketch import rng, two_sided
from attribution.sketch.sign_fold import SignFold, unwrapped, wrap
from attribution.sketch.two_sided import SideFold, TwoSidedFold, fold_all

DIM = 24


def signs(purpose: str, n: int) -> Tensor:
    return torch.from_numpy(rng.signs(purpose, n)).float()


def two_sided_fold(rows: int, columns: int, k_rows: int, k_columns: int, seed: int = 0) -> TwoSidedFold:
    sides = [SideFold(signs(f"{seed}/0", rows), k_rows), SideFold(signs(f"{seed}/1", columns), k_columns)]
    entries = sides[0].buckets * sides[1].buckets
    core = SignFold(signs(f"{seed}/core", entries), rng.offset(f"{seed}/core", DIM), DIM)
    return TwoSidedFold(*sides, core)


def matrix_of(side: SideFold) -> np.ndarray:
    """The fold as a k x n matrix, one weight per column, by its definition."""
    matrix = np.zeros((side.buckets, len(side.weights)))
    for i, weight in enumerate(side.weights.tolist()):
        matrix[i % side.buckets, i] = weight
    return matrix


def written_out(fold: TwoSidedFold, gradient: np.ndarray) -> np.ndarray:
    """``Fold(P G Qᵀ)`` by dense matrices and a loop."""
    small = matrix_of(fold.rows) @ gradient @ matrix_of(fold.columns).T
    out = np.zeros(fold.core.dim)
    for e, (sign, value) in enumerate(zip(fold.core.signs.tolist(), small.reshape(-1), strict=True)):
        out[(fold.core.offset + e) % fold.core.dim] += sign * value
    return out


def sketch_matrix(fold: TwoSidedFold, gradients: Tensor) -> np.ndarray:
    sums = unwrapped(len(gradients), fold.core.dim)
    fold.add_matrices(sums, gradients)
    return wrap(sums).numpy()


SHAPES = [(12, 8, 4, 4), (13, 7, 4, 3), (50, 3, 8, 8), (3, 50, 8, 8), (5, 5, 5, 5), (9, 31, 4, 8), (1, 6, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_gradients_are_mapped_as_the_matrices_say(shape: tuple[int, int, int, int]) -> None:
    fold = two_sided_fold(*shape)
    gradients = torch.randn(3, *shape[:2], generator=torch.Generator().manual_seed(1))
    expected = [written_out(fold, g.double().numpy()) for g in gradients]
    np.testing.assert_allclose(sketch_matrix(fold, gradients), expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_folding_first_and_contracting_after_is_the_same_map(shape: tuple[int, int, int, int]) -> None:
    fold = two_sided_fold(*shape)
    source = torch.Generator().manual_seed(2)
    a, b = torch.randn(2, 5, shape[0], generator=source), torch.randn(2, 5, shape[1], generator=source)
    sums = unwrapped(2, DIM)
    fold.add_product(sums, fold.rows.fold(a), fold.columns.fold(b))
    expected = [written_out(fold, (x.double().t() @ y.double()).numpy()) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(wrap(sums).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_that_is_looked_up_is_the_same_map(shape: tuple[int, int, int, int]) -> None:
    fold = two_sided_fold(*shape)
    source = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, shape[0], (3, 6), generator=source)  # some occur twice
    b = torch.randn(3, 6, shape[1], generator=source)
    sums = unwrapped(3, DIM)
    fold.add_entries(sums, numbers, fold.columns.fold(b))
    one_hot = torch.nn.functional.one_hot(numbers, shape[0]).double()
    expected = [written_out(fold, (e.t() @ x.double()).numpy()) for e, x in zip(one_hot, b, strict=True)]
    np.testing.assert_allclose(wrap(sums).numpy(), expected, atol=1e-5)


def test_both_uses_of_a_tied_table_add_up_in_one_map() -> None:
    fold = two_sided_fold(11, 6, 4, 4)
    source = torch.Generator().manual_seed(4)
    table = torch.randn(11, 6, generator=source, requires_grad=True)
    ids, targets = torch.tensor([[1, 3, 3, 10]]), torch.tensor([[3, 3, 10, 1]])
    embedded = table[ids]
    embedded.retain_grad()
    hidden = torch.tanh(embedded)
    logits = hidden @ table.t()
    logits.retain_grad()
    torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum").backward()
    sums = unwrapped(1, DIM)
    fold.add_entries(sums, ids, fold.columns.fold(embedded.grad))
    fold.add_product(sums, fold.rows.fold(logits.grad), fold.columns.fold(hidden.detach()))
    np.testing.assert_allclose(wrap(sums)[0].numpy(), written_out(fold, table.grad.double().numpy()), atol=1e-5)


@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 40), st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_a_side_is_its_matrix_whatever_the_stretch(n: int, tokens: int, k: int, stretch: int) -> None:
    side = SideFold(signs("side", n), k)
    other = side.scaled(torch.rand(n, generator=torch.Generator().manual_seed(n)))
    x = torch.randn(2, tokens, n, generator=torch.Generator().manual_seed(tokens))
    before, two_sided.STRETCH_ENTRIES = two_sided.STRETCH_ENTRIES, stretch
    try:
        first, second = fold_all(x, [side, other])
        alone = side.fold(x)
    finally:
        two_sided.STRETCH_ENTRIES = before
    np.testing.assert_allclose(first.numpy(), x.double().numpy() @ matrix_of(side).T, atol=1e-4)
    np.testing.assert_allclose(second.numpy(), x.double().numpy() @ matrix_of(other).T, atol=1e-4)
    assert torch.equal(first, alone)


def test_an_axis_no_longer_than_its_buckets_is_kept() -> None:
    side = SideFold(signs("short", 5), 8)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert side.buckets == 5
    assert torch.equal(side.fold(x), x * side.weights)


def test_factors_enter_before_folding() -> None:
    fold = two_sided_fold(13, 7, 4, 3)
    source = torch.Generator().manual_seed(5)
    a, b = torch.rand(13, generator=source), torch.rand(7, generator=source)
    g = torch.randn(1, 13, 7, generator=source)
    scaled = fold.scaled(a, b)
    expected = written_out(fold, (a[:, None] * g[0] * b).double().numpy())
    np.testing.assert_allclose(sketch_matrix(scaled, g)[0], expected, atol=1e-5)
    numbers, x = torch.tensor([[2, 12, 2]]), torch.randn(1, 3, 7, generator=source)
    sums = unwrapped(1, DIM)
    scaled.add_entries(sums, numbers, scaled.columns.fold(x))
    table = torch.zeros(13, 7).index_add_(0, numbers[0], x[0])
    expected = written_out(fold, (a[:, None] * table * b).double().numpy())
    np.testing.assert_allclose(wrap(sums)[0].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_adjoint_is_the_transpose(shape: tuple[int, int, int, int]) -> None:
    fold = two_sided_fold(*shape)
    fold = fold.scaled(torch.linspace(0.5, 2, shape[0]), torch.linspace(2, 1, shape[1]))
    source = torch.Generator().manual_seed(6)
    x, u = torch.randn(2, *shape[:2], generator=source), torch.randn(2, DIM, generator=source)
    left = (sketch_matrix(fold, x) * u.numpy()).sum(1)
    right = (x * fold.adjoint(u)).sum((1, 2)).numpy()
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(40, 9, 4, 4), (6, 30, 4, 4), (21, 22, 8, 4)])
@pytest.mark.parametrize("similarity", [1.0, 0.3, 0.0])
def test_inner_products_are_unbiased_over_seeds(shape: tuple[int, int, int, int], similarity: float) -> None:
    source = torch.Generator().manual_seed(7)
    x, noise = torch.randn(2, *shape[:2], generator=source)
    x, noise = x / x.norm(), noise - x * (noise * x).sum() / x.norm() ** 2
    y = similarity * x + (1 - similarity**2) ** 0.5 * noise / noise.norm()
    found = []
    for seed in range(400):
        s = sketch_matrix(two_sided_fold(*shape, seed=seed), torch.stack([x, y]))
        found.append(float(s[0] @ s[1]))
    assert abs(np.mean(found) - similarity) < 4 * np.std(found) / 20


def test_a_batch_is_a_loop_and_the_map_is_linear() -> None:
    fold = two_sided_fold(13, 31, 4, 8)
    g = torch.randn(4, 13, 31, generator=torch.Generator().manual_seed(8))
    together = sketch_matrix(fold, g)
    alone = np.concatenate([sketch_matrix(fold, one[None]) for one in g])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    combined = sketch_matrix(fold, (2 * g[0] - 3 * g[1])[None])[0]
    np.testing.assert_allclose(combined, 2 * together[0] - 3 * together[1], atol=1e-4)


def test_sums_are_added_to_and_not_overwritten() -> None:
    fold = two_sided_fold(13, 7, 4, 3)
    source = torch.Generator().manual_seed(9)
    a, b = torch.randn(2, 4, 13, generator=source), torch.randn(2, 4, 7, generator=source)
    sums = unwrapped(2, DIM) + 1.0
    fold.add_product(sums, fold.rows.fold(a), fold.columns.fold(b))
    once = wrap(sums) - wrap(torch.ones_like(sums))
    fold.add_matrices(sums, -torch.bmm(a.transpose(1, 2), b))
    np.testing.assert_allclose(wrap(sums).numpy(), wrap(torch.ones_like(sums)).numpy(), atol=1e-4)
    assert once.abs().max() > 0.1
