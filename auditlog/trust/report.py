"""The verdict in the making: checks and findings, gathered in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from auditlog.trust.verdict import Check, Finding, counted


@dataclass(slots=True)
class Report:
    """Checks and findings in the order in which they are printed."""

    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def add(self, name: str, findings: Sequence[Finding], passed: str, *, failed: str = "") -> None:
        """Take the outcome of one check.

        Args:
            name: What was checked.
            findings: What was found.
            passed: What was looked at, if nothing is wrong.
            failed: Why the check failed although it has no finding of its own.
        """
        errors = [finding for finding in findings if finding.level == "error"]
        if errors:
            failed = f"{counted(len(errors), 'finding')}, first: {errors[0].message}"
        self.checks.append(Check(name, "failed" if failed else "passed", failed or passed))
        self.findings += findings

    def skip(self, name: str, why: str, open_question: str = "") -> None:
        """Say that a check was not made."""
        self.checks.append(Check(name, "not run", why))
        if open_question:
            self.not_checked.append(open_question)
