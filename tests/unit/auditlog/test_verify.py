"""Each attack of the catalogue that needs no database, under three kinds of outside knowledge; and what must pass.

The reference is the catalogue itself: the code named there must be the *first* finding, the exit code its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_log import (
    KEPT_SIZE,
    ORIGIN,
    Builder,
    MemoryLog,
    MemoryRun,
    build_custody,
    build_run,
    identity_of,
    make_manifest,
)

from auditlog.errors import FormatError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import LogCheckpoint, Note, Signature, sign_note
from auditlog.format.records import RECORD, EventKind, record_leaves
from auditlog.trust.anchors import Trust
from auditlog.trust.certificates import Certificate, parse_certificate
from auditlog.trust.checkpoints import head_name
from auditlog.trust.keys import Signer
from auditlog.trust.logview import StoredEvent
from auditlog.trust.verdict import CODES, Finding, Verdict
from auditlog.trust.verify import verify_custody, verify_log

MEMBERS = [
    *("step", "attempt", "first_seq", "records", "gradient", "shard", "row", "scale_raw", "scale_whitened"),
    *("commitment", "path", "files", "name", "sha256", "reason", "steps", "certificate", "vkey", "signature"),
]
SIGNER = Signer.generate("bank.example/audit")
ATTACKER = Signer.generate("bank.example/audit")
BUILT = build_run(SIGNER)
SEAL = BUILT.log.size - 1
RECORD_SEQ = 500
BATCH_OF_RECORD = RECORD_SEQ // 64


@pytest.fixture
def run() -> MemoryRun:
    return BUILT.copy()


def trusts() -> dict[str, Trust]:
    return {
        "none": Trust(),
        "key": Trust((SIGNER.vkey,), origin=ORIGIN),
        "head": Trust((SIGNER.vkey,), (BUILT.kept_head,), ORIGIN, certificates=(certificate_of(BUILT.log),)),
    }


def certificate_of(log: MemoryLog) -> Certificate:
    """Return the first session certificate, as somebody keeps it who is handed heads."""
    return parse_certificate(log.stored_events[0].event.json())


def verify(log: MemoryLog, trust: str = "head") -> Verdict:
    return verify_log(log, trusts()[trust])


def errors(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.level == "error"]


def codes(verdict: Verdict) -> set[str]:
    return {finding.code for finding in errors(verdict)}


def message(verdict: Verdict, code: str) -> str:
    return next(finding.message for finding in verdict.findings if finding.code == code)


# --- the catalogue ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """What is done, and the first finding expected without knowledge, with the key, and with key and kept head."""

    do: Callable[[MemoryRun], None]
    none: str
    key: str = ""
    head: str = ""
    names: str = ""  # what the first finding must name under the head

    def expected(self, trust: str) -> str:
        return {"none": self.none, "key": self.key or self.none, "head": self.head or self.key or self.none}[trust]


def edit_step(run: MemoryRun) -> None:
    run.log.set_field(RECORD_SEQ, "step", run.log.rows["step"][run.log.record_at(RECORD_SEQ)] + 1)


def edit_source(run: MemoryRun) -> None:
    at = run.log.record_at(RECORD_SEQ)
    run.log.set_field(RECORD_SEQ, "source_id", (int(run.log.rows["source_id"][at]) + 1) % 3)


def edit_with_leaf(run: MemoryRun) -> None:
    edit_step(run)
    run.log.rehash()


def edit_and_rechain(run: MemoryRun) -> None:
    edit_step(run)
    run.log.rechain()


def flip_sketch(run: MemoryRun) -> None:
    place = place_of(run, RECORD_SEQ)
    raw, whitened = run.log.sketches[place]
    run.log.sketches[place] = (bytes([raw[0] ^ 1]) + raw[1:], whitened)


def swap_sketches(run: MemoryRun) -> None:
    one, other = place_of(run, 10), place_of(run, 20)
    run.log.sketches[one], run.log.sketches[other] = run.log.sketches[other], run.log.sketches[one]


def place_of(run: MemoryRun, seq: int) -> tuple[int, int]:
    row = run.log.rows[run.log.record_at(seq)]
    return int(row["shard"]), int(row["shard_row"])


def delete_record(run: MemoryRun) -> None:
    run.log.delete(300, 301)


def delete_and_renumber(run: MemoryRun) -> None:
    run.log.delete(300, 301)
    run.log.shift(301, -1)
    last = run.log.stored_batches[-1]
    run.log.stored_batches[-1] = replace(last, entries=last.entries - 1)
    run.log.rechain()


def delete_batch(run: MemoryRun) -> None:
    run.log.delete(448, 512)
    del run.log.stored_batches[7]


def exchange_seq(run: MemoryRun) -> None:
    one, other = run.log.record_at(40), run.log.record_at(41)
    run.log.rows["seq"][[one, other]] = (41, 40)


def duplicate(run: MemoryRun) -> None:
    at = run.log.record_at(49)
    run.log.rows = np.concatenate([run.log.rows, run.log.rows[at : at + 1]])
    run.log.leaves.append(run.log.leaves[at])


def two_writers(run: MemoryRun) -> None:
    at = run.log.record_at(514)
    other = run.log.rows[at : at + 1].copy()
    other["loss"] = 9.0
    run.log.rows = np.concatenate([run.log.rows, other])
    run.log.leaves += record_leaves(other)


def append_record(run: MemoryRun) -> None:
    forged = run.log.rows[-1:].copy()
    forged["seq"] = run.log.size
    run.log.rows = np.concatenate([run.log.rows, forged])
    run.log.leaves += record_leaves(forged)


def insert_record(run: MemoryRun) -> None:
    at = run.log.record_at(301)
    forged = run.log.rows[at : at + 1].copy()
    run.log.shift(301, 1)
    run.log.rows = np.concatenate([run.log.rows, forged])
    run.log.leaves += record_leaves(forged)
    run.log.rechain()


def cut_tail(run: MemoryRun) -> None:
    run.log.delete(980, run.log.size)


def cut_to_checkpoint(run: MemoryRun) -> None:
    run.log.delete(512, run.log.size)
    run.log.stored_batches = run.log.stored_batches[:8]
    run.log.drop_notes_above(512)


def empty(run: MemoryRun) -> None:
    run.log.delete(0, run.log.size)
    run.log.stored_batches = []
    run.log.notes, run.log.head_files = [], {}


def lose_wal(run: MemoryRun) -> None:
    """Batches 10 and later never reached the database file; the note files did reach the disk."""
    run.log.delete(640, run.log.size)
    run.log.stored_batches = run.log.stored_batches[:10]
    run.log.drop_notes_above(640, files=False)


def drop_seal_checkpoint(run: MemoryRun) -> None:
    run.log.drop_notes_above(SEAL)


def drop_checkpoints(run: MemoryRun) -> None:
    run.log.notes, run.log.head_files = [], {}


def flip_signature(run: MemoryRun) -> None:
    size, data = run.log.notes[1]
    note = Note.parse(data)
    line = note.signatures[0]
    flipped = Signature(line.name, line.key_hash, bytes([line.signature[0] ^ 1]) + line.signature[1:])
    run.log.notes[1] = (size, Note(note.text, (flipped,)).to_bytes())


def replace_public_key(run: MemoryRun) -> None:
    set_manifest(run, vkey=str(ATTACKER.vkey))


def set_manifest(run: MemoryRun, **fields: Any) -> None:
    assert run.log.run_manifest is not None
    run.log.run_manifest = RunManifest.model_validate(run.log.run_manifest.model_copy(update=fields).model_dump())
    run.log.genesis = run.log.run_manifest.to_bytes()


def resign_with_own_key(run: MemoryRun) -> None:
    """The same history under a key of the attacker's, everywhere in the folder."""
    run.log = build_run(ATTACKER, seed=1).log


