"""``gradtrail erase``: the bytes are gone, the log stays whole; what is gone without a word is still a finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditlog.bundle.export import export_run
from auditlog.errors import DataError, UsageError
from auditlog.format.records import EventKind
from auditlog.ledger import erase as erase_module
from auditlog.ledger.custody import CustodyLog, read_custody
from auditlog.ledger.erase import erase
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.verdict import Verdict
from tests import bundles
from tests.support import LedgerSimulator, Plan

SOURCE, ROW, INDEX = "part-1.jsonl", 3, 15  # part-0.jsonl has 12 rows
BASIS = "GDPR Art. 17(1)(a)"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    return LedgerSimulator(tmp_path_factory.mktemp("erase"), Plan(dim=64)).write()


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    return original.copy_to(tmp_path / "copy")


def verdict(sim: LedgerSimulator) -> Verdict:
    return verify_run(sim.run, Trust(vkeys=(sim.signer.vkey,)))


def codes(sim: LedgerSimulator) -> set[str]:
    return {finding.code for finding in verdict(sim).findings if finding.level == "error"}


def secrets(sim: LedgerSimulator) -> list[bytes]:
    """Return what must be gone: the sample's salt, its sketches, and the gradients and salts of its steps."""
    found = [(sim.run / "salts.bin").read_bytes()[32 * INDEX : 32 * INDEX + 32]]
    shard = np.load(sim.run / "sketches" / "000000.npy")
    step_salts = (sim.run / "step_salts.bin").read_bytes()
    with RunReader.open(sim.run) as reader:
        records = reader.records()
        theirs = records[(records["source_id"] == 1) & (records["row"] == ROW)]
        steps = {event.json()["step"]: event.json()["gradient"] for event in reader.events(EventKind.STEP)}
    assert len(theirs) > 2
    found += [shard[row].tobytes() for row in theirs["shard_row"]]
    gradients = [steps[step]["row"] for step in set(theirs["step"].tolist())]
    found += [shard[row].tobytes() for row in gradients]
    found += [step_salts[32 * row : 32 * row + 32] for row in gradients]
    assert all(any(secret) for secret in found)
    return found


def copies(sim: LedgerSimulator, found: list[bytes]) -> int:
    """Return how many of them a search of all files in the run folder finds."""
    files = [path.read_bytes() for path in sim.run.rglob("*") if path.is_file()]
    return sum(any(secret in content for content in files) for secret in found)


def test_what_was_erased_is_nowhere_in_the_folder_and_the_log_verifies(sim: LedgerSimulator) -> None:
    gone = secrets(sim)
    assert copies(sim, gone) == len(gone)
    before = (sim.run / "ledger.duckdb").read_bytes()
    erased = erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    assert copies(sim, gone) == 0
    assert (sim.run / "ledger.duckdb").read_bytes() == before
    found = verdict(sim)
    assert found.exit_code == 0, found.findings
    said = " ".join(check.detail for check in found.checks)
    assert f"{erased.records} sketches" in said
    assert f"custody entry {erased.event}" in said
    assert f"{24 - erased.gradients} stored gradients were compared with their commitments; {erased.gradients}" in said
    assert BASIS in json.dumps([event.json() for event in read_custody(sim.run)[1:]])
    assert not list(sim.run.rglob("*.partial"))


def test_other_samples_lose_nothing(sim: LedgerSimulator) -> None:
    before = np.load(sim.run / "sketches" / "000000.npy").copy()
    salts = (sim.run / "salts.bin").read_bytes()
    erased = erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    after = np.load(sim.run / "sketches" / "000000.npy")
    changed = (before != after).any(1)
    assert changed.sum() == erased.records + erased.gradients
    assert not after[changed].any()
    rest = (sim.run / "salts.bin").read_bytes()
    assert [i for i in range(21) if salts[32 * i : 32 * i + 32] != rest[32 * i : 32 * i + 32]] == [INDEX]
    assert (sim.run / "salts.bin").stat().st_mode & 0o777 == 0o600


def test_the_same_again_changes_nothing_and_says_nothing_new(sim: LedgerSimulator) -> None:
    first = erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    acts = len(read_custody(sim.run))
    assert erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer).event == first.event
    assert len(read_custody(sim.run)) == acts
    assert verdict(sim).exit_code == 0


