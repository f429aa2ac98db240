"""Writes a run's evidence as one zip file: tables as Parquet, notes, manifest, an index, and a verifier to check it.

The zip is stored, not compressed, with members in a fixed order and fixed dates, so that the same run gives the same
bytes (under one version of pyarrow). Nothing is judged here: a log that was changed is exported as it stands, and the
verdict over the bundle is the verdict over the run. Model weights and source data stay where they are.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from auditlog.bundle import tables
from auditlog.errors import FormatError, ReadError, StoreError, UsageError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import Note, VKey
from auditlog.ledger.custody import FOLDER as CUSTODY
from auditlog.ledger.custody import RESULTS, custody_origin
from auditlog.ledger.files import disk_error, sync_folder
from auditlog.ledger.heads import read_heads
from auditlog.ledger.ranks import rank_folder
from auditlog.ledger.reader import RunReader
from auditlog.ledger.salts import FILE as SALTS
from auditlog.ledger.salts import STEP_SALTS
from auditlog.ledger.shards import FOLDER as SKETCHES
from auditlog.ledger.store import DATABASE, MANIFEST, StoredLog
from auditlog.ledger.view import final_note
from auditlog.trust.ranks import rank_origin

INDEX, README, VERIFIER = "index.json", "README.txt", "verify_gradtrail.py"
FORMAT_NAME, VERSION = "gradtrail/bundle", 0

_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold
_MODE = 0o100644 << 16
_CHUNK_BYTES = 1 << 20
_NOTE = re.compile(r"(lost/)?[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.note")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_VERIFY = "gradtrail verify says what is wrong with the run."


@dataclass(frozen=True, slots=True)
class ExportedLog:
    """One log in a bundle: ``path`` is the folder of its members, empty for the run's own log."""

    path: str
    origin: str
    entries: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``payloads`` says whether sketches, salts and results of queries are inside."""

    path: Path
    size_bytes: int
    sha256: str
    payloads: bool
    logs: tuple[ExportedLog, ...]

    @property
    def sealed(self) -> bool:
        """Whether the run's own log has a seal; only verifying shows whether the seal is good."""
        return self.logs[0].sealed

    def to_json(self) -> dict[str, Any]:
        """Return what was written as plain JSON values."""
        logs = [{name: getattr(log, name) for name in ("path", "origin", "entries", "sealed")} for log in self.logs]
        plain = {"path": str(self.path), "size_bytes": self.size_bytes, "sha256": self.sha256}
        return {"schema": "gradtrail/export", **plain, "sealed": self.sealed, "payloads": self.payloads, "logs": logs}


