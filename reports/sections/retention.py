"""Section 6: which logs are kept. The training log is not one of them, and the section says so."""

from __future__ import annotations

from reports.document import MEASURED, RECORDED, Column, Fact, Facts, Paragraph, Section, Table
from reports.formats import moment
from reports.sections.subject import Subject

_RULES = (
    ("Logs of the system in operation", "at least six months, Article 19(1) and 26(6)", "each record"),
    ("Technical documentation", "10 years, Article 18(1)", "placing on the market or putting into service"),
    ("Training samples and salts", "as long as the purpose needs, Article 5(1)(e) GDPR", "collection"),
)


def retention(subject: Subject) -> Section:
    """Section 6."""
    records = subject.evidence.records
    return Section(
        "6",
        "Log retention, Article 26(6)",
        (
            Paragraph(
                "Logs of the system in operation: not recorded here. This run is documentation of development; it is "
                "not the log of paragraph 6, and its age says nothing about that log."
            ),
            Facts(
                (
                    Fact("Earliest training record", moment(records.first_us), RECORDED, "run log"),
                    Fact("Latest training record", moment(records.last_us), RECORDED, "run log"),
                    Fact("Gaps in the entry numbers", "none found", MEASURED, "verification"),
                    *subject.statements("log_control", "appropriate_period", "logs_outside", "sectoral_rules"),
                )
            ),
            Table(
                (Column("Record", 32, "strong"), Column("Rule", 40), Column("Period begins with", 28)),
                _RULES,
                caption="Which rule holds for which record. Data protection law may shorten, sector law may lengthen.",
            ),
        ),
    )
