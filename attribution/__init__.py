"""The gradient engine: per-sample gradients on the backward pass, their sketches, and what they answer.

    from attribution import AuditMode, dataset

Stands on ``auditlog`` (where everything is recorded); knows nothing of reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attribution.training.audit_mode import AuditMode
    from attribution.training.collators import PackingCollator
    from attribution.training.data import dataset
    from attribution.training.recipe import Recipe
    from attribution.training.trl import keep_ids

__all__ = ["AuditMode", "PackingCollator", "Recipe", "dataset", "keep_ids"]

_HOMES = {
    "AuditMode": "attribution.training.audit_mode",
    "PackingCollator": "attribution.training.collators",
    "Recipe": "attribution.training.recipe",
    "dataset": "attribution.training.data",
    "keep_ids": "attribution.training.trl",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
