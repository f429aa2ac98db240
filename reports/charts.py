"""Charts as inline SVG. Geometry, colours and escaping are all here: an ``<svg>`` takes no style from the page.

One chart serves: dots with error bars on a common axis, with the noise floor as a band behind them. It shows at one
glance what a table hides: which scores stand clear of the noise and of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from reports.text import shorten, visible

Style = Literal["for", "against", "plain"]

_WIDTH = 470.0  # points: the text width of the page
_LABEL = 142.0
_RIGHT = 14.0
_ROW = 10.6
_TOP = 5.0
_AXIS = 30.0
_LEAST_SPAN = 1e-9  # everything at zero: draw an axis from -1 to 1

_STYLE = Markup("""<style>
text { font-family: "DejaVu Sans"; fill: #20262d }
.label { font-size: 6.3px }
.tick { font-size: 6px; fill: #5c6672 }
.axis { font-size: 6.4px; fill: #5c6672 }
.band { fill: #e9edf1 }
.grid { stroke: #dde3e9; stroke-width: 0.4 }
.zero { stroke: #5c6672; stroke-width: 0.6 }
.whisker { stroke-width: 1.1 }
.dot { stroke-width: 0.9 }
.for { stroke: #1d5c8a; fill: #1d5c8a }
.against { stroke: #b4541a; fill: #b4541a }
.plain { stroke: #1d3a5c; fill: #1d3a5c }
.hollow { fill: #ffffff }
</style>""")


@dataclass(frozen=True)
class Whisker:
    """One dot: an estimate and its standard error, in axis units."""

    label: str
    value: float
    error: float
    clear: bool = True  # stands clear of the noise floor; hollow dot otherwise


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    step: float

    def x(self, value: float) -> float:
        return _LABEL + (value - self.low) / (self.high - self.low) * (_WIDTH - _LABEL - _RIGHT)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [k * self.step for k in range(first, last + 1)]


def nice_step(span: float, most: int = 8) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that divides ``span`` into at most ``most`` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * m for m in (1.0, 2.0, 5.0, 10.0) if span / (power * m) <= most)


def _axis(whiskers: Sequence[Whisker], band: float | None) -> _Axis:
    ends = [0.0, -(band or 0.0), band or 0.0]
    for whisker in whiskers:
        ends += [whisker.value - whisker.error, whisker.value + whisker.error]
    low, high = min(ends), max(ends)
    if high - low < _LEAST_SPAN:
        low, high = -1.0, 1.0
    step = nice_step(high - low)
    return _Axis(math.floor(low / step) * step, math.ceil(high / step) * step, step)


def _number(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:+.{decimals}f}".replace("-", "−") if abs(value) > step / 2 else "0"


def _whisker(whisker: Whisker, axis: _Axis, y: float, style: Style) -> Markup:
    left, right, x = (axis.x(whisker.value + d) for d in (-whisker.error, whisker.error, 0.0))
    return Markup(
        '<text class="label" x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>'
        '<line class="whisker {}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>'
        '<circle class="dot {}{}" cx="{:.1f}" cy="{:.1f}" r="2.4"/>'
    ).format(
        _LABEL - 8,
        y + 2.3,
        visible(shorten(whisker.label, 34)),
        style,
        left,
        right,
        y,
        y,
        style,
        "" if whisker.clear else " hollow",
        x,
        y,
    )


def _frame(axis: _Axis, band: float | None, bottom: float, title: str) -> Markup:
    parts = []
    if band:
        parts.append(
            Markup('<rect class="band" x="{:.1f}" y="2" width="{:.1f}" height="{:.1f}"/>').format(
                axis.x(-band), axis.x(band) - axis.x(-band), bottom - 2
            )
        )
    for tick in axis.ticks():
        style = "zero" if abs(tick) < axis.step / 2 else "grid"
        x = axis.x(tick)
        parts.append(
            Markup(
                '<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="2" y2="{:.1f}"/>'
                '<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>'
            ).format(style, x, x, bottom, x, bottom + 10, _number(tick, axis.step))
        )
    middle = (_LABEL + _WIDTH - _RIGHT) / 2
    parts.append(
        Markup('<text class="axis" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(
            middle, bottom + 22, visible(title)
        )
    )
    return Markup("").join(parts)


def whisker_chart(
    whiskers: Sequence[Whisker],
    *,
    style: Style,
    axis_title: str,
    band: float | None = None,
    beside: Sequence[Whisker] = (),
) -> Markup:
    """Draw dots with error bars, one a line.

    Args:
        whiskers: What to draw, top to bottom.
        style: Colour, by what the dots stand for.
        axis_title: What the axis measures, with its unit.
        band: Half-width of the noise floor around zero, in axis units.
        beside: Dots of a neighbouring chart that shall have the same axis.

    Returns:
        An ``<svg>`` element as wide as the page's text.
    """
    axis = _axis((*whiskers, *beside), band)
    bottom = 2 * _TOP + _ROW * len(whiskers)
    parts = [_frame(axis, band, bottom, axis_title)]
    parts += [_whisker(w, axis, _TOP + _ROW * (line + 0.5), style) for line, w in enumerate(whiskers)]
    height = bottom + _AXIS
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{:.1f}pt" height="{:.1f}pt" viewBox="0 0 {:.1f} {:.1f}">'
    ).format(_WIDTH, height, _WIDTH, height)
    return head + _STYLE + Markup("").join(parts) + Markup("</svg>")
