"""What became of every sample: the lists are disjoint, add up, and are those that sets of ids give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from auditlog.errors import FormatError
from auditlog.format.records import EventKind
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.ranks import rank_folder, rank_head
from auditlog.ledger.reader import RunReader
from auditlog.ledger.sample_use import Fate, Samples, places, rows_in_words, sample_use
from auditlog.trust.ranks import rank_origin
from tests.support import LedgerSimulator, Plan, dataset_notice, make_manifest, step_on, write_sources

ROWS = 21  # in two files of 12 and 9
FIRST_OF_SECOND = 12

Notice = dict[str, Any] | None


def run_of(folder: Path, *attempts: tuple[int, Notice, Sequence[list[int]]]) -> LedgerSimulator:
    """Write a run: per attempt the step it goes on from, its dataset notice, and the samples of each step."""
    sim = LedgerSimulator(folder, Plan(steps=1))
    ledger, data = sim.start()
    for number, (from_step, notice, steps) in enumerate(attempts):
        if number:
            ledger.begin_attempt(from_step)
        if notice is not None:
            ledger.append_event(EventKind.NOTICE, notice)
        for place, index in enumerate(steps, start=from_step + 1):
            ledger.append_step(step_on(data, place, index))
    ledger.seal({})
    return sim


def use_of(sim: LedgerSimulator) -> dict[Fate, Samples]:
    with RunReader.open(sim.run) as reader:
        found = sample_use(reader)
    named = [index for samples in found.values() for index in samples.named.tolist()]
    assert len(named) == len(set(named))
    assert sum(samples.count for samples in found.values()) == ROWS
    for samples in found.values():
        if samples.by_source is not None:
            second = sum(index >= FIRST_OF_SECOND for index in samples.named.tolist())
            assert samples.by_source == (samples.count - second, second)
            assert samples.count == len(samples.named)
    return found


def named(found: dict[Fate, Samples]) -> dict[str, list[int]]:
    return {fate.name: samples.named.tolist() for fate, samples in found.items()}


def without(*taken: int) -> list[int]:
    return [index for index in range(ROWS) if index not in taken]


def test_without_a_dataset_notice_the_unused_are_one_list(tmp_path: Path) -> None:
    found = use_of(run_of(tmp_path, (0, None, [[3, 3, 14], [0, 14]])))
    assert named(found) == {"USED": [0, 3, 14], "UNUSED": without(0, 3, 14)}
    assert "not recorded" in Fate.UNUSED.reason


def test_e09_dropped_by_the_trainer_and_not_reached_are_apart(tmp_path: Path) -> None:
    """Rows 2, 3 and 13 were not in the dataset; training ended before the rest was used."""
    found = use_of(run_of(tmp_path, (0, dataset_notice([2, 3, 13]), [[0, 1], [4, 12]])))
    assert named(found) == {
        "USED": [0, 1, 4, 12],
        "DROPPED": [2, 3, 13],
        "NOT_REACHED": without(0, 1, 4, 12, 2, 3, 13),
    }
    assert found[Fate.DROPPED].by_source == (2, 1)


def test_a_dataset_that_held_everything_drops_nothing(tmp_path: Path) -> None:
    found = use_of(run_of(tmp_path, (0, dataset_notice([]), [[0]])))
    assert named(found) == {"USED": [0], "DROPPED": [], "NOT_REACHED": without(0)}


def test_where_the_notice_names_only_the_first_no_sample_is_put_on_the_wrong_list(tmp_path: Path) -> None:
    """Absent are 2, 3, 7 and 15, and the notice names 2, 3 and 7: beyond 7 nobody can tell."""
    found = use_of(run_of(tmp_path, (0, dataset_notice([2, 3, 7, 15], named=3), [[0, 1]])))
    assert named(found) == {"USED": [0, 1], "DROPPED": [2, 3, 7], "NOT_REACHED": [4, 5, 6]}
    assert [found[fate].count for fate in (Fate.DROPPED, Fate.NOT_REACHED)] == [4, ROWS - 2 - 4]
    assert found[Fate.DROPPED].by_source is found[Fate.NOT_REACHED].by_source is None


def test_samples_of_superseded_steps_only_are_not_used_by_the_final_weights(tmp_path: Path) -> None:
    notice = dataset_notice([20])
    found = use_of(run_of(tmp_path, (0, notice, [[0, 1], [2, 3], [4, 5]]), (1, notice, [[3, 6]])))
    assert named(found) == {
        "USED": [0, 1, 3, 6],
        "SUPERSEDED": [2, 4, 5],
        "DROPPED": [20],
        "NOT_REACHED": without(0, 1, 2, 3, 4, 5, 6, 20),
    }


def test_a_sample_that_one_live_attempts_dataset_held_was_not_dropped(tmp_path: Path) -> None:
    first, second = dataset_notice([18, 19]), dataset_notice([17, 18])
    found = use_of(run_of(tmp_path, (0, first, [[0]]), (1, second, [[1]])))
    assert named(found)["DROPPED"] == [18]


def test_the_dataset_of_a_superseded_attempt_does_not_count(tmp_path: Path) -> None:
    """All steps of the first attempt are gone, and with them what its dataset held."""
    found = use_of(run_of(tmp_path, (0, dataset_notice([18]), [[0]]), (0, dataset_notice([17, 18]), [[1]])))
    assert named(found)["DROPPED"] == [17, 18]


@pytest.mark.parametrize("second", [None, dataset_notice([2, 3], named=1)])
def test_what_the_log_cannot_tell_is_one_list(second: Notice, tmp_path: Path) -> None:
    """An attempt without a notice; two datasets, of which one is not named in full."""
    found = use_of(run_of(tmp_path, (0, dataset_notice([2]), [[0]]), (1, second, [[1]])))
    assert set(found) == {Fate.USED, Fate.SUPERSEDED, Fate.UNUSED}


def test_the_processes_of_a_run_are_one(tmp_path: Path) -> None:
    """Two ranks with a dataset each: dropped is what neither held, used is what either used."""
    sim = LedgerSimulator(tmp_path, Plan(steps=1))
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    base = make_manifest(data, sim.signer, sim.plan)
    ledgers = []
    for rank, absent in enumerate(([5, 6], [6, 7])):
        update = {"rank": rank, "world_size": 2, "origin": rank_origin(base.origin, rank)}
        ledger = RunLedger.create(rank_folder(sim.run, rank), base.model_copy(update=update), data, sim.signer)
        ledger.append_event(EventKind.NOTICE, dataset_notice(absent))
        ledger.append_step(step_on(data, 1, [rank]))
        ledgers.append(ledger)
    ledgers[1].seal({})
    ledgers[0].seal({"ranks": [rank_head(sim.run, 1)]})
    assert named(use_of(sim)) == {"USED": [0, 1], "DROPPED": [6], "NOT_REACHED": without(0, 1, 6)}


def test_a_run_without_a_record_has_used_nothing(tmp_path: Path) -> None:
    assert named(use_of(run_of(tmp_path, (0, dataset_notice([1]), [])))) == {"USED": [], "UNUSED": without()}


def spoiled(**changes: Any) -> dict[str, Any]:
    return dataset_notice([2, 3]) | changes


@pytest.mark.parametrize(
    "notice",
    [
        spoiled(absent="2"),
        spoiled(absent=1),
        spoiled(absent_first=[3, 2]),
        spoiled(absent_first=[2, 2]),
        spoiled(absent_first=[-1, 2]),
        spoiled(absent_first=[2, ROWS]),
        spoiled(absent=ROWS + 1),
        {"notice": "dataset"},
    ],
)
def test_a_malformed_dataset_notice_is_named(notice: dict[str, Any], tmp_path: Path) -> None:
    sim = run_of(tmp_path, (0, notice, [[0]]))
    with RunReader.open(sim.run) as reader, pytest.raises(FormatError, match="entry 1: a"):
        sample_use(reader)


def test_places_are_file_and_row(tmp_path: Path) -> None:
    sim = run_of(tmp_path, (0, None, [[0, 11, 12, 20]]))
    with RunReader.open(sim.run) as reader:
        assert places(reader, sample_use(reader)[Fate.USED].named) == [(0, 0), (0, 11), (1, 0), (1, 8)]


@pytest.mark.parametrize(
    ("rows", "count", "most", "words"),
    [
        ([], 0, 3, ""),
        ([("a", 4)], 1, 3, "a: 4"),
        ([("a", 4), ("a", 5), ("a", 7), ("b", 8)], 4, 9, "a: 4–5, 7; b: 8"),
        ([("a", 4), ("a", 5), ("a", 7), ("b", 8)], 1_004, 3, "a: 4–5, 7; and 1,001 more"),
        ([], 7, 3, ""),  # nothing is named, so nothing is "more"
    ],
)
def test_rows_in_words(rows: list[tuple[str, int]], count: int, most: int, words: str) -> None:
    assert rows_in_words(rows, count, most) == words