def stolen_key(run: MemoryRun) -> None:
    """The same origin and key, another history: also what a second run under one name looks like."""
    run.log = build_run(SIGNER, seed=1).log


def stolen_key_cut(run: MemoryRun) -> None:
    run.log = build_run(SIGNER, steps=56).log


def other_algorithm(run: MemoryRun) -> None:
    edit_session(run, lambda body: body["certificate"].update(session_vkey="evil+00000000+AmFiY2Q="))


def edit_session(run: MemoryRun, change: Callable[[dict[str, Any]], None]) -> None:
    body = run.log.stored_events[0].event.json()
    change(body)
    edit_event(run, 0, body=canonical_bytes(body))


def edit_event(run: MemoryRun, number: int, **fields: Any) -> None:
    stored = run.log.stored_events[number]
    run.log.stored_events[number] = StoredEvent(replace(stored.event, **fields), stored.leaf)


def other_run(run: MemoryRun) -> None:
    run.log = build_run(SIGNER, origin="bank.example/other", run_id="run-2").log


def graft_checkpoints(run: MemoryRun) -> None:
    other = build_run(SIGNER, seed=1).log
    run.log.notes, run.log.head_files = other.notes, other.head_files


def replay_checkpoint(run: MemoryRun) -> None:
    run.log.notes[3] = run.log.notes[0]


def other_seed(run: MemoryRun) -> None:
    assert run.log.run_manifest is not None
    set_manifest(run, sketch=run.log.run_manifest.sketch.model_copy(update={"seed": "8"}))


def replace_weights(run: MemoryRun) -> None:
    run.log.digests["snapshots/final/trainable.safetensors"] = "00" * 32


def relabel_version(run: MemoryRun) -> None:
    at = run.log.record_at(RECORD_SEQ)
    run.log.set_field(RECORD_SEQ, "data_version_id", 1 - int(run.log.rows["data_version_id"][at]))


def delete_salt(run: MemoryRun) -> None:
    del run.log.salts[3]


def exchange_salts(run: MemoryRun) -> None:
    run.log.salts[3], run.log.salts[4] = run.log.salts[4], run.log.salts[3]


def remove_shard(run: MemoryRun) -> None:
    run.log.sketches = {}


ATTACKS = {
    "C01": Attack(edit_step, "E_LEAF", names="record 500"),
    "C02": Attack(edit_source, "E_LEAF", names="record 500"),
    "C03": Attack(edit_with_leaf, "E_CHAIN", names=f"batch {BATCH_OF_RECORD} (entries 448 to 511)"),
    "C04": Attack(edit_and_rechain, "E_ROOT", names="log checkpoint 1 (size 512)"),
    "C07": Attack(flip_sketch, "E_PAYLOAD", names="record 500"),
    "C08": Attack(swap_sketches, "E_PAYLOAD", names="record 10"),
    "O01": Attack(delete_record, "E_SEQ", names="entry 300 is missing"),
    "O02": Attack(delete_and_renumber, "E_TRUNC", names="1 entry missing"),
    "O03": Attack(delete_batch, "E_SEQ", names="entries 448 to 511 are missing"),
    "O04": Attack(exchange_seq, "E_LEAF", names="seq was 41 and is 40 now"),
    "O05": Attack(duplicate, "E_SEQ", names="entry 49 is there twice"),
    "O07": Attack(append_record, "E_ORPHAN", names=f"entry {SEAL + 1} stands after the seal"),
    "O08": Attack(insert_record, "E_ROOT", names="log checkpoint 1 (size 512)"),
    "O09": Attack(two_writers, "E_SEQ", names="entry 514 is there twice"),
    "T01": Attack(cut_tail, "E_TRUNC", names="ends after 980 entries"),
    "T02": Attack(cut_to_checkpoint, "E_UNSEALED", head="E_ROLLBACK", names="768 entries, the log has 512"),
    "T04": Attack(empty, "E_UNSEALED", head="E_ROLLBACK", names="the log has 0"),
    "T05": Attack(cut_to_checkpoint, "E_UNSEALED", head="E_ROLLBACK"),
    "T06": Attack(lose_wal, "E_UNSEALED", head="E_ROLLBACK", names="768 entries, the log has 640"),
    "T08": Attack(drop_seal_checkpoint, "E_UNSEALED", names="seal event is there"),
    "T09": Attack(drop_checkpoints, "E_UNSEALED"),
    "K01": Attack(flip_signature, "E_SIG", names="log checkpoint 1 (size 512)"),
    "K02": Attack(replace_public_key, "E_SIG", key="E_KEY", names=SIGNER.vkey.fingerprint[:16]),
    "K03": Attack(resign_with_own_key, "W_UNANCHORED", key="E_KEY", names=ATTACKER.vkey.fingerprint[:16]),
    "K04": Attack(stolen_key, "W_UNANCHORED", key="ok", head="E_FORK", names="768"),
    "K05": Attack(stolen_key_cut, "W_UNANCHORED", key="ok", head="E_ROLLBACK", names="768"),
    "K07": Attack(other_algorithm, "E_FORMAT", names="algorithm 0x02"),
    "B01": Attack(other_run, "W_UNANCHORED", key="E_BIND", names="bank.example/other"),
    "B02": Attack(stolen_key, "W_UNANCHORED", key="ok", head="E_FORK"),
    "B03": Attack(graft_checkpoints, "E_ROOT", names="log checkpoint 0 (size 256)"),
    "B04": Attack(replay_checkpoint, "E_CKPT_ORDER", names="log checkpoint 3"),
    "B06": Attack(other_seed, "E_BIND", names="SHA-256 of the manifest"),
    "B07": Attack(replace_weights, "E_BIND", names="trainable.safetensors"),
    "B09": Attack(relabel_version, "E_LEAF", names="data_version_id was"),
    "R01": Attack(delete_salt, "E_ERASED", names="sample 3"),
    "R05": Attack(exchange_salts, "E_OPENING", names="salt that is stored for sample"),
    "R06": Attack(remove_shard, "E_ERASED", names="shard 0"),
}


