"""The custody log: starts from the run's final note, one signed checkpoint per act, erasable results."""

from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import pytest

from auditlog.errors import FormatError, ReadError, StoreError, UsageError
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger.custody import CustodyLog, custody_head, read_custody, read_result
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from tests.support import LedgerSimulator, Plan

RESULT = {"schema": "test", "question": {"prompt": "Ä?"}, "top": [1.5, None]}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    """A sealed run with two acts in its custody log."""
    sim = LedgerSimulator(tmp_path_factory.mktemp("custody") / "original", Plan(steps=2)).write()
    custody = CustodyLog.open(sim.run, sim.signer)
    result = custody.write_result("query-1", RESULT)
    custody.append(EventKind.QUERY, {"result": result, "records": 16})
    CustodyLog.open(sim.run, sim.signer).append(EventKind.REPORT, {"pdf_sha256": "00" * 32})
    return sim


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    return original.copy_to(tmp_path / "copy")


def codes(sim: LedgerSimulator, trust: Trust | None = None) -> tuple[set[str], int]:
    verdict = verify_run(sim.run, trust or sim.trust("head"))
    return {f.code for f in verdict.findings if f.level == "error"}, verdict.exit_code


def test_acts_follow_the_runs_final_note_and_verify(original: LedgerSimulator) -> None:
    opened, query, report = read_custody(original.run)
    assert opened.body == original.head_files()[-1].read_bytes()
    assert [e.kind for e in (opened, query, report)] == [
        EventKind.CUSTODY_OPENED,
        EventKind.QUERY,
        EventKind.REPORT,
    ]
    assert codes(original) == (set(), 0)
    assert any("custody" in check.name for check in verify_run(original.run, original.trust("head")).checks)
    head = custody_head(original.run)
    assert head is not None
    assert (head.checkpoint().origin, head.checkpoint().size) == (f"{original.plan.origin}/custody", 3)
    assert head.signed_by(original.signer.vkey)


def test_the_run_itself_is_not_touched(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=2)).write()
    before = {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()}
    CustodyLog.open(sim.run, sim.signer).append(EventKind.QUERY, {"n": 1})
    assert {path: path.read_bytes() for path in before} == before
    assert read_custody(sim.run)[1].json() == {"n": 1}


def test_a_run_without_acts_has_no_custody_log(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=2)).write()
    assert read_custody(sim.run) == []
    assert custody_head(sim.run) is None
    assert not (sim.run / "custody").exists()


def test_nothing_is_logged_about_an_unsealed_run(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=2)).write(seal=False)
    with pytest.raises(UsageError, match="not sealed"):
        CustodyLog.open(sim.run, sim.signer)
    assert not (sim.run / "custody").exists()


def test_results_are_read_back_and_compared_with_the_log(original: LedgerSimulator) -> None:
    assert read_result(original.run, "query-1") == RESULT
    with pytest.raises(ReadError, match="no act"):
        read_result(original.run, "query-2")


def test_d09_an_edited_result_is_found(sim: LedgerSimulator) -> None:
    path = sim.run / "custody/results/query-1.json"
    path.write_bytes(path.read_bytes().replace(b"1.5", b"2.5"))
    with pytest.raises(FormatError, match=r"results/query-1\.json is not what entry 1 committed to"):
        read_result(sim.run, "query-1")
    assert codes(sim) == ({"E_EVENT"}, 4)


def test_a_missing_result_is_incomplete_not_an_edit(sim: LedgerSimulator) -> None:
    (sim.run / "custody/results/query-1.json").unlink()
    with pytest.raises(ReadError):
        read_result(sim.run, "query-1")
    assert codes(sim) == ({"E_ERASED"}, 5)


def test_the_commitment_says_nothing_without_its_salt(original: LedgerSimulator) -> None:
    """Two runs with one result have different commitments, so a guess cannot be tested."""
    custody = CustodyLog.open(original.run, original.signer)
    one, two = custody.write_result("a", RESULT), custody.write_result("b", RESULT)
    assert one["commitment"] != two["commitment"]
    assert (original.run / "custody/results/a.salt").stat().st_mode & 0o077 == 0


def test_result_names_cannot_leave_the_folder_or_replace_one_another(original: LedgerSimulator) -> None:
    custody = CustodyLog.open(original.run, original.signer)
    for name in ("../escape", "", "A B", "query-1"):
        with pytest.raises(UsageError):
            custody.write_result(name, RESULT)


def test_a_changed_act_is_found(sim: LedgerSimulator) -> None:
    with duckdb.connect(str(sim.run / "custody/ledger.duckdb")) as con:
        con.execute("UPDATE events SET body = '{\"records\":17}'::BLOB WHERE seq = 1")
    found, exit_code = codes(sim)
    assert found & {"E_EVENT", "E_LEAF"}
    assert exit_code == 4


def test_a_custody_log_of_another_run_is_not_this_ones(sim: LedgerSimulator, tmp_path: Path) -> None:
    other = LedgerSimulator(tmp_path / "other", Plan(steps=2, run_id="x", origin="other"), signer=sim.signer).write()
    CustodyLog.open(other.run, other.signer).append(EventKind.QUERY, {})
    shutil.rmtree(sim.run / "custody")
    shutil.copytree(other.run / "custody", sim.run / "custody")
    assert codes(sim)[1] in (4, 6)


def test_a_cut_tail_shows_against_a_kept_custody_head_only(sim: LedgerSimulator) -> None:
    kept = custody_head(sim.run)
    assert kept is not None
    with duckdb.connect(str(sim.run / "custody/ledger.duckdb")) as con:
        con.execute("DELETE FROM events WHERE seq = 2")
        con.execute("DELETE FROM batches WHERE first_seq = 2")
        con.execute("DELETE FROM checkpoints WHERE size = 3")
    (sim.run / "custody/heads/00000003.note").unlink()
    assert codes(sim) == (set(), 0)
    trust = sim.trust("head")
    assert codes(sim, Trust(trust.vkeys, (*trust.heads, kept), trust.origin)) == ({"E_ROLLBACK"}, 5)


def test_nothing_is_appended_to_a_custody_log_that_was_cut(sim: LedgerSimulator) -> None:
    with duckdb.connect(str(sim.run / "custody/ledger.duckdb")) as con:
        con.execute("DELETE FROM events WHERE seq = 2")
    with pytest.raises(StoreError, match="checkpoint was signed over 3"):
        CustodyLog.open(sim.run, sim.signer).append(EventKind.QUERY, {})


def test_an_auditor_may_act_with_a_key_of_their_own(sim: LedgerSimulator) -> None:
    auditor = Signer.generate("auditor.example")
    CustodyLog.open(sim.run, auditor).append(EventKind.QUERY, {"n": 2})
    trust = sim.trust("head")
    assert codes(sim, Trust((*trust.vkeys, auditor.vkey), trust.heads, trust.origin)) == (set(), 0)
    assert codes(sim)[1] == 6  # and whoever did not pin that key is told so


def test_a_head_alone_anchors_a_run_with_a_custody_log(sim: LedgerSimulator) -> None:
    head = Note.parse(sim.kept_heads()[-1].read_bytes())
    assert codes(sim, Trust(heads=(head,))) == (set(), 0)
