"""Fixtures for tests that run or train a tiny model; each such folder's conftest takes them from here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import write_rows

from auditlog.datamanifest import DataManifest
from auditlog.trust.keys import Signer


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path: Path) -> DataManifest:
    write_rows(tmp_path / "data")
    return DataManifest.build(tmp_path / "data" / "*.jsonl")


@pytest.fixture
def signer() -> Signer:
    return Signer.generate("bank.example/audit")
