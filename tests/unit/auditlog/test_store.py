"""The database: what goes in comes back bit for bit, in order; odd cells and objects are reported."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pytest
from numpy.typing import NDArray

from auditlog.errors import ReadError, StoreError
from auditlog.format.records import RECORD, Event, record_leaves
from auditlog.ledger.columns import TABLES
from auditlog.ledger.store import Store, StoredLog
from auditlog.trust.logview import StoredBatch, StoredEvent

NO_LEAVES: list[bytes] = []


def random_records(n: int, first_seq: int = 0, seed: int = 0) -> NDArray[np.void]:
    """Records of random bits: every value that a column can hold, NaN payloads and infinities included."""
    raw = np.random.default_rng(seed).integers(0, 256, n * RECORD.itemsize, dtype=np.uint8)
    rows = raw.view(RECORD).copy()
    rows["seq"] = np.arange(first_seq, first_seq + n)
    return rows


def never(column: str, row: int, what: str) -> None:
    raise AssertionError(f"{column} {what} in {row}")


def test_random_bits_come_back_unchanged_and_in_order(tmp_path: Path) -> None:
    rows = random_records(3_000)
    rows["loss"][:4] = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    leaves = record_leaves(rows)
    event = Event(seq=3_000, kind=2, ts_us=-5, body=b'{"a":1}')
    store = Store.create(tmp_path / "ledger.duckdb")
    store.append_batch(rows[:1000], leaves[:1000], [], StoredBatch(0, 0, 1000, b"c" * 32))
    later = slice(1000, 3000)
    store.append_batch(
        rows[later], leaves[later], [StoredEvent(event, event.leaf())], StoredBatch(1, 1000, 2001, b"d" * 32)
    )
    store.append_note(3_001, b"note")
    assert store.size() == 3_001
    store.close()
    assert not (tmp_path / "ledger.duckdb.wal").exists()
    with StoredLog(tmp_path / "ledger.duckdb") as log:
        chunks = list(log.records(never))
        assert np.concatenate([c.rows for c in chunks]).tobytes() == rows.tobytes()
        assert [leaf for c in chunks for leaf in c.leaves] == leaves
        assert [s.event for s in log.events(never)] == [event]
        assert log.batches(never) == [StoredBatch(0, 0, 1000, b"c" * 32), StoredBatch(1, 1000, 2001, b"d" * 32)]
        assert log.notes(never) == [(3_001, b"note")]
        assert log.catalogue() == []


def test_order_is_seq_whatever_the_order_on_disk(tmp_path: Path) -> None:
    rows = random_records(50)
    shuffled = rows[np.random.default_rng(1).permutation(50)]
    store = Store.create(tmp_path / "ledger.duckdb")
    store.append_batch(shuffled, record_leaves(shuffled), [], StoredBatch(0, 0, 50, b"c" * 32))
    store.close()
    with StoredLog(tmp_path / "ledger.duckdb") as log:
        assert np.concatenate([c.rows for c in log.records(never)]).tobytes() == rows.tobytes()


def test_the_file_stays_readable_for_the_previous_major_version(tmp_path: Path) -> None:
    """The storage version is kept on every later open; DuckDB 1.5 reads version 68 and below."""
    path = tmp_path / "ledger.duckdb"
    Store.create(path).close()
    Store(path).close()
    assert int.from_bytes(path.read_bytes()[12:20], "little") <= 68


def test_a_batch_is_all_or_nothing(tmp_path: Path) -> None:
    rows = random_records(10)
    store = Store.create(tmp_path / "ledger.duckdb")
    store._con.execute("DROP TABLE batches")
    with pytest.raises(StoreError):
        store.append_batch(rows, record_leaves(rows), [], StoredBatch(0, 0, 10, b"c" * 32))
    assert store.size() == 0
    store.close()


def test_reading_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(ReadError):
        StoredLog(tmp_path / "missing.duckdb")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "ledger.duckdb").write_bytes(b"something")
    with pytest.raises(StoreError, match="exists"):
        Store.create(tmp_path / "ledger.duckdb")
    with pytest.raises(StoreError):
        Store(tmp_path / "ledger.duckdb")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = random_records(5)
    store = Store.create(tmp_path / "ledger.duckdb")
    event = Event(seq=5, kind=2, ts_us=0, body=b"{}")
    store.append_batch(rows, record_leaves(rows), [StoredEvent(event, event.leaf())], StoredBatch(0, 0, 6, b"c" * 32))
    store.append_note(6, b"note")
    store.close()
    return tmp_path / "ledger.duckdb"


def run_sql(path: Path, *statements: str) -> None:
    with duckdb.connect(str(path)) as con:
        for statement in statements:
            con.execute(statement)


def odd_cells(path: Path) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []

    def report(column: str, row: int, what: str) -> None:
        found.append((column, row, what))

    with StoredLog(path) as log:
        for _ in log.records(report):
            pass
        for _ in log.events(report):
            pass
        log.batches(report)
        log.notes(report)
    return found


@pytest.mark.parametrize(("table", "column"), [(t, c) for t in TABLES for c in TABLES[t] if c != "seq"])
def test_null_in_any_column_is_reported_with_its_entry(table: str, column: str, path: Path) -> None:
    where = "WHERE seq = 3" if table == "records" else ""
    run_sql(path, f"UPDATE {table} SET {column} = NULL {where}")
    expected_row = {"records": 3, "events": 5}.get(table, 0)
    assert odd_cells(path) == [(column, expected_row, "is NULL")]


def test_a_missing_seq_is_reported(path: Path) -> None:
    run_sql(path, "UPDATE records SET seq = NULL WHERE seq = 3")
    assert [(column, what) for column, _, what in odd_cells(path)] == [("seq", "is NULL")]


def test_a_digest_of_another_length_is_reported(path: Path) -> None:
    run_sql(path, "UPDATE records SET leaf = 'abc'::BLOB WHERE seq = 2")
    assert odd_cells(path) == [("leaf", 2, "has 3 bytes, expected 32")]


def test_a_number_that_does_not_fit_a_widened_column_is_reported(path: Path) -> None:
    run_sql(path, "ALTER TABLE records ALTER n_tokens TYPE DOUBLE", "UPDATE records SET n_tokens = 0.5 WHERE seq = 1")
    assert odd_cells(path) == [("n_tokens", 1, "is not a uinteger")]


SCHEMA_CHANGES = {
    "x": "CREATE TABLE x (a INTEGER)",
    "v": "CREATE VIEW v AS SELECT 1 AS one",
    "m": "CREATE MACRO m(a) AS a",
    "tm": "CREATE MACRO tm() AS TABLE SELECT 1 AS one",
    "s": "CREATE SCHEMA s",
    "q": "CREATE SEQUENCE q",
    "i": "CREATE INDEX i ON batches (batch)",
    "ty": "CREATE TYPE ty AS ENUM ('a')",
    "records.extra": "ALTER TABLE records ADD COLUMN extra INTEGER",
    "records.loss": "ALTER TABLE records DROP COLUMN loss",
    "events.body": "ALTER TABLE events ALTER body TYPE VARCHAR USING 'x'",
    "batches": "DROP TABLE batches",
    "events.kind": "ALTER TABLE events ALTER kind SET DEFAULT 7",
}


@pytest.mark.parametrize("name", SCHEMA_CHANGES)
def test_every_foreign_object_is_named(name: str, path: Path) -> None:
    run_sql(path, SCHEMA_CHANGES[name])
    with StoredLog(path) as log:
        found = log.catalogue()
    assert {finding.code for finding in found} == {"E_SCHEMA"}
    assert name in {finding.where for finding in found}
    odd_cells(path)  # what is left can still be read


def test_a_trigger_is_named(path: Path) -> None:
    """Only files of storage version 2.0 hold triggers, so the attacker first copies everything into one."""
    copy = path.with_name("copy.duckdb")
    with duckdb.connect() as con:
        con.execute(f"ATTACH '{path}' AS old (READ_ONLY)")
        con.execute(f"ATTACH '{copy}' AS new (STORAGE_VERSION 'v2.0.0')")
        con.execute("COPY FROM DATABASE old TO new")
        con.execute("USE new")
        con.execute("CREATE TRIGGER tr AFTER INSERT ON batches DELETE FROM checkpoints")
    copy.replace(path)
    with StoredLog(path) as log:
        assert [(finding.code, finding.where) for finding in log.catalogue()] == [("E_SCHEMA", "tr")]
