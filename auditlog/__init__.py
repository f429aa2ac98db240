"""The evidence log of a training run: format, trust, and the ledger on disk. No torch.

    from auditlog import DataManifest, Signer

What an auditor needs is here and installs without a model: ``gradtrail verify``, ``gradtrail show``.
Not here: anything that computes a gradient (``attribution``) or renders a page (``reports``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from auditlog.errors import Error

if TYPE_CHECKING:
    from auditlog.datamanifest import DataManifest
    from auditlog.ledger.reader import RunReader
    from auditlog.ledger.verify_run import verify_run
    from auditlog.trust.anchors import Trust
    from auditlog.trust.keys import Signer
    from auditlog.trust.verify import Verdict

__version__ = "0.1.0"
__all__ = ["DataManifest", "Error", "RunReader", "Signer", "Trust", "Verdict", "verify_run"]

_HOMES = {
    "DataManifest": "auditlog.datamanifest",
    "RunReader": "auditlog.ledger.reader",
    "Signer": "auditlog.trust.keys",
    "Trust": "auditlog.trust.anchors",
    "Verdict": "auditlog.trust.verify",
    "verify_run": "auditlog.ledger.verify_run",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that importing the package loads no database."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
