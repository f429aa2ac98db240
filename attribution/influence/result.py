"""The answer to one query as a document: what the custody log commits to, reports print and people read.

Everything in it comes from the log and the question; nothing is rounded. A text preview is the only part that comes
from the source files, and only where they were at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attribution.influence.estimators import Scores, cosines
from attribution.influence.specificity import TOP, Specificity, assess, centre, untested
from attribution.influence.uncertainty import cosine_se, dot_se, noise_floor
from auditlog.format.canonical import finite
from auditlog.format.manifest import RunManifest
from auditlog.format.records import Flag

if TYPE_CHECKING:
    from attribution.influence.query import Answer, Question

SCHEMA = "gradtrail/influence-result"
ESTIMATOR = "inline-cosine"
ALPHA = 0.05
PREVIEW_CHARACTERS = 200
HISTOGRAM_BINS = 40
SIGN = "score > 0: training on the record pushed log p(target) - log p(contrast) up"

_LIMITS = (
    "Standard errors cover the sketch only: how far a figure moves because gradients were stored as "
    "{dim} numbers. They say nothing about training noise, or about how well the method predicts a retraining.",
    "Scores are first order: each use of a record is weighed by its step's learning rate, its measured clip factor "
    "and its share of the batch, and compared with the query's gradient at the final weights only.",
    "Under Adam the optimizer rescales gradients, so a dot score ranks records and files against each other and is "
    "not in nats.",
    "Influence on the model's answer is not the reason for a decision, and leaving the record out was not tried here.",
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What of the run goes into a result.

    Attributes:
        manifest: The run manifest.
        records: ``(n,)`` the records that led to the final weights.
        others: Other cases given, used or not.
        unmeasured_steps: Steps whose clip factor was not finite; their records count as zero.
        superseded: Records of steps that training later went back behind.
        erased: Records whose sketches were erased; they count as zero.
    """

    manifest: RunManifest
    records: NDArray[np.void]
    others: int
    unmeasured_steps: int
    superseded: int = 0
    erased: int = 0


# Records whose sketch is not quite what a score takes it for; they are scored, and this is said.
_DOUBTFUL = {
    Flag.NOT_SEPARABLE: "are not separable: what they stored is partly other samples' loss",
    Flag.UNIT_UNKNOWN: "have a loss that is not plain cross-entropy; they are scored in the trained loss's own scale",
    Flag.NOT_FINITE: "were not finite and count as zero",
}


@dataclass(frozen=True, slots=True)
class RankedRecord:
    """One sample in a list of ten. ``cosine_centred`` is what remains after what all cases share is subtracted."""

    rank: int
    sample_index: int
    source_id: int
    path: str
    row: int
    data_version_id: int
    data_version: str
    uses: int
    cosine: float
    cosine_se: float
    cosine_centred: float | None
    score: float
    score_se: float
    loss_first: float | None
    loss_last: float | None
    above_floor: bool
    preview: str


@dataclass(frozen=True, slots=True)
class SourceTotal:
    """What one source file's samples add up to. ``se`` comes from the sketch of the sum, not from adding errors."""

    source_id: int
    path: str
    samples: int
    total: float
    se: float
    mean: float
    positive: float
    negative: float


