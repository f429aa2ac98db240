"""Section 11, the data: the source files with their versions, and what became of each of their rows."""

from __future__ import annotations

from auditlog.format.versions import version_in_words
from auditlog.ledger.sample_use import MAX_NAMED, rows_in_words
from reports.document import MEASURED, Block, Column, Heading, Table
from reports.evidence import Evidence, SampleFacts, SourceFacts
from reports.text import shorten

MOST_SHOWN = 20  # rows of one list
_COMMIT = 12  # characters of a git commit


def source_files(evidence: Evidence) -> Table:
    """Return the source files: format, version, size and how often training used them."""
    rows = tuple(
        (
            str(source.source_id),
            shorten(source.path, 80),
            source.format,
            _version(source),
            f"{source.rows:,}",
            f"{source.uses:,}",
            f"{source.tokens:,}",
            source.sha256[:16],
        )
        for source in evidence.sources
    )
    return Table(
        (
            Column("Id", 5, "number"),
            Column("File", 23, "strong"),
            Column("Format", 9),
            Column("Data version", 22),
            Column("Rows", 8, "number"),
            Column("Uses", 8, "number"),
            Column("Tokens", 9, "number"),
            Column("SHA-256, start", 16, "mono"),
        ),
        rows,
        caption="Uses: how often training used a row of the file. Tokens are those that carried loss, over all uses. "
        "Full digests: Appendix A.",
        tag=MEASURED,
    )


def _version(source: SourceFacts) -> str:
    revision = source.version.removeprefix("sha256:")
    revision = revision[:_COMMIT] if source.version_kind == "git" else shorten(revision, 120)
    return version_in_words(source.version_kind, revision, source.dirty)


def fates(evidence: Evidence) -> tuple[Block, ...]:
    """Return what became of the rows: per file, and the first rows of each list by name."""
    return Heading("What became of the rows"), _by_file(evidence), _lists(evidence)


def _by_file(evidence: Evidence) -> Table:
    width = 56 / len(evidence.samples)
    columns = [Column("Id", 5, "number"), Column("File", 31, "strong"), Column("Rows", 8, "number")]
    columns += [Column(_title(samples), width, "number") for samples in evidence.samples]
    rows = tuple(
        (
            str(source.source_id),
            shorten(source.path, 80),
            f"{source.rows:,}",
            *(_of_source(samples, number) for samples in evidence.samples),
        )
        for number, source in enumerate(evidence.sources)
    )
    return Table(tuple(columns), rows, caption="How many rows of each file are on which list.", tag=MEASURED)


def _of_source(samples: SampleFacts, number: int) -> str:
    return "not named" if samples.by_source is None else f"{samples.by_source[number]:,}"


def _lists(evidence: Evidence) -> Table:
    paths = [shorten(source.path, 48) for source in evidence.sources]
    rows = tuple(
        (
            _title(samples),
            f"{samples.count:,}",
            samples.fate.reason,
            rows_in_words([(paths[source], row) for source, row in samples.first], samples.count, MOST_SHOWN) or "—",
        )
        for samples in evidence.samples
    )
    return Table(
        (
            Column("List", 20, "strong"),
            Column("Rows", 8, "number"),
            Column("What is known", 28),
            Column("First rows", 44),
        ),
        rows,
        caption=f"The lists do not overlap and add up to all rows. The first {MOST_SHOWN} of each are named by file "
        f"and row, counted from 0; evidence.json holds the first {MAX_NAMED:,}.",
        tag=MEASURED,
    )


def _title(samples: SampleFacts) -> str:
    return samples.fate.capitalize()
