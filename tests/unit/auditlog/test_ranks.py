"""A run of several processes: one log per rank, bound together by rank 0's seal, verified and read as one run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from auditlog import summary
from auditlog.errors import ReadError, StoreError, UsageError
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger.abandon import seal_abandoned
from auditlog.ledger.conservation import recompute
from auditlog.ledger.erase import erase
from auditlog.ledger.ledger import RunLedger, StepEntry
from auditlog.ledger.ranks import rank_folder, rank_head
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from auditlog.trust.ranks import rank_origin, run_origin
from auditlog.trust.verdict import Verdict
from tests.support import LedgerSimulator, Plan, make_manifest, simulated_steps, write_sources

WORLD = 3
PLAN = Plan(steps=5, per_step=6, dim=256, forms=("raw",))


def parts(entry: StepEntry) -> list[StepEntry]:
    """Deal a step's samples out to the ranks; the consumed gradient is the same on all of them."""
    return [
        dataclasses.replace(
            entry, records=entry.records[r::WORLD], index=entry.index[r::WORLD], sketches=entry.sketches[r::WORLD]
        )
        for r in range(WORLD)
    ]


def start(sim: LedgerSimulator) -> list[RunLedger]:
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    base = make_manifest(data, sim.signer, sim.plan)
    ledgers = []
    for rank in range(WORLD):
        update = {"rank": rank, "world_size": WORLD, "origin": rank_origin(base.origin, rank)}
        manifest = base.model_copy(update=update)
        folder = rank_folder(sim.run, rank)
        ledgers.append(RunLedger.create(folder, manifest, data, sim.signer, on_head=sim.auditor))
    return ledgers


def train(sim: LedgerSimulator, ledgers: list[RunLedger], first: int = 1, last: int = PLAN.steps) -> None:
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    for entry in list(simulated_steps(data, sim.plan))[first - 1 : last]:
        for ledger, part in zip(ledgers, parts(entry), strict=True):
            ledger.append_step(part)


def seal(sim: LedgerSimulator, ledgers: list[RunLedger]) -> None:
    for ledger in ledgers[1:]:
        ledger.seal({})
    ledgers[0].seal({"ranks": [rank_head(sim.run, rank) for rank in range(1, WORLD)]})


def write(folder: Path, signer: Signer | None = None, **plan: object) -> LedgerSimulator:
    sim = LedgerSimulator(folder, dataclasses.replace(PLAN, **plan), signer=signer)  # type: ignore[arg-type]
    ledgers = start(sim)
    train(sim, ledgers)
    seal(sim, ledgers)
    return sim


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    return write(tmp_path_factory.mktemp("ranks") / "original")


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    return original.copy_to(tmp_path / "copy")


def errors(verdict: Verdict) -> list[tuple[str, str]]:
    return [(finding.code, finding.message) for finding in verdict.findings if finding.level == "error"]


def test_all_ranks_verify_as_one_run(original: LedgerSimulator) -> None:
    verdict = verify_run(original.run, original.trust("key"), data=original.data_folder)
    assert (verdict.exit_code, verdict.findings) == (0, ())
    lines = {check.name: check.detail for check in verdict.checks if check.name.startswith("rank")}
    assert set(lines) == {"rank 1 log", "rank 2 log"}
    assert lines["rank 1 log"].startswith("17 entries, ")  # certificate, 5 steps of 2 records and an event, seal


def test_every_head_of_every_rank_can_be_kept_and_given_together(original: LedgerSimulator) -> None:
    """on_head keeps ranks apart; the folder of the run is what an auditor names."""
    kept = original.auditor / "run"
    names = {path.relative_to(kept).as_posix() for path in kept.rglob("*.note")}
    assert names == {f"{place}{size:08d}.note" for place in ("", "ranks/1/", "ranks/2/") for size in (1, 16, 17)}
    trust = Trust.load([str(original.signer.vkey)], [kept])
    assert len(trust.heads) == 9
    assert verify_run(original.run, trust).exit_code == 0
    assert verify_run(rank_folder(original.run, 2), trust).exit_code == 0
    assert verify_run(original.run, Trust(heads=trust.heads[:2])).exit_code == 0


