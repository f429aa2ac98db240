"""Numbers and times as a reader wants them: one form each, with a true minus sign."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def moment(time_us: int) -> str:
    """Return a time to the second, in UTC."""
    return datetime.fromtimestamp(time_us // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def day(time_us: int) -> str:
    """Return a date in words, e.g. ``1 December 2026``."""
    date = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    return f"{date.day} {date:%B %Y}"


def signed(value: float, decimals: int) -> str:
    """Return a number with its sign."""
    return f"{value:+.{decimals}f}".replace("-", "−")


def plus_minus(value: float, error: float, decimals: int) -> str:
    """Return ``+0.123 ± 0.016``."""
    return f"{signed(value, decimals)} ± {error:.{decimals}f}"


def short(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, e.g. ``8.8 × 10⁻⁷``, or ``not recorded``."""
    if value is None:
        return "not recorded"
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return mantissa.replace("-", "−") + (times_ten_to(int(exponent)) if exponent else "")


def size(size_bytes: int | None) -> str:
    """Return a file size, or nothing where it is not known."""
    if size_bytes is None:
        return ""
    return f"{size_bytes:,} B" if size_bytes < 10_000 else f"{size_bytes / 1e6:,.2f} MB"


def common_exponent(values: Iterable[float]) -> int:
    """Return ``e`` such that the largest value is between 1 and 10 once divided by ``10**e``."""
    largest = max((abs(value) for value in values), default=0.0)
    return math.floor(math.log10(largest)) if largest > 0 else 0


def times_ten_to(exponent: int) -> str:
    """Return `` × 10⁻³`` for a column title, or nothing for exponent 0."""
    return "" if exponent == 0 else f" × 10{str(exponent).translate(_SUPERSCRIPT)}"


def quantity(number: int, noun: str) -> str:
    """Return ``1 record`` or ``2,304 records``."""
    plural = noun[:-1] + "ies" if noun.endswith(("ry", "ty")) else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"
