"""A run that goes on: from which step, what no longer counts, what was lost, and what is refused.

The reference for what counts is a walk by hand over lists of steps; ``verify`` is the judge of every run folder.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from auditlog import summary
from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError, StoreError, UsageError
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger import ledger as ledger_module
from auditlog.ledger.abandon import seal_abandoned
from auditlog.ledger.appender import Appender
from auditlog.ledger.conservation import recompute
from auditlog.ledger.ledger import RunLedger, StepEntry
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.ledger.writer import LedgerWriter
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import Verdict
from tests.support import LedgerSimulator, Plan, simulated_steps, write_sources

PLAN = Plan(steps=9, per_step=4)


@pytest.fixture
def sim(tmp_path: Path) -> LedgerSimulator:
    return LedgerSimulator(tmp_path / "one", PLAN)


def entries(sim: LedgerSimulator, first: int, last: int, per_step: int = PLAN.per_step) -> list[StepEntry]:
    """Return steps ``first`` to ``last``; another batch size gives other samples."""
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    plan = dataclasses.replace(sim.plan, steps=last, per_step=per_step, seed=per_step)
    return list(simulated_steps(data, plan))[first - 1 :]


def log(ledger: RunLedger, steps: list[StepEntry], *, flush_each: bool = False) -> None:
    for entry in steps:
        ledger.append_step(entry)
        if flush_each:
            ledger.flush()
    ledger.flush()


def crashed(sim: LedgerSimulator, steps: int = 6) -> LedgerSimulator:
    """A run of so many steps, a head over each, that ended without a seal."""
    ledger, _ = sim.start()
    log(ledger, entries(sim, 1, steps), flush_each=True)
    ledger.close_unsealed()
    return sim


def resume(sim: LedgerSimulator, **options: bool) -> RunLedger:
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    return RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor, **options)


def codes(verdict: Verdict) -> set[str]:
    return {finding.code for finding in verdict.findings if finding.level == "error"}


def verified(sim: LedgerSimulator) -> Verdict:
    """Verify with the key and every head that was ever handed over."""
    heads = tuple(Note.parse(path.read_bytes()) for path in sim.kept_heads())
    verdict = verify_run(sim.run, Trust((sim.signer.vkey,), heads, sim.plan.origin), data=sim.data_folder)
    assert (verdict.exit_code, verdict.findings) == (0, ())
    return verdict


# --- going on -------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_one_run_with_two_attempts(sim: LedgerSimulator) -> None:
    crashed(sim)
    ledger = resume(sim)
    assert (ledger.steps, ledger.records, ledger.attempt, ledger.last_step) == (6, 24, 1, 6)
    assert ledger.begin_attempt(4, {"cause": "power cut"}) == 2
    assert (ledger.attempt, ledger.last_step) == (2, 4)
    log(ledger, entries(sim, 5, 9))
    ledger.seal({})
    verdict = verified(sim)
    assert (verdict.attempts, verdict.steps, verdict.records, verdict.sealed) == (2, 9, 44, True)
    with RunReader.open(sim.run) as reader:
        (said,) = (event.json() for event in reader.events(EventKind.RESUME))
        (seal,) = (event.json() for event in reader.events(EventKind.SEAL))
        assert all(check.ok for check in recompute(reader))
    assert said == {
        "attempt": 2,
        "cause": "power cut",
        "from_attempt": 1,
        "from_step": 4,
        "last_step": 6,
        "superseded_records": 8,
        "superseded_steps": 2,
    }
    totals = {"records": 44, "steps": 11, "attempts": 2, "live_records": 36, "live_steps": 9}
    assert seal == {"reason": "finished", **totals}


def test_each_attempt_has_a_session_key_of_its_own_that_signs_its_heads_only(sim: LedgerSimulator) -> None:
    crashed(sim)
    before = {path.name for path in sim.head_files()}
    ledger = resume(sim)
    ledger.begin_attempt(6)
    log(ledger, entries(sim, 7, 9))
    ledger.seal({})
    for path in sim.head_files():
        names = {signature.name for signature in Note.parse(path.read_bytes()).signatures}
        assert f"{PLAN.origin}/session/{1 if path.name in before else 2}" in names
        assert len(names) == 1 + (path == sim.head_files()[-1])


LINES = {  # attempts as (from_attempt, from_step, first step, last step)
    "forward": [(0, 0, 1, 4), (1, 4, 5, 9)],
    "back": [(0, 0, 1, 6), (1, 2, 3, 9)],
    "twice": [(0, 0, 1, 6), (1, 4, 5, 7), (2, 6, 7, 9)],
    "further back each time": [(0, 0, 1, 6), (1, 4, 5, 7), (2, 3, 4, 9)],
    "from the start again": [(0, 0, 1, 6), (1, 0, 1, 9)],
    "from an older attempt": [(0, 0, 1, 6), (1, 2, 3, 4), (1, 5, 6, 9)],
    "two crashes at once": [(0, 0, 1, 6), (1, 4, 1, 0), (2, 4, 5, 9)],
}


@pytest.mark.parametrize("line", LINES)
def test_n03_what_counts_is_what_the_final_weights_went_through(line: str, sim: LedgerSimulator) -> None:
    """N03: against a walk by hand: a step is on the line back from the last attempt, or it is superseded."""
    attempts = LINES[line]
    ledger, _ = sim.start()
    for number, (from_attempt, from_step, first, last) in enumerate(attempts, start=1):
        if number > 1:
            ledger.close_unsealed()
            ledger = resume(sim)
            ledger.begin_attempt(from_step, from_attempt=from_attempt)
        log(ledger, entries(sim, first, last, per_step=3 + number) if last else [])
    ledger.seal({})
    live, number, until = set(), len(attempts), 99
    while number:
        from_attempt, from_step, first, last = attempts[number - 1]
        live |= {(number, step) for step in range(first, last + 1) if step <= until}
        number, until = from_attempt, min(until, from_step)
    verified(sim)
    with RunReader.open(sim.run) as reader:
        records = reader.records()
        mask = [(int(r["attempt"]), int(r["step"])) in live for r in records]
        assert reader.live(records).tolist() == mask
        np.testing.assert_array_equal(reader.live_records(), records[mask])
        steps = [event.json() for event in reader.live_steps()]
        assert [(body["attempt"], body["step"]) for body in steps] == sorted(live, key=lambda pair: pair[1])
        assert sorted(step for _, step in live) == list(range(1, 10))
        every = np.concatenate([block.rows for block in reader.sketches().blocks()])
        live_rows = np.concatenate([block.rows for block in reader.live_sketches().blocks(5)])
        np.testing.assert_array_equal(live_rows, every[mask])
        seal = reader.events(EventKind.SEAL)[0].json()
        document = summary.run(reader)
    assert (seal["live_records"], seal["live_steps"], seal["attempts"]) == (sum(mask), 9, len(attempts))
    assert (document["records"], document["superseded_records"]) == (len(mask), len(mask) - sum(mask))
    assert sum(source["uses"] for source in document["sources"]) == sum(mask)


def test_a22_a_loop_that_starts_again_in_the_same_process_is_a_new_attempt(sim: LedgerSimulator) -> None:
    """A22: out of memory at step 3; the trainer halves the batch and starts at step 1 again, without a word."""
    ledger, _ = sim.start()
    log(ledger, entries(sim, 1, 3, per_step=8))
    for step in (1, 3):
        with pytest.raises(UsageError, match=f"step {step} comes after step 3 of attempt 1"):
            ledger.append_step(entries(sim, step, step)[0])
    ledger.append_event(EventKind.NOTICE, {"waits": "for the next flush"})
    size = ledger.size
    ledger.begin_attempt(0, {"batch_size": 4})
    assert f"{size:08d}.note" in {path.name for path in sim.head_files()}  # signed by the key of its own attempt
    log(ledger, entries(sim, 1, 9, per_step=4))
    ledger.seal({})
    verified(sim)
    with RunReader.open(sim.run) as reader:
        records, document = reader.live_records(), summary.run(reader)
        said = reader.events(EventKind.RESUME)[0].json()
        total = len(reader.records())
    assert (said["from_step"], said["last_step"], said["batch_size"], said["superseded_records"]) == (0, 3, 4, 24)
    assert (total, len(records), document["samples"]) == (24 + 36, 36, len(np.unique(records[["source_id", "row"]])))
    assert len(np.unique(records[["attempt", "step", "micro", "slot", "part"]])) == 36


def test_f05_a_steps_samples_are_shown_for_every_attempt_after_a_change_of_batch_size(sim: LedgerSimulator) -> None:
    """F05: exact ids, file and row; by hand from what was handed to the ledger."""
    crashed(sim)
    ledger = resume(sim)
    ledger.begin_attempt(4)
    log(ledger, entries(sim, 5, 7, per_step=2))
    ledger.close_unsealed()
    with RunReader.open(sim.run) as reader:
        document = summary.step(reader, 6)
        with pytest.raises(UsageError, match="no step 8"):
            summary.step(reader, 8)
    data = write_sources(sim.data_folder, PLAN.rows_per_file)
    assert [(attempt["attempt"], attempt["live"]) for attempt in document["attempts"]] == [(1, False), (2, True)]
    for attempt, entry in zip(document["attempts"], [entries(sim, 6, 6)[0], entries(sim, 6, 6, 2)[0]], strict=True):
        assert [use["sample_index"] for use in attempt["samples"]] == entry.index.tolist()
        for use in attempt["samples"]:
            text = data.read_row(use["sample_index"])["text"]
            assert text == f"file {use['source'][5]} row {use['row']}: ä"


def test_rows_that_a_crash_left_behind_are_written_over(sim: LedgerSimulator) -> None:
    """Sketches reach the disk before their entries: those of a batch that was never stored belong to nobody."""
    ledger, _ = sim.start()
    log(ledger, entries(sim, 1, 3), flush_each=True)
    ledger._sketches.write(entries(sim, 4, 4)[0], 1)  # and then the process dies
    ledger._log.close()
    ledger = resume(sim)
    ledger.begin_attempt(3)
    log(ledger, entries(sim, 4, 9))
    ledger.seal({})
    verified(sim)
    assert np.load(sim.run / "sketches/000000.npy").shape[0] == 9 * 5


def test_a_run_whose_shards_were_cut_for_a_seal_that_failed_goes_on(sim: LedgerSimulator) -> None:
    ledger, _ = sim.start()
    log(ledger, entries(sim, 1, 3))
    ledger.flush()
    ledger._sketches.close(cut=True)
    ledger._log.close()
    ledger = resume(sim)
    ledger.begin_attempt(3)
    log(ledger, entries(sim, 4, 9))
    ledger.seal({})
    verified(sim)


def test_an_attempt_that_could_not_be_handed_over_is_open_all_the_same(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = resume(crashed(sim))
    monkeypatch.setattr(ledger._log, "_on_head", lambda name, note: 1 / 0)
    with pytest.raises(StoreError, match="on_head did not accept"):
        ledger.begin_attempt(6)
    monkeypatch.setattr(ledger._log, "_on_head", sim.auditor)
    log(ledger, entries(sim, 7, 9))
    ledger.seal({})
    assert verified(sim).attempts == 2


def test_nothing_is_written_before_an_attempt_is_open(sim: LedgerSimulator) -> None:
    crashed(sim)
    before = {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()}
    ledger = resume(sim)
    for act in (
        lambda: ledger.append_step(entries(sim, 7, 7)[0]),
        lambda: ledger.append_event(EventKind.NOTICE, {}),
        lambda: ledger.seal({}),
    ):
        with pytest.raises(UsageError, match="no attempt is open"):
            act()
    ledger.flush()
    ledger.close_unsealed()
    after = {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()}
    assert {path.name for path in after} == {path.name for path in before}
    assert {p: b for p, b in after.items() if p.suffix != ".duckdb"} == {
        p: b for p, b in before.items() if p.suffix != ".duckdb"
    }
    assert codes(verify_run(sim.run, sim.trust("key"))) == {"E_UNSEALED"}


def test_a_writer_opens_attempts_behind_what_is_queued_and_raises_what_went_wrong(sim: LedgerSimulator) -> None:
    ledger, _ = sim.start()
    with LedgerWriter(ledger, on_error="continue_and_mark") as writer:
        for entry in entries(sim, 1, 5):
            writer.step(entry)
        with pytest.raises(StoreError, match="logged up to step 5, training would go on from step 8"):
            writer.begin_attempt(8)
        with pytest.warns(UserWarning, match="in trouble"):
            assert writer.begin_attempt(2, {"cause": "out of memory"}) == 2
        for entry in entries(sim, 3, 9):
            writer.step(entry)
        writer.seal({})
    assert verified(sim).attempts == 2


@pytest.mark.parametrize(("from_step", "from_attempt"), [(-1, None), (2, 0), (2, 2)])
def test_a_place_that_does_not_exist_is_refused(from_step: int, from_attempt: int | None, sim: LedgerSimulator) -> None:
    ledger = resume(crashed(sim))
    with pytest.raises(UsageError, match="there is no step"):
        ledger.begin_attempt(from_step, from_attempt=from_attempt)
    ledger.close_unsealed()


# --- refusals -------------------------------------------------------------------------------------------------


def test_a_sealed_run_is_not_resumed(sim: LedgerSimulator) -> None:
    sim.write()
    with pytest.raises(UsageError, match="is sealed") as caught:
        resume(sim)
    assert "Start a new run" in caught.value.advice()
    crashed(other := LedgerSimulator(sim.folder / "other", PLAN))
    seal_abandoned(other.run, other.signer)
    with pytest.raises(UsageError, match="is sealed"):
        resume(other)


def test_another_key_is_refused(sim: LedgerSimulator) -> None:
    crashed(sim)
    data = write_sources(sim.data_folder, PLAN.rows_per_file)
    with pytest.raises(UsageError, match="names the key"):
        RunLedger.resume(sim.run, data, Signer.generate("bank.example/audit"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("row", r"source file part-1\.jsonl: sha256 was [0-9a-f]+ and is [0-9a-f]+"),
        ("file", "there were 2 source files, now there are 3"),
        ("name", r"source file part-1\.jsonl: path was part-1\.jsonl and is part-x\.jsonl"),
        ("description", "description was '' and is 'loans'"),
    ],
)
def test_other_data_is_refused_and_the_first_difference_named(change: str, said: str, sim: LedgerSimulator) -> None:
    crashed(sim)
    path = sim.data_folder / "part-1.jsonl"
    data = write_sources(sim.data_folder, PLAN.rows_per_file)
    if change == "row":
        path.write_text(path.read_text(encoding="utf-8").replace("row 4", "row 5"), encoding="utf-8")
    elif change == "file":
        (sim.data_folder / "part-2.jsonl").write_text('{"text": "more"}\n')
    elif change == "name":
        path.rename(sim.data_folder / "part-x.jsonl")
    else:
        data.block = data.block.model_copy(update={"description": "loans"})
    if change != "description":
        data = DataManifest.build(sim.data_folder / "*.jsonl")
        sources = tuple(s.model_copy(update={"data_version_id": s.source_id % 2}) for s in data.block.sources)
        data.block = data.block.model_copy(update={"sources": sources})
    with pytest.raises(DataError, match=said):
        RunLedger.resume(sim.run, data, sim.signer)


def test_a_damaged_database_is_unreadable_and_nothing_is_touched(sim: LedgerSimulator) -> None:
    crashed(sim)
    sim.flip("ledger.duckdb", 0.5)
    sim.flip("ledger.duckdb", 0.1)
    before = {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()}
    with pytest.raises(StoreError) as caught:
        resume(sim, accept_loss=True)
    assert "ledger.duckdb" in str(caught.value)
    assert "tamper" not in f"{caught.value} {caught.value.advice()}".lower()
    assert {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE records SET epoch = 7 WHERE seq = 8",
        "DELETE FROM records WHERE seq = 8",
        "DELETE FROM events WHERE seq = 30",  # the last entry, with its batch and checkpoint left
        "DELETE FROM batches WHERE first_seq = 26",
    ],
)
def test_an_edited_run_is_not_resumed_not_even_by_accepting_a_loss(edit: str, sim: LedgerSimulator) -> None:
    crashed(sim)
    sim.sql(edit)
    for accept_loss in (False, True):
        with pytest.raises(StoreError):
            resume(sim, accept_loss=accept_loss)


def test_a_head_of_another_log_in_the_folder_is_refused(sim: LedgerSimulator, tmp_path: Path) -> None:
    crashed(sim)
    other = crashed(LedgerSimulator(tmp_path / "two", PLAN, signer=sim.signer))
    shutil.copy(other.head_files()[-1], sim.head_files()[-1])
    with pytest.raises(StoreError, match=r"00000031\.note is a head of another log"):
        resume(sim)


def test_steps_that_were_trained_and_never_logged_are_refused_and_then_named(sim: LedgerSimulator) -> None:
    """The trainer's checkpoint is of step 8, the log ends at step 6."""
    crashed(sim)
    ledger = resume(sim)
    with pytest.raises(StoreError, match="logged up to step 6, training would go on from step 8"):
        ledger.begin_attempt(8)
    ledger.close_unsealed()
    ledger = resume(sim, accept_loss=True)
    ledger.begin_attempt(8)
    log(ledger, entries(sim, 9, 9))
    ledger.seal({})
    verdict = verify_run(sim.run, sim.trust("head"))
    assert (codes(verdict), verdict.exit_code) == ({"E_LOSS_ACCEPTED"}, 5)
    assert "steps 7 to 8 went into it and are not in the log" in verdict.findings[0].message


