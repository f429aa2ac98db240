"""The attack matrix: every way to spoil a run that we know of, against three levels of trust.

``none`` is a verifier who brings nothing, ``key`` one with the pinned public key and the expected origin, ``head`` one
who also kept a head of 865 entries, with the session certificate that was handed over beside it. The letters of an
identifier: C content, O order and count, T truncation and rollback, K keys, B binding, R payloads, E storage, D derived
results. A row says which finding comes first at each level, the exit code, and what that finding must point at. Where
another finding weighs more than the first, or where one would expect another finding than ours, the row says why.

Not in the table, because the feature does not exist yet: signed erasure and pruning events, key rotation, time stamps,
witnesses. Elsewhere: kill -9 and lost or damaged write-ahead logs (``test_crash``), bundles, reports.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from auditlog.errors import ReadError
from auditlog.ledger.columns import TABLES
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.verdict import CODES, Finding, unreadable
from auditlog.trust.verify import verify_log
from tests.attacks.ledger_simulator import LedgerSimulator
from tests.support import Plan

LEVELS = ("none", "key", "head")
OK = "ok"
UNANCHORED = "W_UNANCHORED"

S = LedgerSimulator
Tamper = Callable[[LedgerSimulator], None]
Place = str | int  # a word in the finding's message or place, or the entry that it names


def manifest(block: str, **change: object) -> Tamper:
    return lambda sim: sim.edit_the_manifest(block, change)


def revoked_at_256(trust: Trust, sim: LedgerSimulator) -> Trust:
    """The verifier has learnt that the key was copied when the log had 256 entries."""
    return replace(trust, revocations=(sim.revoked_from(256),)) if trust.is_pinned else trust


def head_without_certificate(trust: Trust, sim: LedgerSimulator) -> Trust:
    return replace(trust, certificates=())


@dataclass(frozen=True)
class Row:
    """One attack. Codes are separated by ``|``; any of them may come first.

    Args:
        id: Its number and what is done.
        tamper: What is done to the run.
        none, key, head: The first finding at each level; ``key`` and ``head`` are those of the level before
            unless given.
        at: What the first finding must point at, where it is about the tampering.
        exit: The exit codes, where they are not those of the first findings.
        why: Why a row is not as one would expect it.
        brings: Changes what the verifier brings.
        custody: Whether the custody log stays. It is a second log to verify, so rows that are not about it do without.
    """

    id: str
    tamper: Tamper
    none: str
    key: str = ""
    head: str = ""
    at: tuple[Place, ...] = ()
    exit: tuple[int, int, int] | None = None
    why: str = ""
    brings: Callable[[Trust, LedgerSimulator], Trust] | None = None
    custody: bool = False

    def expected(self, level: str) -> set[str]:
        key = self.key or self.none
        return set({"none": self.none, "key": key, "head": self.head or key}[level].split("|"))

    def exit_codes(self, level: str) -> set[int]:
        if self.exit is not None:
            return {self.exit[LEVELS.index(level)]}
        return {CODES.get(code, 0) for code in self.expected(level)}


HEAVIER = "the root of a signed checkpoint differs as well, and content weighs more than a missing end"
ROWS = [
    Row("C01 edit an integer", S.edit_integer, "E_LEAF", at=(500, "step was 56 and is 57 now")),
    Row("C02 swap the source of a sample", S.swap_source, "E_LEAF", at=(501, "source_id was")),
    Row(
        "C03 edit a record and its stored hash",
        S.edit_with_leaf,
        "E_CHAIN",
        at=("batch 7 (entries 433 to 504)",),
        why="chain values are stored per batch, so the batch is named and not the record",
    ),
    Row("C04 edit and recompute what needs no key", S.edit_and_rechain, "E_ROOT", at=("checkpoint 7 (size 505)",)),
    Row("C07 flip a byte of a sketch", S.flip_sketch, "E_PAYLOAD", at=(20,)),
    Row("C08 swap two sketches", S.swap_two_sketches, "E_PAYLOAD", at=(10, 20)),
    Row("C13 empty a hashed cell", S.empty_a_cell, "E_ENCODING", at=(5, "records.sketch_commit is NULL")),
    Row("C14 widen a column", S.widen_a_column, "E_SCHEMA", at=("column records.step is DOUBLE",)),
    Row("O01 delete a row", S.delete_row, "E_SEQ", at=(300,)),
    Row(
        "O02 delete a row and close the gap",
        S.delete_row_and_close_the_gap,
        "E_ROOT|E_TRUNC",
        at=("1 entry missing",),
        exit=(4, 4, 4),
        why=HEAVIER,
    ),
    Row("O03 delete a batch", S.delete_batch, "E_SEQ|E_LOST", at=("entries 433 to 504 are missing",), exit=(4, 4, 4)),
    Row("O04 reorder two rows", S.reorder, "E_LEAF", at=(40, 41)),
    Row("O05 duplicate a row", S.duplicate, "E_SEQ", at=(49,)),
    Row("O07 append a forged row, chained", S.append_forged, "E_ORPHAN", at=(1_155,)),
    Row("O08 insert a row in the middle, chained", S.insert_in_the_middle, "E_BATCH|E_ROOT", at=("size 505",)),
    Row("O09 two rows with one number", S.two_writers, "E_SEQ", at=(512,)),
    Row("T01 cut the tail, leave the checkpoints", S.cut_tail, "E_TRUNC", at=("1,000 entries", "1,155")),
    Row(
        "T02 cut to a checkpoint",
        S.cut_to_a_checkpoint,
        "E_UNSEALED",
        head="E_ROLLBACK",
        at=("577",),
    ),
    Row("T04 empty the ledger", S.empty, "E_UNSEALED", head="E_ROLLBACK", at=("0",)),
    Row("T05 restore a backup", S.restore_backup, "E_UNSEALED", head="E_ROLLBACK", at=("289",), custody=True),
    Row("T08 drop the seal's checkpoint", S.drop_the_seals_checkpoint, "E_UNSEALED", at=("1154",)),
    Row("T09 drop all checkpoints", S.drop_all_checkpoints, "E_UNSEALED", at=("no signed log checkpoint",)),
    Row("K01 flip a bit of a signature", S.flip_signature, "E_SIG", at=("checkpoint 2 (size 145)",)),
    Row(
        "K02 replace the public key in the manifest",
        S.replace_manifest_key,
        "E_SIG|E_EVENT",
        key="E_KEY|E_EVENT",
        at=("bank.example/audit",),
    ),
    Row(
        "K03 write all of it anew with an own key",
        S.replace_by_own_key,
        UNANCHORED,
        key="E_KEY",
        at=("cannot be checked: key bank.example/audit", "pinned is"),
    ),
    Row(
        "K04 stolen keys, a record changed, all signed anew",
        S.edit_and_sign_anew,
        UNANCHORED,
        key=OK,
        head="E_FORK",
        at=("865",),
    ),
    Row(
        "K04 stolen long-lived key, written anew under a session of one's own",
        S.rewrite_under_a_new_session,
        UNANCHORED,
        key=OK,
        head="E_FORK",
        at=("865",),
    ),
    Row(
        "K04 the same, and the certificate was not kept with the head",
        S.rewrite_under_a_new_session,
        UNANCHORED,
        key=OK,
        head="E_HEAD",
        at=("cannot be checked: key", "session/1"),
        why="without the certificate nothing tells a fork from a head that somebody forged; both exit 6",
        brings=head_without_certificate,
    ),
    Row(
        "K05 stolen key, cut and sealed again",
        S.cut_and_seal_again,
        UNANCHORED,
        key=OK,
        head="E_ROLLBACK",
        at=("865", "579"),
    ),
    Row(
        "K05 the same, and the certificate was not kept with the head",
        S.cut_and_seal_again,
        UNANCHORED,
        key=OK,
        head="E_HEAD",
        at=("cannot be checked: key",),
        why="a head by an unknown key must not make a run look cut, so it is said to be the head that is in doubt",
        brings=head_without_certificate,
    ),
    Row("K07 name another algorithm", S.downgrade_algorithm, "E_FORMAT", at=("algorithm 0x02",)),
    Row(
        "K10 a key that is revoked from size 256 on",
        lambda sim: None,
        UNANCHORED,
        key="E_KEYREV",
        at=("checkpoint 4 (size 289) and 14 more", "beyond size 256"),
        brings=revoked_at_256,
        custody=True,
    ),
    Row("B01 another run of the same key", S.replace_by_another_run, UNANCHORED, key="E_BIND", at=("other",)),
    Row(
        "B02 a second run under one origin",
        S.rewrite_under_a_new_session,
        UNANCHORED,
        key=OK,
        head="E_FORK",
        at=("865",),
    ),
    Row("B03 graft checkpoints of another run", S.graft_checkpoints, "E_BIND|E_ROOT", at=("checkpoint 0",)),
    Row("B04 replay an old checkpoint", S.replay_checkpoint, "E_CKPT_ORDER", at=("checkpoint 4",)),
    *(
        Row(f"B06 edit {name} in the manifest", tamper, "E_BIND|E_EVENT|E_CHAIN", at=("SHA-256 of the manifest",))
        for name, tamper in {
            "the seed": manifest("sketch", seed="another"),
            "the projection": manifest("sketch", tables_sha256="1" * 64),
            "the width of the sketches": manifest("sketch", dim=8),
            "the base model": manifest("model", name="another"),
            "the data version": S.relabel_data_version,
            "the plan": manifest("training", planned_steps=64),
        }.items()
    ),
    Row(
        "B06 name an unknown projection in the manifest",
        manifest("sketch", kind="another"),
        "E_FORMAT",
        at=("sketch.kind",),
        why="as with an unknown algorithm: what this version does not know it cannot judge",
    ),
    Row("B07 replace the weights on disk", S.replace_weights, "E_BIND", at=("trainable.safetensors",)),
    Row("B09 relabel one record's data version", S.relabel_one_record, "E_LEAF", at=(502, "data_version_id was")),
    Row("R01 erase a salt without an event", S.delete_salt, "E_ERASED", at=("sample 3",)),
    Row("R05 exchange the salts of two samples", S.exchange_salts, "E_OPENING", at=("sample 3", "sample 4")),
    Row("R06 remove a sketch file", S.remove_shard, "E_ERASED", at=("shard 0",)),
    Row(
        "D09 swap two scores of a query", S.swap_scores, "E_EVENT", at=("results/query-1.json", "entry 1"), custody=True
    ),
    Row("E01 replace a table by a view", S.replace_table_by_view, "E_SCHEMA", at=("records",)),
    Row("E03 shadow built-in functions", S.shadow_functions, "E_SCHEMA", at=("sha256",)),
    Row("E04 add a table", S.add_table, "E_SCHEMA", at=("smuggled",)),
    Row("E04 add a column", S.add_column, "E_SCHEMA", at=("records.note",)),
    Row("E04 add an index", S.add_index, "E_SCHEMA", at=("smuggled",)),
]


def outcome(sim: LedgerSimulator, trust: Trust) -> tuple[list[Finding], int]:
    """Return the errors that are found, and the exit code."""
    try:
        verdict = verify_run(sim.run, trust)
    except ReadError as error:
        return [unreadable(sim.run, error)], error.exit_code
    return [finding for finding in verdict.findings if finding.level == "error"], verdict.exit_code


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.id)
def attacked(
    request: pytest.FixtureRequest, original: LedgerSimulator, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Row, LedgerSimulator]:
    """A row of the table, and the run after what it says was done to it."""
    row = request.param
    sim = original.copy_to(tmp_path_factory.mktemp("attacked") / "copy")
    if not row.custody:
        shutil.rmtree(sim.run / "custody")
    row.tamper(sim)
    return row, sim


@pytest.mark.parametrize("level", LEVELS)
def test_an_attack_is_found_named_and_weighed(level: str, attacked: tuple[Row, LedgerSimulator]) -> None:
    row, sim = attacked
    trust = sim.trust(level)
    found, exit_code = outcome(sim, row.brings(trust, sim) if row.brings else trust)
    codes = [finding.code for finding in found]
    assert (codes or [OK])[0] in row.expected(level), found
    assert exit_code in row.exit_codes(level), found
    if codes and codes[0] != UNANCHORED:
        first = [finding for finding in found if finding.code == codes[0]]
        said = " ".join(f"{finding.message} {finding.where}" for finding in first)
        for place in row.at if level == "head" or not row.head else ():
            assert place in said if isinstance(place, str) else place in [finding.seq for finding in first], found


# --- no column of any table goes unchecked ---------------------------------------------------------------------

COLUMNS = [(table, column) for table in TABLES for column in TABLES[table]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    """A run of six batches: what a changed cell does to a verdict does not depend on how many there are."""
    plan = Plan(steps=24, per_step=4, steps_per_head=4, rows_per_file=(30, 20))
    return LedgerSimulator(tmp_path_factory.mktemp("small") / "original", plan).write(custody=False)


@pytest.mark.parametrize("cell", COLUMNS, ids=lambda cell: ".".join(cell))
def test_c05_no_column_of_any_table_goes_unchecked(
    cell: tuple[str, str], small: LedgerSimulator, tmp_path: Path
) -> None:
    """C05: one cell of each column in turn, changed by its type; not one may pass at any level."""
    sim = small.copy_to(tmp_path / "copy")
    sim.change_cell(*cell)
    key = Trust((sim.signer.vkey,))
    head = replace(key, heads=(sim.kept_head(101),))
    with RunReader.open(sim.run) as reader:  # opened once: that is what takes the time here
        verdicts = [verify_log(reader.view(), trust) for trust in (Trust(), key)]
    outcomes = [(list(verdict.findings), verdict.exit_code) for verdict in verdicts]
    for found, exit_code in (*outcomes, outcome(sim, head)):
        assert exit_code in (3, 4, 6), found  # 5 would say that something is missing, and nothing is
        assert cell[0] in " ".join(f"{finding.where} {finding.message}" for finding in found), found


@pytest.fixture(scope="module")
def small_with_acts(small: LedgerSimulator, tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    sim = small.copy_to(tmp_path_factory.mktemp("acts") / "copy")
    sim.act()
    return sim


@pytest.mark.parametrize("cell", [cell for cell in COLUMNS if cell[0] != "records"], ids=lambda cell: ".".join(cell))
def test_c05_nor_does_a_column_of_the_custody_log(
    cell: tuple[str, str], small_with_acts: LedgerSimulator, tmp_path: Path
) -> None:
    sim = small_with_acts.copy_to(tmp_path / "copy")
    custody = LedgerSimulator(tmp_path / "copy", sim.plan, signer=sim.signer)
    custody.run = sim.run / "custody"
    custody.change_cell(*cell, row=1)
    found, exit_code = outcome(sim, Trust((sim.signer.vkey,)))
    assert exit_code in (3, 4, 6), found
    assert all(finding.message.startswith("custody: ") for finding in found), found


# --- several tamperings at once --------------------------------------------------------------------------------


def test_two_tamperings_are_two_findings_and_neither_hides_the_other(sim: LedgerSimulator) -> None:
    sim.edit_integer()
    sim.flip_sketch()
    found, exit_code = outcome(sim, sim.trust("head"))
    assert [(finding.code, finding.seq) for finding in found] == [("E_LEAF", 500), ("E_PAYLOAD", 20)]
    assert exit_code == 4


def test_every_sort_of_tampering_at_once_is_listed(sim: LedgerSimulator) -> None:
    """From each part of the verdict one: the weightiest decides the exit code, all are said."""
    sim.flip_signature()
    sim.delete_row()
    sim.edit_integer()
    sim.flip_sketch()
    sim.delete_salt()
    sim.replace_weights()
    sim.swap_scores()
    sim.add_table()
    found, exit_code = outcome(sim, sim.trust("head"))
    codes = {finding.code for finding in found}
    assert codes >= {"E_SIG", "E_SEQ", "E_LEAF", "E_PAYLOAD", "E_ERASED", "E_BIND", "E_EVENT", "E_SCHEMA"}, found
    assert exit_code == 6


def test_a_custody_log_that_cannot_be_read_hides_nothing_of_the_run(sim: LedgerSimulator) -> None:
    sim.edit_integer()
    sim.remove_custody_database()
    found, exit_code = outcome(sim, sim.trust("key"))
    assert [finding.code for finding in found] == ["E_LEAF", "E_IO"]
    assert exit_code == 3