@pytest.mark.parametrize("trust", ["none", "key", "head"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_of_the_catalogue_gives_its_finding_first(run: MemoryRun, attack: str, trust: str) -> None:
    ATTACKS[attack].do(run)
    verdict = verify(run.log, trust)
    found = errors(verdict)
    expected = ATTACKS[attack].expected(trust)
    if expected == "ok":
        assert (found, verdict.exit_code) == ([], 0)
        return
    assert [found[0].code, ATTACKS[attack].names in found[0].message or trust != "head"] == [expected, True]
    assert verdict.exit_code == CODES[expected] or attack in EXIT_OF_ANOTHER_FINDING
    assert verdict.exit_code != 0


# Here a later finding weighs more than the first one: 3 > 6 > 4 > 5 > 7.
EXIT_OF_ANOTHER_FINDING = {
    "O02",  # the earlier checkpoints' roots differ as well
    "B03",  # the other run's session key is a stranger here
}


@pytest.mark.parametrize("name", RECORD.names)
def test_no_column_of_a_record_can_be_changed_unseen(run: MemoryRun, name: str) -> None:
    """C05 for the records table, one cell of every column."""
    assert RECORD.fields is not None
    cell = run.log.rows.view(np.uint8).reshape(len(run.log.rows), -1)[run.log.record_at(RECORD_SEQ)]
    cell[RECORD.fields[name][1]] ^= 1
    verdict = verify(run.log)
    assert codes(verdict) & {"E_LEAF", "E_SEQ"}
    assert verdict.exit_code == 4


@pytest.mark.parametrize(
    "fields", [{"seq": 7_000}, {"kind": EventKind.NOTICE}, {"ts_us": 1}, {"body": b"{}"}, {"fmt": 1}], ids=str
)
def test_no_column_of_an_event_can_be_changed_unseen(run: MemoryRun, fields: dict[str, Any]) -> None:
    """C05 for the events table."""
    edit_event(run, 50, **fields)
    verdict = verify(run.log)
    assert codes(verdict) & {"E_EVENT", "E_SEQ"}
    assert verdict.exit_code == 4


@pytest.mark.parametrize("fields", [{"batch": 9}, {"first_seq": 3}, {"entries": 63}, {"chain": bytes(32)}], ids=str)
def test_no_column_of_a_batch_can_be_changed_unseen(run: MemoryRun, fields: dict[str, Any]) -> None:
    """C05 for the batches table."""
    run.log.stored_batches[4] = replace(run.log.stored_batches[4], **fields)
    assert codes(verify(run.log)) & {"E_BATCH", "E_CHAIN"}


def test_a_batch_that_starts_elsewhere_is_named(run: MemoryRun) -> None:
    run.log.stored_batches[4] = replace(run.log.stored_batches[4], first_seq=3)
    assert "row 4 says batch 4, first entry 3" in message(verify(run.log), "E_BATCH")


def test_a_checkpoint_row_must_say_the_size_of_its_note(run: MemoryRun) -> None:
    """C05 for the checkpoints table."""
    run.log.notes[1] = (500, run.log.notes[1][1])
    assert codes(verify(run.log)) == {"E_CKPT_ORDER"}


def test_a_stored_leaf_that_was_changed_is_told_from_a_row_that_was_changed(run: MemoryRun) -> None:
    run.log.leaves[run.log.record_at(RECORD_SEQ)] = bytes(32)
    verdict = verify(run.log)
    assert codes(verdict) == {"E_LEAF"}
    assert "the hash stored beside it was changed" in message(verdict, "E_LEAF")


# --- findings that a tired auditor can use ----------------------------------------------------------------


def test_an_edited_record_is_named_with_its_row_and_its_old_value(run: MemoryRun) -> None:
    at = run.log.record_at(RECORD_SEQ)
    row = run.log.rows[at].copy()
    edit_source(run)
    now = run.log.rows[at]
    verdict = verify(run.log)
    assert [finding.code for finding in errors(verdict)] == ["E_LEAF"]  # one edit, one finding
    assert message(verdict, "E_LEAF") == (
        f"record 500 (step {row['step']}, data/part-{now['source_id']}.jsonl row {row['row']}) was changed after "
        f"it was logged: source_id was {row['source_id']} (data/part-{row['source_id']}.jsonl) and is "
        f"{now['source_id']} (data/part-{now['source_id']}.jsonl) now"
    )


def test_two_edits_in_two_batches_are_both_named(run: MemoryRun) -> None:
    for seq in (100, 700):
        run.log.set_field(seq, "epoch", 3 + int(run.log.rows["epoch"][run.log.record_at(seq)]))
    assert [finding.seq for finding in errors(verify(run.log))] == [100, 700]


def test_a_second_edit_is_located_behind_a_broken_batch(run: MemoryRun) -> None:
    run.log.set_field(100, "loss", 7.0)
    run.log.set_field(701, "loss", 7.0)
    run.log.rehash()
    found = [finding.message for finding in errors(verify(run.log)) if finding.code == "E_CHAIN"]
    assert [text.split(" (")[0] for text in found] == ["batch 1", "batch 10"]


def test_an_edit_in_the_last_batch_is_located(run: MemoryRun) -> None:
    run.log.set_field(980, "loss", 7.0)
    run.log.rehash()
    assert "batch 15 (entries 960 to 992)" in message(verify(run.log), "E_CHAIN")


def test_a_ruined_log_is_counted_and_not_listed_without_end(run: MemoryRun) -> None:
    run.log.rows["micro"] += 1
    found = [finding.message for finding in errors(verify(run.log)) if finding.code == "E_LEAF"]
    assert (len(found), found[-1]) == (201, "680 more findings of this kind, not listed one by one")


def test_a_changed_chain_value_is_told_from_a_changed_entry(run: MemoryRun) -> None:
    run.log.stored_batches[4] = replace(run.log.stored_batches[4], chain=bytes(32))
    verdict = verify(run.log)
    assert codes(verdict) == {"E_CHAIN"}
    assert "the stored chain value itself was changed" in message(verdict, "E_CHAIN")
    run.log.set_field(300, "loss", 9.0)


def test_a_bad_root_names_the_stretch_between_two_checkpoints(run: MemoryRun) -> None:
    edit_and_rechain(run)
    assert "entries 256 to 511; 2 later ones cannot hold either" in message(verify(run.log), "E_ROOT")


def test_a_kept_head_on_an_edited_log_is_no_fork(run: MemoryRun) -> None:
    """E_FORK accuses the operator of signing two logs; an edit by anybody must not look like that."""
    for attacks in (
        [edit_step],
        [edit_with_leaf],
        [edit_and_rechain],
        [insert_record],
        [edit_with_leaf, drop_checkpoints],
    ):
        changed = run.copy()
        for attack in attacks:
            attack(changed)
        verdict = verify(changed.log)
        assert "E_FORK" not in codes(verdict)
        assert verdict.exit_code == 4


def test_a_cut_is_incomplete_and_never_integrity(run: MemoryRun) -> None:
    """The demo's second tampering: the last batch, its checkpoints and heads are gone; a head was kept."""
    kept = Note.parse(run.log.notes[-1][1])
    run.log.delete(960, run.log.size)
    run.log.stored_batches = run.log.stored_batches[:15]
    run.log.drop_notes_above(960)
    verdict = verify_log(run.log, Trust((SIGNER.vkey,), (kept,), ORIGIN))
    assert codes(verdict) >= {"E_ROLLBACK", "E_UNSEALED"}
    assert verdict.exit_code == 5
    assert verdict.status == "INCOMPLETE"


def test_cascades_stay_short(run: MemoryRun) -> None:
    """One deleted record must not bury its finding under hundreds."""
    delete_record(run)
    assert len(verify(run.log).findings) <= 3


def test_a_log_with_a_hole_has_no_root(run: MemoryRun) -> None:
    delete_record(run)
    verdict = verify(run.log)
    assert verdict.root == ""
    assert next(check for check in verdict.checks if check.name == "tree").status == "failed"


def test_changes_behind_a_hole_are_still_found(run: MemoryRun) -> None:
    delete_record(run)
    run.log.set_field(700, "epoch", 9)
    assert {finding.seq for finding in errors(verify(run.log))} >= {300, 700}


# --- sessions, keys and ranges ----------------------------------------------------------------------------


def resumed_run() -> Builder:
    """A run that crashed within step 41 and went on from a snapshot of step 38."""
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    for step in range(1, 41):
        builder.step(step)
    builder.step(41, count=3, open_ended=True)
    builder.sign(builder.session)
    builder.start_attempt(from_step=38)
    for step in range(39, 61):
        builder.step(step)
    return builder


def test_n03_a_resumed_run_with_repeated_steps_verifies() -> None:
    """N03: the attempt number rises; repeats are legal and shown."""
    builder = resumed_run()
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert (verdict.exit_code, verdict.attempts, verdict.steps) == (0, 2, 60)
    assert {finding.code for finding in verdict.findings} == {"N_OPEN_STEP"}


def test_an_attempt_may_go_on_from_a_snapshot_of_any_earlier_attempt() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    for steps, origin in (((1, 2, 3, 4, 5), (None, None)), ((3, 4), (2, 1)), ((6, 7), (5, 1))):
        builder.start_attempt(*origin)
        for step in steps:
            builder.step(step)
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert (verdict.exit_code, verdict.attempts, verdict.steps) == (0, 3, 7)


def test_an_attempt_without_a_resume_event_is_named() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.open_session()
    builder.step(2)
    builder.seal(builder.session, SIGNER)
    assert "attempt 2 (entry 10) does not say from where it went on" in message(verify(builder.log, "key"), "E_EVENT")


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        ({"attempt": 3}, "E_EVENT", "it is about attempt 3 and stands in 2"),
        ({"from_attempt": 2}, "E_EVENT", "cannot go on from attempt 2"),
        ({"from_attempt": 0}, "E_EVENT", "cannot go on from attempt 0"),
        ({"from_step": -1}, "E_EVENT", "a RESUME event without a proper from_step"),
        ({"from_step": 1}, "E_GAP_STEP", "step 3 (event 32): step 2 is missing"),
        ({"from_step": 3}, "E_GAP_STEP", "it comes too late, step 4 was expected"),
        ({"superseded_steps": 0}, "E_GAP_STEP", "counts 0 steps that no longer count; the log holds 1"),
        ({"superseded_records": 7}, "E_GAP_STEP", "counts 7 records that no longer count; the log holds 8"),
    ],
    ids=str,
)
def test_a_resume_event_must_say_truly_from_where_it_goes_on(wrong: dict[str, Any], code: str, text: str) -> None:
    """Step 3 is trained again from step 2."""
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    for step in (1, 2, 3):
        builder.step(step)
    builder.open_session()
    builder.resume(2, wrong=wrong)
    builder.step(3, count=2)
    builder.seal(builder.session, SIGNER)
    found = [finding.message for finding in verify(builder.log, "key").findings if finding.code == code]
    assert any(text in each for each in found), found