def test_a_step_of_a_line_that_was_given_up_does_not_count_as_logged(sim: LedgerSimulator) -> None:
    """Attempt 2 went back to step 2 and reached 3: weights of step 5 are attempt 1's, and must be named as such."""
    ledger, _ = sim.start()
    log(ledger, entries(sim, 1, 6))
    ledger.begin_attempt(2)
    log(ledger, entries(sim, 3, 3))
    with pytest.raises(StoreError, match="attempt 2 is logged up to step 3"):
        ledger.begin_attempt(5)
    ledger.begin_attempt(5, from_attempt=1)
    ledger.close_unsealed()


# --- accepted losses ------------------------------------------------------------------------------------------


def rolled_back(sim: LedgerSimulator, *, heads_too: bool = False) -> LedgerSimulator:
    """The database as it was after step 3 of 6, as if its write-ahead log had gone; heads/ knows better."""
    ledger, _ = sim.start()
    log(ledger, entries(sim, 1, 3), flush_each=True)
    ledger.close_unsealed()
    old = (sim.run / "ledger.duckdb").read_bytes()
    notes = {path.name for path in sim.head_files()}
    data = write_sources(sim.data_folder, PLAN.rows_per_file)
    ledger = RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor)
    ledger.begin_attempt(3)
    log(ledger, entries(sim, 4, 6), flush_each=True)
    ledger.close_unsealed()
    (sim.run / "ledger.duckdb").write_bytes(old)
    for path in sim.head_files():
        if heads_too and path.name not in notes:
            path.unlink()
    return sim