def test_one_rank_verifies_alone_and_says_what_it_is(original: LedgerSimulator) -> None:
    verdict = verify_run(rank_folder(original.run, 1), original.trust_key_only())
    assert (verdict.exit_code, verdict.origin) == (0, f"{PLAN.origin}/rank/1")
    assert any("this is the log of rank 1 of 3" in text for text in verdict.not_checked)


def test_a_missing_rank_is_incomplete(sim: LedgerSimulator) -> None:
    shutil.rmtree(rank_folder(sim.run, 2))
    verdict = verify_run(sim.run, sim.trust("key"))
    assert verdict.exit_code == 5
    ((code, message),) = errors(verdict)
    assert code == "E_LOST"
    assert message.startswith("rank 2: ")
    with RunReader.open(sim.run) as reader, pytest.raises(ReadError, match="ranks/2 does not exist"):
        reader.live_records()


def test_a_rank_that_was_replaced_by_another_signed_one_is_found(sim: LedgerSimulator, tmp_path: Path) -> None:
    """Same key, name, data and sketch; only rank 0's seal knows which of the two belonged to the run."""
    other = write(tmp_path / "other", sim.signer, seed=1)
    shutil.rmtree(rank_folder(sim.run, 1))
    shutil.copytree(rank_folder(other.run, 1), rank_folder(sim.run, 1))
    verdict = verify_run(sim.run, sim.trust("key"))
    assert [(code, text.partition(":")[0]) for code, text in errors(verdict)] == [("E_BIND", "rank 1")]
    assert "this is another log" in errors(verdict)[0][1]
    assert verdict.exit_code == 6


def test_ranks_that_were_exchanged_are_found(sim: LedgerSimulator) -> None:
    one, two = rank_folder(sim.run, 1), rank_folder(sim.run, 2)
    one.rename(sim.run / "aside")
    two.rename(one)
    (sim.run / "aside").rename(two)
    found = errors(verify_run(sim.run, sim.trust("key")))
    assert {code for code, _ in found} == {"E_BIND"}
    assert any("rank 1: its rank is 2, expected 1" in text for _, text in found)


@pytest.mark.parametrize(
    ("plan", "what"),
    [({"run_id": "run-2"}, "run id"), ({"origin": "bank.example/else"}, "origin"), ({"dim": 128}, "sketch")],
)
def test_a_rank_of_another_run_is_found_even_before_any_seal(
    plan: dict[str, object], what: str, tmp_path: Path
) -> None:
    sim = LedgerSimulator(tmp_path / "one", PLAN)
    for ledger in start(sim):
        ledger.close_unsealed()
    other = write(tmp_path / "other", sim.signer, **plan)
    shutil.rmtree(rank_folder(sim.run, 1))
    shutil.copytree(rank_folder(other.run, 1), rank_folder(sim.run, 1))
    found = errors(verify_run(sim.run, sim.trust("key")))
    assert any(code == "E_BIND" and text.startswith(f"rank 1: its {what}") for code, text in found), found


def test_an_edited_record_of_a_rank_is_integrity_and_nothing_else(sim: LedgerSimulator) -> None:
    rank = LedgerSimulator(sim.folder, sim.plan, signer=sim.signer)
    rank.run = rank_folder(sim.run, 1)
    rank.sql("UPDATE records SET epoch = 3 WHERE seq = 4")
    verdict = verify_run(sim.run, sim.trust("key"))
    assert [code for code, _ in errors(verdict)] == ["E_LEAF"]
    assert errors(verdict)[0][1].startswith("rank 1: record 4")
    assert verdict.exit_code == 4


