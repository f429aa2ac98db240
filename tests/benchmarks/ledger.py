"""The log itself: how fast it is written and verified, how large it is, and what attacks and ``kill -9`` do to it.

Figures of speed are records per second of one thread: from the first record to the seal, every transaction, signature
and fsync inside; and from opening a run to its verdict. Steps have 64 records. ``ledger.verify_full_per_s`` opens the
commitments too, of sketches of 2 x 4,096 numbers.
"""

from __future__ import annotations

import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import medians
from rich.console import Console
from rich.table import Table

from auditlog.datamanifest import DataManifest
from auditlog.format.chain import LogState
from auditlog.format.digests import sha256
from auditlog.format.records import RECORD, EventKind
from auditlog.ledger.appender import Appender
from auditlog.ledger.ledger import BATCH_ENTRIES, RunLedger
from auditlog.ledger.reader import RunReader
from auditlog.ledger.store import DATABASE, MANIFEST, StoredLog
from auditlog.ledger.verify_run import verify_log_folder
from auditlog.ledger.view import refuse
from auditlog.trust.anchors import Trust
from auditlog.trust.certificates import make_certificate, session_name
from auditlog.trust.keys import Signer
from tests.support import Plan, make_manifest, simulated_steps, write_sources

PLAN = Plan(steps=1, per_step=64, rows_per_file=(5_000, 5_000), dim=4_096)
RECORDS, QUICK_RECORDS = 1_000_000, 200_000
FULL_RECORDS, QUICK_FULL_RECORDS = 50_000, 10_000
MANY = 10_000_000
ROUNDS = 3
KILLS, QUICK_KILLS = 200, 20
ATTACKS = ("tests/attacks", "tests/integration/test_bundle.py", "tests/unit/bundle")
_ROOT = Path(__file__).resolve().parents[2]


def measure(device: str = "cpu") -> dict[str, Any]:
    """Return the ledger's figures. It runs on the host whatever ``device`` is."""
    is_quick = bool(os.environ.get("BENCH_QUICK"))
    records = QUICK_RECORDS if is_quick else RECORDS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gradtrail-ledger-") as name:
        folder = Path(name)
        data, signer = write_sources(folder / "data", PLAN.rows_per_file), Signer.generate("bank.example/audit")
        appended = [written(folder / f"log-{i}", data, signer, records) for i in range(ROUNDS)]
        found |= medians.of(appended).figures("ledger.append_per_s")
        found["ledger.bytes_per_record"] = (folder / "log-0" / DATABASE).stat().st_size / records
        verified = [records / _seconds(lambda: verified_log(folder / "log-0", signer)) for _ in range(ROUNDS)]
        found |= medians.of(verified).figures("ledger.verify_per_s")
        full = QUICK_FULL_RECORDS if is_quick else FULL_RECORDS
        _with_sketches(folder / "full", data, signer, full)
        opened = [full / _seconds(lambda: _verified_run(folder / "full", signer)) for _ in range(ROUNDS)]
        found |= medians.of(opened).figures("ledger.verify_full_per_s")
        if not is_quick:
            written(folder / "many", data, signer, MANY)
            found["ledger.verify_10m_mb"] = peak_mb(folder / "many", signer)
        found["ledger.kill_lost"] = lost_to_kills(folder / "kills", QUICK_KILLS if is_quick else KILLS)
    return found | wrong_verdicts()


def written(run: Path, data: DataManifest, signer: Signer, records: int) -> float:
    """Write a sealed run without sketches; returns records per second."""
    run.mkdir()
    manifest = make_manifest(data, signer, PLAN)
    document = manifest.to_bytes()
    (run / MANIFEST).write_bytes(document)
    session = Signer.ephemeral(session_name(manifest.origin, 1))
    rows = _records(data, records)
    began = time.perf_counter()
    log = Appender.create(run, manifest.origin, document)
    about = {"origin": manifest.origin, "run_id": manifest.run_id, "manifest_sha256": sha256(document).hex()}
    opening = {"attempt": 1, "first_size": 0, "first_root": LogState(document).root(), "session_vkey": session.vkey}
    log.add_event(EventKind.SESSION, make_certificate(signer, **about, **opening))
    steps = range(0, records, PLAN.per_step)
    for step, first in enumerate(steps, 1):
        few = rows[first : first + PLAN.per_step]
        few["seq"] = log.size + np.arange(len(few))
        few["step"] = step
        body = {"step": step, "attempt": 1, "first_seq": log.size, "records": len(few), "gradient": None}
        log.add_records(few)
        log.add_event(EventKind.STEP, body | {"lr": [1e-4], "f": 1.0, "residual": 1e-7, "grad_norm": 1.5})
        if log.waiting + PLAN.per_step >= BATCH_ENTRIES:
            log.flush(session)
    log.flush(session)
    totals = {"records": records, "steps": len(steps), "attempts": 1}
    live = {"live_records": records, "live_steps": len(steps)}
    log.add_event(EventKind.SEAL, {"reason": "finished"} | totals | live)
    log.flush(session, signer)
    log.close()
    return records / (time.perf_counter() - began)


