"""A data version in words: which system names it, and whether anybody compared the files with it."""

from __future__ import annotations

_DECLARED = ("label", "lakefs", "hub")


def version_in_words(kind: str, revision: str, dirty: bool | None) -> str:
    """Return a version with its kind, and what is known of whether the files have it.

    Example:
        >>> version_in_words("lakefs", "credit@8f3a", None)
        'lakefs credit@8f3a (declared, not checked)'
        >>> version_in_words("dvc", "md5:1a2b", True)
        'dvc md5:1a2b (files differ)'
    """
    if kind in _DECLARED:
        known = " (declared, not checked)"
    elif dirty:
        known = " (files differ)"
    elif kind == "dvc" and dirty is None:
        known = " (whether files differ cannot be told)"
    else:
        known = ""
    return f"{kind} {revision}{known}"
