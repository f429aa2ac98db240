"""``gradtrail show``: what became of the samples, how gradients were taken, and what the recorder said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from auditlog import cli
from auditlog.format.manifest import DataVersion
from auditlog.format.records import EventKind, Flag
from auditlog.ledger.ledger import RunLedger
from tests.support import LedgerSimulator, Plan, dataset_notice, make_manifest, simulated_steps, step_on, write_sources

SELF_CHECK = {
    "notice": "self-check",
    "samples": 3,
    "modules": [28, 28],
    "oracle_error": 1.2e-7,
    "sum_error": 4e-8,
    "seconds": 0.2,
    "confirmed": True,
}
TRACKING = {
    "trainable_entries": 1_100,
    "tracked_entries": 1_000,
    "coverage": 1_000 / 1_100,
    "untracked": {f"norm.{number}.weight": 4 for number in range(25)},
    "reasons": {f"norm.{number}.weight": "it mixes the samples of a batch" for number in range(25)},
    "routes": {"linear, exact": 28},
    "mode": "fused",
}


def show(sim: LedgerSimulator, *arguments: str) -> str:
    done = CliRunner().invoke(cli.app, ["show", str(sim.run), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def shown(sim: LedgerSimulator, *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(show(sim, *arguments, "--json"))
    return document


def start(folder: Path, rows_per_file: tuple[int, ...] = (12, 9), **manifest: Any) -> tuple[LedgerSimulator, RunLedger]:
    sim = LedgerSimulator(folder, Plan(rows_per_file=rows_per_file))
    data = write_sources(sim.data_folder, rows_per_file)
    versions = manifest.pop("versions", data.block.versions)
    data.block = data.block.model_copy(update={"versions": versions})
    made = make_manifest(data, sim.signer, sim.plan).model_copy(update=manifest)
    return sim, RunLedger.create(sim.run, made, data, sim.signer)


def test_e09_three_lists_of_samples(tmp_path: Path) -> None:
    """Rows 2, 3 and part-1's row 1 were dropped by the trainer; training ended in the middle of the epoch."""
    sim, ledger = start(tmp_path)
    data = write_sources(sim.data_folder, (12, 9))
    ledger.append_event(EventKind.NOTICE, dataset_notice([2, 3, 13]))
    ledger.append_step(step_on(data, 1, [0, 1, 4, 12]))
    ledger.seal({})
    text, use = show(sim), shown(sim)["sample_use"]
    assert [(each["fate"], each["count"], each["by_source"]) for each in use] == [
        ("used", 4, [3, 1]),
        ("dropped by the trainer before training", 3, [2, 1]),
        ("not reached", 14, [7, 7]),
    ]
    assert use[1]["first"] == [
        {"sample_index": 2, "source": "part-0.jsonl", "row": 2},
        {"sample_index": 3, "source": "part-0.jsonl", "row": 3},
        {"sample_index": 13, "source": "part-1.jsonl", "row": 1},
    ]
    assert "3: the training dataset did not hold them when training began" in text
    assert "rows part-0.jsonl: 2–3; part-1.jsonl: 1\n" in text
    assert re.search(r"part-0\.jsonl +3 +2 +7\n", text)
    assert "notices" not in text  # what it says is in the lists


def test_twenty_samples_are_named_on_paper_and_a_thousand_in_json(tmp_path: Path) -> None:
    sim, ledger = start(tmp_path, rows_per_file=(600, 900))
    ledger.append_step(step_on(write_sources(sim.data_folder, (600, 900)), 1, [0]))
    ledger.seal({})
    (_, unused) = shown(sim)["sample_use"]
    assert (unused["fate"], unused["count"], len(unused["first"])) == ("never used", 1_499, 1_000)
    assert unused["first"][-1] == {"sample_index": 1_000, "source": "part-1.jsonl", "row": 400}
    text = show(sim)
    assert "rows part-0.jsonl: 1–20; and 1,479 more" in text
    assert "whether the trainer dropped them is not recorded" in text


def test_mode_coverage_routes_and_what_left_no_sketch(tmp_path: Path) -> None:
    sim, ledger = start(tmp_path, tracking=TRACKING)
    ledger.seal({})
    text = show(sim)
    assert "fused: linear weight gradients are computed as the sum of the recorded ones" in text
    assert "1,000 of 1,100 trainable values (90.91%)" in text
    assert "28 × linear, exact" in text
    assert text.count("it mixes the samples of a batch") == 20
    assert "5 more; --json lists all" in text
    assert shown(sim)["tracking"] == TRACKING


def test_a_self_check_is_a_fact_and_the_rest_are_notices(tmp_path: Path) -> None:
    sim, ledger = start(tmp_path)
    for notice in (SELF_CHECK, {"notice": "log trouble", "failures": 2}, {"notice": "something new"}):
        ledger.append_event(EventKind.NOTICE, notice)
    ledger.seal({})
    text = show(sim)
    assert "largest relative error 1.2e-07, 28 of 28 modules seen (entry 1)" in text
    assert "self-check" not in text[text.index("notices") :]
    assert all(words in text[text.index("notices") :] for words in ("log trouble", "something new"))
    (check,) = shown(sim)["self_checks"]
    assert (check["seq"], check["confirmed"], check["modules_seen"]) == (1, True, 28)


