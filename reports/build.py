"""The whole way in one function: verify, gather, assemble, render, log, write.

The custody log says what was reported before the file appears, so no report exists that the log does not know.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from auditlog.errors import StoreError, UsageError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.digests import sha256
from auditlog.format.records import EventKind
from auditlog.ledger.custody import CustodyLog
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from reports.art26 import assemble
from reports.declarations import Declarations, load_declarations
from reports.evidence import Evidence
from reports.gather import gather
from reports.obligations import load_register
from reports.pdf import AttachedFile, write_pdf
from reports.render import render_html
from reports.sections.subject import Subject

Kind = Literal["art26"]

EVIDENCE_SCHEMA = "gradtrail/report-evidence"
_RENDERERS = ("gradtrail", "weasyprint", "jinja2")


@dataclass(frozen=True)
class Report:
    """A report as it was written and logged."""

    path: Path
    report_id: str
    pdf_sha256: str
    evidence_sha256: str
    size_bytes: int
    custody_seq: int


def build_report(
    run: Path, output: Path, *, trust: Trust, signer: Signer, declarations: Path | None = None, kind: Kind = "art26"
) -> Report:
    """Make a report from a verified run, log it in the custody log and write it.

    Args:
        run: A sealed run folder.
        output: The PDF to write; replaced if it exists.
        trust: Pinned keys and kept heads to verify against.
        signer: Long-lived key of whoever makes the report; signs the custody log.
        declarations: ``declarations.yaml``; without it every human input is open and no duty is mapped.
        kind: Which report.

    Raises:
        UnverifiedEvidenceError: If the run does not verify. Nothing is written or logged.
        UsageError: If ``output`` cannot be a file, or ``signer`` is not among the pinned keys.
        DeclarationError: If the declarations cannot be used.
        RenderError: If the PDF cannot be made.
        StoreError: If the file or the log cannot be written.
    """
    _check_output(output)
    _check_signer(signer, trust)
    register = load_register()
    declared = Declarations() if declarations is None else load_declarations(declarations, register)
    evidence = gather(run, trust)
    created_s = _now_s()

    document = _evidence_json(kind, evidence, declared, created_s)
    digest = sha256(document)
    subject = Subject(
        evidence=evidence,
        declarations=declared,
        register=register,
        report_id=f"{kind}-{digest.hex()[:12]}",
        evidence_sha256=digest.hex(),
        created_us=created_s * 1_000_000,
    )
    html = render_html(assemble(subject))
    pdf = write_pdf(html, _attachments(document, evidence), identifier=digest[:16], created_s=created_s)

    waiting = _write_beside(output, pdf)
    try:
        event = CustodyLog.open(run, signer).append(EventKind.REPORT, _event_body(kind, subject, pdf))
        waiting.replace(output)
    finally:
        waiting.unlink(missing_ok=True)
    return Report(output, subject.report_id, sha256(pdf).hex(), digest.hex(), len(pdf), event.seq)


def _check_signer(signer: Signer, trust: Trust) -> None:
    """Refuse a key that the given trust does not know: its entry would spoil the custody log for that very trust."""
    if trust.is_pinned and signer.vkey not in trust.naming([signer.vkey]).vkeys:
        raise UsageError(
            f"the key {signer.vkey.name} is not among the pinned keys, so the report's entry would not verify",
            "Sign with the run's own key, or pin this one as well: --trust KEY.vkey.",
        )


def _check_output(output: Path) -> None:
    """Refuse a place that cannot take the file before anything is computed."""
    if output.is_dir() or not output.parent.is_dir():
        what = "is a folder" if output.is_dir() else f"the folder {output.parent} does not exist"
        raise UsageError(f"{output}: {what}", "Choose another place with -o.")


def _now_s() -> int:
    """Return the time, or the one that ``SOURCE_DATE_EPOCH`` fixes to repeat a report byte for byte.

    Raises:
        UsageError: If the variable is set and not a whole number.
    """
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    if fixed is None:
        return int(time.time())
    if not fixed.isdigit():
        raise UsageError(f"SOURCE_DATE_EPOCH={fixed!r} is not a whole number of seconds")
    return int(fixed)


def _evidence_json(kind: Kind, evidence: Evidence, declared: Declarations, created_s: int) -> bytes:
    """Return everything that the document is made from, as canonical JSON."""
    content: dict[str, Any] = {
        "schema": EVIDENCE_SCHEMA,
        "kind": kind,
        "created_s": created_s,
        "renderer": {name: importlib.metadata.version(name) for name in _RENDERERS},
        "evidence": evidence.model_dump(mode="json"),
        "declarations": declared.model_dump(mode="json"),
    }
    return canonical_bytes(content)


def _attachments(document: bytes, evidence: Evidence) -> list[AttachedFile]:
    files = [
        AttachedFile("evidence.json", document, "Everything this report is made from"),
        AttachedFile("final.note", evidence.final_note.encode(), "Final head of the run log"),
    ]
    if evidence.custody_head is not None:
        head = evidence.custody_head.encode()
        files.append(AttachedFile("custody.note", head, "Head of the custody log before this report"))
    return files


def _event_body(kind: Kind, subject: Subject, pdf: bytes) -> dict[str, Any]:
    verification = subject.evidence.verification
    return {
        "kind": kind,
        "report_id": subject.report_id,
        "status": "draft",
        "pdf_sha256": sha256(pdf).hex(),
        "evidence_sha256": subject.evidence_sha256,
        "tree_size": verification.entries,
        "root": verification.root,
    }


def _write_beside(output: Path, pdf: bytes) -> Path:
    """Write the bytes to a temporary file in the output's folder, so that the last step is a rename."""
    waiting = output.with_name(f".{output.name}.part")
    try:
        with waiting.open("wb") as file:
            file.write(pdf)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{output}: {error.strerror or error}", "Choose another place with -o.") from error
    return waiting
