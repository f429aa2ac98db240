"""Every error that gradtrail raises on purpose, sorted by what its reader should do next.

``exit_code`` is what the command line ends with: 2 fix the call or its input, 3 something cannot be read,
written or rendered. Verdicts of ``gradtrail verify`` (4 integrity, 5 incomplete, 6 authenticity,
7 unanchored) are results, not errors, and have no class here. 1 is kept for our own bugs.

    Error                    2
    ├─ UsageError            2   the call is wrong
    ├─ DataError             2   a source file or a row is not usable
    ├─ KeyFileError          3   a key cannot be opened
    └─ ReadError             3   missing, locked, unreadable
       ├─ FormatError        3   the bytes do not parse
       └─ StoreError         3   the database or the disk refuses
"""

from __future__ import annotations


class Error(Exception):
    """Root of all errors raised on purpose.

    Args:
        message: What is wrong, naming the file, row, module or step.
        advice: What to do next; printed on its own line by the command line.
    """

    exit_code = 2

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message, advice)  # positional, so that it survives pickling
        self.message = message
        self._advice = advice

    def __str__(self) -> str:
        return self.message

    def advice(self) -> str:
        """Return what the reader should do next; empty when the message says it all."""
        return self._advice


class UsageError(Error):
    """The call itself is wrong: an option, an argument, or an extra that is not installed."""


class DataError(Error):
    """A source file or one of its rows cannot be used as training data."""


class ReadError(Error):
    """Something is missing, locked or unreadable. Never a statement about tampering."""

    exit_code = 3


class FormatError(ReadError):
    """The bytes do not parse as what they should be, or their format is not supported."""


class StoreError(ReadError):
    """The database engine or the disk refuses to read or write."""


class KeyFileError(ReadError):
    """A signing key cannot be opened: missing, wrong passphrase, or readable by others."""
