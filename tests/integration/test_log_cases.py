"""Public failures of comparable software that concern the log, each set up here: what a verifier and a writer must do.

Cases of the same families about source data (links, renamed and packed files) are in ``test_data_cases``; lost and
damaged write-ahead logs after a real kill are in ``test_crash``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from auditlog.errors import FormatError, ReadError, StoreError
from auditlog.format.records import EventKind
from auditlog.ledger.custody import CustodyLog
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Revocation, Trust
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import Verdict, unreadable
from tests.attacks.ledger_simulator import LedgerSimulator
from tests.support import Plan, simulated_steps, step_on, write_sources

SMALL = Plan(steps=12, per_step=4, steps_per_head=3)
WAL = "ledger.duckdb.wal"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    return LedgerSimulator(tmp_path_factory.mktemp("cases") / "original", SMALL).write(custody=False)


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    return original.copy_to(tmp_path / "copy")


def trusting(sim: LedgerSimulator) -> Trust:
    return Trust((sim.signer.vkey,))


def errors(verdict: Verdict) -> set[str]:
    return {finding.code for finding in verdict.findings if finding.level == "error"}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Faulty:
    """A database connection that fails at one statement, before or after it has taken effect."""

    def __init__(self, connection: Any, statement: str, error: Exception, *, after: bool) -> None:
        self._connection, self._statement, self._error, self._after = connection, statement, error, after

    def execute(self, sql: str, *arguments: Any) -> Any:
        if sql == self._statement and not self._after:
            raise self._error
        done = self._connection.execute(sql, *arguments)
        if sql == self._statement:
            raise self._error
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def fail_once(ledger: RunLedger, statement: str, error: Exception, *, after: bool = False) -> None:
    """Have the ledger's database fail at ``statement``; a connection that is made anew works again."""
    store = ledger._log._store
    store._connection = Faulty(store._connection, statement, error, after=after)  # type: ignore[assignment]


@pytest.fixture
def crashed(tmp_path: Path) -> Iterator[LedgerSimulator]:
    """A copy of a run's folder as it is on the disk while the run goes on, which is what a crash leaves."""
    sim = LedgerSimulator(tmp_path / "running", SMALL)
    ledger, data = sim.start()
    for entry in list(simulated_steps(data, SMALL))[:6]:
        ledger.append_step(entry)
        ledger.flush()
    copy = LedgerSimulator(tmp_path / "crashed", SMALL, signer=sim.signer)
    copy.folder.mkdir()
    shutil.copytree(sim.run, copy.run)
    shutil.copytree(sim.auditor, copy.auditor)
    shutil.copytree(sim.data_folder, copy.data_folder)
    assert (copy.run / WAL).stat().st_size > 0
    yield copy
    ledger.close_unsealed()


def resumed(sim: LedgerSimulator) -> RunLedger:
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    return RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor)


# --- the store -------------------------------------------------------------------------------------------------


def test_B02_a_database_copied_without_its_write_ahead_log_is_behind_its_heads(crashed: LedgerSimulator) -> None:
    assert verify_run(crashed.run, replace(trusting(crashed), allow_open=True)).exit_code == 0
    (crashed.run / WAL).unlink()
    verdict = verify_run(crashed.run, trusting(crashed))
    assert verdict.exit_code == 5
    assert "E_TRUNC" in errors(verdict)
    assert any(WAL in finding.hint for finding in verdict.findings)
    assert verify_run(crashed.run, replace(trusting(crashed), allow_open=True)).exit_code == 5


@pytest.mark.parametrize("position", [0.3, 0.6])
def test_B03_a_flipped_byte_in_the_write_ahead_log_is_no_verdict_and_deletes_nothing(
    position: float, crashed: LedgerSimulator
) -> None:
    crashed.flip(WAL, position)
    before = contents(crashed.run)
    try:
        said, exit_code = "ledger.duckdb", verify_run(crashed.run, trusting(crashed)).exit_code
    except ReadError as error:
        said, exit_code = f"{error} {error.advice()}", error.exit_code
    with pytest.raises(ReadError, match=r"ledger\.duckdb") as caught:
        resumed(crashed)
    assert exit_code in (3, 5)  # the engine takes a log that ends early for one that ends there
    assert "ledger.duckdb" in said
    assert "tamper" not in f"{said} {caught.value} {caught.value.advice()}".lower()
    assert contents(crashed.run) == before


FULL_DISK = duckdb.IOException("IO Error: Could not write file: No space left on device")


