"""Section 12: which training records an estimator names for one output, with everything that limits the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from reports.charts import Style, Whisker, whisker_chart
from reports.document import (
    ESTIMATED,
    MEASURED,
    RECORDED,
    Block,
    Bullets,
    Column,
    Fact,
    Facts,
    Figure,
    Heading,
    Notice,
    Paragraph,
    Section,
    Table,
)
from reports.evidence import Agreement, Influence, InfluenceRow
from reports.formats import common_exponent, plus_minus, quantity, short, signed, times_ten_to
from reports.sections.subject import Subject
from reports.text import quoted, shorten

_METHOD = (
    "Estimated influence under the method named in this section; association with the training objective, not proof of "
    "cause. A positive score says that the record pushed the log-odds of the asked answer up during this run."
)

_READING = (
    "Bars are ± 1 standard error of the sketch only; they hold no training noise and no model error. The grey band is "
    "the noise floor; a hollow dot does not clear it."
)


def influence_section(subject: Subject) -> Section:
    """Section 12."""
    influence = subject.evidence.influence
    title = "Influence evidence"
    if influence is None:
        return Section("12", title, (Paragraph("No influence query is logged in the custody log of this run."),))
    return Section(
        "12",
        title,
        (
            Paragraph(f"{_asked(influence)} {_METHOD}"),
            _specificity(influence),
            Facts(_question(influence)),
            *_sides(influence),
            *_sources(influence),
            Heading("How the answer was computed"),
            Facts(_method(influence)),
            Heading("How specific the answer is"),
            _agreement(influence),
            Heading("Limits of this answer"),
            Bullets((*(shorten(limit, 400) for limit in influence.limits), *_not_performed(subject))),
        ),
    )


def _asked(influence: Influence) -> str:
    case = shorten(influence.case_label, 120) or "one case"
    return f"Asked about {case}: what pushed {quoted(influence.target)} up against {quoted(influence.contrast)}."


def _specificity(influence: Influence) -> Notice:
    level: Literal["note", "exception"] = "note" if influence.specificity.specific else "exception"
    return Notice(level, "Is the answer about this case?", shorten(influence.specificity.statement, 800))


def _question(influence: Influence) -> tuple[Fact, ...]:
    place = str(influence.ref)
    target, contrast = quoted(influence.target), quoted(influence.contrast)
    odds = f"log p({target}) − log p({contrast}) = {signed(influence.log_odds, 3)}"
    chances = f"{target} {influence.p_target:.3f}, {contrast} {influence.p_contrast:.3f}"
    floor = (
        f"|cosine| {influence.noise_floor:.3f}: chance alone exceeds it with probability {influence.noise_alpha:g} "
        "over all rows together"
    )
    return (
        Fact("Case", shorten(influence.case_label, 120) or "not labelled", RECORDED, place),
        Fact("Answer of the model", f"{quoted(influence.answered)}; {chances}", MEASURED, place),
        Fact("What was asked", odds, MEASURED, place),
        Fact("Noise floor", floor, ESTIMATED, place),
    )


def _method(influence: Influence) -> tuple[Fact, ...]:
    place = str(influence.ref)
    method = f"{influence.estimator}, ranked by cosine, {influence.sketch_dim:,} sketch values"
    pool = f"{quantity(influence.n_records, 'record')} of {quantity(influence.n_samples, 'training row')}"
    return (
        Fact("Estimator", method, RECORDED, place),
        Fact("Candidates", pool, MEASURED, place),
        Fact("Commitment to the full result", influence.commitment, RECORDED, place, mono=True),
        Fact("Queries in the custody log", f"{influence.queries}; this is the latest", MEASURED, "custody log"),
    )


def _label(row: InfluenceRow) -> str:
    return f"{shorten(row.path, 24)} row {row.row}"


def _dots(rows: Sequence[InfluenceRow]) -> tuple[Whisker, ...]:
    return tuple(Whisker(_label(row), row.cosine, row.cosine_se, row.above_floor) for row in rows)


def _sides(influence: Influence) -> tuple[Block, ...]:
    """Return drawing and table of the records that pushed either way; both drawings share one axis."""
    towards, away = influence.top_for, influence.top_against
    exponent = common_exponent(row.score for row in (*towards, *away))
    axis_title = "cosine of the record's summed sketch with the query's sketch"
    blocks: list[Block] = []
    sides: tuple[tuple[str, Style, str, tuple[InfluenceRow, ...], tuple[InfluenceRow, ...]], ...] = (
        (influence.target, "for", _READING, towards, away),
        (influence.contrast, "against", "On the same axis as the drawing above.", away, towards),
    )
    for answer, style, reading, rows, others in sides:
        svg = whisker_chart(
            _dots(rows), style=style, axis_title=axis_title, band=influence.noise_floor, beside=_dots(others)
        )
        heading = Heading(f"Pushed towards {quoted(answer)}")
        blocks += [heading, Figure(svg, reading, ESTIMATED), _table(rows, exponent)]
    return tuple(blocks)


def _table(rows: Sequence[InfluenceRow], exponent: int) -> Table:
    unit = 10.0**exponent
    return Table(
        (
            Column("", 4, "number"),
            Column("Source file, row", 27, "strong"),
            Column("Data version", 15),
            Column("Uses", 6, "number"),
            Column("Cosine ± SE", 18, "number"),
            Column(f"Score{times_ten_to(exponent)} ± SE", 17, "number"),
            Column("Loss, first → last", 13, "number"),
        ),
        tuple(
            (
                str(row.rank),
                f"{shorten(row.path, 40)}, {row.row}" + ("" if row.above_floor else " ○"),
                shorten(row.data_version.removeprefix("sha256:"), 12),
                str(row.uses),
                plus_minus(row.cosine, row.cosine_se, 3),
                plus_minus(row.score / unit, row.score_se / unit, 2),
                f"{short(row.loss_first)} → {short(row.loss_last)}",
            )
            for row in rows
        ),
        tag=ESTIMATED,
    )


def _sources(influence: Influence) -> tuple[Block, ...]:
    if not influence.sources:
        return ()
    exponent = common_exponent(source.total for source in influence.sources)
    unit = 10.0**exponent
    dots = tuple(Whisker(s.path, s.total / unit, s.se / unit) for s in influence.sources)
    axis = f"total score{times_ten_to(exponent)} (positive: towards {quoted(influence.target)})"
    figure = Figure(
        whisker_chart(dots, style="plain", axis_title=axis),
        "Total over all rows of a file, ± 1 standard error of the sketch, taken from the file's summed sketch because "
        "the errors of single rows are correlated. A total says what the run drew on, not what was suitable.",
        ESTIMATED,
    )
    table = Table(
        (
            Column("Source file", 36, "strong"),
            Column("Rows", 10, "number"),
            Column(f"Total{times_ten_to(exponent)} ± SE", 22, "number"),
            Column("Positive part", 16, "number"),
            Column("Negative part", 16, "number"),
        ),
        tuple(
            (
                shorten(s.path, 60),
                f"{s.samples:,}",
                plus_minus(s.total / unit, s.se / unit, 2),
                signed(s.positive / unit, 2),
                signed(s.negative / unit, 2),
            )
            for s in influence.sources
        ),
        tag=ESTIMATED,
    )
    return Heading("By source file"), figure, table


def _agreement(influence: Influence) -> Table:
    specificity = influence.specificity
    cases = quantity(specificity.cases, "other case")
    return Table(
        (
            Column(f"Against {cases}", 40, "strong"),
            Column("Rank correlation, mean (range)", 36, "number"),
            Column("Leading records shared, mean", 24, "number"),
        ),
        tuple(
            (name, _correlation(agreement), _overlap(agreement))
            for name, agreement in (
                ("as ranked", specificity),
                ("after subtracting the mean query of the others", specificity.centred),
            )
        ),
        caption="Near 1 and 100 %: the same records are named whoever asks. Near 0: the answer belongs to this case. "
        "Leading records: the ten on either side.",
        tag=MEASURED,
    )


def _correlation(agreement: Agreement) -> str:
    mean, low, high = agreement.spearman_mean, agreement.spearman_min, agreement.spearman_max
    if mean is None or low is None or high is None:
        return "not tested"
    return f"{signed(mean, 2)} ({signed(low, 2)} to {signed(high, 2)})"


def _overlap(agreement: Agreement) -> str:
    share = agreement.top10_overlap_mean
    return "not tested" if share is None else f"{100 * share:.0f} %"


def _not_performed(subject: Subject) -> tuple[str, ...]:
    kinds = {act.kind for act in subject.evidence.custody}
    missing = []
    if "VALIDATION" not in kinds:
        missing.append("Validity on this model (removal and retraining, rank correlation): not performed.")
    if "REPLAY" not in kinds:
        missing.append("Replay of logged steps from data and weights: not performed.")
    missing.append(
        "Rows are named by file and number. Their text, and that of the case, is not printed: it can be personal data "
        "of others. This section is background evidence for the explanation given by the deployer, not the "
        "explanation itself."
    )
    return tuple(missing)