def test_a_rank_that_was_cut_is_incomplete(sim: LedgerSimulator) -> None:
    rank = LedgerSimulator(sim.folder, sim.plan, signer=sim.signer)
    rank.run = rank_folder(sim.run, 1)
    rank.truncate(16, checkpoints=True, head_files=True)
    verdict = verify_run(sim.run, sim.trust("key"))
    assert {code for code, _ in errors(verdict)} == {"E_UNSEALED", "E_TRUNC"}
    assert verdict.exit_code == 5


def test_rank_0_is_not_sealed_before_the_others(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", PLAN)
    ledgers = start(sim)
    with pytest.raises(UsageError, match=r"over ranks \[1, 2\], given were \[\]"):
        ledgers[0].seal({})
    for ledger in ledgers[1:]:
        ledger.close_unsealed()
    with pytest.raises(StoreError, match="is not sealed"):
        rank_head(sim.run, 1)
    with pytest.raises(StoreError, match="rank 3 has left no log"):
        rank_head(sim.run, 3)
    ledgers[0].close_unsealed()


def test_a_seal_that_does_not_name_a_rank_is_incomplete(sim: LedgerSimulator, tmp_path: Path) -> None:
    one = LedgerSimulator(tmp_path / "one", PLAN, signer=sim.signer)
    ledgers = start(one)
    train(one, ledgers)
    for ledger in ledgers[1:]:
        ledger.seal({})
    named = [rank_head(one.run, 1), {"rank": 2}]
    ledgers[0].seal({"ranks": named})
    assert [code for code, _ in errors(verify_run(one.run, one.trust("key")))] == ["E_LOST", "E_LOST"]


@pytest.mark.parametrize("place", [0, 2])
def test_a_rank_belongs_into_its_own_folder(place: int, tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", PLAN)
    data = write_sources(sim.data_folder, PLAN.rows_per_file)
    manifest = make_manifest(data, sim.signer, PLAN).model_copy(update={"rank": 1, "world_size": 3})
    with pytest.raises(UsageError, match="is not the folder of rank 1 of 3"):
        RunLedger.create(rank_folder(sim.run, place), manifest, data, sim.signer)


def test_the_records_of_all_ranks_are_read_as_one_run(original: LedgerSimulator) -> None:
    data = write_sources(original.data_folder, PLAN.rows_per_file)
    steps = list(simulated_steps(data, PLAN))
    with RunReader.open(original.run) as reader:
        records, document, step = reader.live_records(), summary.run(reader), summary.step(reader, 2)
        sketches = np.concatenate([block.rows for block in reader.live_sketches().blocks(4)])
        assert len(reader.live_steps()) == PLAN.steps
    dealt = [parts(entry)[rank] for rank in range(WORLD) for entry in steps]
    np.testing.assert_array_equal(sketches, np.concatenate([entry.sketches for entry in dealt]))
    assert len(records) == document["records"] == 30
    assert document["samples"] == len(np.unique(np.concatenate([entry.index for entry in steps])))
    assert (document["ranks"], document["steps"], document["superseded_records"]) == (3, 5, 0)
    (attempt,) = step["attempts"]
    assert sorted(use["sample_index"] for use in attempt["samples"]) == sorted(steps[1].index.tolist())
    assert [use["rank"] for use in attempt["samples"]] == [0, 0, 1, 1, 2, 2]


def test_a_step_adds_up_over_its_ranks_and_over_no_fewer(original: LedgerSimulator) -> None:
    with RunReader.open(original.run) as reader:
        checks = recompute(reader)
        assert [check.step for check in checks] == list(range(1, 6))
        assert all(check.ok for check in checks)
        reader.ranks.pop().close()
        assert not any(check.ok for check in recompute(reader))


def test_all_ranks_resume_and_are_closed(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", PLAN)
    ledgers = start(sim)
    train(sim, ledgers, last=3)
    for ledger in ledgers:
        ledger.flush()
        ledger.close_unsealed()
    assert {code for code, _ in errors(verify_run(sim.run, sim.trust("key")))} == {"E_UNSEALED"}
    data = write_sources(sim.data_folder, PLAN.rows_per_file)
    ledgers = [
        RunLedger.resume(rank_folder(sim.run, rank), data, sim.signer, on_head=sim.auditor) for rank in range(WORLD)
    ]
    for ledger in ledgers:
        assert ledger.begin_attempt(2) == 2
    train(sim, ledgers, first=3)
    seal(sim, ledgers)
    heads = tuple(Note.parse(path.read_bytes()) for path in sim.auditor.rglob("*.note"))
    verdict = verify_run(sim.run, Trust((sim.signer.vkey,), heads, PLAN.origin))
    assert (verdict.exit_code, verdict.attempts, verdict.findings) == (0, 2, ())
    with RunReader.open(sim.run) as reader:
        assert (len(reader.live_records()), summary.run(reader)["superseded_records"]) == (30, 6)


@pytest.mark.parametrize("sealed", [(), (1,), (1, 2)], ids=str)
def test_an_abandoned_run_is_closed_on_every_rank(sealed: tuple[int, ...], tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", PLAN)
    ledgers = start(sim)
    train(sim, ledgers)
    for rank, ledger in enumerate(ledgers):
        if rank in sealed:
            ledger.seal({})
        else:
            ledger.flush()
            ledger.close_unsealed()
    seal_abandoned(sim.run, sim.signer, on_head=sim.auditor)
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.abandoned) == (0, True), verdict.findings
    with RunReader.open(sim.run) as reader:
        named = reader.events(EventKind.SEAL)[0].json()["ranks"]
    assert named == [rank_head(sim.run, rank) for rank in (1, 2)]


@pytest.mark.parametrize(
    ("origin", "run"),
    [
        ("a/b", "a/b"),
        ("a/b/custody", "a/b"),
        ("a/b/rank/1", "a/b"),
        ("a/b/rank/12/custody", "a/b"),
        ("a/b/rank/x", "a/b/rank/x"),
    ],
)
def test_the_logs_of_one_run_are_known_by_their_origins(origin: str, run: str) -> None:
    assert run_origin(origin) == run
    assert run_origin(rank_origin(origin, 0)) == run


def test_an_erased_sample_is_gone_from_every_rank(sim: LedgerSimulator) -> None:
    """Every rank stores the gradient of all ranks' samples, whoever saw the erased one."""
    with RunReader.open(sim.run) as reader:
        theirs = [r.records()[(r.records()["source_id"] == 0) & (r.records()["row"] == 2)] for r in reader.ranks]
        gradients = [
            {event.json()["step"]: event.json()["gradient"]["row"] for event in rank.events(EventKind.STEP)}
            for rank in reader.ranks
        ]
    steps = set(np.concatenate([own["step"] for own in theirs]).tolist())
    assert steps
    assert not all(len(own) for own in theirs)  # some rank never saw it
    erased = erase(sim.run, [("part-0.jsonl", 2)], "GDPR Art. 17(1)(a)", sim.signer)
    assert (erased.records, erased.gradients) == (sum(map(len, theirs)), len(steps))
    for rank in range(WORLD):
        folder = rank_folder(sim.run, rank)
        shard = np.load(folder / "sketches" / "000000.npy")
        salts = np.fromfile(folder / "step_salts.bin", np.uint8).reshape(-1, 32)
        assert not shard[theirs[rank]["shard_row"]].any()
        for step, row in gradients[rank].items():
            assert (bool(shard[row].any()), bool(salts[row].any())) == (step not in steps, step not in steps)
        assert not (folder / "salts.bin").read_bytes()[32 * 2 : 32 * 3].strip(b"\0")
    assert verify_run(sim.run, sim.trust("key")).exit_code == 0