@pytest.mark.parametrize("statement", ["COMMIT", "CHECKPOINT"])
def test_B05_a_full_disk_is_one_clear_error_and_loses_nothing(statement: str, tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "full", SMALL)
    ledger, data = sim.start()
    steps = list(simulated_steps(data, SMALL))
    for entry in steps[:4]:
        ledger.append_step(entry)
    ledger.flush()
    acknowledged = ledger.size
    ledger.append_step(steps[4])
    fail_once(ledger, statement, FULL_DISK)
    with pytest.raises(StoreError, match=r"cannot write .*ledger\.duckdb.*No space left") as caught:
        ledger.flush() if statement == "COMMIT" else ledger.close_unsealed()
    assert "Free some space" in caught.value.advice()
    if statement == "COMMIT":  # there is room again
        ledger.seal({})
        verdict = verify_run(sim.run, trusting(sim))
        assert (verdict.exit_code, verdict.steps) == (0, 5), verdict.findings
    else:  # close failed: what was acknowledged is there all the same
        verdict = verify_run(sim.run, replace(trusting(sim), allow_open=True))
        assert (verdict.exit_code, verdict.entries >= acknowledged) == (0, True), verdict.findings


@pytest.mark.parametrize("landed", [False, True], ids=["before it took effect", "after it took effect"])
def test_B06_a_fatal_error_of_the_engine_loses_and_doubles_nothing(landed: bool, tmp_path: Path) -> None:
    """The engine checkpoints by itself within a commit; the database object is unusable afterwards."""
    sim = LedgerSimulator(tmp_path / "fatal", SMALL)
    ledger, data = sim.start()
    steps = list(simulated_steps(data, SMALL))
    for entry in steps[:3]:
        ledger.append_step(entry)
    fail_once(ledger, "COMMIT", duckdb.FatalException("FATAL Error: Failed to checkpoint"), after=landed)
    with pytest.raises(StoreError, match="FATAL"):
        ledger.flush()
    for entry in steps[3:]:
        ledger.append_step(entry)
    ledger.seal({})
    verdict = verify_run(sim.run, trusting(sim))
    assert (verdict.exit_code, verdict.steps, verdict.records) == (0, 12, 48), verdict.findings


