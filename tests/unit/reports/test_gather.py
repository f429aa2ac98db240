"""What the recorder said, over all processes of a run, becomes facts, lists and exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditlog.format.records import EventKind
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.ranks import rank_folder, rank_head
from auditlog.trust.ranks import rank_origin
from reports.art26 import assemble
from reports.declarations import Declarations
from reports.errors import UnverifiedEvidenceError
from reports.evidence import Evidence
from reports.gather import gather
from reports.obligations import load_register
from reports.render import render_html
from reports.sections.subject import Subject
from tests.support import LedgerSimulator, Plan, dataset_notice, make_manifest, simulated_steps, step_on, write_sources

SELF_CHECK = {"samples": 3, "modules": [2, 2], "oracle_error": 1e-7, "sum_error": 1e-8}


def test_notices_become_facts_lists_and_exceptions(tmp_path: Path) -> None:
    """Two processes. Each says what its self-check found and what its dataset lacked; one had trouble with its log."""
    sim = LedgerSimulator(tmp_path)
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    base = make_manifest(data, sim.signer, sim.plan).model_copy(update={"world_size": 2})
    ledgers = []
    for rank in range(2):
        update = {"rank": rank, "origin": rank_origin(base.origin, rank)}
        ledger = RunLedger.create(rank_folder(sim.run, rank), base.model_copy(update=update), data, sim.signer)
        ledger.append_event(EventKind.NOTICE, {"notice": "self-check", **SELF_CHECK, "confirmed": rank == 0})
        ledger.append_event(EventKind.NOTICE, dataset_notice([3, 14]))
        ledger.append_step(step_on(data, 1, [rank, 4]))
        ledgers.append(ledger)
    ledgers[1].append_event(EventKind.NOTICE, {"notice": "log trouble", "failures": 2})
    ledgers[1].seal({})
    ledgers[0].seal({"ranks": [rank_head(sim.run, 1)]})
    evidence = gather(sim.run, sim.trust("key"))
    assert [str(check.ref) for check in evidence.self_checks] == ["run log, entry 1", "run log of rank 1, entry 1"]
    assert [(str(notice.ref), notice.text) for notice in evidence.notices] == [
        ("run log of rank 1, entry 6", "failures: 2; notice: log trouble")
    ]
    lists = {facts.fate.name: (facts.count, facts.by_source) for facts in evidence.samples}
    assert lists == {"USED": (3, (3, 0)), "DROPPED": (2, (1, 1)), "NOT_REACHED": (16, (8, 8))}
    assert evidence.samples[1].first == ((0, 3), (1, 2))
    assert evidence.processes == 2
    assert Evidence.model_validate_json(evidence.model_dump_json()) == evidence
    subject = Subject(evidence, Declarations(), load_register(), "r-1", "0" * 64, 0)
    html = render_html(assemble(subject))
    assert "Notice of the recorder (run log of rank 1, entry 6): failures: 2" in html
    assert "Self-check before the first step (run log of rank 1, entry 1): 3 samples compared" in html
    assert "2; each kept its own log" in html


def test_the_evidence_names_a_thousand_rows_of_each_list(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path, Plan(rows_per_file=(600, 900)))
    ledger, data = sim.start()
    ledger.append_step(step_on(data, 1, [0]))
    ledger.seal({})
    _, unused = gather(sim.run, sim.trust("key")).samples
    assert (unused.fate.name, unused.count, unused.by_source) == ("UNUSED", 1_499, (599, 900))
    assert (len(unused.first), unused.first[-1]) == (1_000, (1, 400))


def test_a_run_whose_loss_was_accepted_is_incomplete_and_yields_no_evidence(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path, Plan(steps=6))
    ledger, data = sim.start()
    steps = list(simulated_steps(data, sim.plan))
    ledger.append_step(steps[0])
    ledger.flush()
    ledger.close_unsealed()
    ledger = RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor, accept_loss=True)
    ledger.begin_attempt(5)
    ledger.append_step(steps[5])
    ledger.seal({})
    with pytest.raises(UnverifiedEvidenceError, match=r"INCOMPLETE.*steps 2 to 5 went into it and are not in the log"):
        gather(sim.run, sim.trust("key"))
