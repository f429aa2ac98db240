"""One query's answer on a terminal: the question, both lists of ten, totals per file, specificity, limits.

Texts and paths come from somebody else's files, so they are shown with control characters escaped and never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attribution.influence.result import InfluenceResult, RankedRecord
from attribution.influence.specificity import TOP, Similarity
from auditlog.display import clean

_FAINT = "dim"
_OWN_ROWS = 3


def render(result: InfluenceResult) -> RenderableType:
    """Return everything that a person should see of a result, in reading order."""
    unit, power = _unit(result)
    target, contrast = clean(result.question.target.strip()), clean(result.question.contrast.strip())
    parts: list[RenderableType] = [
        _question(result),
        Text(),
        _ranking(result.top_for, f"pushed the answer towards “{target}”", unit, power),
        _ranking(result.top_against, f"pushed the answer towards “{contrast}”", unit, power),
        _noise(result),
        Text(),
        _sources(result, unit, power),
        Text(),
        _specificity(result),
    ]
    return Group(*parts)


def limits(result: InfluenceResult) -> RenderableType:
    """Return what the figures do not say, one sentence a line."""
    grid = Table.grid(padding=(0, 1))
    for sentence in result.limits:
        grid.add_row(Text("·"), Text(sentence))
    return grid


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _unit(result: InfluenceResult) -> tuple[float, str]:
    """Return a power of a thousand that makes the largest score readable, and its name."""
    largest = max((abs(row.score) for row in (*result.top_for, *result.top_against)), default=0.0)
    for unit, name in ((1.0, ""), (1e-3, " ×10⁻³"), (1e-6, " ×10⁻⁶")):
        if largest >= unit:
            return unit, name
    return 1e-9, " ×10⁻⁹"


def _question(result: InfluenceResult) -> RenderableType:
    question, answer = result.question, result.answer
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=_FAINT)
    grid.add_column()
    if question.case_label:
        grid.add_row("case", _text(question.case_label))
    grid.add_row("asked", _text(question.prompt))
    grid.add_row(
        "the model answers",
        Text.assemble(
            (clean(answer.answered.strip()), "bold"),
            f"   p({clean(question.target.strip())}) = {answer.p_target:.3f}",
            f"   p({clean(question.contrast.strip())}) = {answer.p_contrast:.3f}",
            f"   log odds {answer.log_odds:+.3f}",
        ),
    )
    grid.add_row("records", f"{result.n_records} records of {result.n_samples} samples, D = {result.sketch_dim}")
    return grid


def _ranking(rows: Sequence[RankedRecord], title: str, unit: float, power: str) -> RenderableType:
    """Return one side's records, at most ten; what lies within the noise is faint."""
    if not rows:
        return Text(f"No record's training {title}.")
    table = _table(f"The {len(rows)} records whose training most {title}")
    cells = [
        (
            str(row.rank),
            f"{row.cosine:+.4f} ± {row.cosine_se:.4f}",
            f"{row.score / unit:+.3f} ± {row.score_se / unit:.3f}",
            f"{clean(row.path)}: {row.row}",
        )
        for row in rows
    ]
    names = ("", "cosine ± SE", f"score ± SE{power}", "source file: row")
    for place, name in enumerate(names):
        width = max([len(name), *(len(cell[place]) for cell in cells)])  # figures are never cut short, previews are
        table.add_column(name, justify="left" if place == 3 else "right", no_wrap=True, width=width)
    if any(row.preview for row in rows):
        table.expand = True
        table.add_column("record", overflow="ellipsis", no_wrap=True, ratio=1)
    for row, cell in zip(rows, cells, strict=True):
        preview = [_text(row.preview)] if row.preview else []
        table.add_row(*map(Text, cell), *preview, style="" if row.above_floor else _FAINT)
    return table


def _noise(result: InfluenceResult) -> Text:
    n = result.n_samples
    inside = sum(not row.above_floor for row in (*result.top_for, *result.top_against))
    text = (
        f"Noise floor: among {n} unrelated samples some |cosine| passes {result.floor:.3f} one time in twenty. "
        + (f"{inside} of the rows above lie below it (faint)." if inside else "Every row above passes it.")
        + " SE is the sketch's error only."
    )
    versions = sorted({row.data_version for row in (*result.top_for, *result.top_against)})
    text += f"\nData version of these rows: {', '.join(versions)}." if versions else ""
    return Text(text, style=_FAINT)


def _sources(result: InfluenceResult, unit: float, power: str) -> Table:
    table = _table(f"Totals per source file{power and f' ({power.strip()})'}")
    table.add_column("source file")
    table.add_column("samples", justify="right")
    table.add_column("total ± SE", justify="right", no_wrap=True)
    table.add_column("mean per sample", justify="right")
    table.add_column("pushed up", justify="right")
    table.add_column("pushed down", justify="right")
    for source in result.sources:
        table.add_row(
            _text(source.path),
            str(source.samples),
            f"{source.total / unit:+.2f} ± {source.se / unit:.2f}",
            f"{source.mean / unit:+.3f}",
            f"{source.positive / unit:+.1f}",
            f"{source.negative / unit:+.1f}",
        )
    return table


def _specificity(result: InfluenceResult) -> RenderableType:
    verdict = result.specificity
    colour = "yellow" if verdict.specific is not True else "green"
    parts: list[RenderableType] = [Text("Is this about this case?", style="bold")]
    if verdict.plain is not None and verdict.centred is not None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(f"compared with {verdict.cases} other cases")
        table.add_column("rank correlation: mean (range)", justify="right")
        table.add_column("mean size", justify="right")
        table.add_column("leading records shared", justify="right")
        table.add_row("as it is", *_similarity(verdict.plain))
        table.add_row("less their mean query gradient", *_similarity(verdict.centred))
        parts.append(table)
    parts.append(Text(verdict.statement, style=colour))
    if verdict.specific is False and verdict.centred is not None and verdict.centred.is_specific:
        parts += [Text(), _own_part(result)]
    return Group(*parts)


def _own_part(result: InfluenceResult) -> Table:
    """Return the records that lead once the common part is gone."""
    table = _table("What is this case's own: leading records after the common part is subtracted")
    table.add_column("towards")
    table.add_column("cosine", justify="right")
    table.add_column("source file: row", no_wrap=True)
    table.add_column("record", overflow="ellipsis", no_wrap=True)
    sides = ((result.question.target, result.centred_for), (result.question.contrast, result.centred_against))
    for answer, rows in sides:
        for row in rows[:_OWN_ROWS]:
            place = _text(f"{row.path}: {row.row}")
            table.add_row(_text(answer.strip()), f"{row.cosine_centred:+.3f}", place, _text(row.preview))
    return table


def _similarity(similarity: Similarity) -> tuple[str, str, str]:
    s = similarity
    return (
        f"{s.spearman_mean:+.2f} ({s.spearman_min:+.2f} to {s.spearman_max:+.2f})",
        f"{s.spearman_abs_mean:.2f}",
        f"{2 * TOP * s.top10_overlap_mean:.1f} of {2 * TOP}",
    )


def _text(string: str) -> Text:
    """Return somebody else's text as it is: no markup, no control characters."""
    return Text(clean(string))
