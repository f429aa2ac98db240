"""Commitments, byte for byte against hashlib and struct."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditlog.format.commitments import (
    document_commitment,
    gradient_commitment,
    sample_commitment,
    sample_identity,
    sketch_commitment,
)

digests = st.binary(min_size=32, max_size=32)
scales = st.floats(width=32, min_value=0, allow_nan=False, allow_infinity=False)


@given(digests, st.integers(0, 2**64 - 1), digests, digests)
def test_a_sample_commitment_binds_file_row_and_content(source: bytes, row: int, raw: bytes, salt: bytes) -> None:
    identity = sample_identity(source, row, raw)
    assert identity == source + row.to_bytes(8, "little") + raw
    assert sample_commitment(salt, identity) == hashlib.sha256(b"\x10" + salt + identity).digest()


@given(digests, scales, scales, st.binary(max_size=20), st.binary(max_size=20))
def test_sketch_and_gradient_commitments(salt: bytes, raw: float, whitened: float, a: bytes, b: bytes) -> None:
    body = struct.pack("<f", raw) + struct.pack("<f", whitened) + a + b
    assert sketch_commitment(salt, raw, whitened, a, b) == hashlib.sha256(b"\x11" + salt + body).digest()
    assert gradient_commitment(salt, raw, whitened, a, b) == hashlib.sha256(b"\x12" + salt + body).digest()


@given(digests, st.binary(max_size=40))
def test_a_document_commitment(salt: bytes, document: bytes) -> None:
    assert document_commitment(salt, document) == hashlib.sha256(b"\x13" + salt + document).digest()


def test_another_salt_hides_the_same_sample() -> None:
    identity = sample_identity(bytes(32), 0, bytes(32))
    assert sample_commitment(bytes(32), identity) != sample_commitment(bytes([1]) * 32, identity)


@pytest.mark.parametrize("value", [math.nan, float("nan")])
def test_a_nan_scale_has_one_bit_pattern(value: float) -> None:
    expected = hashlib.sha256(b"\x12" + b"s" * 32 + b"\x00\x00\xc0\x7f" + bytes(4)).digest()
    assert gradient_commitment(b"s" * 32, value, 0, b"", b"") == expected
