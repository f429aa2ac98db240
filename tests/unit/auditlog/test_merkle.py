"""The tree against published vectors, and against the recursive definition of RFC 6962 written out again here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditlog.format.digests import leaf_hash
from auditlog.format.merkle import (
    EMPTY_ROOT,
    Frontier,
    consistency_path,
    inclusion_path,
    root_hash,
    verify_consistency,
    verify_inclusion,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "rfc6962.json").read_text())
LEAVES = [leaf_hash(bytes.fromhex(leaf)) for leaf in VECTORS["leaves"]]
ROOTS = [bytes.fromhex(root) for root in VECTORS["roots"]]

many_leaves = st.integers(0, 70).map(lambda n: [leaf_hash(bytes([i])) for i in range(n)])


def reference_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1, word for word."""
    if not leaves:
        return hashlib.sha256().digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + reference_root(leaves[:k]) + reference_root(leaves[k:])).digest()


def unhex(path: list[str]) -> list[bytes]:
    return [bytes.fromhex(node) for node in path]


@pytest.mark.parametrize("size", range(9))
def test_roots_are_those_of_certificate_transparency(size: int) -> None:
    assert root_hash(LEAVES[:size]) == ROOTS[size]


@pytest.mark.parametrize("proof", VECTORS["inclusion"], ids=lambda p: f"{p['index']}-of-{p['size']}")
def test_inclusion_proofs_are_those_of_certificate_transparency(proof: dict) -> None:
    index, size, path = proof["index"], proof["size"], unhex(proof["path"])
    assert inclusion_path(LEAVES[:size], index) == path
    assert verify_inclusion(LEAVES[index], index, size, path, ROOTS[size])


@pytest.mark.parametrize("proof", VECTORS["consistency"], ids=lambda p: f"{p['old_size']}-in-{p['size']}")
def test_consistency_proofs_are_those_of_certificate_transparency(proof: dict) -> None:
    old_size, size, path = proof["old_size"], proof["size"], unhex(proof["path"])
    assert consistency_path(LEAVES[:size], old_size) == path
    assert verify_consistency(old_size, ROOTS[old_size], size, ROOTS[size], path)


@given(many_leaves)
def test_a_growing_tree_has_the_root_of_the_definition_at_every_size(leaves: list[bytes]) -> None:
    tree = Frontier()
    assert tree.root() == EMPTY_ROOT == reference_root([])
    for size, leaf in enumerate(leaves, start=1):
        tree.append(leaf)
        assert (tree.size, tree.root()) == (size, reference_root(leaves[:size]))


@given(many_leaves, st.data())
def test_every_leaf_has_an_inclusion_proof_and_no_other_leaf_fits_it(leaves: list[bytes], data: st.DataObject) -> None:
    if not leaves:
        return
    index, size, root = data.draw(st.integers(0, len(leaves) - 1)), len(leaves), reference_root(leaves)
    path = inclusion_path(leaves, index)
    assert verify_inclusion(leaves[index], index, size, path, root)
    assert not verify_inclusion(leaf_hash(b"other"), index, size, path, root)
    assert not verify_inclusion(leaves[index], index, size, [*path, bytes(32)], root)
    assert not verify_inclusion(leaves[index], index, size, path, bytes(32))
    for other in range(size):
        assert verify_inclusion(leaves[index], other, size, path, root) == (other == index)
    if path:
        assert not verify_inclusion(leaves[index], index, size, path[:-1], root)


@given(many_leaves, st.data())
def test_every_prefix_has_a_consistency_proof_and_no_other_prefix_fits_it(
    leaves: list[bytes], data: st.DataObject
) -> None:
    old_size = data.draw(st.integers(0, len(leaves)))
    size, old_root, root = len(leaves), reference_root(leaves[:old_size]), reference_root(leaves)
    path = consistency_path(leaves, old_size)
    assert verify_consistency(old_size, old_root, size, root, path)
    assert not verify_consistency(old_size, bytes(32), size, root, path)
    assert not verify_consistency(old_size, old_root, size, root, [*path, bytes(32)])
    if 0 < old_size < size:
        assert not verify_consistency(old_size, old_root, size, bytes(32), path)
        assert not verify_consistency(old_size, old_root, size, root, path[:-1])
        assert not verify_consistency(old_size, old_root, size, root, [])


def test_a_copy_grows_by_itself() -> None:
    tree = Frontier()
    tree.extend(LEAVES[:3])
    twin = tree.copy()
    twin.append(LEAVES[3])
    assert (tree.root(), twin.root()) == (ROOTS[3], ROOTS[4])


def test_proofs_of_leaves_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="no leaf 8 in a tree of 8"):
        inclusion_path(LEAVES, 8)
    with pytest.raises(IndexError, match="no prefix of 9"):
        consistency_path(LEAVES, 9)
    assert not verify_inclusion(LEAVES[0], 8, 8, [], ROOTS[8])
    assert not verify_inclusion(LEAVES[0], -1, 8, [], ROOTS[8])
    assert not verify_consistency(8, ROOTS[8], 7, ROOTS[7], [])


@given(st.lists(st.integers(0, 40), max_size=8))
def test_leaves_added_many_at_a_time_give_the_tree_of_one_at_a_time(stretches: list[int]) -> None:
    many, single = Frontier(), Frontier()
    for number, count in enumerate(stretches):
        leaves = [hashlib.sha256(bytes([number, i])).digest() for i in range(count)]
        many.extend(leaves)
        for leaf in leaves:
            single.append(leaf)
        assert (many.size, many.root(), many.copy().root()) == (single.size, single.root(), single.root())
