"""Evidence to document to PDF: what a verified run folder says, laid out for a reader who was not there.

Nothing here computes a number that no log holds, and nothing here loads a model or draws a legal conclusion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reports.build import build_report
    from reports.gather import gather

__all__ = ["build_report", "gather"]

_HOMES = {"build_report": "reports.build", "gather": "reports.gather"}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that the command line starts without a renderer."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
