"""Sketches on disk: ``sketches/000000.npy`` and so on, 8,192 int8 rows each.

A shard gets its full size when it is made, is filled by ``pwrite`` and read through a memory map, and is cut
to its true row count when the run is sealed. (A growing memory map would end in SIGBUS on a full disk;
``pwrite`` gives an error that loses nothing.) Shards are plain ``.npy`` files at every moment. No digest of
a whole shard exists: each row is committed to in its record, so that a single row can be erased.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import StoreError
from auditlog.ledger.files import disk_error, sync_folder

SHARD_ROWS = 8_192
FOLDER = "sketches"


class Places(NamedTuple):
    """Where rows lie: shard number and row within it, each ``(n,)``."""

    shard: NDArray[np.uint32]
    row: NDArray[np.uint32]


class ShardWriter:
    """Appends int8 rows. A row is given its place only after it has been written.

    Args:
        run: The run folder.
        width: Bytes per row: sketch dimension times the number of forms.
        written: Rows that the log refers to already. What a crash left behind them is written over.
        shard_rows: Rows per shard.
    """

    def __init__(self, run: Path, width: int, *, written: int = 0, shard_rows: int = SHARD_ROWS) -> None:
        self._folder = run / FOLDER
        self._width = width
        self._shard_rows = shard_rows
        self._written = written
        self._header_bytes = len(_header(width, shard_rows))
        self._open: dict[int, int] = {}  # shard -> file descriptor: those not yet synced, and the last
        _make(self._folder)

    def append(self, rows: NDArray[np.int8]) -> Places:
        """Write rows ``(n, width)`` behind the last ones and return where they lie.

        Raises:
            StoreError: If the disk refuses. Nothing is counted as written then, and the same rows may be
                appended again.
        """
        if rows.dtype != np.int8 or rows.ndim != 2 or rows.shape[1] != self._width:
            raise StoreError(f"sketch rows are {rows.dtype} {rows.shape}, expected int8 (n, {self._width})")
        done = 0
        while done < len(rows):
            number, first_row = divmod(self._written + done, self._shard_rows)
            part = rows[done : done + self._shard_rows - first_row]
            self._write(number, first_row, part)
            done += len(part)
        shard, row = np.divmod(np.arange(self._written, self._written + len(rows)), self._shard_rows)
        self._written += len(rows)
        return Places(shard.astype(np.uint32), row.astype(np.uint32))

    def sync(self) -> None:
        """Wait until every row appended so far is on the disk; full shards are closed."""
        last = max(self._written - 1, 0) // self._shard_rows
        for number, descriptor in sorted(self._open.items()):
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise disk_error(self._path(number), error) from error
            if number < last:
                os.close(self._open.pop(number))

    def close(self, *, cut: bool) -> None:
        """Sync and close; with ``cut`` the last shard is shortened to the rows it has."""
        self.sync()
        if cut:
            cut_shards(self._folder.parent, self._width, self._written, shard_rows=self._shard_rows)
        while self._open:
            os.close(self._open.popitem()[1])

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.npy"

    def _write(self, number: int, first_row: int, rows: NDArray[np.int8]) -> None:
        try:
            if number not in self._open:
                self._open[number] = self._create(number)
            data = np.ascontiguousarray(rows).data.cast("B")
            offset = self._header_bytes + first_row * self._width
            while data:
                written = os.pwrite(self._open[number], data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise disk_error(self._path(number), error) from error

    def _create(self, number: int) -> int:
        header = _header(self._width, self._shard_rows)
        descriptor = os.open(self._path(number), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, len(header) + self._shard_rows * self._width)
            os.pwrite(descriptor, header, 0)
            sync_folder(self._folder)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


class ShardReader:
    """Reads single rows and blocks of rows through memory maps, one per shard.

    Args:
        run: The run folder.
        width: Bytes per row.
    """

    def __init__(self, run: Path, width: int) -> None:
        self._folder = run / FOLDER
        self._width = width
        self._maps: dict[int, NDArray[np.int8] | None] = {}

    def row(self, shard: int, row: int) -> NDArray[np.int8] | None:
        """Return one row ``(width,)``, or ``None`` where the shard is missing, short or not a shard."""
        rows = self._map(shard)
        return None if rows is None or row >= len(rows) else rows[row]

    def rows(self, shard: NDArray[np.uint32], row: NDArray[np.uint32]) -> NDArray[np.int8]:
        """Return rows ``(n, width)`` in the order asked for.

        Raises:
            StoreError: If one of them is missing.
        """
        out = np.empty((len(shard), self._width), np.int8)
        for number in np.unique(shard):
            inside = shard == number
            out[inside] = self.span(int(number), 0, int(row[inside].max()) + 1)[row[inside]]
        return out

    def span(self, number: int, first: int, stop: int) -> NDArray[np.int8]:
        """Return a view ``(stop - first, width)`` of one shard's memory map; nothing is read yet.

        Raises:
            StoreError: If the shard is missing or too short.
        """
        stored = self._map(number)
        if stored is None or stop > len(stored):
            raise StoreError(f"{self._path(number)} is missing or too short")
        return stored[first:stop]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.npy"

    def _map(self, number: int) -> NDArray[np.int8] | None:
        if number not in self._maps:
            self._maps[number] = self._load(number)
        return self._maps[number]

    def _load(self, number: int) -> NDArray[np.int8] | None:
        try:
            rows: NDArray[np.int8] = np.load(self._path(number), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        fits = isinstance(rows, np.ndarray) and rows.dtype == np.int8 and rows.ndim == 2
        return rows if fits and rows.shape[1] == self._width else None


def rows_in_use(records: NDArray[np.void], steps: Iterable[dict[str, Any]]) -> int:
    """Return how many rows the log refers to: one more than the last that a record or a step's gradient names.

    Args:
        records: ``(n,)`` all records.
        steps: Bodies of all step events.
    """
    gradients = [body["gradient"] for body in steps if body["gradient"] is not None]
    ends = [gradient["shard"] * SHARD_ROWS + gradient["row"] + 1 for gradient in gradients]
    if len(records):
        ends.append(int((records["shard"].astype(np.int64) * SHARD_ROWS + records["shard_row"]).max()) + 1)
    return max(ends, default=0)


def cut_shards(run: Path, width: int, rows: int, *, shard_rows: int = SHARD_ROWS) -> None:
    """Shorten the shards to ``rows`` rows in all: the last one is cut, shards behind it are removed.

    Raises:
        StoreError: If the disk refuses.
    """
    folder = run / FOLDER
    last, rest = divmod(rows, shard_rows)
    try:
        for path in folder.glob("*.npy"):
            if path.stem.isdigit() and int(path.stem) >= last + (rest > 0):
                path.unlink()
        if rest:
            header = _header(width, rest)
            with (folder / f"{last:06d}.npy").open("r+b") as file:
                file.write(header)
                file.truncate(len(header) + rest * width)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(folder)
    except OSError as error:
        raise disk_error(folder, error) from error


def header_bytes(width: int) -> int:
    """Return the length of a shard's header, behind which its rows begin."""
    return len(_header(width, SHARD_ROWS))


def _header(width: int, rows: int) -> bytes:
    """Return the ``.npy`` header; numpy pads it so that its length does not depend on ``rows``."""
    buffer = io.BytesIO()
    description = {"descr": "|i1", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from error
