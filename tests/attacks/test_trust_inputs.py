"""What a verifier brings, and what happens when that is wrong: forged heads, unknown and revoked keys, trust files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditlog.format.canonical import canonical_bytes
from auditlog.format.notes import LogCheckpoint, Note, sign_note
from auditlog.format.records import EventKind
from auditlog.ledger.custody import CustodyLog, custody_head
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Revocation, Trust
from auditlog.trust.certificates import make_certificate, parse_certificate
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import Verdict
from tests.attacks.ledger_simulator import ENTRIES, KEPT, LedgerSimulator
from tests.support import ORIGIN, Plan, simulated_steps

STRANGER = Signer.generate("bank.example/audit")


def errors(verdict: Verdict) -> list[str]:
    return [finding.code for finding in verdict.findings if finding.level == "error"]


def head(size: int, *signers: Signer, root: bytes = bytes(32), origin: str = ORIGIN) -> Note:
    return sign_note(LogCheckpoint(origin, size, root).text(), *signers)


def trusting(sim: LedgerSimulator, *heads: Note, **brought: object) -> Trust:
    return replace(Trust((sim.signer.vkey,), heads, ORIGIN), **brought)  # type: ignore[arg-type]


# --- kept heads must be signed by somebody ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [500, ENTRIES, 5_000], ids=["shorter", "of the same size", "longer than the log"])
def test_a_forged_head_is_about_the_head_and_never_makes_an_intact_run_look_cut(
    size: int, original: LedgerSimulator
) -> None:
    verdict = verify_run(original.run, trusting(original, head(size, STRANGER)))
    assert (errors(verdict), verdict.exit_code) == (["E_HEAD"], 6)
    (finding,) = verdict.findings
    assert "the kept head of" in finding.message
    assert "cannot be trusted" in finding.message
    assert f"cannot be checked: key {STRANGER.name} (key hash {STRANGER.vkey.key_hash.hex()})" in finding.message


def test_a_head_that_agrees_but_that_nobody_known_signed_anchors_nothing(original: LedgerSimulator) -> None:
    root = original.kept_head().checkpoint().root
    verdict = verify_run(original.run, trusting(original, head(KEPT, STRANGER, root=root)))
    assert errors(verdict) == ["E_HEAD"]


def test_a_bad_signature_of_a_known_key_spoils_a_head(original: LedgerSimulator) -> None:
    good = original.kept_head()
    other = Note(LogCheckpoint(ORIGIN, 5_000, bytes(32)).text(), good.signatures)
    for heads in ((other,), (Note(other.text, (*other.signatures, *head(1, STRANGER).signatures)),)):
        verdict = verify_run(original.run, trusting(original, *heads))
        assert errors(verdict) == ["E_HEAD"]
        assert "does not verify" in verdict.findings[0].message


def test_a_forged_certificate_makes_no_head_believed(original: LedgerSimulator) -> None:
    """The certificate must be by the pinned key; one's own says nothing."""
    session = Signer.generate("bank.example/credit/2026-12/session/1")
    body = make_certificate(
        STRANGER,
        origin=ORIGIN,
        run_id="run-1",
        attempt=1,
        manifest_sha256="00" * 32,
        first_size=0,
        first_root=bytes(32),
        session_vkey=session.vkey,
    )
    trust = trusting(original, head(5_000, session), certificates=(parse_certificate(body),))
    assert errors(verify_run(original.run, trust)) == ["E_HEAD"]


@pytest.mark.parametrize("level", ["key", "no key"])
def test_a_head_that_a_known_key_signed_shows_a_cut(level: str, sim: LedgerSimulator) -> None:
    kept = sim.kept_head()
    sim.cut_to_a_checkpoint()
    brought = trusting(sim, kept) if level == "key" else Trust(heads=(kept,))
    assert errors(verify_run(sim.run, brought)) == ["E_ROLLBACK", "E_UNSEALED"]


