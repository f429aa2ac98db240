"""Every way to spoil a run folder that we know of, against three levels of trust.

The identifiers are those of our attack catalogue: C content, O order and count, T truncation and rollback,
K keys, B binding, R erasure, E engine. ``none`` is a verifier who brings nothing, ``key`` one with the pinned
public key and the expected origin, ``head`` one who also kept a head that was handed over.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pytest

from auditlog.errors import FormatError, ReadError, StoreError, UsageError
from auditlog.ledger.abandon import seal_abandoned
from auditlog.ledger.columns import TABLES
from auditlog.ledger.reader import verify_run
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import CODES
from tests.support import SNAPSHOT, LedgerSimulator

LEVELS = ("none", "key", "head")
OK = frozenset({"ok"})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    """A clean sealed run: 219 entries; heads at 1, 37, 73, 109, 145, 181, 217, 218, 219."""
    return LedgerSimulator(tmp_path_factory.mktemp("attacks") / "original").write()


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    """A copy to spoil."""
    return original.copy_to(tmp_path / "copy")


@dataclass(frozen=True)
class Attack:
    id: str
    tamper: Callable[[LedgerSimulator], None]
    none: frozenset[str]
    key: frozenset[str]
    head: frozenset[str]
    seq: int | None = None  # an error finding must name this entry

    def expected(self, level: str) -> frozenset[str]:
        return {"none": self.none, "key": self.key, "head": self.head}[level]


def attack(
    id: str,
    tamper: Callable[[LedgerSimulator], None],
    always: str = "",
    *,
    none: str = "",
    key: str = "",
    head: str = "",
    seq: int | None = None,
) -> Attack:
    """Codes are separated by ``|``; ``always`` stands for all three levels."""
    none, key, head = ({*(level or always).split("|")} for level in (none, key, head))  # type: ignore[assignment]
    return Attack(id, tamper, frozenset(none), frozenset(key), frozenset(head), seq)


def sql(*statements: str) -> Callable[[LedgerSimulator], None]:
    return lambda sim: sim.sql(*statements)


def edit_and_rechain(*statements: str) -> Callable[[LedgerSimulator], None]:
    """Edit, then recompute everything that needs no key."""

    def tamper(sim: LedgerSimulator) -> None:
        sim.sql(*statements)
        sim.rewrite_unsigned()

    return tamper


def edit_with_leaf(sim: LedgerSimulator) -> None:
    """Edit a record and the leaf hash stored beside it, but not the chain."""
    sim.sql("UPDATE records SET step=step+1 WHERE seq=50")
    chains = sim.query("SELECT batch, chain, entries FROM batches")
    sim.rewrite_unsigned()
    with duckdb.connect(str(sim.run / "ledger.duckdb")) as con:
        for batch, chain, entries in chains:
            con.execute("UPDATE batches SET chain=?, entries=? WHERE batch=?", [chain, entries, batch])


def insert_in_the_middle(sim: LedgerSimulator) -> None:
    sim.sql(
        "UPDATE records SET seq = seq + 1 WHERE seq >= 50",
        "UPDATE events SET seq = seq + 1 WHERE seq >= 50",
        "INSERT INTO records SELECT * REPLACE (50 AS seq) FROM records WHERE seq = 49",
    )
    sim.rewrite_unsigned()


def append_forged(sim: LedgerSimulator) -> None:
    sim.sql("INSERT INTO records SELECT * REPLACE (219 AS seq) FROM records WHERE seq = 49")
    sim.rewrite_unsigned()


def drop_batch(sim: LedgerSimulator) -> None:
    ((first, entries),) = sim.query("SELECT first_seq, entries FROM batches WHERE batch = 3")
    inside = f"seq >= {first} AND seq < {first + entries}"
    sim.sql(
        f"DELETE FROM records WHERE {inside}",
        f"DELETE FROM events WHERE {inside}",
        "DELETE FROM batches WHERE batch = 3",
    )


def replace_by(**changes: object) -> Callable[[LedgerSimulator], None]:
    """Put another run in this one's place; ``signer='other'`` means by somebody else's key."""

    def tamper(sim: LedgerSimulator) -> None:
        made = dict(changes)
        signer = Signer.generate("bank.example/audit") if made.pop("signer", "") == "other" else None
        other = sim.again(sim.folder / "other", signer=signer, **made)
        shutil.rmtree(sim.run)
        shutil.move(other.run, sim.run)

    return tamper


def graft_checkpoints(sim: LedgerSimulator) -> None:
    other = sim.again(sim.folder / "other", run_id="run-2", origin="bank.example/credit/2027-01", seed=1)
    sim.sql("DELETE FROM checkpoints")
    with duckdb.connect(str(sim.run / "ledger.duckdb")) as con:
        con.execute(f"ATTACH '{other.run / 'ledger.duckdb'}' AS other (READ_ONLY)")
        con.execute("INSERT INTO checkpoints SELECT * FROM other.checkpoints")
    shutil.rmtree(sim.run / "heads")
    shutil.copytree(other.run / "heads", sim.run / "heads")


def restore_backup(sim: LedgerSimulator) -> None:
    """Put back a database as it was when only some of the batches had been written, with the heads of then."""
    sim.truncate(109, checkpoints=True, head_files=True)


def drop_seal(sim: LedgerSimulator) -> None:
    sim.sql("DELETE FROM checkpoints WHERE size = 219")
    sim.head_files()[-1].unlink()


def drop_all_checkpoints(sim: LedgerSimulator) -> None:
    sim.sql("DELETE FROM checkpoints")
    shutil.rmtree(sim.run / "heads")


def empty(sim: LedgerSimulator) -> None:
    sim.sql(*(f"DELETE FROM {table}" for table in TABLES))
    shutil.rmtree(sim.run / "heads")


def flip_signature(sim: LedgerSimulator) -> None:
    ((size, note),) = sim.query("SELECT size, note FROM checkpoints WHERE size = 73")
    text = note.decode()
    at = text.rindex("=") - 20
    spoiled = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
    with duckdb.connect(str(sim.run / "ledger.duckdb")) as con:
        con.execute("UPDATE checkpoints SET note = ? WHERE size = ?", [spoiled.encode(), size])
    (sim.run / "heads" / f"{size:08d}.note").write_bytes(spoiled.encode())


def replay_old_checkpoint(sim: LedgerSimulator) -> None:
    sim.sql(
        "UPDATE checkpoints SET note = (SELECT note FROM checkpoints WHERE size = 73) WHERE size = 181",
        "UPDATE checkpoints SET size = 73 WHERE size = 181",
    )
    (sim.run / "heads" / "00000181.note").unlink()


def replace_manifest_key(sim: LedgerSimulator) -> None:
    sim.edit_manifest({"vkey": str(Signer.generate("bank.example/audit").vkey)})


def downgrade_algorithm(sim: LedgerSimulator) -> None:
    """Name a key of another algorithm id in the manifest (0x02 instead of Ed25519's 0x01)."""
    import base64
    import hashlib

    name, material = "bank.example/audit", b"\x02" + b"k" * 32
    key_hash = hashlib.sha256(name.encode() + b"\n" + material).digest()[:4].hex()
    sim.edit_manifest({"vkey": f"{name}+{key_hash}+{base64.b64encode(material).decode()}"})


def edit_data_version(sim: LedgerSimulator) -> None:
    document = json.loads((sim.run / "manifest.json").read_bytes())
    document["data"]["versions"][0]["revision"] = "another"
    sim.edit_manifest({"data": document["data"]})


def edit_sketch_seed(sim: LedgerSimulator) -> None:
    document = json.loads((sim.run / "manifest.json").read_bytes())
    sim.edit_manifest({"sketch": document["sketch"] | {"seed": "another"}})


def replace_table_by_view(sim: LedgerSimulator) -> None:
    sim.sql(
        "ALTER TABLE records RENAME TO hidden",
        "CREATE VIEW records AS SELECT * FROM hidden WHERE seq <> 5",
    )


def spoil_payload(sim: LedgerSimulator) -> None:
    ((row,),) = sim.query("SELECT shard_row FROM records WHERE seq = 20")
    path = sim.run / "sketches" / "000000.npy"
    content = bytearray(path.read_bytes())
    content[128 + row * sim.plan.dim * 2 + 3] ^= 1
    path.write_bytes(content)


UNANCHORED = "W_UNANCHORED"
B_MANIFEST = "E_BIND|E_EVENT|E_CHAIN"
SHADOW = (
    "CREATE MACRO sha256(x) AS 'always the same'",
    "CREATE MACRO duckdb_functions() AS TABLE SELECT 'none' AS function_name, true AS internal",
)

ATTACKS = [
    attack("C01 edit an integer field", sql("UPDATE records SET step=step+1 WHERE seq=50"), "E_LEAF", seq=50),
    attack("C02 swap the source", sql("UPDATE records SET source_id=1-source_id WHERE seq=51"), "E_LEAF", seq=51),
    attack("C03 edit a record and its stored leaf", edit_with_leaf, "E_CHAIN"),
    attack(
        "C04 edit and recompute all that needs no key",
        edit_and_rechain("UPDATE records SET loss=0 WHERE seq=50"),
        "E_ROOT",
    ),
    attack("C07 flip a byte of a sketch", spoil_payload, "E_PAYLOAD", seq=20),
    attack("C08 swap two sketches", lambda sim: sim.swap_sketches(10, 20), "E_PAYLOAD", seq=10),
    attack(
        "C13 NULL in a hashed column", sql("UPDATE records SET sketch_commit=NULL WHERE seq=5"), "E_ENCODING", seq=5
    ),
    attack("C14 column type widened", sql("ALTER TABLE records ALTER step TYPE DOUBLE"), "E_SCHEMA"),
    attack("O01 delete a row", sql("DELETE FROM records WHERE seq=30"), "E_SEQ"),
    attack(
        "O02 delete a row and close the gap", edit_and_rechain("DELETE FROM records WHERE seq=30"), "E_ROOT|E_TRUNC"
    ),
    attack("O03 delete a batch", drop_batch, "E_SEQ|E_LOST"),
    attack(
        "O04 reorder two rows",
        sql("UPDATE records SET seq=CASE seq WHEN 40 THEN 41 ELSE 40 END WHERE seq IN (40, 41)"),
        "E_LEAF",
        seq=40,
    ),
    attack("O05 duplicate a row", sql("INSERT INTO records SELECT * FROM records WHERE seq=49"), "E_SEQ", seq=49),
    attack("O07 append a forged row, chained", append_forged, "E_ORPHAN", seq=219),
    attack("O08 insert a row in the middle, chained", insert_in_the_middle, "E_BATCH|E_ROOT"),
    attack(
        "O09 two rows with one seq in different batches",
        sql("INSERT INTO records SELECT * REPLACE (77 AS seq) FROM records WHERE seq = 10"),
        "E_SEQ",
        seq=77,
    ),
    attack(
        "T01 truncate the tail, leave checkpoints",
        lambda sim: sim.truncate(200, checkpoints=False, head_files=False),
        "E_TRUNC",
    ),
    attack(
        "T02 truncate to an older checkpoint",
        lambda sim: sim.truncate(109, checkpoints=True, head_files=True),
        "E_UNSEALED",
        head="E_ROLLBACK",
    ),
    attack("T04 empty the ledger", empty, "E_UNSEALED", head="E_ROLLBACK"),
    attack("T05 restore a backup from mid-run", restore_backup, "E_UNSEALED", head="E_ROLLBACK"),
    attack("T08 drop the seal's checkpoint", drop_seal, "E_UNSEALED"),
    attack("T09 drop all checkpoints", drop_all_checkpoints, "E_UNSEALED"),
    attack("K01 flip a bit of a signature", flip_signature, "E_SIG"),
    attack(
        "K02 replace the public key in the manifest",
        replace_manifest_key,
        none="E_SIG|E_EVENT|E_BIND",
        key="E_KEY|E_EVENT",
        head="E_KEY|E_EVENT",
    ),
    attack("K03 rewrite all with an own key", replace_by(signer="other"), none=UNANCHORED, key="E_KEY", head="E_KEY"),
    attack("K04 stolen key, history rewritten", replace_by(seed=5), none=UNANCHORED, key="ok", head="E_FORK"),
    attack("K05 stolen key, cut and sealed again", replace_by(steps=12), none=UNANCHORED, key="ok", head="E_ROLLBACK"),
    attack("K07 algorithm downgrade", downgrade_algorithm, "E_FORMAT"),
    attack(
        "B01 another run of the same key",
        replace_by(origin="bank.example/other", run_id="x"),
        none=UNANCHORED,
        key="E_BIND",
        head="E_BIND",
    ),
    attack(
        "B02 a second run under one origin",
        replace_by(seed=9, run_id="run-2"),
        none=UNANCHORED,
        key="ok",
        head="E_FORK",
    ),
    attack("B03 graft checkpoints of another run", graft_checkpoints, "E_BIND|E_ROOT"),
    attack("B04 replay an old checkpoint", replay_old_checkpoint, "E_CKPT_ORDER"),
    attack("B06 edit the data version in the manifest", edit_data_version, B_MANIFEST),
    attack("B06 edit the sketch seed in the manifest", edit_sketch_seed, B_MANIFEST),
    attack(
        "B06 edit the model in the manifest", lambda sim: sim.edit_manifest({"model": {"name": "other"}}), B_MANIFEST
    ),
    attack("B07 replace the weights on disk", lambda sim: sim.flip(SNAPSHOT, 0.5), "E_BIND"),
    attack(
        "B09 relabel a data version",
        sql("UPDATE records SET data_version_id=1-data_version_id WHERE seq=52"),
        "E_LEAF",
        seq=52,
    ),
    attack("R01 erase a salt without an event", lambda sim: sim.erase_salt(3), "E_ERASED"),
    attack("R05 swap the salts of two samples", lambda sim: sim.swap_salts(3, 4), "E_OPENING|E_PAYLOAD"),
    attack("R06 remove a sketch shard", lambda sim: (sim.run / "sketches/000000.npy").unlink(), "E_ERASED"),
    attack("E01 replace a table by a view", replace_table_by_view, "E_SCHEMA"),
    attack("E03 shadow built-in functions", sql(*SHADOW), "E_SCHEMA"),
    attack("E04 extra table", sql("CREATE TABLE x (a INTEGER)"), "E_SCHEMA"),
    attack("E04 extra column", sql("ALTER TABLE records ADD COLUMN note VARCHAR"), "E_SCHEMA"),
    attack("E04 extra index", sql("CREATE INDEX i ON batches (batch)"), "E_SCHEMA"),
]


def outcome(sim: LedgerSimulator, level: str) -> tuple[list[str], int, list[int | None]]:
    """Return error codes in order, the exit code, and the entries named."""
    try:
        verdict = verify_run(sim.run, sim.trust(level))
    except ReadError as error:
        code = {FormatError: "E_FORMAT", StoreError: "E_ENGINE"}.get(type(error), "E_IO")
        return [code], error.exit_code, []
    errors = [finding for finding in verdict.findings if finding.level == "error"]
    return [f.code for f in errors] or ["ok"], verdict.exit_code, [f.seq for f in errors]


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.id)
def test_an_attack_is_found_and_named(case: Attack, original: LedgerSimulator, sim: LedgerSimulator) -> None:
    case.tamper(sim)
    for level in LEVELS:
        codes, exit_code, seqs = outcome(sim, level)
        expected = case.expected(level)
        assert expected & set(codes), f"{level}: found {codes}, expected one of {sorted(expected)}"
        assert exit_code in {CODES.get(code, 0) for code in expected}, f"{level}: {codes}"
        if case.seq is not None:
            assert case.seq in seqs, f"{level}: entry {case.seq} is not named, only {seqs}"