def test_a_resume_event_stands_before_the_steps_of_its_attempt_and_only_once() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.resume(0, from_attempt=1)
    builder.step(1)
    builder.open_session()
    builder.step(2)
    builder.resume(1)
    builder.resume(1)
    builder.seal(builder.session, SIGNER)
    found = " ".join(finding.message for finding in errors(verify(builder.log, "key")))
    assert "attempt 1 cannot go on from attempt 1" in found
    assert "it stands behind steps of attempt 2" in found
    assert "attempt 2 has said already" in found


@pytest.mark.parametrize("accepted", [None, (3, 4), (3, 5)])
def test_weights_that_went_through_unlogged_steps_are_a_gap(accepted: tuple[int, int] | None) -> None:
    """Steps 3 to 4 were trained after the last logged one; only an event that names just those explains it."""
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.step(2)
    builder.open_session()
    if accepted is not None:
        steps = {"first": accepted[0], "last": accepted[1]}
        body = {"size": builder.state.size - 1, "entries": 0, "heads": [], "missing_steps": steps}
        builder.event(EventKind.LOSS_ACCEPTED, body)
    builder.resume(4)
    builder.step(5)
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert codes(verdict) == {"E_LOSS_ACCEPTED" if accepted == (3, 4) else "E_GAP_STEP"}
    assert verdict.exit_code == 5
    assert "steps 3 to 4 went into it and are not in the log" in errors(verdict)[0].message


