"""Section 11 and its exceptions: rows and what became of them, attempts, how gradients were taken, data versions."""

from __future__ import annotations

import pytest

from auditlog.format.notices import SelfCheck
from auditlog.format.tracking import Untracked
from auditlog.ledger.attempt_steps import AttemptSteps
from reports.evidence import AttemptFacts, NoticeFacts, SelfCheckFacts
from reports.sections.exceptions import exceptions
from tests.unit.reports.report_samples import (
    MANIFEST,
    make_evidence,
    make_samples,
    make_self_check,
    make_sources,
    make_subject,
    make_tracking,
)
from tests.unit.reports.test_document import text_of

LOSS = NoticeFacts(ref=MANIFEST, text="size: 40; missing_steps.first: 4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tracking": make_tracking(tracked_entries=10, trainable_entries=12)}, "Only 10 of 12 trainable values"),
        ({"self_checks": ()}, "No self-check before the first step is recorded"),
        ({"self_checks": (SelfCheckFacts(ref=MANIFEST, found=SelfCheck()),)}, "switched off, so nothing confirms"),
        ({"self_checks": (make_self_check(sum_error=0.25, confirmed=False),)}, "more than rounding explains"),
        ({"self_checks": (make_self_check(), make_self_check(confirmed=False))}, "more than rounding explains"),
        ({"samples": make_samples(USED=(228, 110, 114), DROPPED=(0, 4, 0))}, "did not hold 4 of the 456 rows"),
        ({"losses": (LOSS,)}, "A loss was accepted (manifest): size: 40"),
        ({"notices": (LOSS,)}, "Notice of the recorder (manifest): size: 40"),
    ],
)
def test_what_the_recorder_said_is_an_exception_where_it_departs_from_the_plain_case(change: dict, words: str) -> None:
    assert not any(words in sentence for sentence in exceptions(make_evidence()))
    assert any(words in sentence for sentence in exceptions(make_evidence(**change)))


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("PADDED_DUPLICATE", "8 records of a sample repeated to fill a batch: they did contribute to the weights"),
        ("NOT_SEPARABLE", "8 records of samples that could not be separated: other samples are part of"),
    ],
)
def test_flags_are_counted_in_words(flag: str, words: str) -> None:
    records = make_evidence().records.model_copy(update={"flags": {flag: 8}})
    assert any(sentence.startswith(words) for sentence in exceptions(make_evidence(records=records)))


def test_a_confirmed_self_check_is_a_plain_fact() -> None:
    said = "3 samples compared with autograd one at a time, largest relative error 1.2 × 10⁻⁷, 420 of 420 modules seen"
    assert said in text_of(make_subject())
    assert not any("elf-check" in sentence for sentence in exceptions(make_evidence()))


def test_of_several_self_checks_the_least_favourable_is_shown() -> None:
    checks = (make_self_check(), make_self_check(oracle_error=0.01, confirmed=False), make_self_check(sum_error=0.5))
    text = text_of(make_subject(make_evidence(self_checks=checks)))
    assert (
        "3 checks, the least favourable: 3 samples compared with autograd one at a time, largest relative error 0.01, "
        "420 of 420 modules seen; not confirmed" in text
    )


def test_e09_three_lists_of_rows_by_file_and_name() -> None:
    samples = make_samples(USED=(228, 100, 110), DROPPED=(0, 10, 0), NOT_REACHED=(0, 4, 4))
    text = text_of(make_subject(make_evidence(samples=samples)))
    assert "Used 438 recorded in steps that led to the final weights denied.jsonl: 0–19; and 418 more" in text
    assert (
        "Dropped by the trainer before training 10 the training dataset did not hold them when training began "
        "approved_1.jsonl: 0–9" in text
    )
    assert "Not reached 8 in the training dataset, and no step used them approved_1.jsonl: 0–3; approved_2" in text
    assert "1 approved_1.jsonl 114 100 10 4" in text
    assert "10 dropped by the trainer before training; 8 not reached (section 11)" in text