@pytest.mark.parametrize(("table", "column"), [(table, column) for table in TABLES for column in TABLES[table]])
def test_c05_no_column_of_any_table_goes_unchecked(table: str, column: str, sim: LedgerSimulator) -> None:
    """C05: change one cell of each column in turn, by its type; not one may pass."""
    ((row, value),) = sim.query(f"SELECT rowid, {column} FROM {table} ORDER BY rowid LIMIT 1 OFFSET 3")
    changed = value[:-1] + bytes([value[-1] ^ 1]) if isinstance(value, bytes) else value + 1
    with duckdb.connect(str(sim.run / "ledger.duckdb")) as con:
        con.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [changed, row])
    for level in LEVELS:
        codes, exit_code, _ = outcome(sim, level)
        assert exit_code in (3, 4, 5, 6), f"{level}: {codes}"


@pytest.mark.parametrize("level", LEVELS)
def test_n01_a_clean_run_raises_no_alarm(level: str, original: LedgerSimulator) -> None:
    codes, exit_code, _ = outcome(original, level)
    assert (codes, exit_code) == (([UNANCHORED], 7) if level == "none" else (["ok"], 0))


def test_b07_missing_weights_are_named_as_not_checked(sim: LedgerSimulator) -> None:
    """Weights may lie elsewhere, so their absence is no accusation; but the verdict must not be silent about it."""
    (sim.run / SNAPSHOT).unlink()
    verdict = verify_run(sim.run, sim.trust("key"))
    assert any("snapshot" in line for line in verdict.not_checked)


