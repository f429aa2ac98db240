"""The chain against its one-line definition; chain and tree bind the same leaves."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from auditlog.format.chain import LogState, chain_after
from auditlog.format.merkle import EMPTY_ROOT, root_hash

MANIFEST = b'{"format":"gradtrail/run"}'
leaf_lists = st.lists(st.binary(min_size=32, max_size=32), max_size=40)


def reference_chain(leaves: list[bytes]) -> bytes:
    chain = hashlib.sha256(b"gradtrail/genesis/v0\n" + MANIFEST).digest()
    for leaf in leaves:
        chain = hashlib.sha256(chain + leaf).digest()
    return chain


@given(leaf_lists)
def test_the_state_is_chain_and_root_of_all_leaves_so_far(leaves: list[bytes]) -> None:
    state = LogState(MANIFEST)
    assert (state.size, state.chain, state.root()) == (0, reference_chain([]), EMPTY_ROOT)
    state.extend(leaves)
    assert (state.size, state.chain, state.root()) == (len(leaves), reference_chain(leaves), root_hash(leaves))


@given(leaf_lists, leaf_lists)
def test_the_chain_goes_on_from_any_value(first: list[bytes], second: list[bytes]) -> None:
    assert chain_after(reference_chain(first), second) == reference_chain(first + second)


def test_another_genesis_document_gives_another_chain() -> None:
    assert LogState(MANIFEST).chain != LogState(MANIFEST + b" ").chain
