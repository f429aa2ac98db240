"""The register: its names agree with each other, and every id that the code cites is in it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reports.coverage import rate, rate_all
from reports.obligations import Register, load_register

REGISTER = load_register()
REPORTS = Path(__file__).parents[3] / "reports"
ORDER = ["none", "partial", "full"]

obligations = pytest.mark.parametrize("obligation", REGISTER.obligations, ids=lambda o: o.id)
available = st.sets(st.sampled_from(sorted(REGISTER.evidence)))


def test_article_26_is_complete_and_in_order() -> None:
    cited = [o.id for o in REGISTER.obligations if o.id.startswith("AIA-26.")]
    assert cited == [f"AIA-26.{paragraph}" for paragraph in range(1, 13)]


def test_every_obligation_id_in_the_code_exists() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in REPORTS.rglob("*.py"))
    cited = set(re.findall(r"AIA-[A-Z0-9.a-z-]*[A-Za-z0-9]", text)) - {"AIA-26"}
    assert cited <= {o.id for o in REGISTER.obligations}
    assert all(REGISTER[name].id == name for name in cited)


def test_vocabulary_is_used_and_every_word_is_explained() -> None:
    used = {name for o in REGISTER.obligations for name in o.evidence}
    asked = {name for o in REGISTER.obligations for name in o.human_input}
    assert used == set(REGISTER.evidence)
    assert asked == set(REGISTER.human_input)


def test_no_duty_is_within_reach_of_records_alone() -> None:
    assert {o.ceiling for o in REGISTER.obligations} == {"none", "partial"}


def test_a_register_with_an_unknown_name_is_refused() -> None:
    content = REGISTER.model_dump()
    content["obligations"][0]["evidence"] = ("no_such_evidence",)
    with pytest.raises(ValidationError, match="no_such_evidence"):
        Register.model_validate(content)


def test_a_register_with_a_repeated_id_is_refused() -> None:
    content = REGISTER.model_dump()
    content["obligations"][1]["id"] = content["obligations"][0]["id"]
    with pytest.raises(ValidationError, match="twice"):
        Register.model_validate(content)


@given(available)
def test_no_rating_exceeds_its_ceiling(names: set[str]) -> None:
    for item in rate_all(REGISTER.obligations, names):
        assert ORDER.index(item.rating) <= ORDER.index(item.obligation.ceiling)


@given(available, available)
def test_more_evidence_never_lowers_a_rating(some: set[str], more: set[str]) -> None:
    pairs = zip(rate_all(REGISTER.obligations, some), rate_all(REGISTER.obligations, some | more), strict=True)
    assert all(ORDER.index(less.rating) <= ORDER.index(greater.rating) for less, greater in pairs)


@obligations
def test_without_evidence_the_rating_is_none(obligation) -> None:
    assert rate(obligation, set()).rating == "none"
    unrelated = set(REGISTER.evidence) - set(obligation.evidence)
    assert rate(obligation, unrelated).rating == "none"


@obligations
def test_each_required_piece_is_needed(obligation) -> None:
    everything = set(REGISTER.evidence)
    assert rate(obligation, everything).rating == obligation.ceiling
    for name in obligation.requires:
        assert rate(obligation, everything - {name}).rating == "none"


def test_full_needs_every_listed_piece_and_a_full_ceiling() -> None:
    duty = REGISTER["AIA-26.9"].model_copy(update={"ceiling": "full"})
    for size in range(len(duty.evidence) + 1):
        for names in itertools.combinations(duty.evidence, size):
            expected = "none" if size == 0 else "full" if size == len(duty.evidence) else "partial"
            assert rate(duty, names).rating == expected


def test_present_and_missing_together_are_the_listed_evidence() -> None:
    duty = REGISTER["AIA-26.6"]
    item = rate(duty, {"timestamps", "ledger_integrity", "data_version"})
    assert item.present == ("ledger_integrity", "timestamps")
    assert item.missing == ("inference_log", "retention_status")
