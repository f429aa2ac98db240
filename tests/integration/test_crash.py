"""What a killed process, a lost write-ahead log and a full disk leave behind.

The law: everything acknowledged (``flush`` returned) is there afterwards, whole steps only, and the run says
of itself that it is incomplete. An accident is never reported as an edit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from auditlog.errors import ReadError, StoreError
from auditlog.format.notes import Note
from auditlog.ledger.abandon import seal_abandoned
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer
from tests.support import LedgerSimulator, Plan, simulated_steps, write_sources

ROOT = Path(__file__).parents[2]
PASSPHRASE = "a passphrase for tests"

WRITER = """
import sys
from pathlib import Path
from auditlog.trust.keys import Signer
from tests.support import LedgerSimulator, Plan, simulated_steps

folder, key, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
signer = Signer.load(key, passphrase="a passphrase for tests")
simulator = LedgerSimulator(folder, Plan(steps=100_000), signer=signer)
ledger, data = simulator.start()
if mode == "full":
    import resource
    largest = max(path.stat().st_size for path in simulator.run.rglob("*") if path.is_file())
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 20_000, hard))
print(ledger.size, flush=True)
from auditlog.errors import StoreError
for entry in simulated_steps(data, simulator.plan):
    try:
        ledger.append_step(entry)
        if entry.body["step"] % 3 == 0:
            ledger.flush()
            print(ledger.size, flush=True)
    except StoreError as error:
        assert mode == "full", error
        print("refused", ledger.steps, error, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        ledger.flush()
        ledger.seal({})
        break
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "signing.p12"
    Signer.generate("bank.example/audit").save(path, PASSPHRASE)
    return path


def start_writer(folder: Path, key: Path, mode: str) -> subprocess.Popen[str]:
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(key), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def killed_run(folder: Path, key: Path, acknowledgements: int) -> tuple[LedgerSimulator, int]:
    """Kill a writer after so many acknowledgements; returns the run and the last size acknowledged."""
    with start_writer(folder, key, "plain") as writer:
        assert writer.stdout is not None
        acknowledged = 0
        for _ in range(acknowledgements):
            line = writer.stdout.readline()
            assert line, writer.stderr.read() if writer.stderr else ""
            acknowledged = int(line)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    signer = Signer.load(key, passphrase=PASSPHRASE)
    return LedgerSimulator(folder, Plan(steps=100_000), signer=signer), acknowledged


@pytest.mark.parametrize("acknowledgements", [1, 5, 20])
def test_a_killed_run_is_incomplete_and_keeps_every_acknowledged_batch(
    acknowledgements: int, key: Path, tmp_path: Path
) -> None:
    sim, acknowledged = killed_run(tmp_path / "killed", key, acknowledgements)
    head = Note.parse((sim.auditor / "run" / f"{acknowledged:08d}.note").read_bytes())
    trust = Trust(vkeys=(sim.signer.vkey,), heads=(head,), origin=sim.plan.origin)

    verdict = verify_run(sim.run, trust)

    assert verdict.exit_code == 5, verdict.findings
    assert {f.code for f in verdict.findings if f.level == "error"} == {"E_UNSEALED"}
    assert verdict.entries >= acknowledged
    with RunReader.open(sim.run) as reader:
        steps = reader.records()["step"]
        assert set(np.unique(steps, return_counts=True)[1]) <= {sim.plan.per_step}  # whole steps only

    note = seal_abandoned(sim.run, sim.signer)

    closed = verify_run(sim.run, trust)
    assert (closed.exit_code, closed.sealed, closed.abandoned) == (0, True, True), closed.findings
    assert closed.entries == verdict.entries + 1 == note.checkpoint().size
    assert not (sim.run / "ledger.duckdb.wal").exists()


def test_t06_a_lost_write_ahead_log_is_seen_against_the_heads_and_named(key: Path, tmp_path: Path) -> None:
    """T06: the engine opens such a file without a word; heads/ and a kept head know better."""
    sim, acknowledged = killed_run(tmp_path / "killed", key, 8)
    (sim.run / "ledger.duckdb.wal").unlink()
    head = Note.parse((sim.auditor / "run" / f"{acknowledged:08d}.note").read_bytes())

    verdict = verify_run(sim.run, Trust(vkeys=(sim.signer.vkey,), heads=(head,)))

    assert verdict.exit_code == 5
    assert "E_ROLLBACK" in {f.code for f in verdict.findings}
    assert any("ledger.duckdb.wal" in f.hint for f in verdict.findings)
    with pytest.raises(StoreError):
        seal_abandoned(sim.run, sim.signer)


@pytest.mark.parametrize("position", [0.2, 0.5, 0.8])
def test_e06_a_damaged_write_ahead_log_never_passes_and_loses_nothing(
    position: float, key: Path, tmp_path: Path
) -> None:
    """E06: unreadable where the engine notices, otherwise an alarm; the files are left as they are."""
    sim, acknowledged = killed_run(tmp_path / "killed", key, 8)
    sim.flip("ledger.duckdb.wal", position)
    before = {path: path.read_bytes() for path in sim.run.glob("ledger*")}
    head = Note.parse((sim.auditor / "run" / f"{acknowledged:08d}.note").read_bytes())
    try:
        said, code = "", verify_run(sim.run, Trust(vkeys=(sim.signer.vkey,), heads=(head,))).exit_code
    except ReadError as error:
        said, code = f"{error} {error.advice()}", error.exit_code
    assert code in (3, 4, 5)
    assert "tamper" not in said.lower()
    assert {path: path.read_bytes() for path in sim.run.glob("ledger*")} == before


def resume_to(sim: LedgerSimulator, last: int, *, accept_loss: bool = False) -> RunLedger:
    """Resume from the last logged step and go on to step ``last``."""
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    ledger = RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor, accept_loss=accept_loss)
    first = ledger.last_step
    ledger.begin_attempt(first)
    for entry in simulated_steps(data, Plan(steps=last)):
        if entry.body["step"] > first:
            ledger.append_step(entry)
    ledger.flush()
    return ledger