def test_c09_a_batch_that_was_sent_again_is_a_finding_however_well_it_is_signed() -> None:
    """C09: every entry again with a new seq and new hashes; chain, tree and signatures hold."""
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.step(1)
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert verdict.exit_code == 4
    text = message(verdict, "E_SEQ")
    assert "record 10 repeats record 1: attempt 1, step 1, micro-batch 0, row 0, part 0 was logged twice" in text
    assert "and 7 more like it" in text


def test_a_resume_that_repeats_the_last_step_is_no_double() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.start_attempt(from_step=0)
    builder.step(1)
    builder.seal(builder.session, SIGNER)
    assert verify(builder.log, "key").exit_code == 0


@pytest.mark.parametrize(
    ("name", "wrong"), [("live_records", 16), ("live_steps", 2), ("attempts", 1), ("live_records", "8")], ids=str
)
def test_a_seal_must_count_what_led_to_the_final_weights(name: str, wrong: Any) -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.start_attempt(from_step=0)
    builder.step(1)
    totals = {"records": 16, "steps": 2, "attempts": 2, "live_records": 8, "live_steps": 1}
    builder.event(EventKind.SEAL, {"reason": "finished", **totals, name: wrong})
    builder.sign(builder.session, SIGNER)
    assert f"closes {wrong} {name.replace('_', ' ')}" in message(verify(builder.log, "key"), "E_GAP_STEP")


# --- accepted losses --------------------------------------------------------------------------------------


def run_with_loss(size: int = -1, **change: Any) -> tuple[Builder, Note]:
    """Two steps were signed and lost; the operator went on from step 1 and says so. Returns the lost head."""
    lost = Builder(make_manifest(SIGNER), SIGNER)
    builder = Builder(make_manifest(SIGNER), SIGNER, seed=0)
    for each in (lost, builder):
        each.start_attempt()
        each.step(1)
        each.sign(each.session)
    lost.step(2)
    lost.step(3)
    head = lost.sign(builder.session)  # the one session of both, until the second half was lost
    builder.open_session()
    statement = head.checkpoint()
    left = builder.state.size - 1
    body = {"size": left if size < 0 else size, "entries": statement.size - left, "missing_steps": None}
    heads = [{"size": statement.size, "root": statement.root.hex()}]
    builder.event(EventKind.LOSS_ACCEPTED, body | {"heads": heads} | change)
    builder.resume(1)
    for step in (2, 3, 4, 5):
        builder.step(step)
    builder.seal(builder.session, SIGNER)
    return builder, head


def test_an_accepted_loss_is_incomplete_and_neither_a_fork_nor_a_cut() -> None:
    """Exactly the heads that the log itself names are explained, in heads/lost/ and in an auditor's hand."""
    builder, head = run_with_loss()
    builder.log.head_files[f"lost/{head_name(28)}"] = head.to_bytes()
    verdict = verify_log(builder.log, Trust((SIGNER.vkey,), (head,), ORIGIN))
    assert (codes(verdict), verdict.exit_code) == ({"E_LOSS_ACCEPTED"}, 5)
    found = [finding.message for finding in errors(verdict)]
    assert found[0] == "the kept head has 28 entries, of which the last were lost; the loss was accepted at entry 11"
    assert found[1] == "entries 10 to 27 were signed and then lost; the loss was accepted at entry 11"


def test_a_lost_head_that_nobody_accepted_is_not_explained() -> None:
    builder, head = run_with_loss(heads=[{"size": 29, "root": "00" * 32}])
    builder.log.head_files[f"lost/{head_name(28)}"] = head.to_bytes()
    verdict = verify_log(builder.log, Trust((SIGNER.vkey,), (head,), ORIGIN))
    assert codes(verdict) == {"E_FORK", "E_LOST", "E_LOSS_ACCEPTED"}
    assert verdict.exit_code == 6


@pytest.mark.parametrize("size", [0, 9, 12, 28])
def test_a_loss_that_stands_elsewhere_explains_nothing(size: int) -> None:
    """Otherwise any fork could be declared a loss afterwards."""
    builder, head = run_with_loss(size)
    verdict = verify_log(builder.log, Trust((SIGNER.vkey,), (head,), ORIGIN))
    assert codes(verdict) == {"E_FORK", "E_EVENT"}


