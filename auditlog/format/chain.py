"""The running state of a log: hash chain and Merkle tree over the same leaves.

The chain is what "each entry depends on all entries before it" means in one line; the tree is what is signed.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from auditlog.format.digests import genesis
from auditlog.format.merkle import Frontier


class LogState:
    """Size, chain value and tree root of a log, updated entry by entry.

    Args:
        genesis_document: What the log is bound to: a run's manifest, or for a custody log the run's final note.
    """

    __slots__ = ("_tree", "chain")

    def __init__(self, genesis_document: bytes) -> None:
        self.chain = genesis(genesis_document)
        self._tree = Frontier()

    @property
    def size(self) -> int:
        """Number of entries so far, which is the ``seq`` of the next one."""
        return self._tree.size

    def append(self, leaf: bytes) -> None:
        """Take in the next entry's leaf hash: ``chain = SHA-256(chain || leaf)``."""
        self.chain = sha256(self.chain + leaf).digest()
        self._tree.append(leaf)

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Take in leaf hashes in order."""
        added = list(leaves)
        self.chain = chain_after(self.chain, added)
        self._tree.extend(added)

    def root(self) -> bytes:
        """Return the Merkle root over all entries so far."""
        return self._tree.root()


def chain_after(chain: bytes, leaves: Iterable[bytes]) -> bytes:
    """Return the chain value after ``leaves`` when it was ``chain`` before them."""
    for leaf in leaves:
        chain = sha256(chain + leaf).digest()
    return chain