def test_lists_that_the_log_does_not_name_say_so() -> None:
    used, dropped, _ = make_samples(DROPPED=(0, 10, 0))
    cut = dropped.model_copy(update={"by_source": None, "first": dropped.first[:3], "count": 5_000})
    text = text_of(make_subject(make_evidence(samples=(used, cut))))
    assert "when training began approved_1.jsonl: 0–2; and 4,997 more" in text
    assert "0 denied.jsonl 228 228 not named" in text
    unnamed = cut.model_copy(update={"first": ()})
    assert "when training began —" in text_of(make_subject(make_evidence(samples=(used, unnamed))))


def test_a_resumed_run_shows_its_attempts_and_what_no_longer_counts() -> None:
    first, second = (
        AttemptFacts(ref=MANIFEST, steps=AttemptSteps(1, 0, 0, 40, 30, 40)),
        AttemptFacts(ref=MANIFEST, steps=AttemptSteps(2, 1, 30, 0, 0, None)),
    )
    text = text_of(make_subject(make_evidence(attempts=(first, second))))
    assert "1 the start 40 40 30 manifest 2 step 30 of attempt 1 none 0 0 manifest" in text
    assert "Of which count" not in text_of(make_subject())


def test_several_processes_are_named() -> None:
    assert "Processes 2; each kept its own log" in text_of(make_subject(make_evidence(processes=2)))
    assert "each kept its own log" not in text_of(make_subject())


def test_mode_coverage_and_routes_are_shown() -> None:
    tracking = make_tracking(mode="fused", coverage=0.5, tracked_entries=1_221_120, routes=(("linear, exact", 7),))
    text = text_of(make_subject(make_evidence(tracking=tracking)))
    assert "2,442,240, 1,221,120 (50.00%)" in text
    assert "as the sum of the recorded ones; weights differ by rounding" in text
    assert "7 × linear, exact" in text
    assert "weights bit-identical to a run without audit mode" in text_of(make_subject())


def test_what_left_no_sketch_is_a_table_of_its_own() -> None:
    left_out = tuple(Untracked(f"norm.{number}.weight", 4, f"reason {number}") for number in range(25))
    text = text_of(make_subject(make_evidence(tracking=make_tracking(untracked=left_out))))
    assert "norm.19.weight 4 reason 19" in text
    assert "norm.20.weight" not in text
    assert "And 5 further parameters, in evidence.json" in text
    assert "at least 100.00% of each step's squared gradient norm" in text
    assert "left no sketch" not in text_of(make_subject())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version_kind": "git", "version": "0123456789abcdef"}, "git 0123456789ab denied"),
        ({"version_kind": "git", "version": "0123456789abcdef", "dirty": True}, "git 0123456789ab (files differ)"),
        ({"version_kind": "dvc", "version": "md5:ab", "dirty": None}, "dvc md5:ab (whether files differ cannot be"),
        ({"version_kind": "lakefs", "version": "credit@8f"}, "lakefs credit@8f (declared, not checked)"),
        ({"version_kind": "hub", "version": "bank/credit@8f"}, "hub bank/credit@8f (declared, not checked)"),
    ],
)
def test_the_data_version_says_its_kind(changes: dict, words: str) -> None:
    first, *others = make_sources()
    text = text_of(make_subject(make_evidence(sources=(first.model_copy(update=changes), *others))))
    assert words.removesuffix(" denied") in text
    assert "denied.jsonl jsonl" in text  # the format of the file


def test_a_version_that_nobody_could_compare_is_an_exception() -> None:
    sources = tuple(source.model_copy(update={"version_kind": "dvc"}) for source in make_sources())
    found = exceptions(make_evidence(sources=sources))
    assert any("Whether 3 source files differed from what DVC pins" in sentence for sentence in found)
    told = tuple(source.model_copy(update={"dirty": False}) for source in sources)
    assert not any("DVC" in sentence for sentence in exceptions(make_evidence(sources=told)))
