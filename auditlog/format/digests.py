"""SHA-256 with its domain tags. Every other hash of the format is built from these four functions."""

from __future__ import annotations

import hashlib

GENESIS_TAG = b"gradtrail/genesis/v0\n"


def sha256(*parts: bytes) -> bytes:
    """Return SHA-256 over the concatenation of ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def leaf_hash(row: bytes) -> bytes:
    """Return the RFC 6962 leaf hash ``SHA-256(0x00 || row)``."""
    return hashlib.sha256(b"\x00" + row).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the RFC 6962 inner node ``SHA-256(0x01 || left || right)``."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def genesis(document: bytes) -> bytes:
    """Return the chain value before entry 0: it binds the whole log to ``document`` (the manifest)."""
    return sha256(GENESIS_TAG, document)