@pytest.mark.parametrize("heads_too", [False, True])
def test_b02_a_store_behind_its_heads_is_refused_with_both_sizes(heads_too: bool, sim: LedgerSimulator) -> None:
    """B02: also where the whole folder is an old copy, and only the place of the handed-over heads knows."""
    rolled_back(sim, heads_too=heads_too)
    with pytest.raises(StoreError) as caught:
        resume(sim)
    assert "holds 16 entries, a head was signed over 33: the last 17 are missing" in str(caught.value)
    assert "no ledger.duckdb.wal" in str(caught.value)
    assert "accept_loss" in caught.value.advice()
    assert not (sim.run / "heads/lost").exists()


@pytest.mark.parametrize("heads_too", [False, True])
def test_an_accepted_loss_is_named_for_ever_and_never_looks_like_a_fork(heads_too: bool, sim: LedgerSimulator) -> None:
    """New heads reach the sizes of lost ones. An auditor who kept any of both learns what happened."""
    rolled_back(sim, heads_too=heads_too)
    kept_before = {path.name: path.read_bytes() for path in sim.kept_heads()}
    ledger = resume(sim, accept_loss=True)
    ledger.begin_attempt(3)
    log(ledger, entries(sim, 4, 4), flush_each=True)
    ledger.append_event(EventKind.NOTICE, {"now the sizes": "meet"})
    log(ledger, entries(sim, 5, 9, per_step=4), flush_each=True)
    ledger.seal({})

    lost = sorted((sim.run / "heads/lost").glob("*.note"))
    assert [Note.parse(path.read_bytes()).checkpoint().size for path in lost] == [18, 23, 28, 33]
    kept_after = {path.name: path.read_bytes() for path in sim.kept_heads()}
    assert kept_before.items() <= kept_after.items()  # nothing that was handed over is written over
    for path in sim.kept_heads():
        verdict = verify_run(sim.run, Trust((sim.signer.vkey,), (Note.parse(path.read_bytes()),), sim.plan.origin))
        assert (codes(verdict), verdict.exit_code) == ({"E_LOSS_ACCEPTED"}, 5), path
    with RunReader.open(sim.run) as reader:
        (said,) = (event for event in reader.events(EventKind.LOSS_ACCEPTED))
        body = said.json()
    heads = [Note.parse(path.read_bytes()).checkpoint() for path in lost]
    assert body["heads"] == [{"size": head.size, "root": head.root.hex()} for head in heads]
    assert (said.seq, body["size"], body["entries"]) == (17, 16, 17)
    found = next(f.message for f in verdict.findings if "signed and then lost" in f.message)
    assert found == "entries 16 to 32 were signed and then lost; the loss was accepted at entry 17"