def verified_log(run: Path, signer: Signer) -> None:
    """Verify a run's log without its payloads.

    Raises:
        AssertionError: If it is not in order: then its speed means nothing.
    """
    verdict = verify_log_folder(run, Trust(vkeys=(signer.vkey,)), payloads=False).verdict
    assert verdict.exit_code == 0, verdict.findings


def peak_mb(run: Path, signer: Signer) -> float:
    """Return the peak memory of a process that verifies a run, in MB."""
    program = (
        "import resource, sys; from pathlib import Path; from benchmarks.ledger import verified_log;"
        "from auditlog.format.notes import VKey; from types import SimpleNamespace;"
        "verified_log(Path(sys.argv[1]), SimpleNamespace(vkey=VKey.parse(sys.argv[2])));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run), str(signer.vkey)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 1024


def lost_to_kills(folder: Path, rounds: int) -> int:
    """Kill a writing process at random moments; returns in how many rounds something acknowledged was gone."""
    data, signer = write_sources(folder / "data", (40, 40)), Signer.generate("bank.example/audit")
    chance = random.Random(0)
    return sum(_is_lost(folder / f"run-{i}", data, signer, chance.uniform(0.0, 0.15)) for i in range(rounds))


def wrong_verdicts() -> dict[str, Any]:
    """Run every attack against both verifiers; returns how many verdicts were not those expected."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *ATTACKS]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if not counts.get("passed"):
        raise RuntimeError(f"the attacks could not be run: {done.stdout[-300:]}{done.stderr[-300:]}")
    return {
        "ledger.attacks_wrong": counts.get("failed", 0) + counts.get("error", 0),
        "ledger.attacks_run": sum(counts.values()),
    }


def _records(data: DataManifest, records: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows, index = np.zeros(records, RECORD), rng.integers(0, data.rows, records)
    rows["source_id"], rows["row"], rows["data_version_id"] = data.locate(index)
    rows["slot"], rows["attempt"] = np.arange(records) % PLAN.per_step, 1
    rows["loss"], rows["n_tokens"], rows["weight"] = rng.gamma(2.0, size=records), rng.integers(1, 99, records), 0.1
    rows["grad_norm"], rows["scale_raw"] = rng.gamma(2.0, size=records), rng.random(records)
    rows["ts_us"] = 1_764_550_000_000_000 + np.arange(records)
    for name in ("sample_commit", "sketch_commit"):
        rows[name] = rng.bytes(32 * records) if records == 1 else np.frombuffer(rng.bytes(32 * records), "V32")
    return rows


def _with_sketches(run: Path, data: DataManifest, signer: Signer, records: int) -> None:
    ledger = RunLedger.create(run, make_manifest(data, signer, PLAN), data, signer)
    (first,) = simulated_steps(data, PLAN)
    for step in range(1, records // PLAN.per_step + 1):
        first.records["step"], first.body["step"] = step, step
        ledger.append_step(first)
    ledger.seal({})


def _verified_run(run: Path, signer: Signer) -> None:
    verdict = verify_log_folder(run, Trust(vkeys=(signer.vkey,))).verdict
    assert verdict.exit_code == 0, verdict.findings


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _is_lost(run: Path, data: DataManifest, signer: Signer, wait_s: float) -> bool:
    """Let a forked process write and acknowledge, kill it after a while, and look for what it acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _write_until_killed(run, data, signer, writing)
    os.close(writing)
    select.select([reading], [], [], 30)  # the first acknowledgement
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        acknowledged = max(map(int, pipe.read().rpartition(b"\n")[0].split()), default=0)
    with StoredLog(run / DATABASE) as log:
        size = max((size for size, _ in log.notes(refuse)), default=0)
    RunLedger.resume(run, data, signer).close_unsealed()  # recomputes every hash and compares every signed root
    with RunReader.open(run) as reader:
        return size < acknowledged or len(reader.records()) + len(reader.events()) < acknowledged


def _write_until_killed(run: Path, data: DataManifest, signer: Signer, writing: int) -> None:
    try:
        plan = Plan(steps=100_000, rows_per_file=(40, 40))
        ledger = RunLedger.create(run, make_manifest(data, signer, plan), data, signer)
        for entry in simulated_steps(data, plan):
            ledger.append_step(entry)
            if entry.body["step"] % 3 == 0:
                ledger.flush()
                os.write(writing, b"%d\n" % ledger.size)
    finally:
        os._exit(1)


def main() -> None:
    """Measure and print a table."""
    table = Table("figure", "value")
    for name, value in measure().items():
        shown = value if not isinstance(value, list) else statistics.mean(value)
        table.add_row(name, f"{shown:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
