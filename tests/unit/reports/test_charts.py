"""Charts: a dot stands where its value says, and a label cannot become markup."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.charts import Whisker, nice_step, whisker_chart

SVG = "{http://www.w3.org/2000/svg}"
POSITION_TOLERANCE = 0.11  # coordinates are written with one decimal


def draw(*whiskers: Whisker, band: float | None = None, title: str = "cosine", **more: Any) -> ElementTree.Element:
    return ElementTree.fromstring(str(whisker_chart(whiskers, style="for", axis_title=title, band=band, **more)))


def dots(chart: ElementTree.Element) -> list[ElementTree.Element]:
    return chart.findall(f"{SVG}circle")


def test_dots_and_ticks_share_one_linear_axis() -> None:
    values = (-0.2, 0.05, 0.31)
    chart = draw(*(Whisker("row", value, 0.01) for value in values))
    ticks = [t for t in chart.findall(f"{SVG}text") if t.get("class") == "tick"]
    known = {float(t.text.replace("−", "-")): float(t.get("x")) for t in ticks}
    (low, at_low), (high, at_high) = min(known.items()), max(known.items())
    for value, dot in zip(values, dots(chart), strict=True):
        expected = at_low + (value - low) / (high - low) * (at_high - at_low)
        assert float(dot.get("cx")) == pytest.approx(expected, abs=POSITION_TOLERANCE)


def test_an_error_bar_is_one_standard_error_to_either_side() -> None:
    chart = draw(Whisker("row", 0.3, 0.05), Whisker("row", 0.35, 0.0))
    bar = next(line for line in chart.findall(f"{SVG}line") if line.get("class") == "whisker for")
    ends, (first, second) = (float(bar.get("x1")), float(bar.get("x2"))), [float(d.get("cx")) for d in dots(chart)]
    assert ends[1] == pytest.approx(second, abs=POSITION_TOLERANCE)  # 0.30 + 0.05 is where 0.35 stands
    assert ends[0] == pytest.approx(2 * first - second, abs=2 * POSITION_TOLERANCE)


def test_the_band_is_the_noise_floor_on_both_sides_of_zero() -> None:
    chart = draw(Whisker("at the floor", 0.1, 0.0), Whisker("below zero", -0.1, 0.0), band=0.1)
    band = chart.find(f"{SVG}rect")
    right, left = (float(dot.get("cx")) for dot in dots(chart))
    assert float(band.get("x")) == pytest.approx(left, abs=POSITION_TOLERANCE)
    assert float(band.get("x")) + float(band.get("width")) == pytest.approx(right, abs=2 * POSITION_TOLERANCE)


def test_neighbouring_charts_share_their_axis() -> None:
    left, right = Whisker("left", -0.4, 0.02), Whisker("right", 0.2, 0.01)
    together = draw(left, right)
    apart = [draw(left, beside=[right]), draw(right, beside=[left])]
    assert [dots(chart)[0].get("cx") for chart in apart] == [dot.get("cx") for dot in dots(together)]


def test_only_what_does_not_clear_the_floor_is_hollow() -> None:
    chart = draw(Whisker("clear", 0.3, 0.01), Whisker("not", 0.01, 0.01, clear=False), band=0.1)
    assert ["hollow" in dot.get("class") for dot in dots(chart)] == [False, True]


def test_labels_are_text_and_never_markup() -> None:
    hostile = '</text><image href="http://x/"/>&\u202e'
    chart = draw(Whisker(hostile, 0.1, 0.01), title=hostile)
    assert not chart.findall(f".//{SVG}image")
    assert all("\u202e" not in (element.text or "") for element in chart.iter())


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e3)), max_size=12),
    st.none() | st.floats(1e-6, 1.0),
)
def test_every_mark_lies_inside_the_drawing(points: list[tuple[float, float]], band: float | None) -> None:
    chart = draw(*(Whisker("row", value, error) for value, error in points), band=band)
    width, height = float(chart.get("viewBox").split()[2]), float(chart.get("viewBox").split()[3])
    for dot in dots(chart):
        assert 0 <= float(dot.get("cx")) <= width
        assert 0 <= float(dot.get("cy")) <= height


@given(st.floats(1e-9, 1e9), st.integers(2, 12))
def test_a_nice_step_is_1_2_or_5_and_the_smallest_that_fits(span: float, most: int) -> None:
    step = nice_step(span, most)
    assert span / step <= most * (1 + 1e-9)
    assert f"{step:.6e}"[0] in "125"
    assert span / (step / 2.5) > most * (1 - 1e-9)
