"""The command line of the log: exit codes, what is printed, JSON, and what it must never do."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from auditlog import cli
from auditlog.errors import UsageError
from auditlog.ledger.custody import CustodyLog
from auditlog.ledger.ledger import RunLedger
from auditlog.trust.keys import Signer
from tests.support import LedgerSimulator, Plan, simulated_steps, write_sources

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    sim = LedgerSimulator(tmp_path_factory.mktemp("cli") / "original", Plan(steps=6)).write()
    (sim.folder / "bank.vkey").write_text(f"{sim.signer.vkey}\n")
    return sim


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    return original.copy_to(tmp_path / "copy")


def trusting(sim: LedgerSimulator) -> tuple[object, ...]:
    return "--trust", sim.folder / "bank.vkey", "--head", sim.kept_heads()[2], "--origin", sim.plan.origin


def test_verified_is_exit_0_and_says_what_was_not_checked(gradtrail, original: LedgerSimulator) -> None:
    done = gradtrail("verify", original.run, *trusting(original))
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("VERIFIED · exit 0")
    assert lines[-1] == "exit 0"
    assert "bank.example/audit" in done.out
    assert "kept head of" in done.out
    assert "not checked" in lines
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("given", ["text", "file"])
def test_n13_a_key_as_text_and_as_file_give_one_verdict(given: str, gradtrail, original: LedgerSimulator) -> None:
    trust = original.folder / "bank.vkey" if given == "file" else str(original.signer.vkey)
    assert gradtrail("verify", original.run, "--trust", trust).code == 0


def test_each_verdict_has_its_exit_code(gradtrail, sim: LedgerSimulator, tmp_path: Path) -> None:
    """7 unanchored, 6 authenticity, 4 integrity, 5 incomplete, 3 unreadable: printed and returned."""
    other = Signer.generate("other")
    results = {
        7: gradtrail("verify", sim.run),
        6: gradtrail("verify", sim.run, "--trust", other.vkey),
    }
    sim.sql("UPDATE records SET source_id = 1 - source_id WHERE seq = 20")
    results[4] = gradtrail("verify", sim.run, *trusting(sim))
    assert "record 20" in results[4].out
    sim.sql("UPDATE records SET source_id = 1 - source_id WHERE seq = 20")
    sim.truncate(37, checkpoints=True, head_files=True)
    results[5] = gradtrail("verify", sim.run, "--trust", sim.folder / "bank.vkey", "--head", sim.kept_heads()[-1])
    (sim.run / "ledger.duckdb").write_bytes(b"")
    results[3] = gradtrail("verify", sim.run, *trusting(sim))
    for code, done in results.items():
        assert done.code == code, done.out
        assert done.out.splitlines()[-1] == f"exit {code}"


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE events SET kind = NULL WHERE seq = 0",
        "UPDATE events SET body = NULL WHERE seq = (SELECT max(seq) FROM events)",
        "UPDATE checkpoints SET note = NULL",
    ],
)
def test_an_emptied_cell_is_a_finding_and_never_ends_the_verification(
    edit: str, gradtrail, sim: LedgerSimulator
) -> None:
    sim.sql(edit)
    done = gradtrail("verify", sim.run, *trusting(sim))
    assert done.code in (4, 6), done.out  # never 3: one edited cell must not buy "no statement about the content"
    assert "is NULL" in done.out


def test_a_custody_log_that_is_not_there_is_named_as_not_checked(gradtrail, sim: LedgerSimulator) -> None:
    done = gradtrail("verify", sim.run, *trusting(sim))
    assert done.code == 0
    assert "no custody log" in done.out


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_a_missing_or_empty_path_is_exit_3_and_creates_nothing(kind: str, gradtrail, tmp_path: Path) -> None:
    run = tmp_path / "nowhere"
    if kind == "empty":
        run.mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = gradtrail("verify", run)
    assert done.code == 3
    assert str(run) in done.out
    assert sorted(tmp_path.rglob("*")) == before
    for command in ("show", "verify"):
        assert gradtrail(command, run, "--json").code == 3


def test_json_is_one_document_with_the_same_exit_code(gradtrail, sim: LedgerSimulator, tmp_path: Path) -> None:
    done = gradtrail("verify", sim.run, *trusting(sim), "--json")
    document = json.loads(done.out)
    assert (done.code, document["exit_code"], document["status"]) == (0, 0, "VERIFIED")
    assert document["entries"] == sim.entries()
    sim.sql("UPDATE records SET step = step + 1 WHERE seq = 20")
    done = gradtrail("verify", sim.run, *trusting(sim), "--json")
    document = json.loads(done.out)
    assert (done.code, document["exit_code"], document["status"]) == (4, 4, "INTEGRITY")
    assert {"code": "E_LEAF", "seq": 20}.items() <= document["findings"][0].items()
    done = gradtrail("verify", tmp_path / "nowhere", "--json")
    document = json.loads(done.out)
    assert (done.code, document["exit_code"], document["findings"][0]["code"]) == (3, 3, "E_IO")


def test_data_opens_the_commitments(gradtrail, sim: LedgerSimulator) -> None:
    assert gradtrail("verify", sim.run, *trusting(sim), "--data", sim.data_folder).code == 0
    done = gradtrail("verify", sim.run, *trusting(sim), "--data", sim.folder)
    assert done.code == 2  # the call is wrong: the files are not there
    assert "part-0.jsonl" in done.err


def test_a_wrong_key_argument_is_a_usage_error(gradtrail, original: LedgerSimulator) -> None:
    done = gradtrail("verify", original.run, "--trust", "nonsense")
    assert done.code == 2
    assert "error: nonsense" in done.err


@pytest.mark.parametrize("arguments", [(), ("--steps",), ("--recompute",), ("--seq", "9"), ("--seq", "3")])
def test_show_prints_text_and_json(arguments: tuple[str, ...], gradtrail, original: LedgerSimulator) -> None:
    text = gradtrail("show", original.run, *arguments)
    document = json.loads(gradtrail("show", original.run, *arguments, "--json").out)
    assert text.code == 0
    if not arguments:
        assert (document["records"], document["steps"], document["sealed"]) == (48, 6, True)
        assert [source["uses"] for source in document["sources"]] == [
            count for (count,) in original.query("SELECT count(*) FROM records GROUP BY source_id ORDER BY source_id")
        ]
        assert "part-0.jsonl" in text.out
        assert "not verified" in text.out
    elif "--recompute" in arguments:
        assert document["ok"]
        assert "6 steps: the stored samples add up" in text.out
    elif "--steps" in arguments:
        assert [step["step"] for step in document["steps"]] == list(range(1, 7))
    else:
        assert document["seq"] == int(arguments[1])
        assert document["kind"] == ("step" if arguments[1] == "9" else "record")


def test_show_names_an_entry_that_is_not_there(gradtrail, original: LedgerSimulator) -> None:
    done = gradtrail("show", original.run, "--seq", "999")
    assert (done.code, "no entry 999" in done.err) == (2, True)


def test_show_recompute_names_the_step_that_does_not_add_up(gradtrail, sim: LedgerSimulator) -> None:
    sim.sql("UPDATE records SET weight = weight * 5 WHERE seq = 20")
    done = gradtrail("show", sim.run, "--recompute")
    assert "1 of 6 steps do not add up, first in step 3" in done.out


def test_keygen_seal_and_verify_as_a_user_would(gradtrail, tmp_path: Path) -> None:
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("correct horse\n")
    passphrase.chmod(0o600)
    key = tmp_path / "signing.p12"
    made = gradtrail("keygen", key, "--name", "bank.example/audit", "--passphrase-file", passphrase)
    assert made.code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert (tmp_path / "signing.vkey").read_text().strip() in made.out
    assert "correct horse" not in made.out + made.err

    signer = Signer.load(key, passphrase_file=passphrase)
    sim = LedgerSimulator(tmp_path / "crashed", Plan(steps=4), signer=signer).write(seal=False)
    trust = ("--trust", tmp_path / "signing.vkey")
    assert gradtrail("verify", sim.run, *trust).code == 5
    refused = gradtrail("seal", sim.run, "--key", key, "--passphrase-file", passphrase)
    assert (refused.code, "--abandon" in refused.err) == (2, True)
    handed = tmp_path / "handed"
    closed = gradtrail("seal", sim.run, "--abandon", "--key", key, "--passphrase-file", passphrase, "--on-head", handed)
    assert closed.code == 0, closed.err
    assert "sealed as abandoned" in closed.out
    assert gradtrail("verify", sim.run, *trust, "--head", handed / "run").code == 0
    again = gradtrail("seal", sim.run, "--abandon", "--key", key, "--passphrase-file", passphrase)
    assert (again.code, "sealed already" in again.err) == (2, True)


def test_k11_key_trouble_is_exit_3_without_a_secret_or_a_traceback(gradtrail, tmp_path: Path) -> None:
    secret, wrong = tmp_path / "passphrase", tmp_path / "wrong"
    for path, text in ((secret, "correct horse"), (wrong, "battery staple")):
        path.write_text(text)
        path.chmod(0o600)
    key = tmp_path / "signing.p12"
    gradtrail("keygen", key, "--name", "bank.example/audit", "--passphrase-file", secret)
    sim = LedgerSimulator(tmp_path / "crashed", Plan(steps=1)).write(seal=False)

    def seal(passphrase: Path) -> Any:
        return gradtrail("seal", sim.run, "--abandon", "--key", key, "--passphrase-file", passphrase)

    outcomes = [seal(wrong), seal(tmp_path / "missing")]
    key.chmod(0o644)
    outcomes.append(seal(secret))
    key.unlink()
    outcomes.append(seal(secret))
    for done in outcomes:
        assert done.code == 3
        assert "error: " in done.err
        assert "Traceback" not in done.err
        assert not {"horse", "staple"} & set((done.out + done.err).split())


def test_keygen_without_a_passphrase_or_over_a_file_is_refused(gradtrail, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert gradtrail("keygen", tmp_path / "k.p12", "--name", "a/b").code == 2
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("p")
    passphrase.chmod(0o600)
    assert gradtrail("keygen", tmp_path / "k.p12", "--name", "a/b", "--passphrase-file", passphrase).code == 0
    assert gradtrail("keygen", tmp_path / "k.p12", "--name", "a/b", "--passphrase-file", passphrase).code == 3


def test_strings_of_a_run_cannot_write_on_the_terminal(gradtrail, tmp_path: Path) -> None:
    """A source file named with an escape sequence is shown escaped, in text and in JSON."""
    sim = LedgerSimulator(tmp_path / "hostile", Plan(steps=1))
    data = write_sources(sim.data_folder, (3,))
    evil = "\x1b[2J\x1b[32mVERIFIED.jsonl"
    source = data.block.sources[0].model_copy(update={"path": evil})
    data.block = data.block.model_copy(update={"sources": (source,)})
    from tests.support import make_manifest

    ledger = RunLedger.create(sim.run, make_manifest(data, sim.signer, sim.plan), data, sim.signer)
    for entry in simulated_steps(data, sim.plan):
        ledger.append_step(entry)
    ledger.seal({})
    sim.sql("UPDATE records SET loss = 0 WHERE seq = 3")
    for arguments in (
        ("show", sim.run),
        ("verify", sim.run),
        ("show", sim.run, "--seq", "3"),
        ("verify", sim.run, "--json"),
    ):
        done = gradtrail(*arguments)
        assert "\x1b" not in done.out + done.err
        assert "VERIFIED.jsonl" in done.out
    assert "\x1b" not in gradtrail("show", sim.folder / "\x1b[2Jnowhere").err


def test_a_long_list_of_findings_is_cut_in_text_and_complete_in_json(gradtrail, sim: LedgerSimulator) -> None:
    sim.sql("UPDATE records SET n_tokens = n_tokens + 1")
    text = gradtrail("verify", sim.run, *trusting(sim))
    document = json.loads(gradtrail("verify", sim.run, *trusting(sim), "--json").out)
    assert sum(f["code"] == "E_LEAF" for f in document["findings"]) == 48
    assert len(text.out.splitlines()) < 90
    assert "more; --json lists all" in text.out


def test_acts_after_the_seal_are_shown_and_verified(gradtrail, sim: LedgerSimulator) -> None:
    from auditlog.format.records import EventKind

    CustodyLog.open(sim.run, sim.signer).append(EventKind.QUERY, {"n": 1})
    assert "query" in gradtrail("show", sim.run).out
    done = gradtrail("verify", sim.run, *trusting(sim))
    assert (done.code, "custody log" in done.out) == (0, True)


def test_verify_loads_no_model_library_and_help_needs_no_extra(original: LedgerSimulator) -> None:
    """A program that runs both commands and then lists what was imported."""
    program = f"""
