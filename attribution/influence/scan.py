r"""The leading records for many queries in one pass over the stored int8 sketches.

A record's score is ``c_i s_i <q_i, z>``: its coefficient, its scale, and the product of its int8 row with the query's
sketch. The query is rounded to int8 as well, so a row is read once, multiplied as it lies in the page cache, and
summed in int32, which is exact. Nothing is widened on the way: one query runs at the speed of the memory.

What rounding the query costs: an entry is off by a uniform error of variance ``t^2 / 12`` for the query's scale ``t``,
so a cosine is off by ``t / (sqrt(12) |z|)``. For Gaussian entries at ``D = 4096`` that is 1.4e-4, a hundredth of the
sketch's own noise ``1 / sqrt(D)``. A second plane, the remainder of the first rounded to int8, leaves a 254th of it
for twice the arithmetic.

Here one use of a sample in one step is scored. What a sample did over all its uses needs the sum of its rows, which
``estimators`` forms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numkong
import numpy as np
from numpy.typing import NDArray

from attribution.errors import AttributionError, SketchMismatchError
from auditlog.ledger.sketch_reader import SketchReader, SketchRows

Form = Literal["raw", "whitened"]
_Scored = tuple[NDArray[np.int64], NDArray[np.float64]]  # positions and scores of records
_ROWS_AT_ONCE = 32_768  # per thread: enough to forget what the calls around the product cost
MAX_DIM = 2**31 // 128**2 - 1  # entries of which an int32 holds every product


@dataclass(frozen=True, slots=True)
class Leading:
    """The leading records of each query, best first, ties in ledger order; ``k`` of them, or all if there are fewer.

    Attributes:
        position: ``(Q, k)`` int64, positions among the reader's records.
        score: ``(Q, k)`` float64.
    """

    position: NDArray[np.int64]
    score: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TopK:
    """What leads the ranking at either end, and by size.

    Attributes:
        highest: From the largest score down.
        lowest: From the smallest score up.
        largest: By ``|score|``, from the largest down.
    """

    highest: Leading
    lowest: Leading
    largest: Leading


@dataclass(frozen=True, slots=True)
class Int8Queries:
    """Queries as int8: ``z ~ Σ_p scale[p] * planes[p]``.

    Attributes:
        planes: ``(P, Q, D)`` int8.
        scale: ``(P, Q)`` float64.
    """

    planes: NDArray[np.int8]
    scale: NDArray[np.float64]

    @classmethod
    def round(cls, queries: NDArray[np.floating[Any]], planes: int = 1) -> Int8Queries:
        """Round ``(Q, D)`` finite queries; each plane takes up what the ones before it left over."""
        rest = np.array(queries, np.float64)
        rounded, scales = [], []
        for _ in range(planes):
            scale = np.abs(rest).max(axis=1) / 127  # (Q,)
            rows = np.rint(rest / np.where(scale > 0, scale, 1)[:, None])
            rest -= scale[:, None] * rows
            rounded.append(rows.astype(np.int8))
            scales.append(scale)
        return cls(np.stack(rounded), np.stack(scales))

    def norm(self) -> NDArray[np.float64]:
        """Return the norms of the rounded queries, ``(Q,)``."""
        values = np.einsum("pq,pqd->qd", self.scale, self.planes)
        norm: NDArray[np.float64] = np.linalg.norm(values, axis=1)
        return norm

    def dot(self, rows: NDArray[np.int8]) -> NDArray[np.float64]:
        """Return ``<q_i, z>`` for int8 rows ``(n, D)``: ``(n, Q)``, exact but for the sum over the planes."""
        planes, queries, dim = self.planes.shape
        products = np.asarray(numkong.cdist(rows, self.planes.reshape(-1, dim), "dot"))  # whole numbers in float64
        scaled: NDArray[np.float64] = products.reshape(-1, planes, queries) * self.scale
        summed: NDArray[np.float64] = scaled.sum(axis=1)
        return summed


def top_k(
    sketches: SketchReader,
    queries: NDArray[np.floating[Any]],
    k: int = 10,
    *,
    form: Form = "raw",
    coefficients: Callable[[NDArray[np.void]], NDArray[np.float64]] | None = None,
    cosine: bool = False,
    planes: int = 1,
    threads: int | None = None,
) -> TopK:
    """Find the records with the highest and with the lowest scores for each query.

    The result is the same for any number of threads. A record whose scale or coefficient is not finite scores 0.

    Args:
        sketches: The records to choose from; narrow them with ``SketchReader.where``.
        queries: ``(Q, D)``, finite.
        k: How many at either end.
        form: Which half of the rows is compared.
        coefficients: Gives ``c_i`` of records ``(n,)``, ``(n,)``; 1 unless given.
        cosine: Divide by the norms of row and query and by ``|c_i|``; 0 where one of these is 0.
        planes: int8 planes per query, 1 or 2.
        threads: Blocks worked on at once; one for each processor unless given.

    Raises:
        SketchMismatchError: If the run does not hold this form, or its sketches have another dimension.
        AttributionError: If a query is not finite, or the dimension is too large for int32.
        StoreError: If a shard is missing or too short.
    """
    _check(sketches, queries, form)
    rounded = Int8Queries.round(queries, planes)

    def candidates(first: int, blocks: list[SketchRows]) -> list[_Scored]:
        product = np.concatenate([_products(block, rounded, form, cosine) for block in blocks]).T  # (Q, n)
        weight = np.concatenate([block.records[f"scale_{form}"] for block in blocks], dtype=np.float64)  # (n,)
        if coefficients is not None:
            weight *= np.concatenate([coefficients(block.records) for block in blocks])
        weight[~np.isfinite(weight)] = 0
        scores = product * (np.sign(weight) if cosine else weight)
        return [_ends(first, score, k) for score in np.ascontiguousarray(scores)]

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        parts = list(pool.map(lambda group: candidates(*group), _groups(sketches)))
    return _ranked([[part[q] for part in parts] for q in range(len(queries))], k)


def _check(sketches: SketchReader, queries: NDArray[np.floating[Any]], form: Form) -> None:
    if form not in sketches.forms:
        raise SketchMismatchError(
            f"the run holds no {form} sketches, only {', '.join(sketches.forms)}",
            "Compare with a form that was stored.",
        )
    if queries.ndim != 2 or queries.shape[1] != sketches.dim:
        raise SketchMismatchError(
            f"the queries have shape {queries.shape}, the run's sketches {sketches.dim} entries",
            "Sketch the query with the run's own map.",
        )
    if sketches.dim > MAX_DIM:
        raise AttributionError(f"sketches of {sketches.dim} entries are too long: int32 holds products of {MAX_DIM}")
    if not np.isfinite(queries).all():
        raise AttributionError("a query is not finite", "Look at the gradient that it was made from.")


def _groups(sketches: SketchReader) -> Iterator[tuple[int, list[SketchRows]]]:
    """Yield blocks in groups, each group with the position of its first record."""
    group: list[SketchRows] = []
    first = spanned = records = 0
    for block in sketches.blocks():
        group.append(block)
        spanned, records = spanned + len(block.span), records + len(block.records)
        if spanned >= _ROWS_AT_ONCE:
            yield first, group
            group, first, spanned, records = [], first + records, 0, 0
    if group:
        yield first, group


def _products(block: SketchRows, queries: Int8Queries, form: Form, cosine: bool) -> NDArray[np.float64]:
    """Return the products of a block's rows with the queries, ``(n, Q)``; with ``cosine`` over both norms."""
    # Copying wanted rows together costs more than multiplying a few unwanted ones between them.
    few = 2 * len(block.records) < len(block.span)
    rows, place = (block.rows, slice(None)) if few else (block.span, block.place)
    half = rows[:, : block.dim] if form == "raw" else rows[:, block.dim :]
    product = queries.dot(half)[place]
    if not cosine:
        return product
    norm = np.sqrt(np.asarray(numkong.dot(half, half)))[place][:, None] * queries.norm()
    quotient: NDArray[np.float64] = np.divide(product, norm, out=np.zeros_like(product), where=norm > 0)
    return quotient


