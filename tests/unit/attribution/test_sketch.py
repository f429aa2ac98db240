"""The rolled sign-fold against its own matrix, written out entry by entry."""

import numpy as np
import pytest
import torch

from attribution.errors import SketchMismatchError
from attribution.sketch import rng
from attribution.sketch.layout import SketchLayout
from attribution.sketch.quantize import dequantize, quantize
from attribution.sketch.sign_fold import SignFold, unwrapped, wrap


def dense(signs: torch.Tensor, offset: int, dim: int) -> torch.Tensor:
    """The D x n matrix of the fold, from its definition."""
    matrix = torch.zeros(dim, len(signs), dtype=torch.float64)
    for entry, sign in enumerate(signs.tolist()):
        matrix[(offset + entry) % dim, entry] = sign
    return matrix


def fold_of(n: int, dim: int, offset: int, purpose: str = "t") -> SignFold:
    return SignFold(torch.from_numpy(rng.signs(purpose, n)).double(), offset, dim)


@pytest.mark.parametrize("n", [1, 7, 16, 17, 40, 16 * 9, 16 * 33, 16 * 40 + 3])
@pytest.mark.parametrize("offset", [0, 5, 15])
def test_fold_and_adjoint_are_the_matrix_and_its_transpose(n: int, offset: int) -> None:
    fold = fold_of(n, 16, offset)
    S = dense(fold.signs, offset, 16)
    x, u = torch.randn(3, n, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    sums = unwrapped(3, 16, dtype=torch.float64)
    sums[:, :16] += 1
    sums[:, 32:48] += 1
    fold.add_to(sums, x)
    torch.testing.assert_close(wrap(sums), 2 + x @ S.T)
    torch.testing.assert_close(fold.adjoint(u), u @ S)


def test_inner_products_are_unbiased_with_the_variance_of_a_sign_hash() -> None:
    """Var <Sx, Sy> = (‖x‖²‖y‖² + <x,y>² - 2 Σ x²y²) / D for a hash into D buckets.

    The fold's buckets are i mod D, which for a generic vector has the same variance (METHODS.md).
    """
    n, dim, seeds = 512, 64, 400
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.normal(size=n))
    y = 0.5 * x + torch.from_numpy(generator.normal(size=n))
    products = []
    for seed in range(seeds):
        sums = unwrapped(2, dim, dtype=torch.float64)
        fold_of(n, dim, seed % dim, f"seed {seed}").add_to(sums, torch.stack([x, y]))
        out = wrap(sums)
        products.append(float(out[0] @ out[1]))
    exact = float(x @ y)
    variance = float((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x**2 * y**2).sum()) / dim
    assert abs(np.mean(products) - exact) < 4 * np.sqrt(variance / seeds)
    assert np.var(products) == pytest.approx(variance, rel=0.3)


SHAPES = {"a": (4, 30), "b": (30, 4), "bias": (30,)}


def test_layout_adds_every_parameter_into_one_vector_tall_matrices_column_by_column() -> None:
    layout = SketchLayout(SHAPES, dim=32, seed="s")
    grads = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    expected = torch.zeros(32, dtype=torch.float64)
    for name, grad in grads.items():
        flat = grad.t().reshape(-1) if name == "b" else grad.reshape(-1)
        fold = layout.maps[name]
        expected += dense(fold.signs, fold.offset, 32) @ flat.double()
    torch.testing.assert_close(layout.sketch(grads), expected.float())


def test_a_missing_parameter_counts_as_zero_and_an_unknown_one_is_refused() -> None:
    layout = SketchLayout(SHAPES, dim=32)
    assert layout.sketch({}).eq(0).all()
    with pytest.raises(SketchMismatchError, match="parameter a: shape"):
        layout.sketch({"a": torch.zeros(4, 31)})
    with pytest.raises(SketchMismatchError, match="parameter c"):
        layout.sketch({"c": torch.zeros(4)})


def test_layout_is_rebuilt_from_the_manifest_or_refused() -> None:
    layout = SketchLayout(SHAPES, dim=32, seed="s")
    assert SketchLayout.from_block(layout.block()).tables_sha256 == layout.tables_sha256
    assert SketchLayout(SHAPES, dim=32, seed="t").tables_sha256 != layout.tables_sha256
    forged = layout.block().model_copy(update={"seed": "t"})
    with pytest.raises(SketchMismatchError, match="random tables"):
        SketchLayout.from_block(forged)


def test_tables_never_change() -> None:
    """Stored sketches are only readable while this digest stays what it is."""
    assert SketchLayout(SHAPES, dim=32, seed="s").tables_sha256 == (
        "3feb5e8f05a5302b2af22af03bccb735459971a826ad1ca0d9f1d103539518fd"
    )


def test_int8_rows_are_within_half_a_step_and_zero_rows_stay_zero() -> None:
    rows = torch.randn(5, 4096)
    rows[3] = 0
    q, scale = quantize(rows)
    assert q.dtype == np.int8
    assert scale[3] == 0
    error = np.abs(dequantize(q, scale) - rows.numpy())
    assert (error <= scale[:, None] * 0.5000001).all()


def test_int8_costs_almost_nothing_of_the_inner_products() -> None:
    """The bar of the project: Pearson of inner products falls by at most 0.002; row error is 1 to 4 %."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(1, 4096, generator=generator)
    rows = 0.3 * common + torch.randn(96, 4096, generator=generator) * torch.rand(96, 1, generator=generator)
    back = torch.from_numpy(dequantize(*quantize(rows)))
    upper = torch.triu_indices(96, 96, 1)
    exact, kept = (m @ m.T for m in (rows, back))
    pearson = torch.corrcoef(torch.stack([exact[*upper], kept[*upper]]))[0, 1]
    assert pearson > 0.998
    row_error = ((back - rows).norm(dim=1) / rows.norm(dim=1)).max()
    assert row_error < 0.04
