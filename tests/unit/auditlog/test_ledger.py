"""The run's ledger: what a step becomes, when it is durable, and how a run begins and ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from auditlog.errors import StoreError, UsageError
from auditlog.format.commitments import gradient_commitment, sample_commitment, sketch_commitment
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger import appender as appender_module
from auditlog.ledger import ledger as ledger_module
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.reader import RunReader
from auditlog.ledger.salts import Salts
from auditlog.ledger.shards import SHARD_ROWS
from auditlog.ledger.steps import StepWriter
from auditlog.ledger.store import Store
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.keys import Signer
from tests.support import LedgerSimulator, Plan, make_manifest, simulated_steps, write_sources


@pytest.mark.parametrize("forms", [("raw",), ("raw", "whitened")])
def test_a_step_becomes_its_records_and_one_event_that_commit_to_what_was_handed_over(
    forms: tuple[str, ...], tmp_path: Path
) -> None:
    """Every filled field against a hand-made computation from the entry itself."""
    plan = Plan(steps=3, per_step=5, forms=forms)
    sim = LedgerSimulator(tmp_path / "one", plan).write()
    data = write_sources(sim.data_folder, plan.rows_per_file)
    entries = list(simulated_steps(data, plan))
    salts = Salts(sim.run)
    with RunReader.open(sim.run) as reader:
        records, steps = reader.records(), reader.events(EventKind.STEP)
        sketches = np.vstack([block.rows for block in reader.sketches().blocks(4)])
        np.testing.assert_array_equal(sketches, np.vstack([entry.sketches for entry in entries]))
        np.testing.assert_array_equal(reader.sample_index(records), np.concatenate([e.index for e in entries]))
    assert records["seq"].tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17]
    assert [event.seq for event in steps] == [6, 12, 18]
    assert (records["attempt"] == 1).all()
    for entry, event in zip(entries, steps, strict=True):
        body = event.json()
        own = records[records["step"] == body["step"]]
        assert (body["first_seq"], body["records"], body["attempt"]) == (int(own["seq"][0]), 5, 1)
        for record, index, sketch in zip(own, entry.index, entry.sketches, strict=True):
            salt = salts.salt(int(index))
            assert salt is not None
            raw, whitened = sketch[: plan.dim].tobytes(), sketch[plan.dim :].tobytes()
            scales = float(record["scale_raw"]), float(record["scale_whitened"])
            assert record["sample_commit"].tobytes() == sample_commitment(salt, data.identity(int(index)))
            assert record["sketch_commit"].tobytes() == sketch_commitment(salt, *scales, raw, whitened)
        assert entry.gradient is not None
        raw, whitened = entry.gradient[: plan.dim].tobytes(), entry.gradient[plan.dim :].tobytes()
        block = body["gradient"]
        number = SHARD_ROWS * block["shard"] + block["row"]
        salt = (sim.run / "step_salts.bin").read_bytes()[32 * number : 32 * number + 32]
        expected = gradient_commitment(salt, block["scale_raw"], block["scale_whitened"], raw, whitened)
        assert block["commitment"] == expected.hex()


def test_the_recorders_arrays_are_not_changed(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=1))
    ledger, data = sim.start()
    (entry,) = simulated_steps(data, sim.plan)
    before = entry.records.copy()
    ledger.append_step(entry)
    assert entry.records.tobytes() == before.tobytes()
    ledger.close_unsealed()


@pytest.mark.parametrize("entries", [1, 2, 3, 5, 255, 256, 257])
def test_n15_any_size_of_log_and_batches_of_one_verify(entries: int, tmp_path: Path) -> None:
    """N15: logs of ``entries`` + certificate + seal; for small ones every entry is a batch of its own."""
    sim = LedgerSimulator(tmp_path / "one")
    ledger, _ = sim.start()
    for number in range(entries - 1):
        ledger.append_event(EventKind.NOTICE, {"number": number})
        if entries < 10 or number % 7 == 0:
            ledger.flush()
    ledger.seal({})
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.entries) == (0, entries + 1), verdict.findings


@pytest.mark.parametrize(("steps", "per_step", "steps_per_head"), [(1, 1, 1), (3, 1, 1), (5, 51, 2), (1, 255, 1)])
def test_n15_uneven_steps_verify(steps: int, per_step: int, steps_per_head: int, tmp_path: Path) -> None:
    plan = Plan(steps=steps, per_step=per_step, steps_per_head=steps_per_head)
    sim = LedgerSimulator(tmp_path / "one", plan).write()
    assert verify_run(sim.run, sim.trust("key")).exit_code == 0


def test_a_skipped_step_without_gradient_and_an_empty_step_verify(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=3))
    ledger, data = sim.start()
    one, two, three = simulated_steps(data, sim.plan)
    ledger.append_step(one)
    ledger.append_step(dataclasses.replace(two, gradient=None, body=two.body | {"skipped": True}))
    none = slice(0, 0)
    empty = dataclasses.replace(
        three, records=three.records[none], index=three.index[none], sketches=three.sketches[none]
    )
    ledger.append_step(empty)
    ledger.seal({})
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.steps, verdict.records) == (0, 3, 16), verdict.findings


def test_n08_odd_floats_and_times_survive_the_way_through_the_database(tmp_path: Path) -> None:
    """NaN of any bit pattern, infinities, -0.0 and denormals: what is hashed is what is stored."""
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=1))
    ledger, data = sim.start()
    (entry,) = simulated_steps(data, sim.plan)
    odd = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x00800000, 0x3DCCCCCD], np.uint32)
    entry.records["loss"] = odd.view(np.float32)
    entry.records["flags"][:4] = 1
    ledger.append_step(entry)
    ledger.seal({})
    assert verify_run(sim.run, sim.trust("key")).exit_code == 0
    with RunReader.open(sim.run) as reader:
        stored = reader.records()["loss"].view(np.uint32)
    expected = odd.copy()
    expected[:2] = 0x7FC00000  # one bit pattern for every NaN
    np.testing.assert_array_equal(stored, expected)


def test_a_full_batch_is_stored_by_itself_and_never_splits_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "BATCH_ENTRIES", 30)
    monkeypatch.setattr(ledger_module, "BATCH_SECONDS", 1e9)
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=20, steps_per_head=1000)).write()
    assert [entries for (entries,) in sim.query("SELECT entries FROM batches ORDER BY batch")][:4] == [1, 27, 27, 27]
    assert verify_run(sim.run, sim.trust("key")).exit_code == 0


def test_an_old_batch_is_stored_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "BATCH_SECONDS", 0.0)
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=3, steps_per_head=1000)).write()
    assert [entries for (entries,) in sim.query("SELECT entries FROM batches ORDER BY batch")][:4] == [1, 9, 9, 9]


def test_heads_are_handed_over_as_they_are_made(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one").write()
    kept = {path.name: path.read_bytes() for path in sim.kept_heads()}
    assert kept == {path.name: path.read_bytes() for path in sim.head_files()}
    assert kept.keys() == {f"{size:08d}.note" for (size,) in sim.query("SELECT size FROM checkpoints")}


def test_only_the_seal_carries_the_long_lived_key_beside_the_session_key(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one").write()
    *others, last = (Note.parse(path.read_bytes()) for path in sim.head_files())
    assert last.signed_by(sim.signer.vkey)
    assert len(last.signatures) == 2
    assert not any(note.signed_by(sim.signer.vkey) for note in others)
    assert {len(note.signatures) for note in others} == {1}


def test_a_sealed_run_is_self_contained(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one").write()
    names = {path.name for path in sim.run.iterdir()}
    assert names == {"manifest.json", "ledger.duckdb", "heads", "sketches", "salts.bin", "step_salts.bin", "snapshots"}
    shard = np.load(sim.run / "sketches/000000.npy")
    assert shard.shape == (24 * 9, 32)  # cut to the true row count


def test_a_failed_head_delivery_is_made_up_for(tmp_path: Path) -> None:
    """``on_head`` refuses for a while: nothing is lost, and every head arrives in order later."""
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=4))
    received: list[str] = []
    line_is_up = True

    def on_head(name: str, note: bytes) -> None:
        if not line_is_up:
            raise OSError("no line")
        received.append(name)

    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    ledger = RunLedger.create(sim.run, make_manifest(data, sim.signer, sim.plan), data, sim.signer, on_head=on_head)
    line_is_up = False
    for entry in simulated_steps(data, sim.plan):
        ledger.append_step(entry)
        with pytest.raises(StoreError, match="no line"):
            ledger.flush()
    line_is_up = True
    ledger.seal({})
    assert received == [path.name for path in sim.head_files()]
    assert verify_run(sim.run, sim.trust_key_only()).exit_code == 0


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("method", ["append_batch", "append_note"])
def test_c09_a_failed_transaction_is_tried_again_once_and_only_once(
    method: str, lands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit may have landed although its acknowledgement was lost: a retry must not double the batch."""
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=2))
    ledger, data = sim.start()
    one, two = simulated_steps(data, sim.plan)
    ledger.append_step(one)
    original = getattr(Store, method)

    def fail_once(store: Store, *arguments: object) -> None:
        monkeypatch.setattr(Store, method, original)
        if lands:
            original(store, *arguments)
        raise StoreError("no space left")

    monkeypatch.setattr(Store, method, fail_once)
    with pytest.raises(StoreError, match="no space left"):
        ledger.flush()
    ledger.append_step(two)
    ledger.seal({})
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.records) == (0, 16), verdict.findings


