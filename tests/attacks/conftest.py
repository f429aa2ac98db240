"""One finished run for all attacks, written once, copies to spoil, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.ledger_simulator import LedgerSimulator


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    """The clean run, with the other runs that attackers put in its place. Not to be changed."""
    folder = tmp_path_factory.mktemp("attacks")
    return LedgerSimulator(folder / "original").write().with_others(folder / "others")


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    """A copy to spoil."""
    return original.copy_to(tmp_path / "copy")
