"""What makes the fast operators fast: factors, folds, and no table that grows where it should not."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as reference
from scipy.stats import kstest, ortho_group
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attribution.errors import SketchMismatchError
from attribution.sketch.layout import SketchLayout
from attribution.sketch.operators import (
    AFFD,
    AFJL,
    QK,
    SRHT,
    Chunked,
    FastAFFD,
    HaarAFJL,
    Operator,
    RolledFold,
    hadamard,
    moments,
    operator,
)
from attribution.sketch.operators.tables import Tables, gaussians, permutations
from auditlog.errors import UsageError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def identity(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def matrix(S: Operator) -> Tensor:
    """Return ``S`` written out, ``(D, N)``."""
    return (S @ identity(S.N)).T


# The transform.


def test_hadamard_matrices_are_sylvesters() -> None:
    for n in (1, 2, 32):
        assert (hadamard.sylvester(n) == reference(n)).all()


@settings(max_examples=30, deadline=None)
@given(log_n=st.integers(0, 9), log_d=st.integers(0, 9), block=st.sampled_from([2, 4, 8, 64]), data=st.data())
def test_cut_factors_give_the_first_rows_of_the_whole(log_n: int, log_d: int, block: int, data: st.DataObject) -> None:
    n, d = 1 << log_n, 1 << min(log_n, log_d)
    edges = hadamard.blocks(n, block)
    rows = hadamard.leading_rows(edges, d)
    assert (prod(edges), prod(rows)) == (n, d)
    assert max(edges) <= block
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    factors = [torch.randn(e, e, generator=generator, dtype=torch.float64) for e in edges]
    cut = [factor[:kept] for factor, kept in zip(factors, rows, strict=True)]
    signs = torch.randn(n, generator=generator, dtype=torch.float64).sign()
    whole = factors[0]
    for factor in factors[1:]:
        whole = torch.kron(whole, factor)
    x, u = torch.randn(2, n, generator=generator, dtype=torch.float64), torch.randn(2, d, dtype=torch.float64)
    torch.testing.assert_close(hadamard.transform(x, cut, signs), (x * signs) @ whole[:d].T)
    torch.testing.assert_close(hadamard.transform_adjoint(u, cut, signs), (u @ whole[:d]) * signs)


def test_signs_are_applied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    S, x = SRHT(512, 32), torch.randn(3, 512, dtype=torch.float64)
    whole = S @ x
    monkeypatch.setattr(hadamard, "_PIECE", 16)
    torch.testing.assert_close(S @ x, whole, **EXACT)


@pytest.mark.parametrize("kind", [SRHT, AFJL])
@pytest.mark.parametrize(("D", "block"), [(8, 8), (64, 8), (16, 64)])
def test_srht_and_afjl_are_signs_shuffled_rows_and_a_cut(kind: type[SRHT] | type[AFJL], D: int, block: int) -> None:
    """Rows of each factor are shuffled before they are cut: the first rows of the whole are not those of H."""
    S = kind(500, D, block=block)
    whole = identity(1)
    for axis, edge in enumerate(hadamard.blocks(512, block)):
        purpose = f"gradtrail/operator/0/{S.name}/N=512/D={D}/block={block}/rows/{axis}"
        rows = permutations(purpose, 1, edge)[0]
        whole = torch.kron(whole, torch.from_numpy(hadamard.sylvester(edge)[rows]).double() / edge**0.5)
    published = (512 / D) ** 0.5 * whole[:D] @ torch.diag(S.tables.get("signs", whole))
    if kind is AFJL:
        published = S.tables.get("gains", whole)[:, None] * published
    torch.testing.assert_close(matrix(S), published[:, :500], **EXACT)


# AFFD.


@pytest.mark.parametrize(("N", "D", "block"), [(256, 1, 8), (256, 16, 4), (500, 64, 8), (512, 512, 64), (512, 8, 64)])
def test_affd_is_the_published_product_and_a_fold_up_to_a_rotation(N: int, D: int, block: int) -> None:
    S, fast = AFFD(N, D, block=block), FastAFFD(N, D, block=block)
    n = S.padded
    whole_first, whole_second = identity(1), identity(1)
    for axis, edge in enumerate(S.edges):
        full = torch.from_numpy(hadamard.sylvester(edge)).double()
        purpose = f"gradtrail/operator/0/affd/N={n}/D={D}/block={block}"
        rows, columns = (permutations(f"{purpose}/{side}/{axis}", 1, edge)[0] for side in ("rows", "columns"))
        whole_first = torch.kron(whole_first, full[rows] / edge**0.5)
        whole_second = torch.kron(whole_second, full[:, columns] / edge**0.5)
    signs, gains = (S.tables.get(name, whole_first) for name in ("signs", "gains"))
    published = (n / D) ** 0.5 * whole_second[:D] @ torch.diag(gains) @ whole_first @ torch.diag(signs)
    torch.testing.assert_close(matrix(S), published[:, :N], **EXACT)
    # No inner product changes without the last rotation, and the fold adds up N/D entries with weight 1 or 0.
    torch.testing.assert_close(matrix(fast).T @ matrix(fast), matrix(S).T @ matrix(S), rtol=1e-10, atol=1e-10)
    folds = fast._second(identity(n)).T
    assert (folds.sum(0) == 1).all()
    assert (folds.sum(1) == n // D).all()


@pytest.mark.parametrize("kind", [SRHT, QK])
@pytest.mark.parametrize("block", [8, 64])
def test_nothing_is_lost_where_no_row_is_thrown_away(kind: type[SRHT] | type[QK], block: int) -> None:
    S = kind(1000, 1024, block=block)
    assert S.padded == S.D
    torch.testing.assert_close(matrix(S).T @ matrix(S), identity(1000), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["srht", "afjl_fft", "afjl", "afjl_q", "qk"])
def test_rows_are_orthogonal_and_of_equal_norm_before_their_gains(name: str) -> None:
    S = operator(name, 256, 32)
    rows = matrix(S)
    if "afjl" in name:
        gains = S.tables.get("gains", rows)
        assert gains.shape == (32,)
        rows = rows / gains[:, None]
    torch.testing.assert_close(rows @ rows.T, identity(32) * 256 / 32, rtol=1e-10, atol=1e-10)


def test_the_hartley_transform_is_cosine_plus_sine() -> None:
    S = operator("afjl_fft", 64, 64)
    frequencies = S.tables.get("frequencies", torch.zeros(1))
    assert sorted(frequencies.tolist()) == list(range(64))
    angle = 2 * np.pi * torch.outer(frequencies.double(), torch.arange(64.0, dtype=torch.float64)) / 64
    expected = (angle.cos() + angle.sin()) / 8 * S.tables.get("signs", angle) * S.tables.get("gains", angle)[:, None]
    torch.testing.assert_close(matrix(S), expected, rtol=1e-10, atol=1e-10)


def test_the_rows_of_qk_can_be_chosen() -> None:
    S = QK(512, 16, block=8, rows=(2, 2, 4))
    factors = [S.tables.get(f"factor/{axis}", identity(1)) for axis in range(3)]
    assert [tuple(f.shape) for f in factors] == [(2, 8), (2, 8), (4, 8)]
    torch.testing.assert_close(matrix(S), torch.kron(torch.kron(*factors[:2]), factors[2]) * 32**0.5, **EXACT)
    with pytest.raises(UsageError, match="multiply to 32, not to D=16"):
        QK(512, 16, block=8, rows=(2, 4, 4))
    with pytest.raises(UsageError, match="do not fit factors"):
        QK(512, 16, block=8, rows=(1, 1, 16))


# The product's map.


def test_the_products_map_is_a_sum_of_rolled_folds() -> None:
    shapes = {"a": (4, 30), "bias": (30,)}
    gradients = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}
    S = Chunked([RolledFold(prod(shape), 32, f"s/{name}") for name, shape in shapes.items()])
    expected = SketchLayout(shapes, dim=32, seed="s").sketch(gradients)
    torch.testing.assert_close(S.sketch(g.reshape(1, -1) for g in gradients.values())[0], expected)


# Fourth moments of Kronecker factors.


@pytest.mark.parametrize("cut", list(product([True, False], repeat=3)))
def test_fourth_moments_are_the_sum_over_all_pairings(cut: tuple[bool, ...]) -> None:
    """Written out with four vectors and one letter per index."""
    edges = (2, 3, 4)
    sides = [moments.haar(e, e - 1) if c else moments.IDENTITY for e, c in zip(edges, cut, strict=True)]
    vectors = torch.randn(4, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = 0.0
    for choice in product([(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)], repeat=3):
        weight = prod(s.a if groups == (0, 0, 1, 1) else s.b for s, groups in zip(sides, choice, strict=True))
        labels = ["".join("abcdef"[2 * axis + groups[i]] for axis, groups in enumerate(choice)) for i in range(4)]
        total += weight * float(torch.einsum(",".join(labels) + "->", *(v.view(edges) for v in vectors)))
    assert float(moments.fourth(*vectors, edges, sides)) == pytest.approx(total, rel=1e-10)


def test_coefficients_of_cut_rotations_are_those_of_random_rotations() -> None:
    """From 4,000 rotations of SciPy's: E M_11² = a + 2b, E M_11 M_22 = a, E M_12² = b for M = (d/k) QᵀQ."""
    d, k = 5, 2
    cut = ortho_group.rvs(d, size=4000, random_state=0)[:, :k]
    gram = d / k * np.einsum("rki,rkj->rij", cut, cut)
    side = moments.haar(d, k)
    assert float((gram[:, 0, 0] ** 2).mean()) == pytest.approx(side.a + 2 * side.b, rel=0.05)
    assert float((gram[:, 0, 0] * gram[:, 1, 1]).mean()) == pytest.approx(side.a, rel=0.05)
    assert float((gram[:, 0, 1] ** 2).mean()) == pytest.approx(side.b, rel=0.05)
    assert moments.haar(d, d) == moments.IDENTITY


