"""``DataManifest``: source files, their rows and their version, and every question that is asked about a sample."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from auditlog.datamanifest.changes import NAMED, difference, fields_that_differ, rows_that_differ
from auditlog.datamanifest.formats import format_of, open_reader
from auditlog.datamanifest.paths import find_files, missing, require_same_way
from auditlog.datamanifest.rows import Row
from auditlog.datamanifest.scan import Scan, changed, checked_rows, scan
from auditlog.datamanifest.versions import data_versions
from auditlog.errors import DataError
from auditlog.format.commitments import sample_identity
from auditlog.format.digests import sha256
from auditlog.format.manifest import DataBlock, DataVersion, Source

if TYPE_CHECKING:
    import pyarrow as pa


class DataManifest:
    """Source files, their rows and their version. Make it with ``build`` or ``from_dataset``.

    Attributes:
        block: What goes into the run manifest.
        base: Folder that the paths in ``block`` are relative to.
        row_sha256: ``(rows, 32)`` uint8, SHA-256 of each row's raw bytes. For JSON Lines, CSV and text these are the
            bytes in the file without the last newline; for tables the canonical JSON of the row's values.
        values_sha256: ``(rows, 32)`` uint8, SHA-256 of the canonical JSON of each row's values: the same for the same
            values from JSON Lines, gzip, Parquet or a dataset.
        dataset: What ``from_dataset`` was given; ``None`` if the rows are in files.
    """

    def __init__(self, block: DataBlock, base: Path, scanned: Sequence[Scan], dataset: Any = None) -> None:
        self.block = block
        self.base = base
        self.dataset = dataset
        self.row_sha256 = np.concatenate([s.row_sha256 for s in scanned])
        self.values_sha256 = np.concatenate([s.values_sha256 for s in scanned])
        self._scanned = list(scanned)
        self._first = np.array([s.first_index for s in block.sources], dtype=np.int64)
        self._version = np.array([s.data_version_id for s in block.sources], dtype=np.int64)
        self._first_indices = [s.first_index for s in block.sources]
        self._source_digests = [bytes.fromhex(s.sha256) for s in block.sources]

    @property
    def rows(self) -> int:
        """Number of samples over all files."""
        return self.block.rows

    @classmethod
    def build(
        cls,
        patterns: str | Path | Sequence[str | Path],
        *,
        version: str = "files",
        text_fields: Sequence[str] = ("text",),
        description: str = "",
        base: str | Path | None = None,
    ) -> DataManifest:
        r"""Read every matching file once and fix files, rows and version.

        The ending says the format: ``.jsonl`` (also ``.ndjson``, ``.json``), ``.csv``, ``.tsv``, ``.txt``, each also
        with ``.gz``, and ``.parquet`` and ``.arrow``. A row is a line, a CSV record or a table's row, numbered from 0
        per file as ``datasets`` numbers them; blank lines of JSON Lines and CSV are no rows, those of a text are.
        Values are taken without guessing types: JSON keeps its own, a CSV cell is always a text. Files are sorted by
        path. Links are followed inside the base folder and recorded; one that leaves it is refused.

        Args:
            patterns: One or more paths or glob patterns.
            version: ``"files"`` (the digests are the version), ``"git"`` (the commit of the repository that holds the
                files, with a flag if they differ from it), ``"dvc"`` (what DVC's files beside the data pin, with such
                a flag), ``"lakefs://repository@commit"`` or ``"hub:organisation/name@commit"`` (declared: recorded and
                not checked), or a label of your own.
            text_fields: Fields that every row must have as non-empty text.
            description: What the data is, in a sentence; printed in reports.
            base: Folder that recorded paths are relative to and that no link may leave; by default the deepest one
                that holds all files.

        Raises:
            DataError: Naming the file and row: nothing matches, a file is empty, unreadable, of an unknown format or
                not UTF-8, a row does not parse or lacks a text field, a link is refused, or no version can be told.

        Example:
            >>> import tempfile, pathlib
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> _ = (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
            >>> manifest = DataManifest.build(folder / "*.jsonl")
            >>> manifest.rows, manifest.read_row(1)["text"]
            (2, 'two')
        """
        folder, files = find_files(patterns, None if base is None else Path(base))
        scanned = [scan(open_reader(f.path, f.name, format_of(f.path)), text_fields) for f in files]
        versions, owner = data_versions(version, [f.path for f in files], [s.sha256 for s in scanned])
        sources = _sources(scanned, owner, [f.link for f in files])
        return cls(_block(sources, versions, text_fields, description), folder, scanned)

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        revision: str | None = None,
        name: str | None = None,
        text_fields: Sequence[str] = ("text",),
        description: str = "",
    ) -> DataManifest:
        """Fix the rows of a ``datasets.Dataset`` by their values; its fingerprint and its files play no part.

        Args:
            dataset: A map-style dataset: one split.
            revision: The Hub commit that it was loaded from. It is recorded as declared, not checked.
            name: What to call it; by default what its info says.
            text_fields: Fields that every row must have as non-empty text; may be empty.
            description: What the data is, in a sentence; printed in reports.

        Raises:
            DataError: If it has no rows that can be read twice (an ``IterableDataset``) or is more than one split, or
                a row lacks a text field.
        """
        from auditlog.datamanifest.memory import dataset_version, open_dataset

        scanned = open_dataset(dataset, revision, name, tuple(text_fields))
        version = dataset_version(dataset, revision, scanned.sha256)
        block = _block(_sources([scanned], [0], [None]), (version,), text_fields, description)
        return cls(block, Path(), [scanned], dataset)

    def locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return ``(source_id, row, data_version_id)`` of each sample index, all ``(n,)`` int64.

        Raises:
            DataError: If an index lies outside the manifest.
        """
        index = np.asarray(index, dtype=np.int64)
        outside = index[(index < 0) | (index >= self.rows)]
        if outside.size:
            raise DataError(
                f"sample_index {int(outside[0])} is outside the data manifest, which has {self.rows} rows",
                "Take sample_index from attribution.dataset(manifest); never number the rows yourself.",
            )
        source = np.searchsorted(self._first, index, side="right") - 1
        return source, index - self._first[source], self._version[source]

    def identity(self, index: int) -> bytes:
        """Return the 72 bytes that the log commits to for one sample."""
        if not 0 <= index < self.rows:
            self.locate(np.array([index]))  # says what is wrong
        # One number at a time, plain Python is ten times as fast as arrays of length 1; the ledger asks at every step.
        source = bisect_right(self._first_indices, index) - 1
        row = index - self._first_indices[source]
        return sample_identity(self._source_digests[source], row, self.row_sha256[index].tobytes())

    def raw_row(self, index: int) -> bytes:
        """Read one row's bytes and check them against the manifest.

        Raises:
            DataError: If the file is gone or the row is no longer what the manifest recorded.
        """
        return self._checked_row(index)[2].raw

    def read_row(self, index: int) -> dict[str, Any]:
        """Read one row's fields; checked like ``raw_row``. A row of a gzip file costs unpacking all before it."""
        scanned, number, row = self._checked_row(index)
        return scanned.reader.python(number, row)

    def source_rows(self, source_id: int) -> Iterator[dict[str, Any]]:
        """Yield the fields of a source's rows in order, in one pass; each is checked like ``raw_row``."""
        scanned = self._scanned[source_id]
        for number, row in checked_rows(scanned):
            yield scanned.reader.values(number, row)

    def source_table(self, source_id: int) -> pa.Table | None:
        """Return a source's rows as the table that they are, checked like ``raw_row``; ``None`` if it is text."""
        scanned = self._scanned[source_id]
        if not scanned.reader.is_table:
            return None
        for _ in checked_rows(scanned):
            pass
        return scanned.reader.table()

    def check_unchanged(self) -> None:
        """Read every source again.

        Raises:
            DataError: Naming the first source that is gone, renamed, exchanged for a link or different from the
                manifest, and in the last case its rows: which ones differ, were added or removed, or that only the
                container did.
        """
        for source, scanned in zip(self.block.sources, self._scanned, strict=True):
            if source.format == "dataset" or not self._file_is_recorded_one(source):
                self._check_rows(source, scanned)

    def differences(self, other: DataManifest) -> list[str]:
        """Say where this manifest's rows hold other values than another's, sample by sample.

        For rows that a loader read: ``DataManifest.build(path).differences(DataManifest.from_dataset(loaded))`` tells
        which fields it gave another type. Five rows are named at most; values are never printed.

        Raises:
            DataError: If one of those rows cannot be read any more.
        """
        common = min(self.rows, other.rows)
        found = rows_that_differ(self.values_sha256[:common], other.values_sha256[:common])
        said = [
            f"row {index}: {'; '.join(fields_that_differ(self._values(index), other._values(index)))}"
            for index in found[:NAMED].tolist()
        ]
        if len(found) > NAMED:
            said.append(f"{len(found) - NAMED} more rows differ")
        if self.rows != other.rows:
            said.append(f"{self.rows} rows here, {other.rows} there")
        return said

    def _values(self, index: int) -> dict[str, Any]:
        scanned, number, row = self._checked_row(index)
        return scanned.reader.values(number, row)

    def _checked_row(self, index: int) -> tuple[Scan, int, Row]:
        source_ids, rows, _ = self.locate(np.array([index]))
        scanned, number = self._scanned[int(source_ids[0])], int(rows[0])
        start, end = (int(x) for x in scanned.spans[number])
        row = scanned.reader.at(number, start, end)
        if sha256(row.raw) != self.row_sha256[index].tobytes():
            raise changed(scanned.reader.label, f"row {number} differs")
        return scanned, number, row

    def _file_is_recorded_one(self, source: Source) -> bool:
        """Return whether the file has the recorded bytes, after checking how it is reached."""
        try:
            with (self.base / source.path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise missing(self.base, source, error.strerror or str(error)) from error
        require_same_way(self.base, source)
        return digest == source.sha256

    def _check_rows(self, source: Source, scanned: Scan) -> None:
        try:
            now = scan(scanned.reader, ())
        except DataError as error:
            raise changed(source.path, f"it does not read any more: {error}") from error
        if now.sha256 != source.sha256:
            raise changed(source.path, difference(scanned, now))


def _sources(scanned: Sequence[Scan], version_ids: Sequence[int], links: Sequence[str | None]) -> tuple[Source, ...]:
    sources, first = [], 0
    for source_id, (found, version_id, link) in enumerate(zip(scanned, version_ids, links, strict=True)):
        rows = len(found.row_sha256)
        sources.append(
            Source(
                source_id=source_id,
                path=found.reader.label,
                format=found.reader.format,
                sha256=found.sha256,
                size_bytes=found.size_bytes,
                content_sha256=found.content_sha256,
                rows=rows,
                first_index=first,
                data_version_id=version_id,
                link=link,
            )
        )
        first += rows
    return tuple(sources)


def _block(
    sources: tuple[Source, ...], versions: tuple[DataVersion, ...], text_fields: Sequence[str], description: str
) -> DataBlock:
    return DataBlock(
        description=description,
        text_fields=tuple(text_fields),
        sources=sources,
        versions=versions,
        rows=sum(source.rows for source in sources),
    )
