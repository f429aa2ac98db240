"""The Article 26 deployer evidence file: which sections, in which order.

Article 26 asks for no training-data lineage, and section 3 says so; it collects what a deployer
may need from the records of a training run, and shows what those records cannot give.
"""

from __future__ import annotations

from datetime import UTC, datetime

from reports.document import Document, Section
from reports.sections import appendices, closing, duties, identity, integrity, lineage, retention
from reports.sections.influence import influence_section
from reports.sections.subject import Subject


def assemble(subject: Subject) -> Document:
    """Return the document. A function of its argument alone: no clock, no files."""
    sections: tuple[Section, ...] = (
        identity.control(subject),
        identity.identification(subject),
        identity.scope(subject),
        identity.summary(subject),
        duties.article_26(subject),
        retention.retention(subject),
        duties.human_oversight(subject),
        duties.input_data(subject),
        duties.monitoring(subject),
        duties.notices(subject),
        lineage.lineage(subject),
        influence_section(subject),
        integrity.integrity(subject),
        closing.limitations(),
        closing.sign_off(),
        appendices.hashes(subject),
        appendices.commands(subject),
        appendices.register_extract(subject),
        appendices.glossary(),
    )
    return Document(
        report_id=subject.report_id,
        status=identity.STATUS,
        created=datetime.fromtimestamp(subject.created_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        running_title=identity.system_line(subject),
        cover=identity.cover(subject),
        sections=sections,
    )
