"""Findings, checks and the verdict: what ``verify`` says, with stable codes, exit codes and JSON.

Code tells what was seen; its class tells what the reader should think: 3 it cannot be read, 4 integrity,
5 incomplete, 6 authenticity, 7 unanchored. A disk fault is never called tampering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from auditlog.errors import FormatError, ReadError, StoreError

UNREADABLE, INTEGRITY, INCOMPLETE, AUTHENTICITY, UNANCHORED = 3, 4, 5, 6, 7
PRECEDENCE = (UNREADABLE, AUTHENTICITY, INTEGRITY, INCOMPLETE, UNANCHORED)

CODES: dict[str, int] = {
    "E_IO": UNREADABLE,
    "E_ENGINE": UNREADABLE,
    "E_FORMAT": UNREADABLE,
    "E_SCHEMA": INTEGRITY,
    "E_ENCODING": INTEGRITY,
    "E_SEQ": INTEGRITY,
    "E_LEAF": INTEGRITY,
    "E_EVENT": INTEGRITY,
    "E_CHAIN": INTEGRITY,
    "E_BATCH": INTEGRITY,
    "E_ROOT": INTEGRITY,
    "E_ORPHAN": INTEGRITY,
    "E_CKPT_ORDER": INTEGRITY,
    "E_PAYLOAD": INTEGRITY,
    "E_OPENING": INTEGRITY,
    "E_REPORT": INTEGRITY,
    "E_BUNDLE": INTEGRITY,
    "E_TRUNC": INCOMPLETE,
    "E_ROLLBACK": INCOMPLETE,
    "E_UNSEALED": INCOMPLETE,
    "E_GAP_STEP": INCOMPLETE,
    "E_LOST": INCOMPLETE,
    "E_LOSS_ACCEPTED": INCOMPLETE,
    "E_ERASED": INCOMPLETE,
    "E_SIG": AUTHENTICITY,
    "E_KEY": AUTHENTICITY,
    "E_KEYREV": AUTHENTICITY,
    "E_BIND": AUTHENTICITY,
    "E_HEAD": AUTHENTICITY,
    "E_FORK": AUTHENTICITY,
    "E_TSA": AUTHENTICITY,
    "E_TIME": AUTHENTICITY,
    "W_UNANCHORED": UNANCHORED,
}

MAX_LISTED = 200  # findings of one check that are listed one by one

Status = Literal["VERIFIED", "CANNOT READ", "INTEGRITY", "INCOMPLETE", "AUTHENTICITY", "UNANCHORED"]

_STATUS: dict[int, Status] = {
    0: "VERIFIED",
    UNREADABLE: "CANNOT READ",
    INTEGRITY: "INTEGRITY",
    INCOMPLETE: "INCOMPLETE",
    AUTHENTICITY: "AUTHENTICITY",
    UNANCHORED: "UNANCHORED",
}


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 entry``, ``2 entries``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or (``level="note"``) worth knowing.

    Args:
        code: One of ``CODES``; for notes a word of its own, such as ``N_CLOCK``.
        message: What was found, naming record, event, batch or file.
        where: Where to look: table, file, source row.
        seq: The entry, if it is about one.
        level: Notes do not change the verdict.
        hint: What to do next.
    """

    code: str
    message: str
    where: str = ""
    seq: int | None = None
    level: Literal["error", "note"] = "error"
    hint: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code that this finding asks for; 0 for a note."""
        return 0 if self.level == "note" else CODES[self.code]

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON values."""
        names = ("code", "level", "message", "where", "seq", "hint")
        return {name: getattr(self, name) for name in names} | {"exit_code": self.exit_code}


class FindingList:
    """Findings of one check: the first ``MAX_LISTED`` in full, the others counted, whatever state a log is in."""

    def __init__(self) -> None:
        self._listed: list[Finding] = []
        self._more: Counter[tuple[str, Literal["error", "note"]]] = Counter()

    def __len__(self) -> int:
        return len(self._listed)

    def add(self, finding: Finding) -> None:
        """Take one more finding."""
        if len(self._listed) < MAX_LISTED:
            self._listed.append(finding)
        else:
            self._more[finding.code, finding.level] += 1

    def listed(self) -> list[Finding]:
        """Return the findings, and for each kind how many more there are."""
        rest = [
            Finding(code, f"{counted(number, 'more finding')} of this kind, not listed one by one", level=level)
            for (code, level), number in self._more.items()
        ]
        return [*self._listed, *rest]


def unreadable(what: object, error: ReadError) -> Finding:
    """Return the finding that ``what`` could not be read. It says nothing about the content."""
    code = {FormatError: "E_FORMAT", StoreError: "E_ENGINE"}.get(type(error), "E_IO")
    return Finding(code, str(error), str(what), hint=error.advice())


def limited(findings: Iterable[Finding]) -> list[Finding]:
    """Return ``findings``, those beyond ``MAX_LISTED`` as a count."""
    box = FindingList()
    for finding in findings:
        box.add(finding)
    return box.listed()


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict: what was checked and how it went."""

    name: str
    status: Literal["passed", "failed", "not run"]
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Return the check as plain JSON values."""
        return {"name": self.name, "status": self.status, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of ``verify``.

    ``root`` is the tree root over the entries as they stand, in hex; empty if it cannot be computed.
    ``trust`` says what the verifier brought, ``not_checked`` what this verdict does not speak about.
    """

    origin: str
    run_id: str
    entries: int
    records: int
    steps: int
    samples: int
    attempts: int
    sealed: bool
    abandoned: bool
    root: str
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    trust: str
    heads: tuple[int, ...] = field(default=())  # sizes of the signed log checkpoints, smallest first

    @property
    def exit_code(self) -> int:
        """0 verified; otherwise the class of the weightiest finding, in the order 3, 6, 4, 5, 7."""
        found = {finding.exit_code for finding in self.findings}
        return next((code for code in PRECEDENCE if code in found), 0)

    @property
    def status(self) -> Status:
        """The verdict in one word, as it is printed."""
        return _STATUS[self.exit_code]

    @property
    def ok(self) -> bool:
        """Whether everything asked for was checked and holds."""
        return self.exit_code == 0

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values; the schema only ever grows."""
        plain = ("origin", "run_id", "entries", "records", "steps", "samples", "attempts", "sealed", "abandoned")
        return {
            "schema": "gradtrail/verdict",
            "status": self.status,
            "exit_code": self.exit_code,
            **{name: getattr(self, name) for name in plain},
            "root": self.root,
            "heads": list(self.heads),
            "trust": self.trust,
            "checks": [check.to_json() for check in self.checks],
            "findings": [finding.to_json() for finding in self.findings],
            "not_checked": list(self.not_checked),
        }