def test_B08_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Three times the records take no more memory, writing and verifying; the engine's limit is set by us."""
    sim = LedgerSimulator(tmp_path / "long", Plan(steps=1, dim=256, rows_per_file=(30, 20)))
    ledger, data = sim.start()
    (limit,) = ledger._log._store._con.execute("SELECT current_setting('memory_limit')").fetchall()[0]
    assert limit == "488.2 MiB"  # 512 MB
    template = next(simulated_steps(data, replace(sim.plan, per_step=1_000)))
    used = []
    for step in range(1, 13):
        ledger.append_step(replace(template, body=template.body | {"step": step}, records=template.records.copy()))
        template.records["step"] = step + 1
        ledger.flush()
        used.append(resident_mb())
    ledger.seal({})
    assert used[-1] - used[3] < 64, used
    before = resident_mb()
    verdict = verify_run(sim.run, trusting(sim))
    assert (verdict.exit_code, verdict.records) == (0, 12_000), verdict.findings
    assert resident_mb() - before < 64


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def test_B09_the_zone_of_the_machine_changes_no_verdict(
    original: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = []
    try:
        for zone in ("UTC", "Asia/Yekaterinburg", "America/New_York"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            verdicts.append(verify_run(original.run, trusting(original)).to_json())
            with RunReader.open(original.run) as reader:
                verdicts[-1]["times"] = reader.records()["ts_us"].tolist()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert verdicts[0]["exit_code"] == 0
    assert verdicts[1:] == verdicts[:1] * 2


def test_B11_rows_are_read_in_their_order_wherever_they_lie_in_the_file(sim: LedgerSimulator) -> None:
    """Rows that were deleted and put back lie elsewhere; order is ``seq``, and the first bad one is named exactly."""
    sim.sql(
        "CREATE TEMP TABLE moved AS SELECT * FROM records WHERE seq % 3 = 0",
        "DELETE FROM records WHERE seq % 3 = 0",
        "INSERT INTO records SELECT * FROM moved ORDER BY hash(seq)",
    )
    assert verify_run(sim.run, trusting(sim)).exit_code == 0
    with RunReader.open(sim.run) as reader:
        assert (np.diff(reader.records()["seq"].astype(np.int64)) > 0).all()
    sim.sql("UPDATE records SET n_tokens = n_tokens + 1 WHERE seq IN (33, 27)")
    found = [f for f in verify_run(sim.run, trusting(sim)).findings if f.code == "E_LEAF"]
    assert [finding.seq for finding in found] == [27, 33]


def test_B12_a_file_of_a_newer_engine_names_both_versions(sim: LedgerSimulator) -> None:
    path = sim.run / "ledger.duckdb"
    content = bytearray(path.read_bytes())
    assert content[8:12] == b"DUCK"
    assert content[:8] == header_checksum(content)
    content[12:20] = (9_999).to_bytes(8, "little")
    content[:8] = header_checksum(content)
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        verify_run(sim.run, trusting(sim))
    said = f"{caught.value} {caught.value.advice()}"
    assert all(text in said for text in ("ledger.duckdb", "9999", f"installed: {duckdb.__version__}", "Install"))
    assert unreadable(sim.run, caught.value).code == "E_FORMAT"


def header_checksum(content: bytes) -> bytes:
    """Return the engine's checksum of the first header block: a product for each word, all joined by xor."""
    words = np.frombuffer(content, "<u8", 511, 8)
    products = words * np.uint64(0xBF58476D1CE4E5B9)
    return int(np.bitwise_xor.reduce(products) ^ np.uint64(5381)).to_bytes(8, "little")


# --- hashes, keys, time ----------------------------------------------------------------------------------------


def wipe(sim: LedgerSimulator) -> None:
    sim.empty()


def unhash(sim: LedgerSimulator) -> None:
    sim.sql("UPDATE records SET leaf = NULL", "UPDATE events SET leaf = NULL")


def other_file(sim: LedgerSimulator) -> None:
    (sim.run / "ledger.duckdb").write_bytes(b"SQLite format 3\0" + bytes(20_000))


def remove(sim: LedgerSimulator) -> None:
    shutil.rmtree(sim.run)


def test_C02_wiped_missing_unhashed_and_foreign_are_four_verdicts(original: LedgerSimulator, tmp_path: Path) -> None:
    said = {}
    for spoil in (wipe, remove, unhash, other_file):
        sim = original.copy_to(tmp_path / spoil.__name__)
        spoil(sim)
        before = contents(sim.folder)
        try:
            verdict = verify_run(sim.run, trusting(sim))
            entries, exit_code = verdict.entries, verdict.exit_code
            first = verdict.findings[0]
        except ReadError as error:
            entries, exit_code, first = 0, error.exit_code, unreadable(sim.run, error)
        said[spoil.__name__] = (exit_code, first.code, entries)
        assert contents(sim.folder) == before
    assert said == {
        "wipe": (5, "E_UNSEALED", 0),
        "remove": (3, "E_IO", 0),
        "unhash": (4, "E_ENCODING", original.entries()),
        "other_file": (3, "E_ENGINE", 0),
    }


def test_C03_what_is_hashed_is_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock with nanoseconds, a loss of -0.0 and values that no decimal writes exactly."""
    monkeypatch.setattr("auditlog.ledger.appender.time.time_ns", lambda: 1_764_550_000_123_456_789)
    sim = LedgerSimulator(tmp_path / "run", SMALL)
    ledger, data = sim.start()
    entry = step_on(data, 1, [0, 1, 2])
    entry.records["loss"] = [-0.0, 0.1, np.float32(1) / 3]
    ledger.append_step(entry)
    ledger.seal({})
    assert verify_run(sim.run, trusting(sim)).exit_code == 0
    with RunReader.open(sim.run) as reader:
        records = reader.records()
    assert set(records["ts_us"].tolist()) == {1_764_550_000_123_456}
    assert records["loss"].view(np.uint32).tolist() == [0x80000000, 0x3DCCCCCD, 0x3EAAAAAB]


def test_C05_a_key_that_is_missing_or_revoked_is_not_tampering(original: LedgerSimulator, tmp_path: Path) -> None:
    """The run is by one key, what was done later by another; the verifier holds both, one, or knows one as revoked."""
    sim, later = original.copy_to(tmp_path / "copy"), Signer.generate("bank.example/audit-2027")
    CustodyLog.open(sim.run, later).append(EventKind.QUERY, {"n": 1})
    both = Trust((sim.signer.vkey, later.vkey))
    verdicts = {
        "both": verify_run(sim.run, both),
        "first only": verify_run(sim.run, Trust((sim.signer.vkey,))),
        "second only": verify_run(sim.run, Trust((later.vkey,))),
        "first revoked": verify_run(sim.run, replace(both, revocations=(Revocation(sim.signer.vkey.fingerprint, 20),))),
    }
    assert {name: verdict.exit_code for name, verdict in verdicts.items()} == {
        "both": 0,
        "first only": 6,
        "second only": 6,
        "first revoked": 6,
    }
    assert errors(verdicts["first only"]) == {"E_KEY"}
    assert errors(verdicts["first revoked"]) == {"E_KEYREV"}
    for name, key in (("first only", later), ("second only", sim.signer)):
        said = " ".join(finding.message for finding in verdicts[name].findings)
        assert f"cannot be checked: key {key.name}" in said
    everything = " ".join(f.message for verdict in verdicts.values() for f in verdict.findings)
    assert not any(word in everything for word in ("tamper", "changed after it was logged", "does not verify"))
    sim.sql("UPDATE records SET loss = 0 WHERE seq = 2")
    assert verify_run(sim.run, both).exit_code == 4


def test_C06_numbers_have_one_spelling(tmp_path: Path) -> None:
    """RFC 8785 spells them as ECMAScript does; written out by hand here, for an independent reader to compare."""
    sim = LedgerSimulator(tmp_path / "run", SMALL)
    ledger, _ = sim.start()
    numbers = [1e-7, 0.00001, 1.0, -0.0, 1e20, 1e21, 5e-324, 2**53 - 1, float(2**60)]
    seq = ledger.append_event(EventKind.NOTICE, {"numbers": numbers})
    for refused in (2**53 + 1, float("nan"), float("inf")):
        with pytest.raises(FormatError):
            ledger.append_event(EventKind.NOTICE, {"number": refused})
    ledger.seal({})
    assert verify_run(sim.run, trusting(sim)).exit_code == 0
    with RunReader.open(sim.run) as reader:
        (body,) = [event.body for event in reader.events() if event.seq == seq]
    spelled = "1e-7,0.00001,1,0,100000000000000000000,1e+21,5e-324,9007199254740991,1152921504606847000"
    assert body == f'{{"numbers":[{spelled}]}}'.encode()


HOUR_US = 3_600_000_000
YEAR_2100_US = 4_102_444_800_000_000


def test_C08_a_clock_that_steps_is_a_note_and_no_time_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back by an hour, to 1970 and to 2100: order is ``seq``, and each time stands as the clock gave it."""
    now = [1_764_550_000_000_000]
    for module in ("appender", "steps"):
        monkeypatch.setattr(f"auditlog.ledger.{module}.now_us", lambda: now[0])
    sim = LedgerSimulator(tmp_path / "run", SMALL)
    ledger, data = sim.start()
    times = [now[0], now[0] - HOUR_US, 0, YEAR_2100_US]
    for entry, us in zip(simulated_steps(data, SMALL), times, strict=False):
        now[0] = us
        ledger.append_step(entry)
    ledger.seal({})
    verdict = verify_run(sim.run, trusting(sim))
    assert verdict.exit_code == 0
    (note,) = verdict.findings
    assert (note.code, note.level, note.seq) == ("N_CLOCK", "note", 1 + SMALL.per_step + 1)
    assert "goes back by 3,600 s" in note.message
    with RunReader.open(sim.run) as reader:
        assert reader.records()["ts_us"].tolist() == [us for us in times for _ in range(SMALL.per_step)]


def test_C09_a_batch_that_is_sent_again_stands_there_once(tmp_path: Path) -> None:
    """The engine fails after the commit took effect, and the run is resumed at a step that it had logged already."""
    sim = LedgerSimulator(tmp_path / "run", SMALL)
    ledger, data = sim.start()
    steps = list(simulated_steps(data, SMALL))
    for entry in steps[:2]:
        ledger.append_step(entry)
    fail_once(ledger, "COMMIT", duckdb.IOException("IO Error: lost the answer"), after=True)
    with pytest.raises(StoreError):
        ledger.flush()
    ledger.flush()
    ledger.begin_attempt(1)  # the last step again
    for entry in steps[1:3]:
        ledger.append_step(entry)
    ledger.seal({})
    verdict = verify_run(sim.run, trusting(sim))
    assert (verdict.exit_code, verdict.records, verdict.steps) == (0, 4 * SMALL.per_step, 3), verdict.findings


def test_C09_a_doubled_log_is_a_finding_even_if_it_was_signed_like_that(sim: LedgerSimulator) -> None:
    sim.sql("INSERT INTO records SELECT * FROM records WHERE seq = 7")
    sim.rewrite_unsigned()
    assert sim.session is not None
    sim.sign_anew(sim.session)
    verdict = verify_run(sim.run, trusting(sim))
    assert "E_SEQ" in errors(verdict)
    assert any("was logged twice" in finding.message for finding in verdict.findings)
    assert "E_LEAF" not in errors(verdict)
