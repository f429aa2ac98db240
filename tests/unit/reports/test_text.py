"""Foreign strings: nothing hidden stays hidden, ordinary text stays as it is."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.formats import common_exponent, plus_minus, quantity, short, signed, times_ten_to
from reports.text import shorten, visible

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(st.characters(), max_size=200))
def test_nothing_hidden_is_left(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(character) for character in shown} & HIDDEN
    shown.encode("utf-8")


@pytest.mark.parametrize("text", ["credit/denied.jsonl", "Prüfstelle für Übung", "‘déjà vu’ 10⁻³", "אבג", "信用"])
def test_ordinary_text_is_untouched(text: str) -> None:
    assert visible(text) == text


def test_a_bidirectional_override_is_spelled_out() -> None:
    assert visible("fdp.\u202eexe") == "fdp.⟨U+202E⟩exe"


def test_stacked_marks_are_cut_down() -> None:
    shown = visible("a" + "\u0301" * 50)
    assert sum(unicodedata.category(c) == "Mn" for c in shown) == 2


def test_a_very_long_text_says_how_much_is_missing() -> None:
    assert visible("x" * 10_000).endswith("… (7,000 more characters)")


@given(st.text(max_size=80), st.integers(3, 60))
def test_shortened_text_keeps_both_ends_and_the_limit(text: str, limit: int) -> None:
    short_text = shorten(text, limit)
    assert len(short_text) <= limit
    if len(text) > limit:
        head, tail = short_text.split("…")[0], short_text.rsplit("…", 1)[-1]
        assert text.startswith(head)
        assert text.endswith(tail)
    else:
        assert short_text == text


def test_numbers_have_one_form() -> None:
    assert signed(-0.1234, 2) == "−0.12"
    assert plus_minus(0.5, 0.0146, 3) == "+0.500 ± 0.015"
    assert short(None) == "not recorded"
    assert short(-0.00012345) == "−0.000123"
    assert short(8.8e-7) == "8.8 × 10⁻⁷"
    assert (quantity(1, "entry"), quantity(2304, "entry")) == ("1 entry", "2,304 entries")
    assert (common_exponent([0.0042, -0.9]), common_exponent([0.0])) == (-1, 0)
    assert (times_ten_to(-3), times_ten_to(0)) == (" × 10⁻³", "")
