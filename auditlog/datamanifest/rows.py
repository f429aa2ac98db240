"""What every kind of source gives: rows, one after the other and one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from auditlog.errors import DataError
from auditlog.format.manifest import SourceFormat


@dataclass(slots=True)
class FileHash:
    """SHA-256 and size of a source, gathered while it is read."""

    size_bytes: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)

    def update(self, data: bytes | memoryview) -> None:
        """Take in the next bytes."""
        self._digest.update(data)
        self.size_bytes += len(data)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        return str(self._digest.hexdigest())


class Row(NamedTuple):
    """One row as it was read."""

    raw: bytes  # what the row's digest is over
    start: int = 0  # where it lies in the (unpacked) file; a table's rows have no place
    end: int = 0
    place: str = ""  # " (line 3)", for messages
    values: dict[str, Any] | None = None  # where reading gave them along with the bytes


class SourceReader(Protocol):
    """A file or table that consists of rows.

    Attributes:
        label: How messages and the manifest name it.
        format: What it is read as.
        is_table: Whether ``table`` gives its rows in the types that they are stored in.
    """

    label: str
    format: SourceFormat
    is_table: bool

    def rows(self, file: FileHash) -> Iterator[Row]:
        """Yield every row in order; ``file`` is complete when the last one has been taken.

        Raises:
            DataError: If the source cannot be read, or cannot be cut into rows.
        """

    def values(self, number: int, row: Row) -> dict[str, Any]:
        """Return a row's fields, in the types that ``canonical_row`` takes.

        Raises:
            DataError: Naming the row, if it holds no fields.
        """

    def at(self, number: int, start: int, end: int) -> Row:
        """Read one row alone.

        Raises:
            DataError: If the source cannot be read, or ends before that row.
        """

    def python(self, number: int, row: Row) -> dict[str, Any]:
        """Return a row's fields as ordinary Python objects, for people."""

    def table(self) -> Any:
        """Return all rows as a ``pyarrow.Table``."""


def unreadable(label: str, error: OSError) -> DataError:
    """Return the error for a source that the operating system does not hand out."""
    return DataError(f"{label}: cannot be read: {error.strerror or error}")