import sys
from auditlog import cli
for arguments in (["verify", {str(original.run)!r}], ["show", {str(original.run)!r}], ["--help"], ["verify", "--help"]):
    sys.argv = ["gradtrail", *arguments]
    try:
        cli.main()
    except SystemExit as left:
        print("code", left.code)
print("loaded", sorted(set(sys.modules) & {{"torch", "transformers", "peft", "datasets", "weasyprint", "jinja2"}}))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []", done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == [
        "code 7",
        "code 0",
        "code 0",
        "code 0",
    ]


def test_every_command_shows_an_example(gradtrail) -> None:
    for command in ("keygen", "verify", "show", "seal"):
        assert "Example: gradtrail" in gradtrail(command, "--help").out


def test_version_names_the_format_and_a_mixed_install(gradtrail, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gradtrail("--version")
    assert plain.code == 0
    assert plain.out.startswith("gradtrail ")
    assert "django" not in plain.err
    monkeypatch.setattr(cli, "_is_mixed_install", lambda: True)
    assert "django-auditlog" in gradtrail("--version").err


def test_a_missing_extra_is_named(gradtrail, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        def command() -> None:
            raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

        return command

    monkeypatch.setattr(cli, "_root", broken)
    done = gradtrail("query")
    assert done.code == UsageError.exit_code
    assert 'pip install "gradtrail[train]"' in done.err


def test_a_bug_is_not_dressed_up_as_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        def command() -> None:
            raise ModuleNotFoundError("No module named 'auditlog.typo'", name="auditlog.typo")

        return command

    monkeypatch.setattr(cli, "_root", broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main()


# --- several attempts -----------------------------------------------------------------------------------------


def interrupted(folder: Path, *, seal: bool = True) -> LedgerSimulator:
    """Six steps, then on from step 4 with other batches; the database of step 4 is kept beside it."""
    sim = LedgerSimulator(folder, Plan(steps=6))
    ledger, data = sim.start()
    for entry in simulated_steps(data, sim.plan):
        ledger.append_step(entry)
        ledger.flush()
        if entry.body["step"] == 4:
            ledger.close_unsealed()
            shutil.copy(sim.run / "ledger.duckdb", folder / "old.duckdb")
            ledger = RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor)
            ledger.begin_attempt(4)
    ledger.begin_attempt(4)
    for entry in list(simulated_steps(data, Plan(steps=6, per_step=3)))[4:]:
        ledger.append_step(entry)
    ledger.flush()
    ledger.seal({}) if seal else ledger.close_unsealed()
    (folder / "bank.vkey").write_text(f"{sim.signer.vkey}\n")
    return sim


def test_f05_show_step_lists_the_samples_of_every_attempt(gradtrail, tmp_path: Path) -> None:
    sim = interrupted(tmp_path / "run")
    document = json.loads(gradtrail("show", sim.run, "--step", "5", "--json").out)
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    first = list(simulated_steps(data, sim.plan))[4].index.tolist()
    again = list(simulated_steps(data, Plan(steps=6, per_step=3)))[4].index.tolist()
    shown = {a["attempt"]: [use["sample_index"] for use in a["samples"]] for a in document["attempts"]}
    assert shown == {2: first, 3: again}
    assert [a["live"] for a in document["attempts"]] == [False, True]
    text = gradtrail("show", sim.run, "--step", "5").out
    assert "step 5, attempt 2, superseded by a later attempt: 8 samples" in text
    assert "step 5, attempt 3: 3 samples" in text
    use = document["attempts"][1]["samples"][0]
    assert f"{use['source']}: {use['row']}" in text
    missing = gradtrail("show", sim.run, "--step", "9")
    assert (missing.code, "no step 9" in missing.err) == (2, True)


def test_show_says_what_no_longer_counts(gradtrail, tmp_path: Path) -> None:
    sim = interrupted(tmp_path / "run")
    text = gradtrail("show", sim.run).out
    assert "3: 1 to step 4, 2 from step 4 of attempt 1 to step 6, 3 from step 4 of attempt 2 to step 6" in text
    assert "16 records of 2 steps: a later attempt went back behind them" in text
    assert gradtrail("show", sim.run, "--steps").out.count("superseded") == 2
    assert gradtrail("show", sim.run, "--recompute").code == 0


def test_a_shorter_run_is_sealed_with_accept_loss_only(gradtrail, tmp_path: Path) -> None:
    sim = interrupted(tmp_path / "run", seal=False)
    shutil.copy(tmp_path / "run" / "old.duckdb", sim.run / "ledger.duckdb")
    key, passphrase = tmp_path / "key.p12", tmp_path / "passphrase"
    sim.signer.save(key, "long enough for a test")
    passphrase.write_text("long enough for a test")
    passphrase.chmod(0o600)
    arguments = ("seal", sim.run, "--abandon", "--key", key, "--passphrase-file", passphrase)
    refused = gradtrail(*arguments)
    assert (refused.code, "E_TRUNC" in refused.err) == (3, True), refused.err
    assert gradtrail(*arguments, "--accept-loss").code == 0
    verdict = gradtrail("verify", sim.run, "--trust", tmp_path / "run" / "bank.vkey")
    assert verdict.code == 5
    assert "E_LOSS_ACCEPTED" in verdict.out
    assert "were signed and then lost; the loss was accepted at entry" in verdict.out


def test_log_only_leaves_sketches_and_salts_unread_and_says_so(sim: LedgerSimulator, gradtrail) -> None:
    trust = ("--trust", sim.folder / "bank.vkey")
    shutil.rmtree(sim.run / "sketches")
    (sim.run / "salts.bin").unlink()
    assert gradtrail("verify", sim.run, *trust).code == 5
    done = gradtrail("verify", sim.run, *trust, "--log-only")
    assert done.code == 0
    assert "whether sketches and salts are those that were committed" in " ".join(done.out.split())
    sim.sql("UPDATE records SET step = step + 1 WHERE seq = 5")
    assert gradtrail("verify", sim.run, *trust, "--log-only").code == 4
    assert gradtrail("verify", sim.run, *trust, "--log-only", "--data", sim.data_folder).code == 2
