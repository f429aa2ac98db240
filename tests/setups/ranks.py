"""A set-up of several processes: each compares what it captured itself, and says so in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditlog import DataManifest, Signer

if TYPE_CHECKING:
    from setups.measure import SetUp

PASSPHRASE = "correct horse"
KEY = "key.p12"
_TESTS = Path(__file__).parents[1]


def result(folder: Path, rank: int) -> Path:
    """Return where a process leaves what it found."""
    return folder / f"compared-{rank}.json"


def launch(setup: SetUp, mode: str, folder: Path, data: DataManifest, signer: Signer) -> list[dict[str, Any]]:
    """Run ``setups.rank`` in as many processes as the set-up has, and return what each found."""
    folder.mkdir(parents=True, exist_ok=True)
    signer.save(folder / KEY, PASSPHRASE)
    torchrun = ["torch.distributed.run", f"--nproc-per-node={setup.processes}"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    worker = ["-m", "setups.rank", setup.group, setup.name, mode, str(folder), str(data.base)]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, *meeting, *worker],
        cwd=_TESTS.parent,
        env=os.environ | {"PYTHONPATH": str(_TESTS), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(result(folder, rank).read_text()) for rank in range(setup.processes)]
