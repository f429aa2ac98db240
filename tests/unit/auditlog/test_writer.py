"""The writer thread: same log as without it, back-pressure instead of loss, and both ways to take trouble."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from auditlog.errors import StoreError
from auditlog.format.records import EventKind
from auditlog.ledger import writer as writer_module
from auditlog.ledger.ledger import RunLedger, StepEntry
from auditlog.ledger.reader import RunReader
from auditlog.ledger.shards import ShardWriter
from auditlog.ledger.verify_run import verify_run
from auditlog.ledger.writer import LedgerTroubleWarning, LedgerWriter
from tests.support import LedgerSimulator, Plan, simulated_steps

STEPS = 12


@pytest.fixture
def sim(tmp_path: Path) -> LedgerSimulator:
    return LedgerSimulator(tmp_path / "one", Plan(steps=STEPS))


def test_everything_queued_is_in_the_log_in_order(sim: LedgerSimulator) -> None:
    ledger, data = sim.start()
    entries = list(simulated_steps(data, sim.plan))
    with LedgerWriter(ledger) as writer:
        for entry in entries:
            writer.step(entry)
            writer.event(EventKind.NOTICE, {"after": entry.body["step"]})
        note = writer.seal({"why": "test"})
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.steps, verdict.root) == (0, STEPS, note.checkpoint().root.hex())
    with RunReader.open(sim.run) as reader:
        said = [event.json()["after"] for event in reader.events(EventKind.NOTICE)]
        assert said == [event.json()["step"] for event in reader.events(EventKind.STEP)] == list(range(1, STEPS + 1))
        assert reader.events(EventKind.SEAL)[0].json() == {
            "reason": "finished",
            "why": "test",
            "records": STEPS * 8,
            "steps": STEPS,
            "live_records": STEPS * 8,
            "live_steps": STEPS,
            "attempts": 1,
        }


def test_flush_returns_only_when_the_head_was_handed_over(sim: LedgerSimulator) -> None:
    ledger, data = sim.start()
    with LedgerWriter(ledger) as writer:
        for number, entry in enumerate(simulated_steps(data, sim.plan), start=1):
            writer.step(entry)
            writer.flush()
            assert sim.kept_heads()[-1].name == f"{1 + 9 * number:08d}.note"


def test_leaving_without_a_seal_stores_what_was_queued_and_leaves_the_run_open(sim: LedgerSimulator) -> None:
    ledger, data = sim.start()
    with LedgerWriter(ledger) as writer:
        for entry in simulated_steps(data, sim.plan):
            writer.step(entry)
    verdict = verify_run(sim.run, sim.trust_key_only())
    assert (verdict.exit_code, verdict.steps) == (5, STEPS)
    with pytest.raises(StoreError, match="closed"):
        writer.flush()


def test_a_slow_disk_makes_the_caller_wait_and_says_for_how_long(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue holds one step and the disk is held up: the third submit blocks until it is let go."""
    gate = threading.Event()
    append = RunLedger.append_step

    def slow(ledger: RunLedger, entry: StepEntry) -> None:
        gate.wait()
        append(ledger, entry)

    ledger, data = sim.start()
    monkeypatch.setattr(RunLedger, "append_step", slow)
    entries = list(simulated_steps(data, sim.plan))
    with LedgerWriter(ledger, queue_steps=1) as writer:
        writer.step(entries[0])
        threading.Timer(0.2, gate.set).start()
        for entry in entries[1:]:
            writer.step(entry)
        writer.seal({})
        assert writer.blocked_s > 0.05
    assert verify_run(sim.run, sim.trust("key")).steps == STEPS


def test_a_waiting_batch_is_stored_although_no_further_step_comes(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BATCH_SECONDS", 0.02)
    delivered = threading.Event()
    ledger, data = sim.start()
    flush = ledger.flush
    monkeypatch.setattr(ledger, "flush", lambda: (flush(), delivered.set()))
    with LedgerWriter(ledger) as writer:
        writer.step(next(simulated_steps(data, sim.plan)))
        assert delivered.wait(10)
        assert len(sim.kept_heads()) == 2


def fail_in_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk refuse the sketches of one step."""
    append = ShardWriter.append
    seen = iter(range(1, 1000))

    def full(shards: ShardWriter, rows: object) -> object:
        if next(seen) == step:
            raise StoreError("cannot write sketches/000000.npy: No space left on device")
        return append(shards, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardWriter, "append", full)


def test_under_stop_trouble_reaches_the_next_call_and_earlier_steps_are_kept(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_step(5, monkeypatch)
    ledger, data = sim.start()
    with LedgerWriter(ledger, on_error="stop") as writer:

        def train() -> None:
            for entry in simulated_steps(data, sim.plan):
                writer.step(entry)
            writer.flush()

        with pytest.raises(StoreError, match="No space left"):
            train()
        with pytest.raises(StoreError, match="No space left"):
            writer.seal({})
    verdict = verify_run(sim.run, sim.trust_key_only())
    assert (verdict.exit_code, verdict.steps) == (5, 4)
    assert {f.code for f in verdict.findings if f.level == "error"} == {"E_UNSEALED"}


def test_under_continue_trouble_is_warned_about_once_and_named_in_the_log(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_step(5, monkeypatch)
    ledger, data = sim.start()
    with LedgerWriter(ledger, on_error="continue_and_mark") as writer:

        def train() -> None:
            for entry in simulated_steps(data, sim.plan):
                writer.step(entry)
                writer.flush()
            writer.seal({})

        with pytest.warns(LedgerTroubleWarning, match="No space left") as caught:
            train()
        assert len(caught) == 1
        assert writer.lost_steps == [5]
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.sealed, verdict.steps) == (5, True, STEPS - 1)
    assert "E_GAP_STEP" in {finding.code for finding in verdict.findings}
    with RunReader.open(sim.run) as reader:
        (notice,) = (event.json() for event in reader.events(EventKind.NOTICE))
    assert notice["lost_steps"] == [5]
    assert "No space left" in notice["first"]


def test_under_continue_a_database_in_trouble_loses_no_step(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries wait in memory while the database refuses, and are stored when it takes them again."""
    ledger, data = sim.start()
    store, append_batch, failures = ledger._log._store, ledger._log._store.append_batch, iter(range(3))

    def refuse(*arguments: object) -> None:
        if next(failures, None) is not None:
            raise StoreError("No space left on device")
        append_batch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "append_batch", refuse)
    with LedgerWriter(ledger, on_error="continue_and_mark") as writer:

        def train() -> None:
            for entry in simulated_steps(data, sim.plan):
                writer.step(entry)
                writer.flush()

        with pytest.warns(LedgerTroubleWarning):
            train()
        writer.seal({})
        assert writer.lost_steps == []
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.steps) == (0, STEPS), verdict.findings


def test_a_step_that_does_not_fit_is_reported_to_the_caller(sim: LedgerSimulator) -> None:
    ledger, data = sim.start()
    entry = next(simulated_steps(data, sim.plan))
    with LedgerWriter(ledger) as writer:
        writer.step(dataclasses.replace(entry, index=entry.index + 1000))
        with pytest.raises(Exception, match="outside the data manifest"):
            writer.flush()
