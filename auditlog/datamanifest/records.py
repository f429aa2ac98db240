r"""How the bytes of JSON Lines, CSV and plain text are cut into rows, and what a row holds.

Only ``\n`` ends a line: no Unicode separator and no lone ``\r`` moves a row number. A row's bytes are without its
last ``\n``; a ``\r`` before it belongs to the bytes and not to the text. A byte order mark belongs to the bytes of the
first line.

Values are taken as they stand. JSON keeps its types: ``1`` is an integer, ``1.0`` a float, ``"2024-01-02"`` a text.
A CSV cell is always a text: ``NA``, ``001`` and the empty cell stay what they are.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, Protocol

from auditlog.datamanifest.rows import Row
from auditlog.errors import DataError

BOM = b"\xef\xbb\xbf"


class Layout(Protocol):
    """Cuts lines into rows and reads a row. One object per file: CSV keeps the names of its header."""

    def cut(self, lines: Iterator[bytes], label: str) -> Iterator[Row]:
        """Yield the rows that the lines (each with its newline) form."""

    def parse(self, row: Row, where: str) -> dict[str, Any]:
        """Return the fields of one row; ``where`` names it in errors."""


class JsonLines:
    """One JSON object per line. A line of nothing but blanks is no row, as for ``datasets`` and Arrow."""

    def cut(self, lines: Iterator[bytes], label: str) -> Iterator[Row]:
        """Yield each line that is not blank."""
        start = 0
        for number, line in enumerate(lines, 1):
            if line.removeprefix(BOM if start == 0 else b"").strip():
                yield Row(line.removesuffix(b"\n"), start, start + len(line), f" (line {number})")
            start += len(line)

    def parse(self, row: Row, where: str) -> dict[str, Any]:
        """Return the object."""
        text = decoded(row.raw, where, first=row.start == 0)
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}", "Each line must hold one JSON object.") from error
        if not isinstance(document, dict):
            raise DataError(
                f"{where}: a JSON {type(document).__name__}, not an object", "Each line must hold one JSON object."
            )
        return document


class TextLines:
    """One row per line with the single field ``text``; an empty line is a row with an empty text."""

    def cut(self, lines: Iterator[bytes], label: str) -> Iterator[Row]:
        """Yield each line."""
        start = 0
        for number, line in enumerate(lines, 1):
            yield Row(line.removesuffix(b"\n"), start, start + len(line), f" (line {number})")
            start += len(line)

    def parse(self, row: Row, where: str) -> dict[str, Any]:
        """Return the line's text."""
        return {"text": decoded(row.raw, where, first=row.start == 0).removesuffix("\r")}


class Delimited:
    r"""CSV as RFC 4180 has it, with a header; cells may hold newlines between quotes.

    A line of nothing but blanks between two rows is no row, as for ``datasets``. A column without a name is called
    ``Unnamed: <number>``, as there. A row with more or fewer cells than the header is refused.

    Args:
        delimiter: ``","`` or ``"\t"``.
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        self._names: list[str] = []
        csv.field_size_limit(2**31 - 1)  # the module's own limit of 128 kB would refuse a long text

    def cut(self, lines: Iterator[bytes], label: str) -> Iterator[Row]:
        """Read the header, then yield each record with the bytes it came from."""
        self._names = []
        taken: list[bytes] = []
        start = line = 0

        def feed() -> Iterator[str]:
            for raw in lines:
                taken.append(raw)
                yield decoded(raw, f"{label}: line {line + len(taken)}", first=line + len(taken) == 1)

        reader = csv.reader(feed(), delimiter=self._delimiter, strict=True)
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(
                    f"{label}: the record that begins on line {line + 1} is not CSV: {error}",
                    'Look for a quote that is not closed, or not written as "" inside a quoted cell.',
                ) from error
            if cells is None:
                return
            raw, place, line = b"".join(taken), f" (line {line + 1})", line + len(taken)
            taken.clear()
            end = start + len(raw)
            if cells and raw.strip(b" \r\n"):
                if self._names:
                    yield Row(raw.removesuffix(b"\n"), start, end, place)
                else:
                    self._names = _header(cells, label)
            start = end

    def parse(self, row: Row, where: str) -> dict[str, Any]:
        """Return the cells by column name."""
        lines = io.StringIO(decoded(row.raw, where, first=False), newline="\n")
        cells = next(csv.reader(lines, delimiter=self._delimiter, strict=True))
        if len(cells) != len(self._names):
            raise DataError(
                f"{where}: {len(cells)} cells, the header has {len(self._names)}",
                "Mend the row; a cell that holds the delimiter, a quote or a newline must be quoted.",
            )
        return dict(zip(self._names, cells, strict=True))


def _header(cells: list[str], label: str) -> list[str]:
    names = [cell or f"Unnamed: {number}" for number, cell in enumerate(cells)]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise DataError(f"{label}: two columns are called {double!r}", "Give each column its own name in the header.")
    return names


def decoded(raw: bytes, where: str, *, first: bool) -> str:
    """Return the text of UTF-8 bytes; ``first`` if a byte order mark may stand before it.

    Raises:
        DataError: Naming the first byte that is not UTF-8.
    """
    try:
        return (raw.removeprefix(BOM) if first else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}",
            "Convert the file first, for example: iconv -f latin1 -t utf-8 FILE > CONVERTED",
        ) from error