# Random tables.


def test_gaussians_are_standard_and_independent() -> None:
    drawn = gaussians("test", 20_001)
    assert kstest(drawn, "norm").pvalue > 0.01
    assert abs(float((drawn[0:-1:2] * drawn[1::2]).mean())) < 4 / 100
    assert (drawn * 2**16 == np.rint(drawn * 2**16)).all(), "another libm must round to the same table"
    assert (drawn.astype(np.float32) == drawn).all()


def test_permutations_are_uniform_and_apart() -> None:
    drawn = permutations("test", 6000, 3)
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert np.abs(counts - 1000).max() < 5 * 1000**0.5


def test_rotations_have_no_preferred_direction() -> None:
    """Signs of the first entry are even, and its square has mean 1/n: QR alone would make it one-sided."""
    first = []
    for seed in range(400):
        tables = Tables(str(seed), "")
        tables.haar("q", 4, 2)
        first.append(float(tables.get("q", identity(1))[0, 0]))
    drawn = np.array(first)
    assert abs((drawn > 0).mean() - 0.5) < 4 * 0.5 / 20
    assert (drawn**2).mean() == pytest.approx(0.25, rel=0.15)


def test_distinct_integers_are_distinct_and_evenly_drawn() -> None:
    tables = Tables("p", "")
    tables.distinct("all", 50, 50)
    assert sorted(tables.get("all", identity(1)).tolist()) == list(range(50))
    sums = []
    for seed in range(400):
        tables = Tables(str(seed), "")
        tables.distinct("few", 100, 5)
        sums.append(float(tables.get("few", identity(1)).double().mean()))
    assert abs(np.mean(sums) - 49.5) < 4 * np.std(sums) / 20


