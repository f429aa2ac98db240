"""Canonical JSON (RFC 8785): one document, one byte string. Used for the manifest and for event bodies."""

from __future__ import annotations

import json
import math
from typing import Any

import rfc8785

from auditlog.errors import FormatError


def canonical_bytes(document: Any) -> bytes:
    """Return the RFC 8785 bytes of a JSON document.

    Raises:
        FormatError: If a value has no canonical form: a float that is not finite (write ``null`` instead, see
            ``finite``), an integer beyond 2^53, a lone surrogate, or a type JSON does not know.
    """
    try:
        return rfc8785.dumps(document)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError, RecursionError) as error:
        raise FormatError(f"no canonical JSON form: {error}") from error


def parse_canonical(data: bytes) -> Any:
    """Parse canonical JSON and insist that it was canonical.

    Raises:
        FormatError: If the bytes are not JSON, or are JSON written in any other than the canonical way.
    """
    try:
        document = json.loads(data.decode("utf-8"), parse_int=_parse_int)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from error
    if canonical_bytes(document) != data:
        raise FormatError("JSON is not in canonical form (RFC 8785)")
    return document


def _parse_int(digits: str) -> int | float:
    """Read whole numbers from 2^53 on as the doubles that they are: RFC 8785 writes ``1e16`` as seventeen digits."""
    return int(digits) if abs(float(digits)) < 2**53 else float(digits)


def finite(value: float) -> float | None:
    """Return ``value``, or ``None`` where it is not finite, as the format writes it."""
    return float(value) if math.isfinite(value) else None


def whole(body: dict[str, Any], name: str) -> int:
    """Return a member that must be a whole number from 0 on; raises ``KeyError`` or ``ValueError`` with its name."""
    value = body[name]
    if type(value) is not int or value < 0:
        raise ValueError(name)
    return value
