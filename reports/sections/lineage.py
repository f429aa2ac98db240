"""Section 11: the provider's material that the run itself holds: base model, data lineage, training, versions."""

from __future__ import annotations

from reports.document import MEASURED, RECORDED, Block, Column, Fact, Facts, Heading, Section, Table
from reports.evidence import Evidence, Settings
from reports.formats import moment, quantity, short
from reports.sections.capture import capture_facts, untracked
from reports.sections.duties import duty_table
from reports.sections.rows import fates, source_files
from reports.sections.subject import Subject
from reports.text import shorten

_MOST_SETTINGS = 16
_DATA_STATEMENTS = (
    *("collection_method", "original_purpose", "legal_basis", "licence_terms"),
    *("selection_rationale", "labelling_procedure"),
)


def lineage(subject: Subject) -> Section:
    """Section 11."""
    described = subject.evidence.data_description or "not recorded"
    blocks: list[Block] = [
        Heading("Base model and training run"),
        Facts((*_model(subject), *capture_facts(subject.evidence), *_run(subject))),
        *untracked(subject.evidence),
        *_attempts(subject.evidence),
        Heading("Source files"),
        source_files(subject.evidence),
        Facts(
            (
                Fact("What the data is", shorten(described, 600), RECORDED, "manifest"),
                *subject.statements(*_DATA_STATEMENTS),
            )
        ),
        *fates(subject.evidence),
        Heading("Settings and software of the run"),
        _settings(subject.evidence.training, subject.evidence.environment),
    ]
    provider = subject.coverage("provider")
    if provider:
        blocks += [Heading("Provider duties that these records touch"), duty_table(subject, provider)]
    return Section("11", "Supporting provider material", tuple(blocks))


def _model(subject: Subject) -> list[Fact]:
    model = subject.evidence.model
    source = str(model.ref)
    adapter = model.get("adapter")
    return [
        Fact("Base model", shorten(model.get("name") or "not recorded", 120), RECORDED, source),
        Fact(
            "SHA-256 of its frozen weights", model.get("frozen_sha256") or "not recorded", MEASURED, source, mono=True
        ),
        Fact("Adapter", adapter or "none: the model's own weights were trained", RECORDED, source),
    ]


def _run(subject: Subject) -> list[Fact]:
    evidence = subject.evidence
    records, steps = evidence.records, evidence.steps
    place, log = str(steps.ref), str(records.ref)
    factor = f"{short(steps.factor_min, 4)} to {short(steps.factor_max, 4)}, below 1 in {steps.clipped} steps"
    uses = f"{records.records:,} uses of {records.samples:,} rows, {records.tokens:,} tokens"
    if records.superseded:
        uses += f"; {records.superseded:,} more that a later attempt superseded are not counted"
    facts = [
        Fact("Period", f"{moment(records.first_us)} to {moment(records.last_us)}", RECORDED, log),
        Fact("Records", uses, MEASURED, log),
        Fact("Optimizer steps", f"{steps.steps:,}, {steps.skipped} skipped", MEASURED, place),
        Fact(
            "Training loss, first and last step",
            f"{short(steps.loss_first)}, {short(steps.loss_last)}",
            MEASURED,
            place,
        ),
        Fact(
            "Conservation residual, median and largest",
            f"{short(steps.residual_median)}, {short(steps.residual_max)} (step {steps.residual_max_step})",
            MEASURED,
            place,
        ),
        Fact(
            "Sketch of each gradient",
            f"{evidence.sketch.get('kind')}, {evidence.sketch.get('dim')} values, {evidence.sketch.get('forms')}",
            RECORDED,
            str(evidence.sketch.ref),
        ),
        Fact("Clip factor as measured", factor, MEASURED, place),
    ]
    if evidence.processes > 1:
        facts.append(Fact("Processes", f"{evidence.processes}; each kept its own log", RECORDED, "manifest"))
    for checkpoint in evidence.checkpoints:
        label = f"Saved weights at step {checkpoint.step}"
        facts.append(
            Fact(label, f"{checkpoint.path}, {quantity(len(checkpoint.files), 'file')}", RECORDED, str(checkpoint.ref))
        )
    return facts


def _attempts(evidence: Evidence) -> tuple[Block, ...]:
    """Return from where training went on, attempt by attempt; nothing for a run that was never resumed."""
    if len(evidence.attempts) < 2:
        return ()
    rows = tuple(
        (
            str(attempt.steps.number),
            f"step {attempt.steps.from_step:,} of attempt {attempt.steps.from_attempt}"
            if attempt.steps.from_attempt
            else "the start",
            "none" if attempt.steps.last_step is None else f"{attempt.steps.last_step:,}",
            f"{attempt.steps.steps:,}",
            f"{attempt.steps.live_steps:,}",
            str(attempt.ref),
        )
        for attempt in evidence.attempts
    )
    return (
        Heading("Attempts"),
        Table(
            (
                Column("Attempt", 10, "number"),
                Column("Went on from", 26),
                Column("Last step", 12, "number"),
                Column("Steps logged", 12, "number"),
                Column("Of which count", 14, "number"),
                Column("Source", 26),
            ),
            rows,
            caption="A step counts if the final weights went through it. The others are logged, and a later attempt "
            "went back behind them.",
            tag=MEASURED,
        ),
    )


def _settings(*blocks: Settings) -> Table:
    rows = [(name, shorten(value, 110)) for block in blocks for name, value in block.values]
    shown = sorted(rows, key=lambda row: row[0].count("."))[:_MOST_SETTINGS]
    rest = len(rows) - len(shown)
    more = f"; {quantity(rest, 'further setting')} in evidence.json" if rest else ""
    return Table(
        (Column("Setting", 45, "mono"), Column("Value", 55)),
        tuple(row for row in rows if row in shown),
        caption=f"From the manifest{more}.",
        tag=RECORDED,
    )
