"""Domain tags: the four hashes, byte for byte, against hashlib."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from auditlog.format.digests import genesis, leaf_hash, node_hash, sha256


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_parts_are_hashed_as_one_string(parts: list[bytes]) -> None:
    assert sha256(*parts) == hashlib.sha256(b"".join(parts)).digest()


@given(st.binary(max_size=40), st.binary(min_size=32, max_size=32))
def test_every_kind_of_hash_has_its_own_tag(row: bytes, node: bytes) -> None:
    assert leaf_hash(row) == hashlib.sha256(b"\x00" + row).digest()
    assert node_hash(node, row) == hashlib.sha256(b"\x01" + node + row).digest()
    assert genesis(row) == hashlib.sha256(b"gradtrail/genesis/v0\n" + row).digest()


def test_a_leaf_is_never_an_inner_node() -> None:
    left, right = bytes(32), bytes([1]) * 32
    assert leaf_hash(left + right) != node_hash(left, right)