def test_an_erasure_that_was_broken_off_is_seen_and_can_be_finished(
    sim: LedgerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(erase_module, "_wipe_rows", fail)
        with pytest.raises(KeyboardInterrupt):
            erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    found = verdict(sim)
    assert found.exit_code == 5
    assert any("still there" in finding.message for finding in found.findings)
    erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    assert verdict(sim).exit_code == 0


@pytest.mark.parametrize("what", ["salt", "sketch", "gradient", "step salt"])
def test_what_is_gone_without_an_erasure_is_a_finding(sim: LedgerSimulator, what: str) -> None:
    with RunReader.open(sim.run) as reader:
        row, gradient = (
            int(reader.records()[5]["shard_row"]),
            reader.events(EventKind.STEP)[2].json()["gradient"]["row"],
        )
    match what:
        case "salt":
            sim.erase_salt(INDEX)
        case "sketch" | "gradient":
            shard = np.load(sim.run / "sketches" / "000000.npy", mmap_mode="r+")
            shard[row if what == "sketch" else gradient] = 0
            shard.flush()
        case _:
            salts = np.memmap(sim.run / "step_salts.bin", np.uint8, mode="r+").reshape(-1, 32)
            salts[gradient] = 0
            salts.flush()
    assert verdict(sim).exit_code in (4, 5)
    assert codes(sim) <= {"E_ERASED", "E_PAYLOAD"}


def test_an_erasure_excuses_its_own_samples_only(sim: LedgerSimulator) -> None:
    erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    sim.erase_salt(INDEX - 1)
    assert codes(sim) == {"E_ERASED"}


def test_an_erasure_by_a_key_that_nobody_pinned_excuses_nothing(
    sim: LedgerSimulator, original: LedgerSimulator, tmp_path: Path
) -> None:
    stranger = LedgerSimulator(tmp_path / "stranger").signer
    erase(sim.run, [(SOURCE, ROW)], BASIS, stranger)
    found = verdict(sim)
    assert found.exit_code == 6
    assert "E_ERASED" in {finding.code for finding in found.findings}


def test_results_that_name_the_sample_go_and_others_stay(sim: LedgerSimulator) -> None:
    custody = CustodyLog.open(sim.run, sim.signer)
    for name, row in (("query-1", ROW), ("query-2", ROW + 1)):
        document = {"top_for": [{"source_id": 1, "row": row, "preview": f"personal words {row}"}]}
        custody.append(EventKind.QUERY, {"result": custody.write_result(name, document)})
    erased = erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    assert erased.results == ("results/query-1.json",)
    assert [path.name for path in sorted((sim.run / "custody" / "results").iterdir())] == [
        "query-2.json",
        "query-2.salt",
    ]
    assert copies(sim, [f"personal words {ROW}".encode()]) == 0
    assert verdict(sim).exit_code == 0, verdict(sim).findings
    (sim.run / "custody" / "results" / "query-2.json").unlink()
    assert "E_ERASED" in codes(sim)


@pytest.mark.parametrize(("source", "row"), [("part-7.jsonl", 0), (SOURCE, 9), (SOURCE, -1)])
def test_a_row_that_does_not_exist_is_refused_before_anything_is_touched(
    sim: LedgerSimulator, source: str, row: int
) -> None:
    with pytest.raises(DataError):
        erase(sim.run, [(SOURCE, ROW), (source, row)], BASIS, sim.signer)
    assert not (sim.run / "custody").exists()
    assert verdict(sim).exit_code == 0


def test_a_run_that_is_open_is_not_erased_from(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path, Plan(steps=4)).write(seal=False)
    with pytest.raises(UsageError, match="not sealed"):
        erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)


def test_a_basis_must_be_given(sim: LedgerSimulator) -> None:
    with pytest.raises(UsageError, match="basis"):
        erase(sim.run, [(SOURCE, ROW)], "  ", sim.signer)


def test_the_command_says_what_went_and_what_is_left(
    sim: LedgerSimulator, tmp_path: Path, gradtrail: Callable[..., Any]
) -> None:
    sim.signer.save(tmp_path / "key.p12", "correct horse")
    (tmp_path / "pass").write_text("correct horse\n")
    (tmp_path / "pass").chmod(0o600)
    options = ["--source", SOURCE, "--row", str(ROW), "--basis", BASIS, "--key", str(tmp_path / "key.p12")]
    options += ["--passphrase-file", str(tmp_path / "pass")]
    code, _, err = gradtrail("erase", sim.run, *options)
    assert code == 2
    assert "cannot be undone" in err
    code, out, _ = gradtrail("erase", sim.run, *options, "--yes")
    assert code == 0, out
    for words in ("salts", "gradients of", "custody entry 1", "backups", "trained weights"):
        assert words in out
    code, out, _ = gradtrail("verify", sim.run, "--trust", tmp_path / "key.vkey")
    assert code == 0
    assert "erased" in out


# --- the verifier that shares no code with ours ---------------------------------------------------------------


def second_verdict(sim: LedgerSimulator, tmp_path: Path) -> bundles.Outcome:
    out = tmp_path / "bundle.zip"
    export_run(sim.run, out, payloads=True, force=True)
    return bundles.check(out, keys=[sim.signer.vkey])


def test_the_second_verifier_takes_an_erasure_for_what_it_is(sim: LedgerSimulator, tmp_path: Path) -> None:
    erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    assert second_verdict(sim, tmp_path).code == 0
    sim.erase_salt(INDEX - 1)
    found = second_verdict(sim, tmp_path)
    assert (found.code, found.codes) == (5, {"E_ERASED"})


@pytest.mark.parametrize("left", ["salts.bin", "step_salts.bin", "sketches/000000.npy"])
def test_both_verifiers_see_what_should_be_gone(sim: LedgerSimulator, tmp_path: Path, left: str) -> None:
    before = (sim.run / left).read_bytes()
    erase(sim.run, [(SOURCE, ROW)], BASIS, sim.signer)
    (sim.run / left).write_bytes(before)
    assert (verdict(sim).exit_code, codes(sim)) == (5, {"E_ERASED"})
    found = second_verdict(sim, tmp_path)
    assert (found.code, found.codes) == (5, {"E_ERASED"})


def test_for_the_second_verifier_too_a_stranger_excuses_nothing(sim: LedgerSimulator, tmp_path: Path) -> None:
    erase(sim.run, [(SOURCE, ROW)], BASIS, LedgerSimulator(tmp_path / "stranger").signer)
    found = second_verdict(sim, tmp_path)
    assert found.code == 6
    assert "E_ERASED" in found.codes