@pytest.mark.parametrize("position", [0.3, 0.5, 2 / 3, 0.9])
def test_e05_a_flipped_byte_in_the_database_is_a_disk_fault_or_a_finding_never_silence(
    position: float, original: LedgerSimulator, sim: LedgerSimulator
) -> None:
    """The engine keeps a checksum per block; where it notices, the verdict is withheld. Free space may differ."""
    sim.flip("ledger.duckdb", position)
    codes, exit_code, _ = outcome(sim, "key")
    same = [original.query(f"SELECT * FROM {t} ORDER BY ALL") == _rows(sim, t) for t in TABLES]
    assert exit_code == (0 if all(same) else 3), codes


def _rows(sim: LedgerSimulator, table: str) -> list[tuple[object, ...]] | None:
    try:
        return sim.query(f"SELECT * FROM {table} ORDER BY ALL")
    except duckdb.Error:
        return None


def test_e05_a_damaged_header_is_unreadable_not_tampering(sim: LedgerSimulator) -> None:
    content = bytearray((sim.run / "ledger.duckdb").read_bytes())
    content[5000] ^= 0xFF
    (sim.run / "ledger.duckdb").write_bytes(content)
    with pytest.raises(StoreError) as caught:
        verify_run(sim.run, sim.trust("key"))
    assert "ledger.duckdb" in str(caught.value)
    assert "tamper" not in f"{caught.value} {caught.value.advice()}".lower()


