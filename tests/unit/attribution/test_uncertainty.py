"""Standard errors against the spread over many sketches of the same vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attribution.influence.uncertainty import cosine_se, dot_se, noise_floor
from attribution.sketch.layout import SketchLayout

N, DIM, DRAWS = 900, 128, 400
COVERAGE = (0.92, 0.98)  # of nominal 95 % intervals; 400 draws put +-0.022 around 0.95


def sketches(vectors: np.ndarray, seed: str) -> np.ndarray:
    """Sketch rows by the engine's own map, two parameters of different shape."""
    layout = SketchLayout({"a": (20, 30), "b": (10, 30)}, DIM, seed)
    rows = torch.from_numpy(vectors).float()
    return (
        torch.stack([layout.sketch({"a": row[:600].view(20, 30), "b": row[600:].view(10, 30)}) for row in rows])
        .numpy()
        .astype(np.float64)
    )


@pytest.fixture(scope="module")
def draws() -> tuple[np.ndarray, np.ndarray]:
    """Six vectors that share a direction, and ``(DRAWS, 6, DIM)`` sketches of them."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(6, N)) + 0.7 * rng.normal(size=N)
    return vectors, np.stack([sketches(vectors, f"draw {i}") for i in range(DRAWS)])


def test_dot_error_bars_cover_the_true_inner_product(draws) -> None:
    vectors, z = draws
    truth = vectors[0] @ vectors[1]
    found = (z[:, 0] * z[:, 1]).sum(1)
    se = dot_se(np.linalg.norm(z[:, 0], axis=1), np.linalg.norm(z[:, 1], axis=1), found, DIM)
    assert np.mean(se) == pytest.approx(found.std(), rel=0.12)
    assert COVERAGE[0] <= np.mean(np.abs(found - truth) < 1.96 * se) <= COVERAGE[1]


def test_cosine_error_bars_cover_the_true_cosine(draws) -> None:
    vectors, z = draws
    norms, z_norms = np.linalg.norm(vectors, axis=1), np.linalg.norm(z, axis=2)
    truth = vectors[0] @ vectors[1] / (norms[0] * norms[1])
    found = (z[:, 0] * z[:, 1]).sum(1) / (z_norms[:, 0] * z_norms[:, 1])
    se = cosine_se(found, DIM)
    assert np.mean(se) == pytest.approx(found.std(), rel=0.12)
    assert COVERAGE[0] <= np.mean(np.abs(found - truth) < 1.96 * se) <= COVERAGE[1]


def test_a_totals_error_comes_from_the_aggregated_sketch(draws) -> None:
    """The samples share the sketch, so adding their variances as if independent promises far too much."""
    vectors, z = draws
    query, group = z[:, 0], z[:, 1:]
    truth = vectors[0] @ vectors[1:].sum(0)
    total = (query[:, None] * group).sum((1, 2))
    query_norm = np.linalg.norm(query, axis=1)
    aggregated = dot_se(np.linalg.norm(group.sum(1), axis=1), query_norm, total, DIM)
    single = dot_se(np.linalg.norm(group, axis=2), query_norm[:, None], (query[:, None] * group).sum(2), DIM)
    naive = np.sqrt((single**2).sum(1))
    inside = lambda se: np.mean(np.abs(total - truth) < 1.96 * se)  # noqa: E731
    assert COVERAGE[0] <= inside(aggregated) <= COVERAGE[1]
    assert inside(naive) < 0.9


def test_the_noise_floor_is_passed_one_time_in_twenty() -> None:
    rng = np.random.default_rng(1)
    samples, trials = 60, 1200
    z = rng.choice([-1.0, 1.0], size=(trials, samples, DIM))
    cosine = z @ rng.choice([-1.0, 1.0], size=DIM) / DIM
    passed = (np.abs(cosine) > noise_floor(samples, DIM)).any(1).mean()
    assert passed == pytest.approx(0.05, abs=0.02)


def test_the_noise_floor_of_a_million_samples() -> None:
    """5.45 standard deviations, from the normal table."""
    assert noise_floor(1_000_000, 4096) == pytest.approx(5.45 / 64, rel=1e-3)