def test_a_forged_head_hides_no_tampering(sim: LedgerSimulator) -> None:
    sim.edit_integer()
    verdict = verify_run(sim.run, trusting(sim, head(5_000, STRANGER)))
    assert errors(verdict) == ["E_LEAF", "E_HEAD"]


def test_certificates_come_with_the_heads_of_a_folder(original: LedgerSimulator) -> None:
    trust = Trust.load([str(original.signer.vkey)], [original.auditor / "run"])
    assert [certificate.attempt for certificate in trust.certificates] == [1]
    assert trust.certificates == original.certificates()


# --- a missing key is no tampering -----------------------------------------------------------------------------


def test_a_missing_key_is_said_as_a_missing_key(original: LedgerSimulator, gradtrail: Callable[..., Any]) -> None:
    done = gradtrail("verify", original.run, "--trust", STRANGER.vkey)
    assert done.code == 6
    assert f"cannot be checked: key {original.signer.name} {original.signer.vkey.fingerprint[:16]}" in done.out
    assert f"pinned is {STRANGER.name} {STRANGER.vkey.fingerprint[:16]}" in done.out
    assert not any(word in done.out for word in ("tamper", "was changed", "E_LEAF", "E_ROOT", "E_SIG"))


# --- heads of other logs of the run ----------------------------------------------------------------------------


def test_the_trust_line_says_of_which_log_a_head_is(original: LedgerSimulator) -> None:
    acts = custody_head(original.run)
    assert acts is not None
    verdict = verify_run(original.run, trusting(original, original.kept_head(), acts))
    assert verdict.exit_code == 0, verdict.findings
    assert f"kept head of 865 entries and kept head of 3 entries of the log {ORIGIN}/custody" in verdict.trust
    (line,) = [check.detail for check in verdict.checks if check.name == "kept heads"]
    assert line == "1 of 1 of this log lie on it, the largest with 865 entries; 1 of other logs, compared there"


def test_a_cut_custody_log_and_a_missing_one_show_against_its_head(sim: LedgerSimulator) -> None:
    acts = custody_head(sim.run)
    assert acts is not None
    shutil.rmtree(sim.run / "custody")
    missing = verify_run(sim.run, trusting(sim, acts))
    assert (errors(missing), missing.exit_code) == (["E_ROLLBACK"], 5)
    assert "/custody has 3 entries; the folder holds no custody log" in missing.findings[0].message
    forged = verify_run(sim.run, trusting(sim, head(9, STRANGER, origin=f"{ORIGIN}/custody")))
    assert errors(forged) == ["E_HEAD"]
    CustodyLog.open(sim.run, sim.signer).append(EventKind.QUERY, {"n": 1})
    assert errors(verify_run(sim.run, trusting(sim, acts))) == ["E_ROLLBACK"]


def test_a_custody_head_without_a_pinned_key_is_compared(sim: LedgerSimulator) -> None:
    acts = custody_head(sim.run)
    assert acts is not None
    assert errors(verify_run(sim.run, Trust(heads=(acts, sim.kept_head())))) == []


def test_a_head_of_a_log_that_the_run_does_not_have_is_named(original: LedgerSimulator) -> None:
    verdict = verify_run(original.run, trusting(original, head(9, original.signer, origin=f"{ORIGIN}/rank/7")))
    assert errors(verdict) == ["E_BIND"]
    assert "/rank/7; this run has no such log" in verdict.findings[0].message


