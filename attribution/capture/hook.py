"""A hook that stays behind: a copy or a pickle of the audited model gets one that does nothing."""

from __future__ import annotations

import functools
from typing import Any


class Hook(functools.partial):  # type: ignore[type-arg]
    """A hook of one model, not of its copies: averaged weights, best models and saved ones are plain models."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return inert

    def __reduce__(self) -> Any:
        return _inert, ()


def inert(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _inert() -> Any:
    return inert
