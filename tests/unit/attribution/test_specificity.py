"""Specificity against scipy's rank correlation and hand-made rankings."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from attribution.influence.estimators import Scores
from attribution.influence.result import centred_cosine
from attribution.influence.specificity import MIN_CASES, assess, centre, compare, untested

N, OTHERS = 300, 9


def cosines(shared: float, seed: int = 0) -> np.ndarray:
    """``(N, 1 + OTHERS)``: a common part and each case's own."""
    rng = np.random.default_rng(seed)
    return shared * rng.normal(size=(N, 1)) + (1 - shared) * rng.normal(size=(N, 1 + OTHERS))


def test_rank_correlation_is_scipys() -> None:
    found = compare(cosines(0.5))
    rho = [spearmanr(cosines(0.5)[:, 0], cosines(0.5)[:, j]).statistic for j in range(1, 1 + OTHERS)]
    assert found.spearman_mean == pytest.approx(np.mean(rho))
    assert (found.spearman_min, found.spearman_max) == (pytest.approx(min(rho)), pytest.approx(max(rho)))
    assert found.spearman_abs_mean == pytest.approx(np.mean(np.abs(rho)))


def test_overlap_counts_both_ends_by_hand() -> None:
    case = np.arange(40.0)
    same_top_only = case.copy()
    same_top_only[:10] = np.arange(29.5, 19.5, -1.0)  # the old bottom ten move to the middle
    found = compare(np.column_stack([case, case, same_top_only]))
    assert found.top10_overlap_mean == pytest.approx((1.0 + 0.5) / 2)


def test_the_same_answer_for_everybody_is_not_specific() -> None:
    found = assess(cosines(0.95), cosines(0.0), floor=0.1)
    assert found.specific is False
    assert found.statement.startswith("Not specific to this case: compared with 9 other cases")
    assert "case's own" in found.statement


def test_an_answer_of_its_own_is_specific() -> None:
    found = assess(cosines(0.0), cosines(0.0), floor=0.1)
    assert found.specific is True
    assert found.statement.startswith("Specific to this case")


def test_a_reversed_ranking_is_as_unspecific_as_an_equal_one() -> None:
    case = np.random.default_rng(0).normal(size=(N, 1))
    sign = np.where(np.arange(1 + OTHERS) % 2, -1.0, 1.0)
    found = assess(cosines(0.95), case * sign, floor=0.1)
    assert found.centred is not None
    assert abs(found.centred.spearman_mean) < 0.2
    assert not found.centred.is_specific
    assert "resembles theirs or their reverse" in found.statement


def test_what_is_left_may_be_noise() -> None:
    assert "no record stands out" in assess(cosines(0.95), 1e-3 * cosines(0.0), floor=0.1).statement


def test_centring_takes_the_mean_of_the_other_cases_from_all() -> None:
    queries = np.random.default_rng(0).normal(size=(4, 5))
    mean = (queries[1] + queries[2] + queries[3]) / 3
    np.testing.assert_allclose(centre(queries), queries - mean)


def test_centred_cosines_are_those_of_the_centred_queries() -> None:
    """Scores are linear in the query, so they are centred without another scan; here with one."""
    rng = np.random.default_rng(0)
    u, queries = rng.normal(size=(7, 12)), rng.normal(size=(4, 12)) + 1.0
    norm = np.linalg.norm(u, axis=1)
    counts = np.arange(7), np.ones(7, dtype=np.int64)
    scores = Scores(*counts, norm=norm, dot=-u @ queries.T, source_sums=u[:1], queries=queries)
    own = queries - queries[1:].mean(0)
    expected = -(u @ own.T) / np.outer(norm, np.linalg.norm(own, axis=1))
    np.testing.assert_allclose(centred_cosine(scores), expected)


def test_too_few_cases_are_said_to_be_untested() -> None:
    found = untested(MIN_CASES - 1)
    assert found.specific is None
    assert found.to_document()["spearman_mean"] is None
    assert "at least 8 are needed" in found.statement