def test_a_custody_log_kept_elsewhere_is_verified_too(
    sim: LedgerSimulator, tmp_path: Path, gradtrail: Callable[..., Any]
) -> None:
    auditor = Signer.generate("auditor.example/acts")
    shutil.move(sim.run / "custody", tmp_path / "set-aside")
    CustodyLog.open(sim.run, auditor).append(EventKind.QUERY, {"n": 1})
    shutil.move(sim.run / "custody", tmp_path / "elsewhere")
    shutil.move(tmp_path / "set-aside", sim.run / "custody")
    acts = custody_head(sim.run)
    assert acts is not None
    trust = ("--trust", sim.signer.vkey, "--trust", auditor.vkey)
    done = gradtrail("verify", sim.run, *trust, "--custody", tmp_path / "elsewhere")
    assert done.code == 0, done.out
    assert "custody elsewhere log" in done.out
    # A kept head of the run's own custody log is then about the one elsewhere, which is another log.
    both = replace(trusting(sim, acts), vkeys=(sim.signer.vkey, auditor.vkey))
    assert "E_ROLLBACK" in errors(verify_run(sim.run, both, custody=tmp_path / "elsewhere"))
    unknown = gradtrail("verify", sim.run, "--trust", sim.signer.vkey, "--custody", tmp_path / "elsewhere")
    assert (unknown.code, "cannot be checked: key auditor.example/acts" in unknown.out) == (6, True)
    missing = gradtrail("verify", sim.run, *trust, "--custody", tmp_path / "nowhere")
    assert (missing.code, "nowhere/ledger.duckdb is missing" in missing.out) == (3, True)


# --- since -----------------------------------------------------------------------------------------------------


def test_since_says_that_nothing_before_was_skipped(original: LedgerSimulator, gradtrail: Callable[..., Any]) -> None:
    note = original.auditor / "run" / f"{KEPT:08d}.note"
    done = gradtrail("verify", original.run, "--trust", original.signer.vkey, "--since", note)
    assert done.code == 0, done.out
    assert "entries before 865 are those of the kept head, none skipped or changed; 290 entries came after" in done.out
    assert "kept head of 865 entries" in done.out


def test_since_may_be_a_head_of_the_custody_log(original: LedgerSimulator) -> None:
    note = Note.parse((original.run / "custody" / "heads" / "00000002.note").read_bytes())
    verdict = verify_run(original.run, trusting(original, since=note))
    assert verdict.exit_code == 0, verdict.findings
    (check,) = [check for check in verdict.checks if check.name == "custody: since"]
    assert check.detail.startswith("entries before 2 are those of the kept head")
    assert check.detail.endswith("1 entry came after")


@pytest.mark.parametrize("spoil", [LedgerSimulator.cut_to_a_checkpoint, LedgerSimulator.edit_and_sign_anew, None])
def test_since_fails_where_the_log_does_not_go_on(
    spoil: Callable[[LedgerSimulator], None] | None, sim: LedgerSimulator
) -> None:
    """Cut, rewritten, or shown by a head that nobody known has signed."""
    note = sim.kept_head() if spoil else head(KEPT, STRANGER)
    if spoil:
        spoil(sim)
    verdict = verify_run(sim.run, trusting(sim, since=note))
    (check,) = [check for check in verdict.checks if check.name == "since"]
    assert check.status == "failed"
    assert errors(verdict)[0] in ("E_ROLLBACK", "E_FORK", "E_HEAD")


# --- what may be allowed ---------------------------------------------------------------------------------------


def test_an_open_run_verifies_as_far_as_it_is_signed_if_that_is_allowed(
    tmp_path: Path, gradtrail: Callable[..., Any]
) -> None:
    sim = LedgerSimulator(tmp_path / "open", Plan(steps=6)).write(seal=False)
    trust = ("--trust", sim.signer.vkey)
    assert gradtrail("verify", sim.run, *trust).code == 5
    done = gradtrail("verify", sim.run, *trust, "--allow-open")
    assert done.code == 0, done.out
    assert "open, which was allowed" in done.out
    assert "N_OPEN" in done.out
    sim.sql("UPDATE records SET loss = 0 WHERE seq = 3")
    assert gradtrail("verify", sim.run, *trust, "--allow-open").code == 4


@pytest.mark.parametrize("spoil", ["drop_the_seals_checkpoint", "drop_all_checkpoints", "empty", "cut_tail"])
def test_allowing_an_open_run_excuses_no_run_that_lost_its_end(spoil: str, sim: LedgerSimulator) -> None:
    getattr(sim, spoil)()
    verdict = verify_run(sim.run, trusting(sim, allow_open=True))
    assert verdict.exit_code == 5


