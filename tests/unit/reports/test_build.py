"""From a real run folder to a logged PDF: only what verified, every number as the log has it, nothing unlogged."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from pypdf import PdfReader
from typer.testing import CliRunner

from auditlog.errors import UsageError
from auditlog.format.digests import sha256
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.ledger.custody import CustodyLog, custody_head, read_custody
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from reports.art26 import assemble
from reports.build import _attachments, build_report
from reports.cli import app
from reports.declarations import Declarations
from reports.errors import RenderError, UnverifiedEvidenceError
from reports.evidence import Evidence
from reports.gather import _records, gather
from reports.obligations import load_register
from reports.pdf import write_pdf
from reports.render import render_html
from reports.sections.subject import Subject
from tests.support import LedgerSimulator, Plan, simulated_steps
from tests.unit.reports.report_samples import influence_document
from tests.unit.reports.test_document import forbidden_in

EPOCH = "1796083800"


def add_query(sim: LedgerSimulator, name: str = "query-1") -> None:
    custody = CustodyLog.open(sim.run, sim.signer)
    custody.append(EventKind.QUERY, {"result": custody.write_result(name, influence_document())})


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    sim = LedgerSimulator(tmp_path_factory.mktemp("sealed")).write()
    add_query(sim)
    return sim


@pytest.fixture
def sim(sealed: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    return sealed.copy_to(tmp_path / "copy")


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)


# --- what may be reported -------------------------------------------------------------------------------------


def test_counts_equal_those_of_the_database(sealed: LedgerSimulator) -> None:
    evidence = gather(sealed.run, sealed.trust("head"))
    ((records, tokens, first, last),) = sealed.query(
        "SELECT count(*), sum(n_tokens), min(ts_us), max(ts_us) FROM records"
    )
    assert (evidence.records.records, evidence.records.tokens) == (records, tokens)
    assert (evidence.records.first_us, evidence.records.last_us) == (first, last)
    for source in evidence.sources:
        ((uses, tokens),) = sealed.query(
            f"SELECT count(*), sum(n_tokens) FROM records WHERE source_id = {source.source_id}"
        )
        assert (source.uses, source.tokens) == (uses, tokens)
    used = evidence.samples[0]
    counted = sealed.query("SELECT count(DISTINCT row) FROM records GROUP BY source_id ORDER BY source_id")
    assert (used.fate, used.count, used.by_source) == ("used", evidence.records.samples, tuple(n for (n,) in counted))
    assert evidence.verification.entries == sealed.entries()


def test_steps_are_the_extremes_of_the_step_events(sealed: LedgerSimulator) -> None:
    steps = gather(sealed.run, sealed.trust("key")).steps
    with RunReader.open(sealed.run) as reader:
        events = reader.events(EventKind.STEP)
    factors = [event.json()["f"] for event in events]
    assert (steps.steps, steps.factor_min, steps.factor_max) == (len(events), min(factors), max(factors))
    assert steps.clipped == sum(factor == 0.5 for factor in factors)
    assert (steps.ref.seq, steps.ref.last_seq) == (events[0].seq, events[-1].seq)


def test_a_resumed_run_is_reported_by_what_led_to_its_final_weights(tmp_path: Path) -> None:
    """Steps 4 to 6 were trained twice: only the second time counts, and how much does not is said."""
    sim = LedgerSimulator(tmp_path, Plan(steps=6))
    ledger, data = sim.start()
    for entry in simulated_steps(data, sim.plan):
        ledger.append_step(entry)
    ledger.begin_attempt(3)
    for entry in list(simulated_steps(data, Plan(steps=6, per_step=5, seed=4)))[3:]:
        ledger.append_step(entry)
    ledger.seal({})
    evidence = gather(sim.run, sim.trust("key"))
    live = "FROM records WHERE attempt = 2 OR step <= 3"
    ((records, tokens, samples),) = sim.query(
        f"SELECT count(*), sum(n_tokens), count(DISTINCT (source_id, row)) {live}"
    )
    facts = evidence.records
    assert (facts.records, facts.tokens, facts.samples) == (records, tokens, samples) == (39, tokens, samples)
    assert (facts.superseded, evidence.steps.steps) == (24, 6)
    assert sum(source.uses for source in evidence.sources) == 39
    subject = Subject(evidence, Declarations(), load_register(), "r-1", "0" * 64, 0)
    assert "24 more that a later attempt superseded are not counted" in render_html(assemble(subject))
    told = [(a.steps.number, a.steps.from_step, a.steps.steps, a.steps.live_steps) for a in evidence.attempts]
    assert told == [(1, 0, 6, 3), (2, 3, 3, 3)]
    with RunReader.open(sim.run) as reader:
        (resume,) = reader.events(EventKind.RESUME)
    assert evidence.attempts[1].ref.seq == resume.seq
    ((ever,),) = sim.query("SELECT count(DISTINCT (source_id, row)) FROM records")
    lists = {found.fate.name: found.count for found in evidence.samples}
    assert lists == {"USED": samples, "SUPERSEDED": ever - samples, "UNUSED": 21 - ever}


def test_every_value_points_at_the_entry_it_stands_in(sealed: LedgerSimulator) -> None:
    evidence = gather(sealed.run, sealed.trust("head"))
    with RunReader.open(sealed.run) as reader:
        kinds = {event.seq: event.kind for event in reader.events()}
    assert [kinds[item.ref.seq] for item in evidence.checkpoints] == [EventKind.MODEL_CHECKPOINT]
    assert [kinds[item.ref.seq] for item in evidence.sessions] == [EventKind.SESSION]
    acts = {event.seq: event.kind for event in read_custody(sealed.run)}
    assert evidence.influence is not None
    assert acts[evidence.influence.ref.seq] == EventKind.QUERY
    assert [(act.ref.seq, EventKind[act.kind]) for act in evidence.custody] == list(acts.items())


def test_the_latest_query_is_reported(sim: LedgerSimulator) -> None:
    add_query(sim, "query-2")
    influence = gather(sim.run, sim.trust("key")).influence
    assert influence is not None
    assert (influence.queries, influence.ref.seq) == (2, read_custody(sim.run)[-1].seq)


def test_without_trust_from_outside_there_is_no_evidence(sealed: LedgerSimulator) -> None:
    with pytest.raises(UnverifiedEvidenceError, match="nothing from outside") as caught:
        gather(sealed.run, Trust())
    assert caught.value.exit_code == 3
    assert "--trust" in caught.value.advice()


def test_a_changed_record_yields_no_evidence(sim: LedgerSimulator) -> None:
    sim.sql("UPDATE records SET source_id = 1 - source_id WHERE seq = 5")
    with pytest.raises(UnverifiedEvidenceError, match="INTEGRITY"):
        gather(sim.run, sim.trust("key"))


def test_a_shortened_run_yields_no_evidence(sim: LedgerSimulator) -> None:
    sim.truncate(100, checkpoints=True, head_files=True)
    with pytest.raises(UnverifiedEvidenceError, match="INCOMPLETE"):
        gather(sim.run, sim.trust("head"))


def test_an_edited_result_yields_no_evidence(sim: LedgerSimulator) -> None:
    path = sim.run / "custody" / "results" / "query-1.json"
    document = json.loads(path.read_bytes())
    document["top"]["for"][0]["cosine"], document["top"]["for"][1]["cosine"] = 0.01, 0.9
    path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))
    with pytest.raises(UnverifiedEvidenceError, match=r"query-1\.json"):
        gather(sim.run, sim.trust("key"))


def test_an_unsealed_run_yields_no_evidence(tmp_path: Path) -> None:
    unsealed = LedgerSimulator(tmp_path).write(seal=False)
    with pytest.raises(UnverifiedEvidenceError, match="INCOMPLETE"):
        gather(unsealed.run, unsealed.trust("key"))


def test_flags_are_counted_by_name(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path)
    ledger, data = sim.start()
    for entry in simulated_steps(data, sim.plan):
        if entry.body["step"] == 2:
            entry.records["flags"][:3] = [1, 3, 16]
        ledger.append_step(entry)
    ledger.seal({})
    flags = gather(sim.run, sim.trust("key")).records.flags
    assert flags == {"NOT_FINITE": 2, "NO_LOSS_TOKEN": 1, "UNIT_UNKNOWN": 1}


def test_a_log_of_training_is_no_log_of_the_deployed_system(sealed: LedgerSimulator) -> None:
    available = gather(sealed.run, sealed.trust("head")).available()
    assert available <= set(load_register().evidence)
    assert not available & {"inference_log", "external_anchor", "human_oversight_record", "incident_records"}
    assert {"ledger_integrity", "data_version", "model_checkpoint_hash", "influence_top_k"} <= available


# --- the report -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(sealed: LedgerSimulator, tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    """A copy of the run with a report of it beside it, ``report.pdf``."""
    sim = sealed.copy_to(tmp_path_factory.mktemp("reported") / "copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", EPOCH)
        build_report(sim.run, sim.folder / "report.pdf", trust=sim.trust("head"), signer=sim.signer)
    return sim


def test_a_report_is_logged_and_the_run_still_verifies(reported: LedgerSimulator, sealed: LedgerSimulator) -> None:
    output = reported.folder / "report.pdf"
    event = read_custody(reported.run)[-1]
    body = event.json()
    attached = {name: content[0] for name, content in PdfReader(output).attachments.items()}
    assert event.kind == EventKind.REPORT
    assert body["pdf_sha256"] == sha256(output.read_bytes()).hex()
    assert body["evidence_sha256"] == sha256(attached["evidence.json"]).hex()
    assert Note.parse(attached["custody.note"]) == custody_head(sealed.run)  # the head before the report
    assert Note.parse(attached["final.note"]).checkpoint().root.hex() == body["root"]
    assert verify_run(reported.run, reported.trust("head")).ok
    assert not list(reported.folder.glob(".*"))


def test_the_same_run_at_the_same_time_gives_the_same_bytes(sim: LedgerSimulator, reported: LedgerSimulator) -> None:
    made = build_report(sim.run, sim.folder / "twin.pdf", trust=sim.trust("head"), signer=sim.signer)
    assert (sim.folder / "twin.pdf").read_bytes() == (reported.folder / "report.pdf").read_bytes()
    assert made.custody_seq == read_custody(sim.run)[-1].seq


def test_the_document_can_be_made_again_from_what_is_attached(reported: LedgerSimulator) -> None:
    output = (reported.folder / "report.pdf").read_bytes()
    attached = PdfReader(io.BytesIO(output)).attachments
    content = attached["evidence.json"][0]
    parsed, digest = json.loads(content), sha256(content)
    evidence = Evidence.model_validate(parsed["evidence"])
    subject = Subject(
        evidence=evidence,
        declarations=Declarations.model_validate(parsed["declarations"]),
        register=load_register(),
        report_id=f"{parsed['kind']}-{digest.hex()[:12]}",
        evidence_sha256=digest.hex(),
        created_us=parsed["created_s"] * 1_000_000,
    )
    files = _attachments(content, evidence)
    html = render_html(assemble(subject))
    assert write_pdf(html, files, identifier=digest[:16], created_s=parsed["created_s"]) == output


def test_the_wording_rules_hold_for_what_the_verifier_says(reported: LedgerSimulator) -> None:
    text = " ".join(page.extract_text() for page in PdfReader(reported.folder / "report.pdf").pages)
    assert forbidden_in(" ".join(text.split())) == []


def test_no_report_without_a_run_that_verifies(sim: LedgerSimulator, tmp_path: Path) -> None:
    acts = len(read_custody(sim.run))
    with pytest.raises(UnverifiedEvidenceError):
        build_report(sim.run, tmp_path / "r.pdf", trust=Trust(), signer=sim.signer)
    assert not (tmp_path / "r.pdf").exists()
    assert len(read_custody(sim.run)) == acts


def test_a_key_that_the_trust_does_not_know_makes_no_report(sim: LedgerSimulator, tmp_path: Path) -> None:
    """Its custody entry would turn the next verification against the same trust into exit 6."""
    acts = len(read_custody(sim.run))
    with pytest.raises(UsageError, match="not among the pinned keys"):
        build_report(sim.run, tmp_path / "r.pdf", trust=sim.trust("key"), signer=Signer.generate("evil.example"))
    assert not (tmp_path / "r.pdf").exists()
    assert len(read_custody(sim.run)) == acts


def test_a_failing_renderer_leaves_neither_file_nor_entry(
    sim: LedgerSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = len(read_custody(sim.run))
    monkeypatch.setattr("reports.build.render_html", lambda document: '<img src="file:///etc/hostname">')
    with pytest.raises(RenderError, match="refused"):
        build_report(sim.run, tmp_path / "r.pdf", trust=sim.trust("key"), signer=sim.signer)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    assert len(read_custody(sim.run)) == acts


def test_an_output_that_cannot_be_written_is_named_and_nothing_is_logged(sim: LedgerSimulator, tmp_path: Path) -> None:
    acts = len(read_custody(sim.run))
    with pytest.raises(UsageError, match=r"no/such/r\.pdf"):
        build_report(sim.run, tmp_path / "no" / "such" / "r.pdf", trust=sim.trust("key"), signer=sim.signer)
    assert len(read_custody(sim.run)) == acts


def test_a_run_without_a_query_still_yields_evidence(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path).write()
    evidence = gather(sim.run, sim.trust("key"))
    assert (evidence.influence, evidence.custody, evidence.custody_head) == (None, (), None)
    assert [file.name for file in _attachments(b"{}", evidence)] == ["evidence.json", "final.note"]


def test_a_time_that_is_no_number_is_refused(
    sim: LedgerSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
        build_report(sim.run, tmp_path / "r.pdf", trust=sim.trust("key"), signer=sim.signer)


# --- the commands ---------------------------------------------------------------------------------------------


def test_the_report_command_writes_and_says_what_it_logged(sim: LedgerSimulator, tmp_path: Path) -> None:
    key, passphrase = tmp_path / "bank.p12", tmp_path / "passphrase.txt"
    sim.signer.save(key, "correct horse")
    passphrase.write_text("correct horse\n")
    passphrase.chmod(0o600)
    declarations = tmp_path / "declarations.yaml"
    declarations.write_text("declared_by: A\ndeclared_on: 2026-12-01\nroles: [deployer]\nclassification: {basis: B}\n")
    output = tmp_path / "r.pdf"
    command = ["report", str(sim.run), "-o", str(output), "--trust", str(key.with_suffix(".vkey")), "--json"]
    command += ["--key", str(key), "--passphrase-file", str(passphrase), "--declarations", str(declarations)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    said = json.loads(result.stdout)
    assert result.exit_code == 0
    assert said["pdf_sha256"] == sha256(output.read_bytes()).hex()
    assert said["custody_seq"] == read_custody(sim.run)[-1].seq


def test_the_obligations_command_lists_the_register() -> None:
    register = load_register()
    listed = CliRunner().invoke(app, ["obligations", "--json"], catch_exceptions=False)
    assert [o["id"] for o in json.loads(listed.stdout)["obligations"]] == [o.id for o in register.obligations]
    told = CliRunner().invoke(app, ["obligations", "--role", "provider"], catch_exceptions=False).stdout
    assert all((o.id in told) == (o.role == "provider") for o in register.obligations if o.id != "AIA-26.1")


def test_sums_are_wide_enough(sealed: LedgerSimulator) -> None:
    """Token counts are uint32 in a record; their sum must not wrap."""
    with RunReader.open(sealed.run) as reader:
        records = reader.records()[:3].copy()
    records["n_tokens"] = np.iinfo(np.uint32).max
    assert _records(records, np.arange(3)).tokens == 3 * (2**32 - 1)
