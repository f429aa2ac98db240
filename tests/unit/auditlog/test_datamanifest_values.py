"""The canonical form of a row's values: RFC 8785 where JSON has the type, one form for each type that it lacks."""

from __future__ import annotations

import itertools
import json
import math
import struct
from decimal import Decimal

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from auditlog.datamanifest.values import Tagged, canonical_row

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: not name.startswith("$"))
scalars = st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


@given(st.dictionaries(names, values, max_size=5))
def test_what_json_has_is_written_as_rfc_8785_says(row: dict[str, object]) -> None:
    assert canonical_row(row) == rfc8785.dumps(row)


@given(st.floats())
def test_a_float_is_named_by_its_bits(value: float) -> None:
    written = json.loads(canonical_row({"x": value}))["x"]["$float"]
    (again,) = struct.unpack(">d", bytes.fromhex(written))
    assert math.isnan(again) if math.isnan(value) else struct.pack("d", again) == struct.pack("d", value)


def test_unlike_values_never_look_alike() -> None:
    unlike = [
        1, 1.0, "1", True, 0.0, -0.0, 0, False, "", math.nan, math.inf, -math.inf, 2**53, 2.0**53, str(2**53), b"1",
        b"", [], [None], [[]], {}, {"a": {}}, Decimal("1"), Decimal("1.0"), {"$float": "3ff0000000000000"},
        {"$$float": "x"}, {"$int": "9007199254740992"}, {"$bytes": "31"}, Tagged("date", "1"), Tagged("time", "1"),
        {"$date": "1"}, Tagged("timestamp", "1"), Tagged("timestamp", "1 UTC"), Tagged("duration", "1"),
    ]  # fmt: skip
    written = [canonical_row({"x": value}) for value in unlike]
    for (i, left), (j, right) in itertools.combinations(enumerate(written), 2):
        assert left != right, (unlike[i], unlike[j])


def test_a_missing_field_and_a_null_one_are_alike_and_a_null_in_a_list_stays() -> None:
    assert canonical_row({"a": 1, "b": None, "c": {"d": None}}) == canonical_row({"c": {}, "a": 1})
    assert canonical_row({"a": [None, 1]}) == b'{"a":[null,1]}'


def test_what_has_no_form_is_said() -> None:
    with pytest.raises(ValueError, match="a set has no canonical form"):
        canonical_row({"a": {1}})
    with pytest.raises(ValueError, match="surrogates not allowed"):
        canonical_row({"a": "\ud800"})