def test_new_heads_of_lost_sizes_are_handed_over_beside_the_old_ones(sim: LedgerSimulator) -> None:
    rolled_back(sim)
    old = {path.name for path in sim.kept_heads()}
    ledger = resume(sim, accept_loss=True)
    ledger.begin_attempt(3)  # certificate, acceptance, resume: sizes 19, 24, …; a notice moves them onto the old ones
    for number in range(4):
        ledger.append_event(EventKind.NOTICE, {"number": number})
        ledger.flush()
    assert (sim.run / "heads/00000023.note").exists()
    new = {path.name for path in sim.kept_heads()} - old
    assert sum(name.startswith("00000023.") for name in new) == 1
    ledger.close_unsealed()
    again = resume(sim)  # hands everything over once more: the same names, nothing in the way
    again.begin_attempt(3)
    again.close_unsealed()
    assert len({path.name for path in sim.kept_heads()} - old) == len(new) + 1


def test_a_head_that_the_acceptance_does_not_name_is_still_a_fork(sim: LedgerSimulator) -> None:
    rolled_back(sim)
    stray = Note.parse(sim.kept_heads()[-1].read_bytes())
    for folder in (sim.run / "heads", sim.auditor / "run"):
        (folder / "00000033.note").unlink()  # the operator hides the last head before accepting
    ledger = resume(sim, accept_loss=True)
    ledger.begin_attempt(3)
    log(ledger, entries(sim, 4, 9))
    ledger.seal({})
    trust = Trust((sim.signer.vkey,), (stray,), sim.plan.origin, certificates=sim.certificates())
    assert "E_FORK" in codes(verify_run(sim.run, trust))
    # Whoever kept the head without the certificate cannot tell a fork from a forged head, and is told just that.
    verdict = verify_run(sim.run, Trust((sim.signer.vkey,), (stray,), sim.plan.origin))
    assert ("E_HEAD" in codes(verdict), verdict.exit_code) == (True, 6)