def test_a_head_of_entries_that_are_still_there_is_never_a_loss() -> None:
    other = Builder(make_manifest(SIGNER), SIGNER, seed=5)
    other.start_attempt()
    other.step(1)
    kept = other.sign(other.session)
    heads = [{"size": kept.checkpoint().size, "root": kept.checkpoint().root.hex()}]
    builder, _ = run_with_loss(heads=heads)
    trust = Trust((SIGNER.vkey,), (kept,), ORIGIN, certificates=(certificate_of(other.log),))
    assert "E_FORK" in codes(verify_log(builder.log, trust))


def test_a_session_key_outside_its_range_is_not_believed() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    first_session = builder.session
    builder.step(1)
    builder.start_attempt()
    builder.step(2)
    builder.sign(first_session)  # the key of attempt 1 signs entries of attempt 2
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert codes(verdict) == {"E_KEYREV"}
    assert "from 1 to 10 only" in message(verdict, "E_KEYREV")


def test_an_attempt_must_go_on_from_the_root_before_it() -> None:
    builder = resumed_run()
    builder.seal(builder.session, SIGNER)
    number = next(i for i, s in enumerate(builder.log.stored_events) if s.event.kind == EventKind.SESSION and i)
    body = builder.log.stored_events[number].event.json()
    body["certificate"]["first_root"] = "00" * 32
    event = replace(builder.log.stored_events[number].event, body=canonical_bytes(body))
    builder.log.stored_events[number] = StoredEvent(event, event.leaf())
    assert {"E_ROOT", "E_SIG"} <= codes(verify(builder.log, "key"))


def test_a_session_key_does_not_sign_what_was_there_before_its_attempt() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    before = LogCheckpoint(ORIGIN, builder.state.size, builder.state.root()).text()
    builder.close_batch()
    builder.start_attempt()
    builder.log.add_note(sign_note(before, builder.session))
    builder.step(2)
    builder.seal(builder.session, SIGNER)
    assert "from 11 on only" in message(verify(builder.log, "key"), "E_KEYREV")


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        ({"attempt": 2}, "E_EVENT", "attempt 2, expected 1"),
        ({"first_size": 5}, "E_EVENT", "starts after 5 entries, yet 0 stand before it"),
        ({"first_root": bytes(32)}, "E_ROOT", "from another root"),
        ({"origin": "bank.example/else"}, "E_BIND", "for origin bank.example/else"),
        ({"run_id": "run-9"}, "E_BIND", "for run id run-9"),
        ({"manifest_sha256": "00" * 32}, "E_BIND", "for SHA-256 of the manifest 0000"),
    ],
    ids=str,
)
def test_a_certificate_must_name_this_place_in_this_log(wrong: dict[str, Any], code: str, text: str) -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt(**wrong)
    builder.step(1)
    builder.seal(builder.session, SIGNER)
    assert text in message(verify(builder.log, "key"), code)


def test_a_checkpoint_of_another_log_is_named(run: MemoryRun) -> None:
    size, data = run.log.notes[1]
    statement = replace(Note.parse(data).checkpoint(), origin="bank.example/else")
    run.log.notes[1] = (size, sign_note(statement.text(), run.session).to_bytes())
    assert "belongs to bank.example/else" in message(verify(run.log), "E_BIND")


def test_one_size_has_one_checkpoint(run: MemoryRun) -> None:
    run.log.notes.append(run.log.notes[-1])
    assert codes(verify(run.log)) == {"E_CKPT_ORDER"}


def test_a_checkpoint_by_a_stranger_is_named_with_both_keys(run: MemoryRun) -> None:
    size, data = run.log.notes[1]
    stranger = Signer.generate("stranger.example")
    note = sign_note(Note.parse(data).text, stranger)
    run.log.notes[1] = (size, note.to_bytes())
    text = message(verify(run.log), "E_KEY")
    assert "stranger.example" in text
    assert "bank.example/audit" in text


def test_a_seal_without_the_long_lived_key_is_no_seal() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.seal(builder.session)
    verdict = verify(builder.log, "key")
    assert codes(verdict) == {"E_UNSEALED"}
    assert not verdict.sealed


def test_an_abandoned_run_is_closed_by_the_long_lived_key_alone() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.step(2, count=4, open_ended=True)
    builder.seal(SIGNER, reason="abandoned")
    verdict = verify(builder.log, "key")
    assert (verdict.exit_code, verdict.sealed, verdict.abandoned) == (0, True, True)


def test_an_open_run_is_incomplete_and_its_tail_is_a_note() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.sign(builder.session)
    builder.step(2)
    builder.close_batch()
    verdict = verify(builder.log, "key")
    assert codes(verdict) == {"E_UNSEALED"}
    assert "9 entries from 10 on" in message(verdict, "N_TAIL")


def test_a_key_found_in_the_run_is_never_trusted(run: MemoryRun) -> None:
    verdict = verify(run.log, "none")
    assert (verdict.exit_code, verdict.status) == (7, "UNANCHORED")
    assert [finding.code for finding in errors(verdict)] == ["W_UNANCHORED"]


def test_a_kept_head_alone_anchors_and_the_verdict_says_what_it_leaves_open(run: MemoryRun) -> None:
    verdict = verify_log(run.log, Trust(heads=(run.kept_head,)))
    assert verdict.exit_code == 0
    assert any("who signed" in text for text in verdict.not_checked)
    assert "kept head of 768 entries" in verdict.trust


def test_a_pinned_key_alone_anchors_and_the_verdict_says_what_it_leaves_open(run: MemoryRun) -> None:
    verdict = verify(run.log, "key")
    assert verdict.exit_code == 0
    assert any("nothing here binds the operator" in text for text in verdict.not_checked)


def test_a_kept_head_of_another_log_is_not_compared(run: MemoryRun) -> None:
    head = sign_note(LogCheckpoint("elsewhere.example/log", 768, bytes(32)).text(), SIGNER)
    assert codes(verify_log(run.log, Trust((SIGNER.vkey,), (head,)))) == {"E_BIND"}


