"""An unpacked bundle to spoil: cells, members, notes; packed again as its owner or an attacker would, and verified."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from auditlog.bundle import verify_gradtrail as verifier
from auditlog.bundle.export import export_run
from auditlog.format.notes import Note, VKey
from auditlog.trust.anchors import Trust
from tests.support import LedgerSimulator

EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Outcome:
    """What the single-file verifier says."""

    code: int
    findings: tuple[verifier.Finding, ...]
    not_checked: tuple[str, ...]

    @property
    def codes(self) -> set[str]:
        return {finding.code for finding in self.findings if finding.level == "error"}

    @property
    def places(self) -> str:
        return " ".join(f"{finding.where} {finding.message}" for finding in self.findings)

    @property
    def seqs(self) -> set[int | None]:
        return {finding.seq for finding in self.findings if finding.level == "error"}


def check(path: Path, *, keys: Sequence[VKey] = (), heads: Sequence[Note] = (), **trust: Any) -> Outcome:
    """Verify a bundle in this process."""
    report = verifier.Report()
    brought = verifier.Trust(
        [verifier.parse_vkey(str(key)) for key in keys],
        [(f"kept-{note.checkpoint().size}", verifier.parse_note(note.to_bytes())) for note in heads],
        **trust,
    )
    try:
        verifier.verify_bundle(path, brought, report)
    except verifier.Unreadable as error:
        report.add(error.args[2] if len(error.args) > 2 else "E_FORMAT", "", str(error))
    return Outcome(report.exit_code, tuple(report.findings), tuple(report.not_checked))


def check_with(trust: Trust, path: Path, **more: Any) -> Outcome:
    """Verify with what our own verifier would be given."""
    certificates = [
        verifier.Certificate(
            {"origin": certificate.origin},
            verifier.parse_vkey(str(certificate.session_vkey)),
            verifier.parse_vkey(str(certificate.vkey)),
            certificate.is_signed(certificate.vkey),
        )
        for certificate in trust.certificates
    ]
    return check(path, keys=trust.vkeys, heads=trust.heads, origin=trust.origin, certificates=certificates, **more)


def check_as(sim: LedgerSimulator, path: Path, level: str, **more: Any) -> Outcome:
    """Verify with what ``LedgerSimulator.trust`` brings on that level."""
    return check_with(sim.trust(level), path, **more)


class Bundle:
    """A bundle, unpacked into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, run: Path, folder: Path, *, payloads: bool = True) -> Bundle:
        """Export a run and unpack the file."""
        made = export_run(run, folder.with_suffix(".zip"), payloads=payloads)
        with zipfile.ZipFile(made.path) as archive:
            archive.extractall(folder)
        return cls(folder)

    def path(self, name: str) -> Path:
        return self.folder / name

    def members(self) -> list[str]:
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return sorted(found, key=lambda name: (name == "index.json", name))

    def write(self, name: str, content: bytes) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(content)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return pq.read_table(self.path(name)).to_pylist()

    def put(self, name: str, rows: list[dict[str, Any]] | pa.Table) -> None:
        """Write a table with the columns that it had."""
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, pq.read_schema(self.path(name)))
        pq.write_table(table, self.path(name), store_schema=False)

    def edit(self, name: str, at: int, **cells: Any) -> None:
        rows = self.rows(name)
        rows[at] |= cells
        self.put(name, rows)

    def reindex(self) -> Bundle:
        """Make the index anew, which needs no key."""
        index = json.loads(self.path("index.json").read_bytes())
        index["members"] = [
            {"name": name, "sha256": hashlib.sha256(self.path(name).read_bytes()).hexdigest(), "size": self.size(name)}
            for name in self.members()
            if name != "index.json"
        ]
        text = json.dumps(index, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self.path("index.json").write_text(text, encoding="utf-8")
        return self

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def pack(self, path: Path, extra: Sequence[tuple[str, bytes]] = (), method: int = zipfile.ZIP_STORED) -> Path:
        """Write the members, and more of them, as a zip."""
        with zipfile.ZipFile(path, "w", method) as archive:
            for name in self.members():
                archive.writestr(zipfile.ZipInfo(name, EPOCH), self.path(name).read_bytes(), method)
            for name, content in extra:
                archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
        return path