def test_the_digest_depends_on_every_table_and_the_description() -> None:
    def digest(purpose: str, description: str, value: int) -> str:
        tables = Tables(purpose, description)
        tables.keep("t", np.array([value], dtype=np.int8))
        return tables.digest

    assert len({digest("p", "d", 1), digest("q", "d", 1), digest("p", "e", 1), digest("p", "d", 2)}) == 4


def test_tables_follow_the_dtype_of_what_they_meet() -> None:
    S = SRHT(64, 8)
    for dtype in (torch.float64, torch.float32, torch.float64):
        assert (S @ torch.ones(64, dtype=dtype)).dtype == dtype


# Memory.


class Largest(TorchDispatchMode):
    """Watches every tensor that torch makes: the largest one of numbers and the largest one of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.indices = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(made, Tensor) and made.dtype == torch.int64:
                self.indices = max(self.indices, made.numel())
            elif isinstance(made, Tensor):
                self.numbers = max(self.numbers, made.numel())
        return out


@contextmanager
def peak_of_numpy() -> Iterator[list[int]]:
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [AFFD, FastAFFD, AFJL, HaarAFJL, QK, SRHT])
def test_no_table_of_size_dn_and_no_index_of_length_n(kind: type[Operator]) -> None:
    """Making the map takes a few bytes per entry, applying it at most a few copies of ``x``."""
    N, D = 1 << 18, 1 << 10
    with peak_of_numpy() as peak:
        S = kind(N, D)
    bytes_per_entry = {AFFD: 160, FastAFFD: 160, QK: 4, HaarAFJL: 4}.get(kind, 16)  # drawing Gaussians takes most
    assert peak[0] < bytes_per_entry * N
    with Largest() as largest:
        S.adjoint(S @ torch.ones(N))
    assert largest.numbers <= N
    assert largest.indices < 1024
    assert not any(table.dtype.kind == "i" and table.itemsize > 1 for table in S.tables._host.values())


def test_a_stream_holds_one_chunk() -> None:
    S = Chunked.of(SRHT, 1 << 16, 64, chunk=1 << 10)
    with Largest() as largest:
        S.sketch(torch.ones(1, 1 << 8) for _ in range(1 << 8))
    assert largest.numbers <= 64 * 64  # the largest factor
    with pytest.raises(SketchMismatchError):
        S.sketch([])
