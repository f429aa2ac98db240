"""One source read once: its digest, and for each row where it lies, what its bytes are and what its values are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.datamanifest.rows import FileHash, Row, SourceReader
from auditlog.datamanifest.values import canonical_row
from auditlog.errors import DataError
from auditlog.format.digests import sha256


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over a source found."""

    reader: SourceReader
    sha256: str
    size_bytes: int
    spans: NDArray[np.int64]  # (rows, 2): start and end in the unpacked content
    row_sha256: NDArray[np.uint8]  # (rows, 32), over each row's bytes
    values_sha256: NDArray[np.uint8]  # (rows, 32), over each row's values

    @property
    def content_sha256(self) -> str:
        """SHA-256 over the digests of the rows' values, in order."""
        return sha256(self.values_sha256.tobytes()).hex()


def scan(reader: SourceReader, text_fields: Sequence[str]) -> Scan:
    """Read a source whole.

    Args:
        reader: The source.
        text_fields: Fields that every row must have as text; only a line of a text file may be empty.

    Raises:
        DataError: Naming the source and row, if it cannot be read or a row is not usable.
    """
    file, spans, raw_digests, digests = FileHash(), array("q"), bytearray(), bytearray()
    for number, row in enumerate(reader.rows(file)):
        values = reader.values(number, row)
        _check_text(reader, number, row, values, text_fields)
        raw_digests += sha256(row.raw)
        digests += sha256(_canonical(reader, number, row, values))
        spans.extend((row.start, row.end))
    if not digests:
        raise DataError(
            f"{reader.label}: the file is empty: it holds no row",
            "Remove it from the pattern, or write its rows first.",
        )
    return Scan(
        reader=reader,
        sha256=file.hexdigest(),
        size_bytes=file.size_bytes,
        spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
        row_sha256=np.frombuffer(bytes(raw_digests), dtype=np.uint8).reshape(-1, 32),
        values_sha256=np.frombuffer(bytes(digests), dtype=np.uint8).reshape(-1, 32),
    )


def checked_rows(scanned: Scan) -> Iterator[tuple[int, Row]]:
    """Yield every row with its number, as long as each is the one that was scanned.

    Raises:
        DataError: Naming the first row that differs, or how many there are now.
    """
    count, number = len(scanned.row_sha256), -1
    for number, row in enumerate(scanned.reader.rows(FileHash())):
        if number >= count or sha256(row.raw) != scanned.row_sha256[number].tobytes():
            raise changed(scanned.reader.label, f"row {number} {'differs' if number < count else 'was added'}")
        yield number, row
    if number + 1 < count:
        raise changed(scanned.reader.label, f"{number + 1} rows, there were {count}")


def changed(label: str, what: str) -> DataError:
    """Return the error for a source that is no longer what was recorded."""
    return DataError(
        f"{label}: changed after the data manifest was built ({what})",
        "Restore the file, or call DataManifest.build again and start a new run.",
    )


def _canonical(reader: SourceReader, number: int, row: Row, values: dict[str, Any]) -> bytes:
    if row.values is not None:  # a table: its rows' bytes are their canonical form already
        return row.raw
    try:
        return canonical_row(values)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{reader.label}: row {number}{row.place}: no canonical form: {error}") from error


def _check_text(reader: SourceReader, number: int, row: Row, values: dict[str, Any], names: Sequence[str]) -> None:
    """Raise ``DataError`` unless every text field holds text."""
    may_be_empty = reader.format in ("text", "text.gz")
    for name in names:
        value = values.get(name)
        if not isinstance(value, str) or not (value or may_be_empty):
            raise DataError(
                f"{reader.label}: row {number}{row.place}: no text in field {name!r}; its fields are {sorted(values)}",
                "Mend the row, or name the text fields: DataManifest.build(…, text_fields=(…,)).",
            )
