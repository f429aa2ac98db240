"""The RFC 6962 Merkle tree over leaf hashes: roots, inclusion proofs, consistency proofs.

Everything here takes *leaf hashes* (see ``digests.leaf_hash``), never rows. Proofs are lists of hashes as in
RFC 9162, sections 2.1.3 and 2.1.4, so any other implementation checks them. Nothing is cached between calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from auditlog.format.digests import node_hash, sha256

EMPTY_ROOT = sha256()


class Frontier:
    """A tree that only grows: O(log n) memory, because it keeps nothing but the perfect subtrees' roots.

    Example:
        >>> tree = Frontier()
        >>> tree.root() == EMPTY_ROOT
        True
        >>> tree.append(b"a" * 32)
        >>> tree.size, tree.root() == b"a" * 32
        (1, True)
    """

    __slots__ = ("_peaks", "size")

    def __init__(self) -> None:
        self.size = 0
        self._peaks: list[bytes] = []  # one root per set bit of ``size``, largest subtree first

    def append(self, leaf: bytes) -> None:
        """Add one leaf hash."""
        node, size = leaf, self.size
        while size & 1:  # every complete pair closes
            node = node_hash(self._peaks.pop(), node)
            size >>= 1
        self._peaks.append(node)
        self.size += 1

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Add leaf hashes in order, level by level: several times as fast as one by one."""
        nodes, left = list(leaves), self.size
        self.size += len(nodes)
        peaks: list[bytes] = []  # smallest subtree first
        while nodes or left:
            if left & 1:  # this level's perfect subtree stands to the left of the new ones
                nodes.insert(0, self._peaks.pop())
            if len(nodes) & 1:
                peaks.append(nodes.pop())
            nodes = [node_hash(one, other) for one, other in zip(nodes[::2], nodes[1::2], strict=True)]
            left >>= 1
        self._peaks = peaks[::-1]

    def root(self) -> bytes:
        """Return the root over all leaves so far; SHA-256 of nothing for an empty tree."""
        if not self._peaks:
            return EMPTY_ROOT
        node = self._peaks[-1]
        for peak in reversed(self._peaks[:-1]):
            node = node_hash(peak, node)
        return node

    def copy(self) -> Frontier:
        """Return a tree that grows on from here by itself."""
        twin = Frontier()
        twin.size, twin._peaks = self.size, list(self._peaks)
        return twin


def root_hash(leaves: Sequence[bytes]) -> bytes:
    """Return the root over ``leaves`` (leaf hashes)."""
    tree = Frontier()
    tree.extend(leaves)
    return tree.root()


def inclusion_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the sibling hashes that lead from leaf ``index`` to the root, lowest first.

    Raises:
        IndexError: If there is no such leaf.
    """
    if not 0 <= index < len(leaves):
        raise IndexError(f"no leaf {index} in a tree of {len(leaves)}")
    path = []
    low, high = 0, len(leaves)
    while high - low > 1:
        middle = low + _split(high - low)
        if index < middle:
            path.append(root_hash(leaves[middle:high]))
            high = middle
        else:
            path.append(root_hash(leaves[low:middle]))
            low = middle
    return path[::-1]


def verify_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Return whether ``path`` shows that ``leaf`` is entry ``index`` of the tree with ``size`` leaves and ``root``.

    Source: RFC 9162, section 2.1.3.2.
    """
    if not 0 <= index < size:
        return False
    node, position, last = leaf, index, size - 1
    for sibling in path:
        if last == 0:
            return False  # the path is longer than the tree is high
        if position & 1 or position == last:
            node = node_hash(sibling, node)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            node = node_hash(node, sibling)
        position, last = position >> 1, last >> 1
    return last == 0 and node == root


def consistency_path(leaves: Sequence[bytes], old_size: int) -> list[bytes]:
    """Return the hashes that show the tree over ``leaves[:old_size]`` to be a prefix of the tree over ``leaves``.

    Raises:
        IndexError: If ``old_size`` is not within 0 and ``len(leaves)``.
    """
    if not 0 <= old_size <= len(leaves):
        raise IndexError(f"no prefix of {old_size} in a tree of {len(leaves)}")
    if old_size in (0, len(leaves)):
        return []
    path = []
    low, high, prefix_is_whole = 0, len(leaves), True
    while old_size != high:  # SUBPROOF of RFC 6962, section 2.1.2, unrolled
        middle = low + _split(high - low)
        if old_size <= middle:
            path.append(root_hash(leaves[middle:high]))
            high = middle
        else:
            path.append(root_hash(leaves[low:middle]))
            low, prefix_is_whole = middle, False
    if not prefix_is_whole:
        path.append(root_hash(leaves[low:high]))
    return path[::-1]


def verify_consistency(old_size: int, old_root: bytes, size: int, root: bytes, path: Sequence[bytes]) -> bool:
    """Return whether ``path`` shows that the old tree is a prefix of the new one.

    Source: RFC 9162, section 2.1.4.2. The empty tree is a prefix of every tree, with an empty path.
    """
    if not 0 <= old_size <= size:
        return False
    if old_size == size:
        return not path and old_root == root
    if old_size == 0:
        return not path and old_root == EMPTY_ROOT
    hashes = list(path)
    position, last = old_size - 1, size - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    if position == 0:  # the old tree is perfect, so its root starts the path
        hashes.insert(0, old_root)
    if not hashes:
        return False
    old_node = node = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            return False
        if position & 1 or position == last:
            old_node, node = node_hash(sibling, old_node), node_hash(sibling, node)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            node = node_hash(node, sibling)
        position, last = position >> 1, last >> 1
    return last == 0 and old_node == old_root and node == root


def _split(size: int) -> int:
    """Return the largest power of two below ``size``: where RFC 6962 divides a tree."""
    return 1 << (size - 1).bit_length() - 1
