"""Section 5 and the tables of duties: evidence, gap and human input side by side. Never a tick, never a score."""

from __future__ import annotations

from collections.abc import Iterable

from reports.coverage import Coverage
from reports.document import Block, Bullets, Column, Facts, Heading, Notice, Paragraph, Section, Table
from reports.sections.subject import ROLE_NOT_DECLARED, Subject

_COLUMNS = (
    Column("Provision", 17, "strong"),
    Column("Records available", 24),
    Column("Gap and limit", 29),
    Column("Human input", 22),
    Column("Rating", 8),
)

_ELSEWHERE = frozenset(  # human inputs with a section of their own
    (
        *("eu_database_entry", "put_into_service"),  # 2, 3
        *("appropriate_period", "log_control", "logs_outside", "sectoral_rules"),  # 6
        *("overseer_assignment", "overseer_authority", "overseer_training"),  # 7
        *("input_control", "input_representativeness"),  # 8
        *("monitoring_plan", "notification_times", "risk_determination", "suspension_decision"),  # 9
        *("dpia", "dpo_consultation", "fria", "fria_notification", "person_notice", "worker_notice"),  # 10
        *("collection_method", "labelling_procedure", "legal_basis", "licence_terms"),  # 11
        *("original_purpose", "selection_rationale"),  # 11
    )
)

_RATING = Paragraph(
    "The rating says how far verified records reach a duty: none, partial or full. It is no statement that a duty is "
    "fulfilled, declarations do not raise it, and it never exceeds the ceiling set in Appendix C. Where it is none, "
    "records at hand are context for the reader, not support."
)


def duty_table(subject: Subject, coverage: tuple[Coverage, ...]) -> Table:
    """Return the table of evidence, gap and human input for rated duties."""
    return Table(_COLUMNS, tuple(_row(subject, item) for item in coverage))


def _row(subject: Subject, item: Coverage) -> tuple[str, ...]:
    register, obligation = subject.register, item.obligation
    present = _list(register.evidence[name] for name in item.present) or "None recorded."
    if item.rating == "none" and item.present:
        present = f"Context only: {present[0].lower()}{present[1:]}"
    needed = [register.evidence[name] for name in obligation.requires if name in item.missing]
    gap = f"Not recorded: {'; '.join(needed)}. {obligation.limit}" if needed else obligation.limit
    declared = [name for name in obligation.human_input if name in subject.declarations.statements]
    lacking = [register.human_input[name] for name in obligation.human_input if name not in declared]
    inputs = []
    if declared:
        inputs.append(f"Declared: {'; '.join(register.human_input[name] for name in declared)}.")
    if lacking:
        inputs.append(f"Open: {'; '.join(lacking)}.")
    title = f"{obligation.reference.replace('Article ', '')} {obligation.title}"
    return title, present, gap, " ".join(inputs) or "—", item.rating


def _list(names: Iterable[str]) -> str:
    joined = "; ".join(names)
    return f"{joined[0].upper()}{joined[1:]}." if joined else ""


def article_26(subject: Subject) -> Section:
    """Section 5."""
    coverage = tuple(c for c in subject.coverage("deployer") if c.obligation.id.startswith("AIA-26."))
    if not coverage:
        reason = ROLE_NOT_DECLARED if not subject.mapped_roles else "Deployer role not declared: Article 26 not mapped"
        return Section("5", "Article 26, paragraph by paragraph", (Notice("open", reason), *_other_statements(subject)))
    others = tuple(c for c in subject.coverage("deployer") if not c.obligation.id.startswith("AIA-26."))
    return Section(
        "5",
        "Article 26, paragraph by paragraph",
        (
            _RATING,
            duty_table(subject, coverage),
            Heading("Related duties of a deployer"),
            duty_table(subject, others),
            *_other_statements(subject),
        ),
    )


def _other_statements(subject: Subject) -> tuple[Block, ...]:
    """Return what was declared and has no section of its own."""
    declared = [name for name in subject.declarations.statements if name not in _ELSEWHERE]
    if not declared:
        return ()
    return Heading("Further statements"), Facts(tuple(subject.statement(name) for name in declared))


def _facts(subject: Subject, *names: str) -> Facts:
    return Facts(subject.statements(*names))


def human_oversight(subject: Subject) -> Section:
    """Section 7."""
    return Section(
        "7",
        "Human oversight, Article 26(2)",
        (
            Paragraph("Reviews, overrides and stops: not recorded. The run holds no entry of the system in operation."),
            _facts(subject, "overseer_assignment", "overseer_training", "overseer_authority"),
        ),
    )


def input_data(subject: Subject) -> Section:
    """Section 8."""
    return Section(
        "8",
        "Input data, Article 26(4)",
        (
            Paragraph(
                "Profile of input data in operation: not recorded. The counts per source in section 11 describe the "
                "training data and are at most a baseline to compare with."
            ),
            _facts(subject, "input_control", "input_representativeness"),
        ),
    )


def monitoring(subject: Subject) -> Section:
    """Section 9."""
    return Section(
        "9",
        "Monitoring and incidents, Article 26(5)",
        (
            Paragraph("Incident entries: none recorded. Events outside this run cannot be excluded."),
            _facts(subject, "monitoring_plan", "risk_determination", "notification_times", "suspension_decision"),
        ),
    )


def notices(subject: Subject) -> Section:
    """Section 10."""
    return Section(
        "10",
        "Notices and assessments, Article 26(7) to (11)",
        (
            _facts(subject, "worker_notice", "person_notice"),
            _facts(subject, "dpia", "dpo_consultation", "fria", "fria_notification"),
            Bullets(
                (
                    "Computing influence on a decision about a person is itself a processing operation: enter it in "
                    "the records of processing (Article 30 GDPR).",
                )
            ),
        ),
    )
