"""Which kind of source a file is: its name's ending says it."""

from __future__ import annotations

from pathlib import Path

from auditlog.datamanifest.rows import SourceReader
from auditlog.datamanifest.textual import TextualFile
from auditlog.errors import DataError
from auditlog.format.manifest import SourceFormat

_ENDINGS: dict[str, SourceFormat] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".ndjson": "jsonl",
    ".ndjson.gz": "jsonl.gz",
    ".json": "jsonl",
    ".json.gz": "jsonl.gz",
    ".csv": "csv",
    ".csv.gz": "csv.gz",
    ".tsv": "tsv",
    ".tsv.gz": "tsv.gz",
    ".txt": "text",
    ".txt.gz": "text.gz",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


def format_of(path: Path) -> SourceFormat:
    """Return the format that a file's name stands for; upper and lower case are alike.

    Raises:
        DataError: If the ending is none of the known ones.
    """
    name = path.name.lower()
    for ending, kind in _ENDINGS.items():
        if name.endswith(ending):
            return kind
    raise DataError(
        f"{path.name}: the ending says nothing about the format",
        f"Rename the file, or leave it out of the pattern. Known endings: {' '.join(_ENDINGS)}.",
    )


def open_reader(path: Path, label: str, kind: SourceFormat) -> SourceReader:
    """Return the reader of a file; nothing is read yet.

    Raises:
        DataError: If the source was a dataset in memory, which no file stands for.
    """
    if kind == "dataset":
        raise DataError(
            f"{label}: was a dataset in memory, not a file",
            "Compare it in Python, with DataManifest.from_dataset over the dataset as it was.",
        )
    if kind not in ("parquet", "arrow"):
        return TextualFile(path, label, kind)
    from auditlog.datamanifest.arrow import ArrowTable, ParquetTable, TableSource

    return TableSource(ParquetTable(path) if kind == "parquet" else ArrowTable(path), label, kind)