def test_an_open_run_that_was_cut_shows_against_a_kept_head(sim: LedgerSimulator) -> None:
    """``cut_to_a_checkpoint`` leaves what a run that is still going on looks like: only a head tells them apart."""
    kept = sim.kept_head()
    sim.cut_to_a_checkpoint()
    assert verify_run(sim.run, trusting(sim, allow_open=True)).exit_code == 0
    assert errors(verify_run(sim.run, trusting(sim, kept, allow_open=True))) == ["E_ROLLBACK"]


def test_allow_unanchored_gives_exit_0_and_still_says_so(
    original: LedgerSimulator, gradtrail: Callable[..., Any]
) -> None:
    done = gradtrail("verify", original.run, "--allow-unanchored")
    assert done.code == 0
    assert "W_UNANCHORED" in done.out
    assert "all of it could have been made today" in done.out


# --- revocations -----------------------------------------------------------------------------------------------


def test_k10_what_rests_on_a_revoked_key_is_named_from_the_first_size_on(original: LedgerSimulator) -> None:
    verdict = verify_run(original.run, trusting(original, revocations=(original.revoked_from(ENTRIES - 1),)))
    assert (errors(verdict), verdict.exit_code) == (["E_KEYREV", "E_KEYREV"], 6)
    messages = [finding.message for finding in verdict.findings]
    assert messages[0].startswith(f"log checkpoint 18 (size {ENTRIES:,}): it rests on the key bank.example/audit")
    assert messages[1].startswith("custody: log checkpoint 0")  # whatever was done afterwards came after that


@pytest.mark.parametrize(
    "revocation",
    [
        lambda sim: Revocation(STRANGER.vkey.fingerprint, 0),
        lambda sim: Revocation(sim.signer.vkey.fingerprint, 0, origin="bank.example/other"),
    ],
    ids=["another key", "another log"],
)
def test_a_revocation_of_something_else_is_no_finding(
    revocation: Callable[[LedgerSimulator], Revocation], original: LedgerSimulator
) -> None:
    assert verify_run(original.run, trusting(original, revocations=(revocation(original),))).exit_code == 0


def test_a_checkpoint_that_another_key_signed_too_does_not_rest_on_the_revoked_one(sim: LedgerSimulator) -> None:
    shutil.rmtree(sim.run / "custody")
    witness = Signer.generate("witness.example/log")
    for size, note in sim.query("SELECT size, note FROM checkpoints"):
        parsed = Note.parse(bytes(note))
        both = Note(parsed.text, (*parsed.signatures, *sign_note(parsed.text, witness).signatures))
        sim.put_note(size, both.to_bytes())
    trust = trusting(sim, revocations=(sim.revoked_from(0),))
    assert verify_run(sim.run, replace(trust, vkeys=(sim.signer.vkey, witness.vkey))).exit_code == 0
    assert errors(verify_run(sim.run, trust)) == ["E_KEYREV"]


# --- certificates are handed over -------------------------------------------------------------------------------


def test_a_resumed_run_hands_over_a_certificate_for_each_attempt(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "resumed", Plan(steps=4, per_step=2))
    ledger, data = sim.start()
    steps = list(simulated_steps(data, sim.plan))
    for entry in steps[:2]:
        ledger.append_step(entry)
    ledger.begin_attempt(2)
    for entry in steps[2:]:
        ledger.append_step(entry)
    ledger.seal({})
    certificates = sim.certificates()
    assert [certificate.attempt for certificate in certificates] == [1, 2]
    assert all(certificate.is_signed(sim.signer.vkey) for certificate in certificates)
    name = next((sim.auditor / "run").glob("session-2.*.json"))
    assert canonical_bytes(json.loads(name.read_bytes())) == name.read_bytes()
