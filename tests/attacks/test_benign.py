"""What must raise no alarm. A false alarm on clean data is how such a verifier most often fails.

Elsewhere: killed and resumed runs (``test_crash``), repeated steps and several processes (``test_resume``,
``test_ranks``), exports, reports that are rendered twice.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from tests.attacks.ledger_simulator import LedgerSimulator
from tests.support import Plan, simulated_steps


@pytest.mark.parametrize("level", ["none", "key", "head"])
def test_n01_a_clean_run_raises_no_alarm(level: str, original: LedgerSimulator) -> None:
    verdict = verify_run(original.run, original.trust(level))
    assert (verdict.entries, verdict.records, verdict.samples) == (1_155, 1_024, 50)
    found = [finding.code for finding in verdict.findings]
    assert (found, verdict.exit_code) == ((["W_UNANCHORED"], 7) if level == "none" else ([], 0))


def test_n03_steps_that_repeat_after_a_resume_are_legal(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "resumed", Plan(steps=6, per_step=4))
    ledger, data = sim.start()
    for entry in simulated_steps(data, sim.plan):
        ledger.append_step(entry)
    ledger.begin_attempt(4)
    for entry in list(simulated_steps(data, sim.plan))[4:]:
        ledger.append_step(entry)
    ledger.seal({})
    verdict = verify_run(sim.run, Trust((sim.signer.vkey,), origin=sim.plan.origin))
    assert (verdict.exit_code, verdict.attempts, verdict.steps) == (0, 2, 6), verdict.findings


def test_n13_a_key_by_name_as_pem_and_as_fingerprint_gives_one_verdict(tmp_path: Path) -> None:
    """N13: on the clean run, and on one where another key's name was put into the manifest."""
    original = LedgerSimulator(tmp_path / "small", Plan(steps=3, per_step=4)).write(custody=False)
    vkey = original.signer.vkey
    (tmp_path / "bank.vkey").write_text(f"{vkey}\n")
    pem = Ed25519PublicKey.from_public_bytes(vkey.public_key).public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "bank.pem").write_bytes(pem)
    spellings = [
        str(vkey),
        tmp_path / "bank.vkey",
        tmp_path / "bank.pem",
        vkey.fingerprint,
        f"sha256:{vkey.fingerprint}",
    ]
    spoiled = original.copy_to(tmp_path / "spoiled")
    spoiled.replace_manifest_key()
    for run, code in ((original.run, 0), (spoiled.run, 6)):
        verdicts = [verify_run(run, Trust.load([given], origin=original.plan.origin)).to_json() for given in spellings]
        assert {verdict["exit_code"] for verdict in verdicts} == {code}
        assert all(verdict["findings"] == verdicts[0]["findings"] for verdict in verdicts)
        assert all(verdict["trust"] == verdicts[0]["trust"] for verdict in verdicts)


def test_n13_a_fingerprint_of_another_key_is_no_pinned_key(original: LedgerSimulator) -> None:
    stranger = Signer.generate("bank.example/audit").vkey.fingerprint
    verdict = verify_run(original.run, Trust.load([stranger]))
    assert verdict.exit_code == 6
    assert {f.code for f in verdict.findings} >= {"E_KEY"}
    assert any(stranger[:16] in finding.message for finding in verdict.findings)


def sealed(folder: Path, batches: list[int]) -> LedgerSimulator:
    """Write a run whose batches hold so many records each, one step to a batch."""
    sim = LedgerSimulator(folder, Plan(steps=1))
    ledger, data = sim.start()
    for step, records in enumerate(batches, 1):
        entry = list(simulated_steps(data, Plan(steps=step, per_step=records)))[-1]
        ledger.append_step(entry)
        ledger.flush()
    ledger.seal({})
    return sim


@pytest.mark.parametrize("batches", [[], [1], [1, 1], [3, 5, 7], [252], [253], [254, 1]], ids=str)
def test_n15_batches_and_trees_of_awkward_sizes(batches: list[int], tmp_path: Path) -> None:
    """Trees of 2, 4, 255, 256, 257 … entries, batches of one record and of no power of two."""
    sim = sealed(tmp_path / "run", batches)
    verdict = verify_run(sim.run, sim.trust("key"))
    assert (verdict.exit_code, verdict.records) == (0, sum(batches)), verdict.findings
    assert verdict.entries == 2 + sum(batches) + len(batches)


def test_source_data_is_opened_and_a_changed_row_is_named(sim: LedgerSimulator, tmp_path: Path) -> None:
    """With the data each record's commitment is opened; a source file that differs is an opening that fails."""
    assert verify_run(sim.run, sim.trust("key"), data=sim.data_folder).exit_code == 0
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in sim.data_folder.iterdir():
        (changed / path.name).write_bytes(path.read_bytes().replace(b"file 1 row 4:", b"file 1 row 9:"))
    spoiled = verify_run(sim.run, sim.trust("key"), data=changed)
    assert (spoiled.exit_code, {f.code for f in spoiled.findings}) == (4, {"E_OPENING"})


def test_the_verdict_as_json_holds_every_finding(sim: LedgerSimulator) -> None:
    sim.edit_integer()
    sim.delete_salt()
    document = json.loads(json.dumps(verify_run(sim.run, sim.trust("none")).to_json()))
    assert [finding["code"] for finding in document["findings"]] == ["E_LEAF", "E_ERASED", "W_UNANCHORED"]
