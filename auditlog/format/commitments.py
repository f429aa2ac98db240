"""Salted commitments: the log is bound to a sample and its sketch without containing either.

The salt is 32 random bytes per sample and lives in ``salts.bin``. Whoever destroys the salt (and the row)
leaves a log that still verifies and says nothing about the sample any more. While the salt exists, a
commitment is personal data if the sample is.
"""

from __future__ import annotations

import struct

from auditlog.format.digests import sha256

SALT_BYTES = 32


def sample_identity(source_sha256: bytes, row: int, row_sha256: bytes) -> bytes:
    """Return the 72 bytes that say which row of which file a sample is.

    Args:
        source_sha256: SHA-256 of the whole source file, 32 bytes.
        row: Row within the file, from 0.
        row_sha256: SHA-256 of the row's raw bytes, 32 bytes.
    """
    return source_sha256 + struct.pack("<Q", row) + row_sha256


def sample_commitment(salt: bytes, identity: bytes) -> bytes:
    """Return ``SHA-256(0x10 || salt || identity)``."""
    return sha256(b"\x10", salt, identity)


def sketch_commitment(salt: bytes, scale_raw: float, scale_whitened: float, raw: bytes, whitened: bytes) -> bytes:
    """Return ``SHA-256(0x11 || salt || scales || raw || whitened)``; scales are little-endian float32."""
    return sha256(b"\x11", salt, struct.pack("<ff", scale_raw, scale_whitened), raw, whitened)


def gradient_commitment(salt: bytes, scale_raw: float, scale_whitened: float, raw: bytes, whitened: bytes) -> bytes:
    """Return ``SHA-256(0x12 || salt || scales || raw || whitened)`` of a step's consumed gradient.

    It belongs to no single sample, so it has a salt of its own: without one, whoever knows the step's other samples
    could try out what an erased one had been.
    """
    return sha256(b"\x12", salt, struct.pack("<ff", scale_raw, scale_whitened), raw, whitened)


def document_commitment(salt: bytes, document: bytes) -> bytes:
    """Return ``SHA-256(0x13 || salt || document)``: how the custody log names a result without containing it."""
    return sha256(b"\x13", salt, document)
