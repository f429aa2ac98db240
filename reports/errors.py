"""What can go wrong between a run folder and its report.

The number is the exit code; both roots and the other numbers are in ``auditlog.errors``.

    auditlog.errors.Error
    ├─ DeclarationError            2   the declarations file does not parse or says something unknown
    ├─ UnverifiedEvidenceError     3   the run did not verify, so nothing may be reported from it
    └─ RenderError                 3   the template or the PDF renderer gave up
"""

from __future__ import annotations

from auditlog.errors import Error


class DeclarationError(Error):
    """A declarations file cannot be used."""


class UnverifiedEvidenceError(Error):
    """The log did not verify against trust from outside, so a report would only lend it weight."""

    exit_code = 3


class RenderError(Error):
    """A template or the PDF renderer failed."""

    exit_code = 3