def test_a_seal_that_could_not_be_signed_is_completed_by_abandon(tmp_path: Path) -> None:
    """The long-lived key fails at the very end; what was stored is closed by it later."""
    from auditlog.ledger.abandon import seal_abandoned

    sim = LedgerSimulator(tmp_path / "one", Plan(steps=2))
    ledger, data = sim.start()
    for entry in simulated_steps(data, sim.plan):
        ledger.append_step(entry)
    broken = Signer(sim.signer.vkey, lambda message: (_ for _ in ()).throw(StoreError("the device is gone")))
    ledger._signer = broken
    with pytest.raises(StoreError, match="device is gone"):
        ledger.seal({})
    ledger.flush()  # must not sign the seal with the session key alone
    assert verify_run(sim.run, sim.trust("key")).exit_code == 5
    seal_abandoned(sim.run, sim.signer)
    assert verify_run(sim.run, sim.trust("key")).exit_code == 0


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one")
    sim.run.mkdir(parents=True)
    (sim.run / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        sim.start()
    assert [path.name for path in sim.run.iterdir()] == ["notes.txt"]


def test_a_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one")
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    manifest = make_manifest(data, sim.signer, sim.plan)

    def refuse(name: str, note: bytes) -> None:
        raise OSError("no line")

    with pytest.raises(StoreError, match="no line"):
        RunLedger.create(sim.run, manifest, data, sim.signer, on_head=refuse)
    assert not sim.run.exists()
    RunLedger.create(sim.run, manifest, data, sim.signer).close_unsealed()


def test_arguments_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one")
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    manifest = make_manifest(data, sim.signer, sim.plan)
    with pytest.raises(UsageError, match="names the key"):
        RunLedger.create(sim.run, manifest, data, Signer.generate("other"))
    other = write_sources(tmp_path / "other", (3,))
    with pytest.raises(UsageError, match="data block"):
        RunLedger.create(sim.run, manifest, other, sim.signer)
    assert not sim.run.exists()


def test_a_step_that_does_not_fit_is_refused_by_name_and_nothing_is_lost(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=2))
    ledger, data = sim.start()
    one, two = simulated_steps(data, sim.plan)
    ledger.append_step(one)
    with pytest.raises(UsageError, match="step 2: sample_index 99 is outside"):
        ledger.append_step(dataclasses.replace(two, index=np.full_like(two.index, 99)))
    with pytest.raises(UsageError, match=r"step 2: sketches has shape \(8, 31\)"):
        ledger.append_step(dataclasses.replace(two, sketches=two.sketches[:, 1:]))
    with pytest.raises(UsageError, match="step 2: gradient has shape"):
        ledger.append_step(dataclasses.replace(two, gradient=two.sketches))
    ledger.append_step(two)
    ledger.seal({})
    assert verify_run(sim.run, sim.trust("key")).exit_code == 0


def test_each_act_of_a_batch_follows_only_when_the_one_before_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sketches synced, entries committed, signed, note stored, note file, hand-over: a crash never says too much."""
    acts: list[str] = []

    def log_calls(owner: object, name: str, act: str) -> None:
        original = getattr(owner, name)

        def logged(*arguments: object, **named: object) -> object:
            result = original(*arguments, **named)
            acts.append(act)
            return result

        monkeypatch.setattr(owner, name, logged)

    sim = LedgerSimulator(tmp_path / "one", Plan(steps=1))
    ledger, data = sim.start()
    log_calls(StepWriter, "sync", "sketches")
    log_calls(Store, "append_batch", "entries")
    log_calls(appender_module, "sign_note", "signature")
    log_calls(Store, "append_note", "note")
    log_calls(appender_module, "write_once", "file")
    log_calls(appender_module, "deliver", "handed over")
    ledger.append_step(next(simulated_steps(data, sim.plan)))
    ledger.flush()
    assert acts == ["sketches", "entries", "signature", "note", "file", "handed over"]
    ledger.close_unsealed()
