"""Canonical JSON: the example of RFC 8785, and that nothing but the canonical spelling is accepted."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditlog.errors import FormatError
from auditlog.format.canonical import canonical_bytes, finite, parse_canonical

RFC_8785_EXAMPLE = {
    "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
    "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"\u002f",
    "literals": [None, True, False],
}
RFC_8785_BYTES = (
    '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
    '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
).encode()

numbers = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=("Cs",)))
documents = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def test_the_example_of_rfc_8785() -> None:
    assert canonical_bytes(RFC_8785_EXAMPLE) == RFC_8785_BYTES
    assert parse_canonical(RFC_8785_BYTES)["numbers"][0] == 333333333.3333333


@given(documents)
def test_what_is_written_is_read_back(document: object) -> None:
    data = canonical_bytes(document)
    assert parse_canonical(data) == document


@pytest.mark.parametrize(
    "spelling",
    [b'{"b":1,"a":2}', b'{"a": 1}', b'{"a":1.0}', b'"\\u0041"', b"1E2", b'{"a":1}\n', b"{", b"\xff", b'{"a":1,"a":1}'],
)
def test_any_other_spelling_is_refused(spelling: bytes) -> None:
    with pytest.raises(FormatError):
        parse_canonical(spelling)


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**53, "\ud800", b"bytes", {1: 2}, {1, 2}], ids=repr)
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(FormatError, match="no canonical JSON form"):
        canonical_bytes({"value": value})


@pytest.mark.parametrize("value", [2.0**53, 1e16, -1e20, 1e21, 1.7976931348623157e308])
def test_large_doubles_are_read_back(value: float) -> None:
    """A gradient norm of 1e16 is written without a decimal point; reading it must not stumble over that."""
    assert parse_canonical(canonical_bytes({"grad_norm": value})) == {"grad_norm": value}


def test_whole_numbers_that_no_double_holds_are_refused() -> None:
    with pytest.raises(FormatError):
        parse_canonical(b"9007199254740993")
    with pytest.raises(FormatError):
        parse_canonical(b"9" * 400)


def test_two_spellings_of_one_letter_stay_two_keys() -> None:
    """No Unicode normalisation: what was written is what is hashed."""
    assert len(json.loads(canonical_bytes({"\u00e9": 1, "e\u0301": 2}))) == 2


@pytest.mark.parametrize(("value", "written"), [(1.5, 1.5), (0.0, 0.0), (math.nan, None), (-math.inf, None)])
def test_not_finite_is_written_as_null(value: float, written: float | None) -> None:
    assert finite(value) == written
