"""Fixtures for tests that train a tiny model with audit mode on."""

from training_fixtures import data, one_thread, signer

__all__ = ["data", "one_thread", "signer"]