def _ends(first: int, score: NDArray[np.float64], k: int) -> _Scored:
    """Return the ``k`` highest and the ``k`` lowest of a block's scores ``(n,)``, in ledger order."""
    n = len(score)
    own = np.arange(n)
    if n > 2 * k:
        cut = np.partition(score, (k - 1, n - k))
        low, high = np.flatnonzero(score <= cut[k - 1]), np.flatnonzero(score >= cut[n - k])  # ties make them longer
        own = np.union1d(low[_order(score[low], k)], high[_order(-score[high], k)])
    return first + own, score[own]


def _ranked(candidates: list[list[_Scored]], k: int) -> TopK:
    """Rank each query's candidates, which are in ledger order."""
    position = [np.concatenate([np.empty(0, np.int64), *(p for p, _ in blocks)]) for blocks in candidates]
    score = [np.concatenate([np.empty(0), *(s for _, s in blocks)]) for blocks in candidates]

    def by(key: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Leading:
        chosen = [_order(key(s), k) for s in score]
        return Leading(
            np.stack([p[c] for p, c in zip(position, chosen, strict=True)]),
            np.stack([s[c] for s, c in zip(score, chosen, strict=True)]),
        )

    return TopK(highest=by(lambda s: -s), lowest=by(lambda s: s), largest=by(lambda s: -np.abs(s)))


def _order(key: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Return where the ``k`` smallest keys lie, the smallest first, the earlier one of equal keys first."""
    order: NDArray[np.int64] = np.argsort(key, kind="stable")[:k]
    return order