def test_a_crash_in_the_middle_of_accepting_a_loss_accepts_nothing(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolled_back(sim)
    ledger = resume(sim, accept_loss=True)
    with monkeypatch.context() as patch:
        patch.setattr(Appender, "add_event", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.begin_attempt(3)
    ledger._log.close()
    assert len(list((sim.run / "heads/lost").glob("*.note"))) == 4
    assert "E_TRUNC" in codes(verify_run(sim.run, sim.trust("key")))
    with pytest.raises(StoreError, match="17 are missing"):
        resume(sim)
    ledger = resume(sim, accept_loss=True)
    ledger.begin_attempt(3)
    log(ledger, entries(sim, 4, 9))
    ledger.seal({})
    assert codes(verify_run(sim.run, sim.trust("key"))) == {"E_LOSS_ACCEPTED"}


@pytest.mark.parametrize("from_step", [0, 6])
def test_a_run_that_lost_every_entry_starts_again_as_attempt_1(from_step: int, sim: LedgerSimulator) -> None:
    """All of it was still in the write-ahead log; the manifest, the salts and the heads are left."""
    crashed(sim)
    sim.sql(*(f"DELETE FROM {table}" for table in ("records", "events", "batches", "checkpoints")))
    with pytest.raises(StoreError, match="holds 0 entries, a head was signed over 31"):
        resume(sim)
    ledger = resume(sim, accept_loss=True)
    assert ledger.begin_attempt(from_step) == 1
    log(ledger, entries(sim, from_step + 1, 9))
    ledger.seal({})
    verdict = verify_run(sim.run, sim.trust("head"), data=sim.data_folder)
    assert codes(verdict) == {"E_LOSS_ACCEPTED"}
    assert any("entries 0 to 30 were signed and then lost" in f.message for f in verdict.findings)
    assert any("steps 1 to 6 went into it" in f.message for f in verdict.findings) == (from_step == 6)
    with RunReader.open(sim.run) as reader:
        assert len(reader.live_records()) == (9 - from_step) * PLAN.per_step


def test_accepting_a_loss_that_there_is_not_says_nothing(sim: LedgerSimulator) -> None:
    ledger = resume(crashed(sim), accept_loss=True)
    ledger.begin_attempt(6)
    log(ledger, entries(sim, 7, 9))
    ledger.seal({})
    assert verified(sim).attempts == 2


# --- closing --------------------------------------------------------------------------------------------------


def test_a_run_of_several_attempts_is_closed_as_abandoned(sim: LedgerSimulator) -> None:
    ledger = resume(crashed(sim))
    ledger.begin_attempt(4)
    log(ledger, entries(sim, 5, 6))
    ledger.close_unsealed()
    seal_abandoned(sim.run, sim.signer)
    verdict = verify_run(sim.run, sim.trust("head"))
    assert (verdict.exit_code, verdict.abandoned, verdict.attempts) == (0, True, 2)
    with RunReader.open(sim.run) as reader:
        seal = reader.events(EventKind.SEAL)[0].json()
    assert (seal["live_records"], seal["live_steps"], seal["records"]) == (24, 6, 32)


def test_a_shorter_run_is_closed_only_by_accepting_the_loss(sim: LedgerSimulator) -> None:
    rolled_back(sim)
    with pytest.raises(StoreError, match="E_TRUNC"):
        seal_abandoned(sim.run, sim.signer, on_head=sim.auditor)
    seal_abandoned(sim.run, sim.signer, on_head=sim.auditor, accept_loss=True)
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (codes(verdict), verdict.sealed, verdict.abandoned) == ({"E_LOSS_ACCEPTED"}, True, True)
    with pytest.raises(UsageError, match="sealed already"):
        seal_abandoned(sim.run, sim.signer, accept_loss=True)


def test_a_run_that_accepted_a_loss_can_be_closed_later(sim: LedgerSimulator) -> None:
    rolled_back(sim)
    ledger = resume(sim, accept_loss=True)
    ledger.begin_attempt(3)
    ledger.close_unsealed()
    seal_abandoned(sim.run, sim.signer, on_head=sim.auditor)
    assert codes(verify_run(sim.run, sim.trust("key"))) == {"E_LOSS_ACCEPTED"}


def test_a_batch_is_stored_with_the_attempt_it_belongs_to(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificate and RESUME event reach the database in one transaction: a crash never parts them."""
    monkeypatch.setattr(ledger_module, "BATCH_ENTRIES", 1)
    ledger = resume(crashed(sim))
    ledger.begin_attempt(6)
    ledger.close_unsealed()
    (batch,) = sim.query("SELECT first_seq, entries FROM batches ORDER BY batch DESC LIMIT 1")
    assert batch == (31, 2)
