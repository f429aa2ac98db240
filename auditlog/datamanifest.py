r"""The data manifest: which files and rows a run trains on, fixed by digests before the first step.

A sample's only name afterwards is its *sample index*: its position over all source files in path order. Rows
are the byte strings between ``\n`` bytes, so no Unicode line separator can move a row number. Reads files;
knows neither the log nor a model.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.errors import DataError
from auditlog.format.commitments import sample_identity
from auditlog.format.digests import sha256
from auditlog.format.manifest import DataBlock, DataVersion, Source

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class _ScannedFile:
    """One file read once: its digest, and where each row starts."""

    path: Path
    sha256: str
    size_bytes: int
    offsets: NDArray[np.int64]  # (rows + 1,); row r is bytes [offsets[r], offsets[r + 1]), newline included
    row_sha256: NDArray[np.uint8]  # (rows, 32)


class DataManifest:
    """Source files, their rows and their version.

    Attributes:
        block: What goes into the run manifest.
        base: Folder that the paths in ``block`` are relative to.
        row_sha256: ``(rows, 32)`` uint8, SHA-256 of each row's raw bytes without its newline.
    """

    def __init__(self, block: DataBlock, base: Path, scanned: Sequence[_ScannedFile]) -> None:
        self.block = block
        self.base = base
        self.row_sha256 = np.concatenate([s.row_sha256 for s in scanned])
        self._offsets = [s.offsets for s in scanned]
        self._first = np.array([s.first_index for s in block.sources], dtype=np.int64)
        self._version = np.array([s.data_version_id for s in block.sources], dtype=np.int64)

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
    ) -> DataManifest:
        r"""Read every matching JSON Lines file once and fix files, rows and version.

        Args:
            patterns: One or more paths or glob patterns.
            version: ``"files"`` (the digests are the version), ``"git"`` (the commit of the repository that
                holds the files, with a flag if they differ from it), or a label of your own.
            text_fields: Fields that every row must have as non-empty text.
            description: What the data is, in a sentence; printed in reports.

        Raises:
            DataError: Naming the file and row: nothing matches, a file is empty or not UTF-8, a row is not a
                JSON object or lacks a text field, or ``git`` cannot tell a commit.

        Example:
            >>> import tempfile, pathlib
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> _ = (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
            >>> manifest = DataManifest.build(folder / "*.jsonl")
            >>> manifest.rows, manifest.read_row(1)["text"]
            (2, 'two')
        """
        paths = _expand(patterns)
        base = Path(os.path.commonpath([p.parent for p in paths]))
        scanned = [_scan(path, tuple(text_fields)) for path in paths]
        sources, first = [], 0
        for source_id, scan in enumerate(scanned):
            rows = len(scan.row_sha256)
            sources.append(
                Source(
                    source_id=source_id,
                    path=scan.path.relative_to(base).as_posix(),
                    sha256=scan.sha256,
                    size_bytes=scan.size_bytes,
                    rows=rows,
                    first_index=first,
                    data_version_id=0,
                )
            )
            first += rows
        block = DataBlock(
            description=description,
            text_fields=tuple(text_fields),
            sources=tuple(sources),
            versions=(_data_version(version, base, paths, [s.sha256 for s in sources]),),
            rows=first,
        )
        return cls(block, base, scanned)

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
        source, row, _ = self.locate(np.array([index]))
        digest = bytes.fromhex(self.block.sources[int(source[0])].sha256)
        return sample_identity(digest, int(row[0]), self.row_sha256[index].tobytes())

    def raw_row(self, index: int) -> bytes:
        """Read one row's bytes and check them against the manifest.

        Raises:
            DataError: If the file is gone or the row is no longer what the manifest recorded.
        """
        source_ids, rows, _ = self.locate(np.array([index]))
        source_id, row = int(source_ids[0]), int(rows[0])
        source = self.block.sources[source_id]
        start, end = (int(x) for x in self._offsets[source_id][row : row + 2])
        try:
            with (self.base / source.path).open("rb") as file:
                file.seek(start)
                raw = file.read(end - start).removesuffix(b"\n")
        except OSError as error:
            raise DataError(f"{source.path}: cannot be read: {error.strerror}") from error
        if sha256(raw) != self.row_sha256[index].tobytes():
            raise _changed(source, f"row {row} differs")
        return raw

    def read_row(self, index: int) -> dict[str, Any]:
        """Read one row as a JSON object; checked like ``raw_row``."""
        document: dict[str, Any] = json.loads(self.raw_row(index).removeprefix(_BOM))
        return document

    def check_unchanged(self) -> None:
        """Hash every source file again.

        Raises:
            DataError: Naming the first file that is gone or differs from the manifest.
        """
        for source in self.block.sources:
            path = self.base / source.path
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise DataError(
                    f"{source.path}: listed in the data manifest but cannot be read: {error.strerror}",
                    f"Restore the file under {self.base}, or build the manifest again.",
                ) from error
            if found != source.sha256:
                raise _changed(source, f"its SHA-256 is {found[:16]}…, recorded was {source.sha256[:16]}…")


def _changed(source: Source, what: str) -> DataError:
    return DataError(
        f"{source.path}: changed after the data manifest was built ({what})",
        "Restore the file, or call DataManifest.build again and start a new run.",
    )


def _expand(patterns: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the absolute paths of all matches, each once, in path order."""
    given = [patterns] if isinstance(patterns, str | Path) else list(patterns)
    found: set[Path] = set()
    for pattern in given:
        matches = {Path(match).resolve() for match in glob.glob(str(pattern), recursive=True)}
        files = {match for match in matches if match.is_file()}
        if not files:
            raise DataError(
                f"no file matches {str(pattern)!r}",
                f"Patterns are relative to the current folder, which is {Path.cwd()}.",
            )
        found |= files
    return sorted(found)


def _scan(path: Path, text_fields: tuple[str, ...]) -> _ScannedFile:
    """Hash a file and its rows, and check each row."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    offsets, digests = [], []
    for row, (start, raw) in enumerate(_rows(content)):
        _check_row(path, row, raw, text_fields)
        offsets.append(start)
        digests.append(sha256(raw))
    if not digests:
        raise DataError(f"{path.name}: the file is empty", "Remove it from the pattern, or write its rows first.")
    offsets.append(start + len(raw) + 1)  # one past the last row's newline, present or not
    return _ScannedFile(
        path=path,
        sha256=sha256(content).hex(),
        size_bytes=len(content),
        offsets=np.array(offsets, dtype=np.int64),
        row_sha256=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32),
    )


def _rows(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield ``(offset, raw bytes)`` of each row; what follows the last newline counts only if not blank."""
    start = 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if not content[start:].strip():
            return
        yield start, content[start:end]
        start = end + 1


def _check_row(path: Path, row: int, raw: bytes, text_fields: tuple[str, ...]) -> None:
    """Raise ``DataError`` unless ``raw`` is a UTF-8 JSON object with every text field."""
    where = f"{path.name}: row {row} (line {row + 1})"
    try:
        text = raw.removeprefix(_BOM if row == 0 else b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}",
            f"Convert the file first, for example: iconv -f latin1 -t utf-8 {path.name} > converted.jsonl",
        ) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = "the line is blank" if not text.strip() else f"not JSON: {error}"
        raise DataError(f"{where}: {detail}", "Each line must hold one JSON object.") from error
    if not isinstance(document, dict):
        raise DataError(f"{where}: a JSON {type(document).__name__}, not an object")
    for name in text_fields:
        value = document.get(name)
        if not isinstance(value, str) or not value:
            raise DataError(
                f"{where}: no text in field {name!r}; its fields are {sorted(document)}",
                "Mend the row, or name the text fields: DataManifest.build(…, text_fields=(…,)).",
            )


def _data_version(version: str, base: Path, paths: Sequence[Path], digests: Sequence[str]) -> DataVersion:
    root = sha256(*(bytes.fromhex(digest) for digest in digests)).hex()
    if version == "files":
        return DataVersion(data_version_id=0, kind="files", revision=f"sha256:{root[:16]}", root=root)
    if version == "git":
        commit = _git(base, "rev-parse", "HEAD")
        status = _git(base, "status", "--porcelain", "--ignored", "--", *(str(p) for p in paths))
        return DataVersion(data_version_id=0, kind="git", revision=commit, dirty=bool(status), root=root)
    return DataVersion(data_version_id=0, kind="label", revision=version, root=root)


def _git(base: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(base), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise DataError(
            f"version='git', but git cannot tell the commit of {base}: {detail.strip().splitlines()[-1]}",
            "Commit the data first, or use version='files' or a label of your own.",
        ) from error
    return done.stdout.strip()
