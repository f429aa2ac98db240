"""Salts: one per row, private, never written over, erased by zeros."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from auditlog.errors import StoreError
from auditlog.ledger.salts import Salts, create_salts


def test_every_row_has_its_own_salt_and_the_file_is_private(tmp_path: Path) -> None:
    create_salts(tmp_path, 70_000)  # more than one chunk
    salts = Salts(tmp_path)
    assert len(salts) == 70_000
    assert len({salts.salt(i) for i in range(70_000)}) == 70_000
    assert stat.S_IMODE((tmp_path / "salts.bin").stat().st_mode) == 0o600


def test_a_salt_of_zeros_is_an_erased_one_and_outside_there_is_none(tmp_path: Path) -> None:
    create_salts(tmp_path, 3)
    content = bytearray((tmp_path / "salts.bin").read_bytes())
    content[32:64] = bytes(32)
    (tmp_path / "salts.bin").write_bytes(content)
    salts = Salts(tmp_path)
    assert [salts.salt(i) is None for i in (-1, 0, 1, 2, 3)] == [True, False, True, False, True]
    assert salts.salt(2) == bytes(content[64:96])


def test_salts_are_never_replaced(tmp_path: Path) -> None:
    create_salts(tmp_path, 1)
    before = (tmp_path / "salts.bin").read_bytes()
    with pytest.raises(StoreError, match="never replaced"):
        create_salts(tmp_path, 1)
    assert (tmp_path / "salts.bin").read_bytes() == before


def test_a_run_without_salts_has_none(tmp_path: Path) -> None:
    assert len(Salts(tmp_path)) == 0
    assert Salts(tmp_path).salt(0) is None