def test_e07_a_ledger_open_in_another_process_is_named_with_its_holder(sim: LedgerSimulator) -> None:
    path = sim.run / "ledger.duckdb"
    program = f"import duckdb, sys; con = duckdb.connect({str(path)!r}); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ReadError) as caught:
            verify_run(sim.run, sim.trust("key"))
        assert str(holder.pid) in str(caught.value)
        assert not isinstance(caught.value, StoreError)  # nothing is broken
        holder.communicate()


@pytest.mark.parametrize("kind", ["view", "macro"])
def test_e01_hostile_sql_in_the_file_is_never_run_for_a_verdict(
    kind: str, sim: LedgerSimulator, tmp_path: Path
) -> None:
    """A view that would read a file outside the database must be reported and must not be read."""
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    if kind == "view":
        sim.sql(f"CREATE VIEW spy AS SELECT * FROM read_csv('{secret}')")
    else:
        sim.sql(f"CREATE MACRO spy() AS TABLE SELECT * FROM read_csv('{secret}')")
    verdict = verify_run(sim.run, sim.trust("key"))
    assert [f.where for f in verdict.findings] == ["spy"]


def test_a_macro_named_like_the_catalogue_cannot_hide_a_table(sim: LedgerSimulator) -> None:
    """The engine lets a macro in the file shadow ``duckdb_tables()``; the reader must not ask the macro."""
    sim.sql(
        "CREATE TABLE smuggled (a INTEGER)",
        "CREATE MACRO duckdb_tables() AS TABLE SELECT 'main' AS schema_name, 'x' AS table_name, false AS internal",
        "CREATE MACRO duckdb_functions() AS TABLE SELECT '' AS function_name, true AS internal",
    )
    found = {finding.where for finding in verify_run(sim.run, sim.trust("key")).findings}
    assert {"smuggled", "duckdb_tables", "duckdb_functions"} <= found