def test_an_expected_origin_is_compared(run: MemoryRun) -> None:
    assert codes(verify_log(run.log, Trust((SIGNER.vkey,), origin="bank.example/else"))) == {"E_BIND"}


# --- steps, seal counts, head files, payloads -----------------------------------------------------------------


def test_a_missing_step_is_named() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    for step in (1, 2, 4):
        builder.step(step)
    builder.seal(builder.session, SIGNER)
    assert "step 3 is missing" in message(verify(builder.log, "key"), "E_GAP_STEP")


def test_a_first_step_other_than_one_is_named() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(2)
    builder.seal(builder.session, SIGNER)
    assert "step 1 is missing" in message(verify(builder.log, "key"), "E_GAP_STEP")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"records": 7}, "counts 7 records; the log holds 8"),
        ({"first_seq": 2}, "says that its records start at entry 2; they start at 1"),
    ],
    ids=str,
)
def test_a_step_must_count_its_records(wrong: dict[str, int], text: str) -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1, **wrong)
    builder.seal(builder.session, SIGNER)
    assert text in message(verify(builder.log, "key"), "E_GAP_STEP")


@pytest.mark.parametrize(("name", "wrong"), [("records", 879), ("steps", 109)])
def test_a_seal_must_count_what_it_closes(name: str, wrong: int) -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.event(EventKind.SEAL, {"reason": "finished", "records": 8, "steps": 1, name: wrong})
    builder.sign(builder.session, SIGNER)
    assert f"closes {wrong} {name}" in message(verify(builder.log, "key"), "E_GAP_STEP")


def test_records_of_a_finished_run_need_a_step_event() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.step(2, open_ended=True)
    builder.seal(builder.session, SIGNER)
    assert "8 records of step 2 (from entry 10) without a step event" in message(
        verify(builder.log, "key"), "E_GAP_STEP"
    )


def test_a_record_of_another_attempt_is_named() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.attempt = 2
    builder.step(1)
    builder.seal(builder.session, SIGNER)
    assert "says attempt 2" in message(verify(builder.log, "key"), "E_EVENT")


def test_a_head_file_beyond_the_log_shows_the_cut(run: MemoryRun) -> None:
    """A lost write-ahead log, without any outside head: heads/ still tells the length after an accident."""
    lose_wal(run)
    verdict = verify(run.log, "key")
    assert f"heads/{head_name(SEAL + 1)} commits to" in message(verdict, "E_TRUNC")
    assert "ledger.duckdb.wal" in next(finding.hint for finding in verdict.findings if finding.code == "E_TRUNC")
    assert verdict.exit_code == 5


def test_head_files_and_table_must_hold_the_same_bytes(run: MemoryRun) -> None:
    name = head_name(512)
    run.log.head_files[name] = sign_note(Note.parse(run.log.head_files[name]).text, run.session, SIGNER).to_bytes()
    assert codes(verify(run.log)) == {"E_CKPT_ORDER"}


def test_a_lost_head_file_of_a_sealed_run_is_named(run: MemoryRun) -> None:
    del run.log.head_files[head_name(512)]
    assert head_name(512) in message(verify(run.log), "E_LOST")


def test_a_changed_step_gradient_is_found(run: MemoryRun) -> None:
    gradient = run.log.stored_events[10].event.json()["gradient"]
    run.log.sketches[gradient["shard"], gradient["row"]] = (bytes(16), b"")
    assert "consumed gradient is not the committed one" in message(verify(run.log), "E_PAYLOAD")


def test_exchanged_salts_name_both_samples(run: MemoryRun) -> None:
    exchange_salts(run)
    text = " ".join(finding.message for finding in errors(verify(run.log)))
    assert "sample 3 (data/part-0.jsonl row 3)" in text
    assert "salt that is stored for sample 3" in text


def test_source_data_is_compared_when_it_is_given(run: MemoryRun) -> None:
    manifest = make_manifest(SIGNER)
    trust = trusts()["head"]
    good = verify_log(run.log, trust, identities=lambda index: identity_of(manifest, index))
    assert good.exit_code == 0
    assert not any("--data" in text for text in good.not_checked)
    bad = verify_log(run.log, trust, identities=lambda index: identity_of(manifest, max(index, 1)))
    assert codes(bad) == {"E_OPENING"}
    assert any("--data" in text for text in verify_log(run.log, trust).not_checked)


def test_a_clock_that_goes_back_is_a_note() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1)
    builder.now_us -= 3_600_000_000
    builder.step(2)
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert verdict.exit_code == 0
    assert "goes back by 3,600 s at entry 10" in message(verdict, "N_CLOCK")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("source_id", 7),
        ("row", 99),
        ("data_version_id", 9),
        ("fmt", 1),
        ("loss", np.uint32(0xFFC00001).view(np.float32)),
    ],
)
def test_values_outside_the_format_are_found_even_if_properly_signed(name: str, value: Any) -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    fill = builder._fill

    def odd_fill(row: Any, *place: int) -> None:
        fill(row, *place)
        row[name] = value

    builder._fill = odd_fill  # type: ignore[method-assign]
    builder.start_attempt()
    builder.step(1, count=1)
    builder.seal(builder.session, SIGNER)
    assert "E_ENCODING" in codes(verify(builder.log, "key"))


@pytest.mark.parametrize("body", [b"[]", b'{"b":1, "a":2}', b"\xff", b"{}"])
def test_step_events_must_be_canonical_and_complete(body: bytes) -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.event(EventKind.STEP, {})
    event = replace(builder.log.stored_events[-1].event, body=body)
    builder.log.stored_events[-1] = StoredEvent(event, event.leaf())
    assert "E_EVENT" in codes(verify(builder.log, "key"))


def test_a_log_that_does_not_open_with_a_session_is_named() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.event(EventKind.NOTICE, {"text": "hello"})
    assert "entry 0 is not the SESSION event" in message(verify(builder.log, "key"), "E_EVENT")


def test_an_event_of_the_custody_log_does_not_belong_into_a_run() -> None:
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.event(EventKind.QUERY, {})
    assert "does not belong into this log" in message(verify(builder.log, "key"), "E_EVENT")


