"""Sources that are bytes: JSON Lines, CSV and plain text, as they are or packed with gzip."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from auditlog.datamanifest.records import Delimited, JsonLines, Layout, TextLines
from auditlog.datamanifest.rows import FileHash, Row, unreadable
from auditlog.errors import DataError
from auditlog.format.manifest import SourceFormat

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER = 1 << 20


class TextualFile:
    """One file of text rows. ``sha256`` is that of the file on the disk, rows are those of the unpacked content.

    Attributes:
        label: How messages name it.
        format: ``jsonl``, ``csv``, ``tsv`` or ``text``, with ``.gz`` if packed.
    """

    is_table = False

    def __init__(self, path: Path, label: str, format: SourceFormat) -> None:
        self._path = path
        self.label = label
        self.format = format
        self._layout = _layout(format.removesuffix(".gz"))

    def rows(self, file: FileHash) -> Iterator[Row]:
        """Yield every row, hashing the file's bytes as they pass."""
        with self._content(file) as content:
            yield from self._layout.cut(iter(content), self.label)

    def values(self, number: int, row: Row) -> dict[str, Any]:
        """Return a row's fields."""
        return self._layout.parse(row, f"{self.label}: row {number}{row.place}")

    def at(self, number: int, start: int, end: int) -> Row:
        """Read one row; in a packed file by unpacking everything before it."""
        with self._content(FileHash()) as content:
            content.seek(start)
            return Row(content.read(end - start).removesuffix(b"\n"), start, end)

    python = values  # they are ordinary objects already

    def table(self) -> Any:
        """Return nothing: text has no types of its own."""
        return None

    @contextmanager
    def _content(self, file: FileHash) -> Iterator[BinaryIO]:
        """Open the unpacked content, and say in words what stands in the way of reading it."""
        try:
            with self._path.open("rb", buffering=0) as raw:
                stream: Any = io.BufferedReader(_Hashing(raw, file), _BUFFER)
                if self.format.endswith(".gz"):
                    stream = io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=stream)), _BUFFER)
                yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.label}: not a whole gzip file: {error}",
                "Copy or pack the file again; it may have been cut off.",
            ) from error
        except OSError as error:
            raise unreadable(self.label, error) from error


def _layout(kind: str) -> Layout:
    if kind == "jsonl":
        return JsonLines()
    if kind == "text":
        return TextLines()
    return Delimited("," if kind == "csv" else "\t")


class _Hashing(io.RawIOBase):
    """A file that tells a ``FileHash`` every byte that is read from it."""

    def __init__(self, raw: io.FileIO, file: FileHash) -> None:
        self._raw = raw
        self._file = file

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True; after a jump the hash means nothing."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Jump."""
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        """Return the position."""
        return self._raw.tell()

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read, and tell."""
        size = self._raw.readinto(buffer) or 0
        self._file.update(memoryview(buffer)[:size])
        return size
