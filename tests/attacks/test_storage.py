"""Disk and input faults: unreadable, named, and never called tampering; and SQL in the file that is never run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from auditlog.errors import ReadError, StoreError, UsageError
from auditlog.ledger.abandon import seal_abandoned
from auditlog.ledger.columns import TABLES
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.keys import Signer
from tests.attacks.ledger_simulator import LedgerSimulator
from tests.support import SNAPSHOT, Plan

S = LedgerSimulator
FAULTS = {
    "E05 a damaged header": (S.damage_header, "E_ENGINE", "ledger.duckdb"),
    "E05 a database that ends early": (S.truncate_database, "E_ENGINE", "ledger.duckdb"),
    "a missing database": (S.remove_database, "E_IO", "ledger.duckdb is missing"),
    "a missing manifest": (S.remove_manifest, "E_IO", "manifest.json"),
    "a manifest that is no JSON": (S.scramble_manifest, "E_FORMAT", "manifest.json"),
    "a custody log without its database": (S.remove_custody_database, "E_IO", "custody/ledger.duckdb is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_exit_3_with_its_file_and_no_accusation(
    fault: str, sim: LedgerSimulator, gradtrail: Callable[..., Any]
) -> None:
    damage, code, named = FAULTS[fault]
    damage(sim)
    before = {path: path.stat().st_mtime_ns for path in sim.run.rglob("*")}
    printed = gradtrail("verify", sim.run, "--trust", sim.signer.vkey)
    assert printed.code == 3
    assert code in printed.out
    assert named in printed.out
    assert "tamper" not in printed.out.lower()
    assert "Traceback" not in printed.out + printed.err
    assert {path: path.stat().st_mtime_ns for path in sim.run.rglob("*")} == before


@pytest.mark.parametrize("position", [0.3, 0.5, 2 / 3, 0.9])
def test_e05_a_flipped_byte_in_the_database_is_a_disk_fault_or_harmless(
    position: float, original: LedgerSimulator, sim: LedgerSimulator
) -> None:
    """The engine keeps a checksum for each block; where it notices, the verdict is withheld. Free space may differ."""
    sim.flip("ledger.duckdb", position)
    try:
        exit_code, said = verify_run(sim.run, sim.trust("key")).exit_code, ""
    except ReadError as error:
        exit_code, said = error.exit_code, f"{error} {error.advice()}"
    same = [_rows(original, table) == _rows(sim, table) for table in TABLES]
    assert exit_code == (0 if all(same) else 3)
    assert "tamper" not in said.lower()


def _rows(sim: LedgerSimulator, table: str) -> list[tuple[object, ...]] | None:
    try:
        return sim.query(f"SELECT * FROM {table} ORDER BY ALL")
    except duckdb.Error:
        return None


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


def test_e03_a_macro_named_like_the_catalogue_cannot_hide_a_table(sim: LedgerSimulator) -> None:
    """The engine lets a macro in the file shadow ``duckdb_tables()``; the reader must not ask the macro."""
    sim.sql(
        "CREATE TABLE smuggled (a INTEGER)",
        "CREATE MACRO duckdb_tables() AS TABLE SELECT 'main' AS schema_name, 'x' AS table_name, false AS internal",
        "CREATE MACRO duckdb_functions() AS TABLE SELECT '' AS function_name, true AS internal",
    )
    found = {finding.where for finding in verify_run(sim.run, sim.trust("key")).findings}
    assert {"smuggled", "duckdb_tables", "duckdb_functions"} <= found


def test_b07_missing_weights_are_named_as_not_checked(sim: LedgerSimulator) -> None:
    """Weights may lie elsewhere, so their absence is no accusation; but the verdict must not be silent about it."""
    (sim.run / SNAPSHOT).unlink()
    verdict = verify_run(sim.run, sim.trust("key"))
    assert any("snapshot" in line for line in verdict.not_checked)


# --- what the writer refuses -----------------------------------------------------------------------------------


@pytest.fixture
def crashed(tmp_path: Path) -> LedgerSimulator:
    return LedgerSimulator(tmp_path / "crashed", Plan(steps=24)).write(seal=False)


def test_t12_a_truncated_run_is_not_sealed_again(crashed: LedgerSimulator) -> None:
    """T12: the writer refuses to go on from a log that is shorter than its own heads."""
    crashed.truncate(145, checkpoints=True, head_files=False)
    before = crashed.query("SELECT count(*) FROM events")
    with pytest.raises(StoreError, match=r"E_TRUNC|E_LOST"):
        seal_abandoned(crashed.run, crashed.signer)
    assert crashed.query("SELECT count(*) FROM events") == before


def test_a_sealed_run_is_not_sealed_twice(sim: LedgerSimulator) -> None:
    with pytest.raises(UsageError, match="sealed already"):
        seal_abandoned(sim.run, sim.signer)


def test_a_wrong_key_cannot_seal(crashed: LedgerSimulator) -> None:
    with pytest.raises(StoreError, match="E_KEY"):
        seal_abandoned(crashed.run, Signer.generate("bank.example/audit"))