@pytest.mark.parametrize("seq", [2**33, 2**60, 2**63, 2**64 - 1])
@pytest.mark.parametrize("attack", ["record", "event"])
def test_an_absurd_position_neither_hangs_nor_breaks_the_check(run: MemoryRun, attack: str, seq: int) -> None:
    if attack == "record":
        run.log.set_field(RECORD_SEQ, "seq", seq)
    else:
        edit_event(run, 50, seq=seq)
    assert verify(run.log).exit_code == 4


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=5),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(EventKind), st.dictionaries(st.sampled_from(MEMBERS), JSON, max_size=6))
def test_no_event_body_breaks_the_check(kind: EventKind, body: dict[str, Any]) -> None:
    """Whatever an operator signs, the auditor gets a verdict and never a traceback."""
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1, count=1)
    builder.event(kind, body)
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert verdict.exit_code in (0, 3, 4, 5, 6)
    assert canonical_bytes(verdict.to_json())


# --- clean logs must pass -------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [1, 2, 3, 5, 61, 62, 63, 252, 253, 254, 255])
def test_clean_logs_of_awkward_sizes_verify(records: int) -> None:
    """N15: batches of one, trees that are not a power of two, ends on and beside a batch's edge."""
    builder = Builder(make_manifest(SIGNER), SIGNER)
    builder.start_attempt()
    builder.step(1, count=records)
    builder.seal(builder.session, SIGNER)
    verdict = verify(builder.log, "key")
    assert errors(verdict) == []
    assert verdict.root == builder.state.root().hex()


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 10_000])
def test_the_verdict_does_not_depend_on_how_records_are_read(run: MemoryRun, chunk: int) -> None:
    edit_source(run)
    run.log.chunk = 100
    expected = verify(run.log).to_json()
    run.log.chunk = chunk
    assert verify(run.log).to_json() == expected


def test_a_verified_run_says_what_it_did_not_check(run: MemoryRun) -> None:
    verdict = verify(run.log)
    assert (verdict.status, verdict.exit_code, verdict.findings) == ("VERIFIED", 0, ())
    assert (verdict.entries, verdict.records, verdict.steps, verdict.samples) == (993, 880, 110, 50)
    assert verdict.heads == (256, 512, KEPT_SIZE, 993)
    assert any("not that it was right" in text for text in verdict.not_checked)
    assert all(check.status == "passed" for check in verdict.checks if check.name != "source data")


def test_progress_ends_at_the_size_of_the_log(run: MemoryRun) -> None:
    seen: list[int] = []
    verify_log(run.log, Trust(), progress=seen.append)
    assert seen[-1] == run.log.size


def test_what_the_opener_found_is_part_of_the_verdict(run: MemoryRun) -> None:
    run.log.opener_findings = [Finding("E_SCHEMA", "table records has a column too many: note")]
    verdict = verify(run.log)
    assert (errors(verdict)[0].code, verdict.exit_code) == ("E_SCHEMA", 4)


def test_a_manifest_that_cannot_be_read_is_no_integrity_verdict(run: MemoryRun) -> None:
    class Broken(MemoryLog):
        def manifest(self) -> RunManifest | None:
            raise FormatError("manifest.json: fmt: unknown")

    broken = Broken(**vars(run.log))
    assert (verify_log(broken, Trust()).status, verify_log(broken, Trust()).exit_code) == ("CANNOT READ", 3)


# --- custody --------------------------------------------------------------------------------------------------

FINAL_NOTE = BUILT.log.notes[-1][1]


def verify_acts(log: MemoryLog, *heads: Note, note: bytes = FINAL_NOTE) -> Verdict:
    return verify_custody(log, Trust((SIGNER.vkey,), heads), note)


def test_a_custody_log_verifies_and_says_that_its_end_is_open() -> None:
    verdict = verify_acts(build_custody(BUILT, SIGNER))
    assert (verdict.exit_code, verdict.entries, verdict.origin) == (0, 4, f"{ORIGIN}/custody")
    assert any("cut off the end" in text for text in verdict.not_checked)


def test_an_auditors_own_key_may_sign_acts() -> None:
    auditor = Signer.generate("auditor.example")
    log = build_custody(BUILT, auditor)
    assert codes(verify_acts(log)) == {"E_KEY"}
    assert verify_custody(log, Trust((SIGNER.vkey, auditor.vkey)), FINAL_NOTE).exit_code == 0


def test_a_custody_log_of_another_run_is_not_accepted() -> None:
    other = build_run(SIGNER, seed=1)
    verdict = verify_acts(build_custody(BUILT, SIGNER), note=other.log.notes[-1][1])
    assert "another run" in message(verdict, "E_BIND")


def test_a_forged_act_is_an_orphan() -> None:
    log = build_custody(BUILT, SIGNER)
    event = replace(log.stored_events[-1].event, seq=4)
    log.stored_events.append(StoredEvent(event, event.leaf()))
    assert codes(verify_acts(log)) == {"E_ORPHAN"}


def test_an_edited_act_is_named() -> None:
    log = build_custody(BUILT, SIGNER)
    stored = log.stored_events[2]
    log.stored_events[2] = StoredEvent(replace(stored.event, body=b'{"number":9}'), stored.leaf)
    assert "event 2 (QUERY)" in message(verify_acts(log), "E_EVENT")


def test_a_cut_custody_log_shows_against_a_kept_head_only() -> None:
    log = build_custody(BUILT, SIGNER)
    kept = Note.parse(log.notes[-1][1])
    log.delete(3, 4)
    log.stored_batches.pop()
    log.drop_notes_above(3)
    assert verify_acts(log).exit_code == 0
    assert codes(verify_acts(log, kept)) == {"E_ROLLBACK"}


def test_a_custody_log_without_any_anchor_is_unanchored() -> None:
    assert codes(verify_custody(build_custody(BUILT, SIGNER), Trust(), FINAL_NOTE)) == {"W_UNANCHORED"}


def test_a_head_of_the_custody_log_says_nothing_about_the_run(run: MemoryRun) -> None:
    head = Note.parse(build_custody(BUILT, SIGNER).notes[-1][1])
    assert verify_log(run.log, Trust((SIGNER.vkey,), (head,))).exit_code == 0
