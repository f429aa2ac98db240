"""Fixtures for tests that run a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import MODELS, write_rows

from auditlog.datamanifest import DataManifest
from auditlog.trust.keys import Signer


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return MODELS[request.param]().train()


@pytest.fixture
def data(tmp_path: Path) -> DataManifest:
    write_rows(tmp_path / "data")
    return DataManifest.build(tmp_path / "data" / "*.jsonl")


@pytest.fixture
def signer() -> Signer:
    return Signer.generate("bank.example/audit")