def test_flags_are_counted_in_words(tmp_path: Path) -> None:
    sim, ledger = start(tmp_path)
    entry = step_on(write_sources(sim.data_folder, (12, 9)), 1, [0, 1, 2])
    entry.records["flags"][:] = [Flag.PADDED_DUPLICATE, Flag.PADDED_DUPLICATE, Flag.NOT_SEPARABLE]
    ledger.append_step(entry)
    ledger.seal({})
    text = show(sim)
    assert re.search("padded duplicate +2 records: .* did contribute to the weights", text)
    assert re.search("not separable +1 record: other samples are part of", text)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ({"kind": "lakefs", "revision": "credit@8f3a"}, "lakefs credit@8f3a (declared, not checked)"),
        ({"kind": "hub", "revision": "bank/credit@8f3a"}, "hub bank/credit@8f3a (declared, not checked)"),
        ({"kind": "dvc", "revision": "md5:ab", "dirty": True}, "dvc md5:ab (files differ)"),
    ],
)
def test_a_data_version_says_its_kind(version: dict[str, Any], words: str, tmp_path: Path) -> None:
    versions = tuple(DataVersion(data_version_id=number, root="0" * 64, **version) for number in range(2))
    sim, ledger = start(tmp_path, versions=versions)
    ledger.seal({})
    assert show(sim).count(words) == 2
    first = shown(sim)["sources"][0]
    assert (first["format"], first["data_version_kind"], first["dirty"]) == (
        "jsonl",
        version["kind"],
        version.get("dirty"),
    )


def test_a_packed_step_shows_the_tokens_of_each_record(tmp_path: Path) -> None:
    """Two micro-batches; the second sample of the first lies in two pieces and goes on at its token 4."""
    sim, ledger = start(tmp_path)
    entry = step_on(write_sources(sim.data_folder, (12, 9)), 1, [5, 6, 7])
    entry.records["micro"], entry.records["slot"] = [0, 0, 1], [0, 0, 0]
    first, second, third = [[0, 0, 6, 0]], [[0, 6, 10, 0], [1, 0, 3, 4]], [[0, 0, 9, 0]]
    ledger.append_step(replace(entry, body=entry.body | _packed([first, second], [third])))
    ledger.seal({})
    samples = shown(sim, "--step", "1")["attempts"][0]["samples"]
    assert [[tuple(span.values()) for span in sample["spans"]] for sample in samples] == [
        [(0, 0, 6, 0)],
        [(0, 6, 10, 0), (1, 0, 3, 4)],
        [(0, 0, 9, 0)],
    ]
    lines = show(sim, "--step", "1").splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "tokens of the row",
        "0–5",
        "6–9, row 1: 0–2 (its tokens from 4 on)",
        "0–8",
    ]


def test_a_step_that_is_not_packed_has_no_column_of_tokens(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path, Plan(steps=2)).write()
    assert "tokens of the row" not in show(sim, "--step", "1")
    assert shown(sim, "--step", "1")["attempts"][0]["samples"][0]["spans"] is None


def test_attempts_are_counted_by_the_steps_that_they_logged(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path, Plan(steps=6))
    ledger, data = sim.start()
    steps = list(simulated_steps(data, sim.plan))
    for entry in steps[:4]:
        ledger.append_step(entry)
    ledger.begin_attempt(2)
    ledger.begin_attempt(3, from_attempt=1)
    for entry in steps[3:]:
        ledger.append_step(entry)
    ledger.seal({})
    names = ("number", "from_attempt", "from_step", "steps", "live_steps", "last_step")
    assert [tuple(attempt[name] for name in names) for attempt in shown(sim)["attempts"]] == [
        (1, 0, 0, 4, 3, 4),
        (2, 1, 2, 0, 0, None),
        (3, 1, 3, 3, 3, 6),
    ]
    text = show(sim)
    assert "3: 1 to step 4, 2 from step 2 of attempt 1 without a step, 3 from step 3 of attempt 1 to step 6" in text
    assert "8 records of 1 step: " in text
    assert "not used by the final weights" in text


def test_a_loss_that_was_accepted_is_named(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path, Plan(steps=6))
    ledger, data = sim.start()
    steps = list(simulated_steps(data, sim.plan))
    for entry in steps[:3]:
        ledger.append_step(entry)
    ledger.flush()
    ledger.close_unsealed()
    ledger = RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor, accept_loss=True)
    ledger.begin_attempt(5)
    ledger.append_step(steps[5])
    ledger.seal({})
    assert "steps 4 to 5 were trained and never logged (entry " in show(sim)
    assert shown(sim)["losses"][0]["missing_steps"] == {"first": 4, "last": 5}


def _packed(*micro_batches: list[list[list[int]]]) -> dict[str, Any]:
    return {"micro_batches": [{"rows": 2, "loss": 1.0, "spans": spans} for spans in micro_batches]}