@pytest.mark.parametrize("acknowledgements", [1, 4, 9])
def test_n02_a_killed_run_is_resumed_to_its_end_and_verifies(acknowledgements: int, key: Path, tmp_path: Path) -> None:
    """N02: kill -9 anywhere: at most the open batch is lost, every acknowledged head lies on the finished run."""
    sim, acknowledged = killed_run(tmp_path / "killed", key, acknowledgements)
    kept = [Note.parse(path.read_bytes()) for path in sim.kept_heads() if int(path.stem) <= acknowledged]
    ledger = resume_to(sim, 40)
    assert ledger.attempt == 2
    ledger.close_unsealed()  # and once more
    ledger = resume_to(sim, 50)
    ledger.seal({})

    verdict = verify_run(sim.run, Trust((sim.signer.vkey,), tuple(kept), sim.plan.origin), data=sim.data_folder)

    assert (verdict.exit_code, verdict.attempts, verdict.steps, verdict.records) == (0, 3, 50, 400), verdict.findings
    assert verdict.findings == ()


def test_b02_a_lost_write_ahead_log_is_refused_and_then_accepted_in_words(key: Path, tmp_path: Path) -> None:
    """B02: the file alone opens without a word; nothing is re-rooted in silence, and the loss is named for ever."""
    sim, acknowledged = killed_run(tmp_path / "killed", key, 8)
    (sim.run / "ledger.duckdb.wal").unlink()
    head = Note.parse((sim.auditor / "run" / f"{acknowledged:08d}.note").read_bytes())
    with pytest.raises(StoreError, match=r"a head was signed over .* are missing, and there is no ledger\.duckdb\.wal"):
        resume_to(sim, 30)
    resume_to(sim, 30, accept_loss=True).seal({})

    verdict = verify_run(sim.run, Trust((sim.signer.vkey,), (head,), sim.plan.origin), data=sim.data_folder)

    assert {f.code for f in verdict.findings if f.level == "error"} == {"E_LOSS_ACCEPTED"}
    assert (verdict.exit_code, verdict.sealed, verdict.steps) == (5, True, 30)


@pytest.mark.parametrize("position", [0.2, 0.5])
def test_b03_a_damaged_write_ahead_log_is_not_resumed_not_deleted_and_not_called_tampering(
    position: float, key: Path, tmp_path: Path
) -> None:
    """B03: one byte flipped in the middle, as after a kill; resume refuses and leaves every file as it is."""
    sim, _ = killed_run(tmp_path / "killed", key, 8)
    sim.flip("ledger.duckdb.wal", position)
    before = {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()}
    with pytest.raises(ReadError) as caught:
        resume_to(sim, 30)
    said = f"{caught.value} {caught.value.advice()}"
    assert "ledger.duckdb" in said
    assert "tamper" not in said.lower()
    assert {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()} == before


def test_a_full_disk_loses_nothing_that_was_recorded(key: Path, tmp_path: Path) -> None:
    """The database cannot grow any more; when there is room again the same ledger goes on and seals."""
    with start_writer(tmp_path / "full", key, "full") as writer:
        output, errors = writer.communicate(timeout=120)
    assert writer.returncode == 0, errors
    refused = [line for line in output.splitlines() if line.startswith("refused")]
    assert len(refused) == 1, output
    steps_appended = int(refused[0].split()[1])
    sim = LedgerSimulator(tmp_path / "full", signer=Signer.load(key, passphrase=PASSPHRASE))

    verdict = verify_run(sim.run, sim.trust("head"))

    assert verdict.exit_code == 0, verdict.findings
    assert verdict.steps == steps_appended
