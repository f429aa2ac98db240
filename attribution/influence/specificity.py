"""Is the answer about this case, or would every case have got the same one?

Query gradients of similar questions resemble each other (they share their answer tokens), so the same records tend to
lead every list. Two comparisons with other cases say how far that goes: rank correlation over all samples, and how
many of the ten leading records on either side are the same. Both are repeated after the mean query gradient of the
other cases has been subtracted: what remains is peculiar to the case.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

MIN_CASES = 8
TOP = 10
# Ours, not a standard: above either, what the ranking says is mostly what it says of anybody.
SPEARMAN_LIMIT = 0.5
OVERLAP_LIMIT = 0.5


@dataclass(frozen=True, slots=True)
class Similarity:
    """How much one case's ranking resembles those of the others.

    Attributes:
        spearman_abs_mean: Mean size of the rank correlations. A reversed ranking is as unspecific as an equal one: it
            has the same records at its ends, with the opposite sign.
        top10_overlap_mean: Share of the leading records, both ends counted, 0 to 1.
    """

    spearman_mean: float
    spearman_min: float
    spearman_max: float
    spearman_abs_mean: float
    top10_overlap_mean: float

    @property
    def is_specific(self) -> bool:
        """Whether both figures lie below the limits."""
        return self.spearman_abs_mean < SPEARMAN_LIMIT and self.top10_overlap_mean < OVERLAP_LIMIT


@dataclass(frozen=True, slots=True)
class Specificity:
    """The comparison with other cases, plain and centred, and what it means in words.

    ``specific`` is ``None`` when there were too few other cases to tell.
    """

    cases: int
    plain: Similarity | None
    centred: Similarity | None
    centred_above_floor: int
    specific: bool | None
    statement: str

    def to_document(self) -> dict[str, Any]:
        """Return the block of the result document."""
        empty = dict.fromkeys(field.name for field in fields(Similarity))
        return {
            "cases": self.cases,
            **(asdict(self.plain) if self.plain else empty),
            "centred": asdict(self.centred) if self.centred else empty,
            "centred_above_floor": self.centred_above_floor,
            "specific": self.specific,
            "statement": self.statement,
        }


def compare(cosine: NDArray[np.float64], top: int = TOP) -> Similarity:
    """Compare the first query's ranking with every other's.

    Args:
        cosine: ``(n, Q)``, ``Q >= 2``.
        top: Records taken from either end.
    """
    ranks = rankdata(cosine, axis=0)
    ranks -= ranks.mean(0)
    ranks /= np.linalg.norm(ranks, axis=0).clip(min=1e-300)
    rho = ranks[:, 1:].T @ ranks[:, 0]  # (Q - 1,) Spearman: Pearson of the ranks
    order = np.argsort(cosine, axis=0, kind="stable")
    top = min(top, len(cosine) // 2)
    ends = [(set(order[:top, q]), set(order[len(order) - top :, q])) for q in range(cosine.shape[1])]
    low, high = ends[0]
    shared = [(len(low & other_low) + len(high & other_high)) / max(2 * top, 1) for other_low, other_high in ends[1:]]
    return Similarity(
        spearman_mean=float(rho.mean()),
        spearman_min=float(rho.min()),
        spearman_max=float(rho.max()),
        spearman_abs_mean=float(np.abs(rho).mean()),
        top10_overlap_mean=float(np.mean(shared)),
    )


def centre(queries: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``(Q, D)`` queries less the mean of all but the first, which is the case in question."""
    return queries - queries[1:].mean(0)


def untested(others: int) -> Specificity:
    """Return what can be said when ``others`` cases are too few to compare with."""
    statement = (
        f"Not tested: {others or 'no'} other cases were given, at least {MIN_CASES} are needed. "
        "Nothing here shows that these records matter more for this case than for any other."
    )
    return Specificity(others, None, None, 0, None, statement)


def assess(cosine: NDArray[np.float64], centred_cosine: NDArray[np.float64], floor: float) -> Specificity:
    """Judge the first query's ranking against the others'.

    Args:
        cosine: ``(n, Q)``; column 0 is the case in question; ``Q > MIN_CASES``.
        centred_cosine: The same with centred queries.
        floor: ``|cosine|`` below which a record cannot be told from noise.
    """
    others = cosine.shape[1] - 1
    above = int((np.abs(centred_cosine[:, 0]) > floor).sum())
    plain, centred = compare(cosine), compare(centred_cosine)
    return Specificity(others, plain, centred, above, plain.is_specific, _say(others, plain, centred, above))


def _say(others: int, plain: Similarity, centred: Similarity, above: int) -> str:
    """Put the two comparisons into words."""
    shared = round(2 * TOP * plain.top10_overlap_mean)
    figures = (
        f"mean rank correlation {plain.spearman_mean:.2f}, {shared} of {2 * TOP} leading records shared on average"
    )
    if plain.is_specific:
        return f"Specific to this case: compared with {others} other cases, {figures}."
    opening = (
        f"Not specific to this case: compared with {others} other cases, {figures}. The ranking says what shaped this "
        "kind of answer in general, not what set this case apart."
    )
    after = "After subtracting what the cases have in common"
    if above == 0:
        return f"{opening} {after}, no record stands out from the sketch's noise."
    size = f"mean size of the rank correlation {centred.spearman_abs_mean:.2f}"
    if centred.is_specific:
        return f"{opening} {after}, a part is left that is this case's own ({size}); {above} records stand out in it."
    return f"{opening} {after}, the ranking still resembles theirs or their reverse ({size})."
