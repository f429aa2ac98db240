"""Fixtures for tests that run a model."""

from __future__ import annotations

import pytest
import torch
from tiny import MODELS
from training_fixtures import data, one_thread, signer

__all__ = ["data", "model", "one_thread", "signer"]


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return MODELS[request.param]().train()