def export_run(
    run: Path,
    out: Path,
    *,
    payloads: bool = False,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Exported:
    """Write the bundle of a run: its log, the logs of its other ranks and its custody log.

    Args:
        run: The run folder, sealed or not; or that of one rank, which is then exported alone.
        out: The zip file.
        payloads: Also put in sketches, salts and the results of queries. They are as confidential as the data.
        force: Replace ``out`` if it exists.
        progress: Called with the number of entries written so far.

    Raises:
        UsageError: If ``out`` exists, or lies inside the run folder.
        ReadError: If the run cannot be read, or holds what the format has no place for.
        StoreError: If the disk refuses. Nothing is left behind then.
    """
    run, out = Path(run), Path(out)
    _check_place(run, out, force=force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            temporary = Path(folder) / "bundle.zip"
            with temporary.open("w+b") as file:
                logs = _write(file, run, Path(folder), payloads=payloads, progress=progress)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            _move(temporary, out, force=force)
        sync_folder(out.parent)
        return Exported(out, out.stat().st_size, digest, payloads, tuple(logs))
    except OSError as error:
        raise disk_error(out, error) from error


def _check_place(run: Path, out: Path, *, force: bool) -> None:
    if run.resolve() in out.resolve().parents:
        raise UsageError(f"{out} lies inside the run folder", "A run is not changed by an export: name another place.")
    if out.is_dir():
        raise UsageError(f"{out} is a folder", "Name the zip file to write.")
    if out.exists() and not force:
        raise UsageError(f"{out} exists already", "Give another name with -o, or --force to replace it.")


def _move(temporary: Path, out: Path, *, force: bool) -> None:
    """Give the finished file its name; without ``force`` never over one that has appeared meanwhile."""
    if force:
        temporary.replace(out)
        return
    try:
        os.link(temporary, out)
    except FileExistsError as error:
        raise UsageError(f"{out} exists already", "Give another name with -o, or --force to replace it.") from error
    except OSError:  # a file system without links
        if out.exists():
            raise UsageError(f"{out} exists already", "Give another name with -o, or --force to replace it.") from None
        temporary.replace(out)


def _write(
    file: BinaryIO, run: Path, scratch: Path, *, payloads: bool, progress: Callable[[int], None] | None
) -> list[ExportedLog]:
    with RunReader.open(run) as reader:
        manifest, sealed = reader.manifest, _is_sealed(lambda: reader.final_note)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        members = _Members(archive, scratch, progress)
        members.add(README, _readme(manifest, sealed=sealed, payloads=payloads).encode())
        members.add(VERIFIER, Path(__file__).with_name(VERIFIER).read_bytes())
        logs = [_add_log(members, run, "", manifest.origin, payloads=payloads)]
        for rank in range(1, manifest.world_size) if manifest.rank == 0 else ():
            folder = rank_folder(run, rank)
            if folder.exists():  # one that is not there is for the verifier to miss
                origin = rank_origin(manifest.origin, rank)
                logs.append(_add_log(members, folder, f"ranks/{rank}/", origin, payloads=payloads))
        if (run / CUSTODY).exists():
            origin = custody_origin(manifest.origin)
            logs.append(_add_log(members, run / CUSTODY, f"{CUSTODY}/", origin, payloads=payloads))
        members.add_index(manifest, logs, payloads=payloads)
    return logs


@dataclass(slots=True)
class _Members:
    """The members written so far, and the way to write one more."""

    archive: zipfile.ZipFile
    scratch: Path
    progress: Callable[[int], None] | None
    index: list[dict[str, Any]] = field(default_factory=list)
    entries: int = 0

    def add(self, name: str, content: bytes) -> None:
        """Write a small member."""
        self._store(name, len(content), iter((content,)))

    def add_file(self, name: str, path: Path) -> None:
        """Write a file as it stands on the disk."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._store(name, size, iter(lambda: file.read(_CHUNK_BYTES), b""))
        except FileNotFoundError as error:
            raise ReadError(f"{path} disappeared while it was exported") from error

    def add_segments(self, prefix: str, table: str, chunks: Iterator[pa.Table], rows: int) -> int:
        """Write ``<table>/000000.parquet`` and so on, at most ``rows`` rows each, and return the number of all rows."""
        done = 0
        for number, first in enumerate(chunks):
            part = self._counted(chain((first,), islice(chunks, rows // first.num_rows - 1)))
            done += self._add_table(f"{prefix}{table}/{number:06d}.parquet", table, part)
        return done

    def add_table(self, prefix: str, table: str, rows: pa.Table) -> None:
        """Write ``<table>.parquet``."""
        self._add_table(f"{prefix}{table}.parquet", table, (rows,))

    def add_index(self, manifest: RunManifest, logs: list[ExportedLog], *, payloads: bool) -> None:
        """Write what the bundle consists of. It is not signed: the log is what vouches for itself."""
        document = {
            "format": FORMAT_NAME,
            "version": VERSION,
            "fmt": manifest.fmt,
            "origin": manifest.origin,
            "run_id": manifest.run_id,
            "payloads": payloads,
            "logs": [
                {"path": log.path, "origin": log.origin, "entries": log.entries, "sealed": log.sealed} for log in logs
            ],
            "members": self.index,
        }
        self._store(INDEX, len(content := canonical_bytes(document)), iter((content,)))

    def _add_table(self, name: str, table: str, chunks: Iterable[pa.Table]) -> int:
        path = self.scratch / "table.parquet"
        rows = tables.write(path, table, chunks)
        self.add_file(name, path)
        path.unlink()
        return rows

    def _counted(self, chunks: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for table in chunks:
            self.entries += table.num_rows
            if self.progress is not None:
                self.progress(self.entries)
            yield table

    def _store(self, name: str, size: int, content: Iterator[bytes]) -> None:
        info = zipfile.ZipInfo(name, _DATE)
        info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_STORED, 3, _MODE
        info.file_size = size  # decides whether the 64-bit form is needed, before anything is written
        digest, written = hashlib.sha256(), 0
        with self.archive.open(info, "w") as member:
            for piece in content:
                member.write(piece)
                digest.update(piece)
                written += len(piece)
        if written != size:
            raise StoreError(f"{name} changed while it was exported", "Wait until nothing writes to the run any more.")
        if name != INDEX:
            self.index.append({"name": name, "sha256": digest.hexdigest(), "size": size})


def _add_log(members: _Members, folder: Path, prefix: str, origin: str, *, payloads: bool) -> ExportedLog:
    """Write the members of one log: a run's, a rank's, or a custody log."""
    if not (folder / DATABASE).is_file():
        raise ReadError(f"{folder / DATABASE} is missing, but {folder} is there", _VERIFY)
    with StoredLog(folder / DATABASE) as log:
        odd = log.catalogue()
        if odd:
            raise FormatError(f"{folder / DATABASE}: {odd[0].message}", f"{_VERIFY} A bundle cannot hold that.")
        sealed = _is_sealed(lambda: final_note(log))
        if prefix != f"{CUSTODY}/":
            members.add_file(f"{prefix}{MANIFEST}", folder / MANIFEST)
        entries = members.add_segments(prefix, "records", tables.records(log), tables.SEGMENT_RECORDS)
        entries += members.add_segments(prefix, "events", tables.events(log), tables.SEGMENT_EVENTS)
        members.add_table(prefix, "batches", tables.batches(log))
        members.add_table(prefix, "checkpoints", tables.checkpoints(log))
    for name, note in read_heads(folder).items():
        if not _NOTE.fullmatch(name):
            raise FormatError(f"{folder / 'heads' / name}: not a name that a head has", "Move the file out of heads/.")
        members.add(f"{prefix}heads/{name}", note)
    for name in _payload_names(folder) if payloads else ():
        members.add_file(f"{prefix}{name}", folder / name)
    return ExportedLog(prefix, origin, entries, sealed)


def _is_sealed(final: Callable[[], Note | None]) -> bool:
    """Return whether a log has a final note; one that cannot be read is none, and for the verifier to report."""
    try:
        return final() is not None
    except FormatError:
        return False


def _payload_names(folder: Path) -> list[str]:
    """Return the files that the commitments open to, in a fixed order; those of a custody log are results."""
    names = [name for name in (SALTS, STEP_SALTS) if (folder / name).is_file()]
    for place, pattern in ((SKETCHES, "*.npy"), (RESULTS, "*.json"), (RESULTS, "*.salt")):
        found = sorted(path.name for path in (folder / place).glob(pattern))
        names += [f"{place}/{name}" for name in found if _FILE.fullmatch(name)]
    return names


def _readme(manifest: RunManifest, *, sealed: bool, payloads: bool) -> str:
    """Return the page that an auditor opens first."""
    try:
        fingerprint = VKey.parse(manifest.vkey).fingerprint
    except FormatError:
        fingerprint = "cannot be read"
    state = "sealed" if sealed else "NOT sealed: the run was still open, or had been interrupted, when this was written"
    inside = "are inside: treat this file like the training data" if payloads else "are not inside"
    return _README.format(
        origin=manifest.origin, run_id=manifest.run_id, state=state, fingerprint=fingerprint, inside=inside
    )


_README = """\
Evidence of a training run, written by gradtrail.

  log      {origin}
  run      {run_id}
  state    {state}

To check it you need Python 3.11 or newer and:  pip install cryptography pyarrow numpy

  python verify_gradtrail.py BUNDLE.zip --key KEY.vkey --head NOTE --origin NAME

BUNDLE.zip is this file, or the folder that it was unpacked into. What you bring decides what the answer is worth:

  --key     the operator's public key, which you got by a way that you trust. Nothing in this bundle can tell you
            that it is the right one. The bundle itself names a key with the fingerprint
            {fingerprint}
  --head    a signed head of the log that was handed over while the run went on. Only that shows that the holder of
            the key has not written the log anew.
  --origin  the log that you expect to see.

The program in this bundle came from whoever made the bundle. Take verify_gradtrail.py from gradtrail's own release
instead, or compare the two files.

It ends with 0 verified, 3 cannot be read, 4 integrity, 5 incomplete, 6 authenticity, 7 nothing from outside to compare
with, and prints what it did not check. It never says that the trainer wrote the truth, only what was or was not
changed later. FORMAT.md in gradtrail's source describes every hashed byte.

Sketches, salts and the results of queries {inside}. Source files and model weights are never inside.
"""