@dataclass(frozen=True, slots=True)
class InfluenceResult:
    """The whole answer to one query."""

    created_us: int
    question: Question
    answer: Answer
    sketch_dim: int
    n_records: int
    n_samples: int
    floor: float
    top_for: tuple[RankedRecord, ...]
    top_against: tuple[RankedRecord, ...]
    centred_for: tuple[RankedRecord, ...]
    centred_against: tuple[RankedRecord, ...]
    sources: tuple[SourceTotal, ...]
    specificity: Specificity
    limits: tuple[str, ...]
    histogram: tuple[tuple[float, ...], tuple[int, ...]]

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document that the custody log commits to."""
        edges, counts = self.histogram
        return {
            "schema": SCHEMA,
            "created_us": self.created_us,
            "question": {**asdict(self.question), **asdict(self.answer)},
            "estimator": {
                "name": ESTIMATOR,
                "ranking": "cosine",
                "score": "inline dot",
                "sketch_dim": self.sketch_dim,
                "forms": ["raw"],
                "n_records": self.n_records,
                "n_samples": self.n_samples,
                "uses_per_sample": self.n_records / max(self.n_samples, 1),
                "sign": SIGN,
                "uncertainty": "sketch only",
            },
            "noise_floor": {"cosine": self.floor, "alpha": ALPHA, "n": self.n_samples},
            "top": {"for": _documents(self.top_for), "against": _documents(self.top_against)},
            "top_centred": {"for": _documents(self.centred_for), "against": _documents(self.centred_against)},
            "sources": [asdict(source) for source in self.sources],
            "specificity": self.specificity.to_document(),
            "limits": list(self.limits),
            "scores_histogram": {"edges": list(edges), "counts": list(counts)},
        }


def _gaps(facts: RunFacts) -> tuple[str, ...]:
    """Return what the scores leave out or cannot vouch for, one sentence each."""
    counts = {
        "steps had no finite clip factor; their records count as zero": facts.unmeasured_steps,
        "records are left out: training went back behind their steps and took others": facts.superseded,
        "records are of samples that were erased from the run; what they taught the model is not in the scores": (
            facts.erased
        ),
    }
    counts |= {
        f"records {what}": int(np.count_nonzero(facts.records["flags"] & flag)) for flag, what in _DOUBTFUL.items()
    }
    return tuple(f"{count} {what}." for what, count in counts.items() if count)


def build_result(
    facts: RunFacts, question: Question, answer: Answer, scores: Scores, preview: Callable[[int], str] | None = None
) -> InfluenceResult:
    """Rank the samples for the first query and put everything that goes with it into one result."""
    dim, n = scores.queries.shape[1], len(scores.sample)
    cosine = scores.cosine
    floor = noise_floor(n, dim, ALPHA)
    centred = centred_cosine(scores) if cosine.shape[1] > 1 else None
    specificity = untested(facts.others) if centred is None else assess(cosine, centred, floor)
    row = _Rows(facts, scores, cosine, centred, floor, preview)
    top_for, top_against = _both_ends(row, cosine[:, 0])
    centred_for, centred_against = ((), ()) if centred is None else _both_ends(row, centred[:, 0])
    return InfluenceResult(
        created_us=time.time_ns() // 1000,
        question=question,
        answer=answer,
        sketch_dim=dim,
        n_records=len(facts.records),
        n_samples=n,
        floor=floor,
        top_for=top_for,
        top_against=top_against,
        centred_for=centred_for,
        centred_against=centred_against,
        sources=_source_totals(facts.manifest, scores),
        specificity=specificity,
        limits=tuple(text.format(dim=dim) for text in _LIMITS) + _gaps(facts),
        histogram=_histogram(cosine[:, 0]),
    )


class _Rows:
    """Looks up everything that is printed beside one ranked sample."""

    def __init__(
        self,
        facts: RunFacts,
        scores: Scores,
        cosine: NDArray[np.float64],
        centred: NDArray[np.float64] | None,
        floor: float,
        preview: Callable[[int], str] | None,
    ) -> None:
        self._data, self._records = facts.manifest.data, facts.records
        self._scores, self._cosine, self._centred = scores, cosine, centred
        self._floor, self._preview = floor, preview
        self._dim = scores.queries.shape[1]
        first = np.array([source.first_index for source in self._data.sources], dtype=np.int64)
        self._index = first[facts.records["source_id"]] + facts.records["row"].astype(np.int64)

    def __call__(self, position: int, rank: int) -> RankedRecord:
        """Return the sample at ``position`` of the scores."""
        scores, index = self._scores, int(self._scores.sample[position])
        losses = self._records["loss"][self._index == index]
        source = next(s for s in reversed(self._data.sources) if s.first_index <= index)
        version = self._data.versions[source.data_version_id]
        cosine, dot = float(self._cosine[position, 0]), float(scores.dot[position, 0])
        query_norm = float(np.linalg.norm(scores.queries[0]))
        return RankedRecord(
            rank=rank,
            sample_index=index,
            source_id=source.source_id,
            path=source.path,
            row=index - source.first_index,
            data_version_id=version.data_version_id,
            data_version=version.revision,
            uses=int(scores.uses[position]),
            cosine=cosine,
            cosine_se=float(cosine_se(cosine, self._dim)),
            cosine_centred=None if self._centred is None else float(self._centred[position, 0]),
            score=dot,
            score_se=float(dot_se(scores.norm[position], query_norm, dot, self._dim)),
            loss_first=finite(losses[0]),
            loss_last=finite(losses[-1]),
            above_floor=abs(cosine) > self._floor,
            preview="" if self._preview is None else self._preview(index)[:PREVIEW_CHARACTERS],
        )


def _documents(rows: tuple[RankedRecord, ...]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _both_ends(row: _Rows, cosine: NDArray[np.float64]) -> tuple[tuple[RankedRecord, ...], tuple[RankedRecord, ...]]:
    """Return the ten samples with the highest cosine above 0, and the ten with the lowest below 0."""
    order = np.argsort(-cosine, kind="stable")
    highest = [i for i in order[:TOP] if cosine[i] > 0]
    lowest = [i for i in order[::-1][:TOP] if cosine[i] < 0]
    return tuple(row(i, n) for n, i in enumerate(highest, 1)), tuple(row(i, n) for n, i in enumerate(lowest, 1))


def centred_cosine(scores: Scores) -> NDArray[np.float64]:
    """Return the cosines with queries less their common part; dot scores are linear, so nothing is scanned again."""
    dot = scores.dot - scores.dot[:, 1:].mean(1, keepdims=True)
    return cosines(dot, scores.norm, np.linalg.norm(centre(scores.queries), axis=1))


def _source_totals(manifest: RunManifest, scores: Scores) -> tuple[SourceTotal, ...]:
    """Return each file's total score, with its error from the aggregated sketch."""
    dim, query_norm = scores.queries.shape[1], float(np.linalg.norm(scores.queries[0]))
    totals = scores.source_dot[:, 0]
    errors = dot_se(np.linalg.norm(scores.source_sums, axis=1), query_norm, totals, dim)
    found = []
    for source in manifest.data.sources:
        inside = (scores.sample >= source.first_index) & (scores.sample < source.first_index + source.rows)
        dot = scores.dot[inside, 0]
        found.append(
            SourceTotal(
                source_id=source.source_id,
                path=source.path,
                samples=int(inside.sum()),
                total=float(totals[source.source_id]),
                se=float(errors[source.source_id]),
                mean=float(totals[source.source_id] / max(inside.sum(), 1)),
                positive=float(dot[dot > 0].sum()),
                negative=float(dot[dot < 0].sum()),
            )
        )
    return tuple(found)


def _histogram(cosine: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return edges and counts of the cosines, over a range that is symmetric about zero."""
    reach = float(np.abs(cosine).max(initial=0.0)) or 1.0
    counts, edges = np.histogram(cosine, bins=HISTOGRAM_BINS, range=(-reach, reach))
    return tuple(float(edge) for edge in edges), tuple(int(count) for count in counts)
