"""One finished run for all attacks, written once, copies to spoil, and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from auditlog import cli
from tests.attacks.ledger_simulator import LedgerSimulator


@dataclass(frozen=True)
class Output:
    code: int
    out: str
    err: str


@pytest.fixture
def gradtrail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """Run the command line in this process."""

    def run(*arguments: object) -> Output:
        monkeypatch.setattr(sys, "argv", ["gradtrail", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return Output(int(left.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    """The clean run, with the other runs that attackers put in its place. Not to be changed."""
    folder = tmp_path_factory.mktemp("attacks")
    return LedgerSimulator(folder / "original").write().with_others(folder / "others")


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    """A copy to spoil."""
    return original.copy_to(tmp_path / "copy")
