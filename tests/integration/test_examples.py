"""Every example runs, offline, on its tiny model."""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "01_plain_loop.py": ("VERIFIED: 48 records in 6 steps, exit 0",),
    "02_trainer.py": ("48 records in 6 steps",),
    "03_ask.py": ("Is this about this case?", "not logged"),
    "05_packing.py": ("24 records from 3 rows", "error below 1e-5: True"),
    "06_resume.py": ("broken off after 4 steps", "VERIFIED: 2 attempts"),
    "04_catch_tampering.py": ("UNANCHORED", "INTEGRITY, exit 4", "E_LEAF: record 5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / name))
    said = capsys.readouterr().out
    for line in SAYS[name]:
        assert line in said


def test_every_example_is_tested() -> None:
    assert set(SAYS) == {path.name for path in EXAMPLES.glob("0*.py")}
