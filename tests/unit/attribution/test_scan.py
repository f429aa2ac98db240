"""The top-k scan against brute force: every product in int64, every record sorted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from attribution.errors import AttributionError, SketchMismatchError
from attribution.influence import scan
from attribution.influence.scan import Int8Queries, top_k
from attribution.influence.torch_view import as_tensor
from auditlog.errors import StoreError
from auditlog.format.records import RECORD
from auditlog.ledger.reader import open_sketches
from auditlog.ledger.shards import ShardReader
from auditlog.ledger.sketch_reader import LogSketches, SketchReader
from auditlog.trust.keys import Signer
from tests.support import LedgerSimulator, Plan, make_manifest, write_sources

Rows = NDArray[np.int8]
Make = Callable[..., tuple[SketchReader, Rows, NDArray[np.void]]]
DIM = 24


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Store rows ``(n, forms x D)``, three to a step, with a row of no sample behind each step, and open a reader."""
    manifests = {}
    for number, forms in enumerate((("raw",), ("raw", "whitened"))):
        data = write_sources(tmp_path_factory.mktemp("data") / str(number), (4,))
        signer = Signer.generate("bank.example/audit")
        manifests[len(forms)] = lambda dim, d=data, s=signer, f=forms: make_manifest(d, s, Plan(dim=dim, forms=f))

    def make(
        rows: Rows, scale: NDArray[np.float64] | None = None, *, forms: int = 1, dim: int = DIM, shard_rows: int = 16
    ) -> tuple[SketchReader, Rows, NDArray[np.void]]:
        folder = tmp_path_factory.mktemp("run")
        records = np.zeros(len(rows), RECORD)
        records["seq"] = np.arange(len(rows))
        records["scale_raw"] = 1 if scale is None else scale
        records["scale_whitened"] = 2 * records["scale_raw"]
        place = np.arange(len(rows)) + np.arange(len(rows)) // 3
        stored = np.full((len(rows) + len(rows) // 3 + 1, forms * dim), 127, np.int8)  # the gradient that was consumed
        stored[place] = rows
        records["shard"], records["shard_row"] = np.divmod(place, shard_rows)
        (folder / "sketches").mkdir()
        for number in range(-(-len(stored) // shard_rows)):
            part = stored[number * shard_rows : (number + 1) * shard_rows]
            np.save(folder / f"sketches/{number:06d}.npy", part)
        reader = SketchReader(manifests[forms](dim), [LogSketches(records, ShardReader(folder, forms * dim))])
        return reader, rows, records

    return make


def random_rows(n: int, width: int = DIM, seed: int = 0, lowest: int = -127) -> Rows:
    return np.random.default_rng(seed).integers(lowest, 128, (n, width)).astype(np.int8)


def products(rows: Rows, queries: Int8Queries) -> NDArray[np.float64]:
    """``(n, Q)``: exact integer products, then the scales of the planes."""
    planes = [
        rows.astype(np.int64) @ plane.astype(np.int64).T * t
        for plane, t in zip(queries.planes, queries.scale, strict=True)
    ]
    return np.array(planes).sum(axis=0)


def by_hand(score: NDArray[np.float64], k: int, key: Callable[[float], float]) -> list[tuple[int, float]]:
    """The first ``k`` records by ``key``, the earlier of equal ones first."""
    order = sorted(range(len(score)), key=lambda i: (key(score[i]), i))
    return [(i, float(score[i])) for i in order[:k]]


def check(found: scan.TopK, scores: NDArray[np.float64], k: int) -> None:
    """``scores`` is ``(n, Q)``."""
    keys = {"highest": lambda s: -s, "lowest": lambda s: s, "largest": lambda s: -abs(s)}
    for name, key in keys.items():
        leading = getattr(found, name)
        assert leading.position.shape == leading.score.shape == (scores.shape[1], min(k, len(scores)))
        for q in range(scores.shape[1]):
            wanted = by_hand(scores[:, q], k, key)
            assert leading.position[q].tolist() == [i for i, _ in wanted], name
            np.testing.assert_allclose(leading.score[q], [s for _, s in wanted], rtol=1e-12, atol=0)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_both_ends_and_the_largest_are_those_of_brute_force(k: int, threads: int, planes: int, make: Make) -> None:
    scale = np.random.default_rng(1).uniform(0.001, 0.1, 200)
    reader, rows, records = make(random_rows(200), scale)
    queries = np.random.default_rng(2).standard_normal((3, DIM))
    rounded = Int8Queries.round(queries, planes)
    scores = products(rows, rounded) * records["scale_raw"].astype(np.float64)[:, None]
    check(top_k(reader, queries, k, planes=planes, threads=threads), scores, k)


@given(
    st.integers(1, 60), st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 16])
)
@settings(max_examples=60, deadline=None)
def test_ties_and_zeros_keep_the_ledgers_order(make: Make, n: int, k: int, q: int, seed: int, shard_rows: int) -> None:
    """Few different values, so that most scores are tied, over many blocks and groups of them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-1, 2, (n, 2)).astype(np.int8)
    reader, rows, records = make(rows, rng.integers(0, 2, n).astype(np.float64), dim=2, shard_rows=shard_rows)
    queries = rng.integers(-1, 2, (q, 2)).astype(np.float64)
    scores = products(rows, Int8Queries.round(queries)) * records["scale_raw"].astype(np.float64)[:, None]
    found = {threads: top_k(reader, queries, k, threads=threads) for threads in (1, 2)}
    check(found[1], scores, k)
    for name in ("highest", "lowest", "largest"):
        one, two = (getattr(found[threads], name) for threads in (1, 2))
        np.testing.assert_array_equal(one.position, two.position)
        np.testing.assert_array_equal(one.score, two.score)


def test_groups_of_blocks_count_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_ROWS_AT_ONCE", 20)
    reader, rows, _ = make(random_rows(150))
    queries = np.random.default_rng(2).standard_normal((2, DIM))
    check(top_k(reader, queries, 7, threads=2), products(rows, Int8Queries.round(queries)), 7)


@pytest.mark.parametrize("dim", [1, 31, 33, 4_096, 8_192])
def test_products_are_exact_at_the_ends_of_int8(dim: int) -> None:
    """-128 never leaves our own rounding; a foreign row may hold it, and no sum may saturate."""
    rows = np.stack([np.full(dim, v, np.int8) for v in (-128, -127, 127)])
    queries = Int8Queries(np.stack([np.full((2, dim), v, np.int8) for v in (127, -127)]), np.array([[1.0, 2], [4, 8]]))
    np.testing.assert_array_equal(queries.dot(rows), products(rows, queries))
    assert queries.dot(rows)[2].tolist() == [dim * 127**2 * (1 - 4), dim * 127**2 * (2 - 8)]


@pytest.mark.parametrize("form", ["raw", "whitened"])
def test_each_form_is_compared_with_its_own_half_and_scale(form: str, make: Make) -> None:
    reader, rows, records = make(random_rows(40, 2 * DIM), np.linspace(0.5, 1, 40), forms=2)
    queries = np.random.default_rng(2).standard_normal((2, DIM))
    half = rows[:, :DIM] if form == "raw" else rows[:, DIM:]
    scores = products(half, Int8Queries.round(queries)) * records[f"scale_{form}"].astype(np.float64)[:, None]
    check(top_k(reader, queries, 5, form=form), scores, 5)  # type: ignore[arg-type]


def test_coefficients_multiply_and_what_is_not_finite_scores_zero(make: Make) -> None:
    scale = np.linspace(0.5, 1, 40)
    scale[3], scale[4] = np.nan, np.inf
    reader, rows, records = make(random_rows(40), scale)
    weight = np.random.default_rng(3).standard_normal(40)
    weight[7], weight[8] = np.nan, -np.inf
    queries = np.random.default_rng(2).standard_normal((2, DIM))
    factor = records["scale_raw"].astype(np.float64) * weight
    factor[[3, 4, 7, 8]] = 0
    found = top_k(reader, queries, 40, coefficients=lambda r: weight[r["seq"]])
    check(found, products(rows, Int8Queries.round(queries)) * factor[:, None], 40)


def test_cosines_are_those_of_the_stored_rows(make: Make) -> None:
    rows = random_rows(60)
    rows[5] = 0
    scale = np.random.default_rng(1).uniform(0.001, 0.1, 60)
    scale[9] = 0
    reader, _, _ = make(rows, scale)
    weight = np.random.default_rng(3).standard_normal(60)
    queries = np.random.default_rng(2).standard_normal((2, DIM))
    queries[1] = 0
    rounded = Int8Queries.round(queries)
    x, z = rows.astype(np.float64), (rounded.scale[0][:, None] * rounded.planes[0])
    with np.errstate(invalid="ignore"):
        cosine = np.nan_to_num(x @ z.T / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(z, axis=1)))
    cosine *= np.sign(weight * scale)[:, None]
    found = top_k(reader, queries, 60, cosine=True, coefficients=lambda r: weight[r["seq"]])
    for leading, sign in ((found.highest, -1), (found.lowest, 1)):
        np.testing.assert_allclose(leading.score, np.sort(sign * cosine.T, axis=1) * sign, atol=1e-14)
    assert np.abs(found.largest.score[0]).max() <= 1 + 1e-14
    assert not found.largest.score[1].any()


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_only_records_that_pass_the_filter_are_ranked(share: float, make: Make) -> None:
    """Few of a stretch are copied together, many are multiplied with what lies between them."""
    reader, rows, records = make(random_rows(200))
    records["step"] = np.random.default_rng(4).uniform(size=200) < share
    narrowed = reader.where(steps=[1])
    kept = records["step"] == 1
    queries = np.random.default_rng(2).standard_normal((2, DIM))
    check(top_k(narrowed, queries, 9), products(rows[kept], Int8Queries.round(queries)), 9)


def test_nothing_to_rank_gives_nothing(make: Make) -> None:
    reader, _, _ = make(random_rows(5))
    found = top_k(reader.where(steps=[99]), np.ones((2, DIM)), 3)
    assert found.highest.position.shape == found.largest.score.shape == (2, 0)


@pytest.mark.parametrize(("planes", "bound"), [(1, 1.0), (2, 1 / 254), (3, 1 / 254**2)])
def test_rounding_is_off_by_half_a_unit_of_the_last_plane(planes: int, bound: float) -> None:
    z = np.random.default_rng(0).standard_normal((4, 4_096))
    rounded = Int8Queries.round(z, planes)
    off = z - np.einsum("pq,pqd->qd", rounded.scale, rounded.planes)
    unit = np.abs(z).max(axis=1, keepdims=True) / 127
    assert (np.abs(off) <= 0.5 * bound * unit * (1 + 1e-9)).all()
    assert (np.abs(off) > 0.4 * bound * unit).any()


def test_what_rounding_the_query_costs_is_what_the_module_says() -> None:
    """Spread of the cosine's error over random rows, at D = 4096: 1.4e-4."""
    rng = np.random.default_rng(0)
    z, rows = rng.standard_normal((16, 4_096)), random_rows(2_000, 4_096)
    x = rows.astype(np.float64)
    error = (Int8Queries.round(z).dot(rows) - x @ z.T) / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(z, axis=1))
    assert error.std() == pytest.approx(1.4e-4, rel=0.1)


def test_an_all_zero_query_scores_every_record_zero(make: Make) -> None:
    reader, _, _ = make(random_rows(6))
    found = top_k(reader, np.zeros((1, DIM)), 4)
    assert found.highest.position.tolist() == found.lowest.position.tolist() == [[0, 1, 2, 3]]
    assert not found.largest.score.any()


def test_what_cannot_be_compared_is_refused(make: Make) -> None:
    reader, _, _ = make(random_rows(6))
    with pytest.raises(SketchMismatchError, match="no whitened sketches, only raw"):
        top_k(reader, np.ones((1, DIM)), form="whitened")
    with pytest.raises(SketchMismatchError, match=r"\(1, 25\).* 24 entries"):
        top_k(reader, np.ones((1, DIM + 1)))
    with pytest.raises(SketchMismatchError, match=r"\(24,\)"):
        top_k(reader, np.ones(DIM))
    with pytest.raises(AttributionError, match="not finite"):
        top_k(reader, np.full((1, DIM), np.nan))


def test_a_dimension_that_int32_cannot_hold_is_refused(make: Make) -> None:
    assert scan.MAX_DIM * 128**2 < 2**31 <= (scan.MAX_DIM + 1) * 128**2
    dim = scan.MAX_DIM + 1
    reader, _, _ = make(np.zeros((1, dim), np.int8), dim=dim)
    with pytest.raises(AttributionError, match="too long"):
        top_k(reader, np.ones((1, dim)))


def test_a_missing_shard_stops_the_scan(make: Make) -> None:
    reader, _, _ = make(random_rows(60))
    folder = reader._logs[0].shards._folder
    (folder / "000002.npy").unlink()
    with pytest.raises(StoreError, match=r"000002\.npy is missing"):
        top_k(reader, np.ones((1, DIM)), threads=2)


@pytest.mark.parametrize("forms", [("raw",), ("raw", "whitened")])
def test_a_written_run_is_ranked(forms: tuple[str, ...], tmp_path: Path) -> None:
    run = LedgerSimulator(tmp_path / "one", Plan(steps=5, forms=forms)).write().run
    reader = open_sketches(run)
    rows = np.concatenate([block.rows for block in reader.blocks()])
    z = np.random.default_rng(0).standard_normal((1, 16))
    for form in forms:
        half = rows[:, :16] if form == "raw" else rows[:, 16:]
        scores = products(half, Int8Queries.round(z)) * reader.records[f"scale_{form}"].astype(np.float64)[:, None]
        check(top_k(reader, z, 4, form=form), scores, 4)  # type: ignore[arg-type]


def test_a_tensor_shares_the_memory_map(make: Make) -> None:
    reader, rows, _ = make(random_rows(3, 2 * DIM), forms=2)
    (block,) = reader.blocks()
    raw, whitened = as_tensor(block.raw), as_tensor(block.whitened)
    assert raw.dtype == torch.int8
    assert raw.data_ptr() == block.span.ctypes.data
    np.testing.assert_array_equal(raw.numpy(), rows[:, :DIM])
    np.testing.assert_array_equal(whitened.numpy(), rows[:, DIM:])
