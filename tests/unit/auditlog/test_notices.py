"""Notices, the tracking block and data versions, read and put into words."""

from __future__ import annotations

from typing import Any

import pytest

from auditlog.errors import FormatError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.notices import Dataset, SelfCheck, parse_notice
from auditlog.format.records import Event, EventKind
from auditlog.format.tracking import Tracking, Untracked
from auditlog.format.versions import version_in_words

CHECKED = {
    "notice": "self-check",
    "samples": 3,
    "modules": [26, 28],
    "oracle_error": 1.2e-7,
    "sum_error": 4e-8,
    "seconds": 0.2,
    "confirmed": True,
}


def parsed(body: dict[str, Any]) -> SelfCheck | Dataset | None:
    return parse_notice(Event(7, EventKind.NOTICE, 0, canonical_bytes(body)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            "3 samples compared with autograd one at a time, largest relative error 1.2e-07, 26 of 28 modules seen",
        ),
        (
            {"samples": 1, "oracle_error": None},
            "1 sample compared with autograd as a sum, largest relative error 4.0e-08, 26 of 28 modules seen",
        ),
        (
            {"sum_error": 0.25, "confirmed": False},
            "3 samples compared with autograd one at a time, largest relative error 2.5e-01, 26 of 28 modules seen; "
            "not confirmed: that is more than rounding explains",
        ),
        ({"skipped": True}, "switched off, so nothing confirms the sketches"),
    ],
)
def test_a_self_check_in_words(changes: dict[str, Any], words: str) -> None:
    notice = parsed(CHECKED | changes)
    assert isinstance(notice, SelfCheck)
    assert notice.sentence() == words
    assert notice.confirmed is (not changes or "oracle_error" in changes)


def test_other_notices_are_left_as_they_are() -> None:
    assert parsed({"notice": "log trouble", "failures": 1}) is None
    assert parsed({"text": "something else"}) is None


@pytest.mark.parametrize("lacking", ["samples", "modules", "oracle_error", "sum_error", "confirmed"])
def test_a_self_check_that_lacks_a_member_is_named(lacking: str) -> None:
    with pytest.raises(FormatError, match=f"entry 7: a notice of kind 'self-check' without a proper '{lacking}'"):
        parsed({name: value for name, value in CHECKED.items() if name != lacking})


def test_the_tracking_block_is_read_by_name() -> None:
    block = {
        "modules": 29,
        "trainable_entries": 120,
        "tracked_entries": 100,
        "coverage": 100 / 120,
        "untracked": {"z.weight": 15, "a.bias": 5},
        "reasons": {"z.weight": "it mixes samples"},
        "routes": {"linear, exact": 28, "any module, recomputed": 1},
        "mode": "fused",
    }
    tracking = Tracking.read(block)
    assert tracking.untracked == (
        Untracked("a.bias", 5, "no reason is recorded"),
        Untracked("z.weight", 15, "it mixes samples"),
    )
    assert (tracking.trainable_entries, tracking.tracked_entries, tracking.coverage) == (120, 100, 100 / 120)
    assert tracking.routes_in_words == "1 × any module, recomputed; 28 × linear, exact"
    assert "weights differ by rounding" in tracking.mode_in_words
    assert "weights bit-identical" in Tracking.read(block | {"mode": "observe"}).mode_in_words


@pytest.mark.parametrize("block", [{}, {"untracked": ["a"], "routes": 3, "coverage": "all", "mode": None}])
def test_a_block_of_another_form_is_not_recorded(block: dict[str, Any]) -> None:
    tracking = Tracking.read(block)
    assert tracking == Tracking()
    assert (tracking.mode_in_words, tracking.routes_in_words) == ("not recorded", "not recorded")


@pytest.mark.parametrize(
    ("kind", "dirty", "words"),
    [
        ("files", None, "files r1"),
        ("git", False, "git r1"),
        ("git", True, "git r1 (files differ)"),
        ("dvc", False, "dvc r1"),
        ("dvc", True, "dvc r1 (files differ)"),
        ("dvc", None, "dvc r1 (whether files differ cannot be told)"),
        ("label", None, "label r1 (declared, not checked)"),
        ("lakefs", None, "lakefs r1 (declared, not checked)"),
        ("hub", None, "hub r1 (declared, not checked)"),
    ],
)
def test_a_data_version_says_its_kind_and_what_is_known(kind: str, dirty: bool | None, words: str) -> None:
    assert version_in_words(kind, "r1", dirty) == words