def test_t12_a_truncated_run_is_not_sealed_again(tmp_path: Path) -> None:
    """The writer refuses to re-root a log that is shorter than its own heads."""
    sim = LedgerSimulator(tmp_path / "crashed").write(seal=False)
    sim.truncate(145, checkpoints=True, head_files=False)
    before = sim.query("SELECT count(*) FROM events")
    with pytest.raises(StoreError, match=r"E_TRUNC|E_LOST"):
        seal_abandoned(sim.run, sim.signer)
    assert sim.query("SELECT count(*) FROM events") == before


def test_a_sealed_run_is_not_sealed_twice(sim: LedgerSimulator) -> None:
    with pytest.raises(UsageError, match="sealed already"):
        seal_abandoned(sim.run, sim.signer)


def test_a_wrong_key_cannot_seal(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "crashed").write(seal=False)
    with pytest.raises(StoreError, match="E_KEY"):
        seal_abandoned(sim.run, Signer.generate("bank.example/audit"))


def test_source_data_is_opened_and_a_changed_row_is_named(sim: LedgerSimulator) -> None:
    """With ``--data`` each record's commitment is opened; a source file that differs is an opening that fails."""
    clean = verify_run(sim.run, sim.trust("key"), data=sim.data_folder)
    assert clean.exit_code == 0
    path = sim.data_folder / "part-1.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("row 4", "row 9"), encoding="utf-8")
    spoiled = verify_run(sim.run, sim.trust("key"), data=sim.data_folder)
    assert spoiled.exit_code == 4
    assert {f.code for f in spoiled.findings} == {"E_OPENING"}
