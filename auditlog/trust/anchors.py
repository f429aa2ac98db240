"""What a verifier brings from outside the run: pinned public keys, kept heads, the expected origin.

A key shows *who* signed; a kept head shows that nobody, the key's holder included, went back on what was handed
over. Each leaves something open that the other closes, and ``describe`` and ``leaves_open`` say which. Reading all
this from files is ``auditlog.trust.trustfile``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from auditlog.format.notes import Note, VKey
from auditlog.trust.certificates import Certificate
from auditlog.trust.ranks import CUSTODY_SUFFIX
from auditlog.trust.verdict import counted

_NAMED_HEADS = 3  # of one log; more are counted


@dataclass(frozen=True, slots=True)
class Revocation:
    """A key that is not believed any more for log checkpoints of more than ``size`` entries.

    Args:
        fingerprint: SHA-256 of the public key, hex.
        size: The last size up to which the key is still believed.
        origin: The log in which ``size`` counts; empty for any.
        reason: The verifier's own words.
    """

    fingerprint: str
    size: int
    origin: str = ""
    reason: str = ""

    def limit(self, origin: str) -> int | None:
        """Return the last size believed in the log ``origin``; ``None`` if this revocation is about another log.

        What a custody log says came after the run, so unless a revocation is about that very log, nothing in it
        can be dated before the revocation.
        """
        if origin.endswith(CUSTODY_SUFFIX) and self.origin in ("", origin.removesuffix(CUSTODY_SUFFIX)):
            return 0
        return self.size if self.origin in ("", origin) else None


@dataclass(frozen=True, slots=True)
class Trust:
    """The verifier's own knowledge. Nothing in it may come from the folder that is verified.

    Args:
        vkeys: Pinned public keys of the long-lived keys.
        heads: Signed log checkpoints that were handed over while the log grew.
        origin: The log one expects to see. Alone it anchors nothing.
        origins: The logs one may expect to see, where no ``origin`` is given.
        fingerprints: Further pinned keys, by the SHA-256 of their public key in hex. What they are called stands in
            the run: see ``naming``.
        certificates: Session certificates that were handed over with the heads. They show that a head's session key
            was certified, even where the log does not hold that certificate any more.
        since: A kept head from which on the log is to be shown to have only grown.
        revocations: Keys that are not believed any more, and from which size on.
        tsa_roots: Certificates of time-stamping authorities (DER). Not used yet, and said to be unused.
        allow_open: Whether a run that is not sealed yet may verify.
        allow_unanchored: Whether a run may verify with nothing from outside to compare it with.
    """

    vkeys: tuple[VKey, ...] = ()
    heads: tuple[Note, ...] = ()
    origin: str | None = None
    origins: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    since: Note | None = None
    revocations: tuple[Revocation, ...] = ()
    tsa_roots: tuple[bytes, ...] = ()
    allow_open: bool = False
    allow_unanchored: bool = False

    @property
    def is_pinned(self) -> bool:
        """Whether there is a pinned key, by whatever name."""
        return bool(self.vkeys or self.fingerprints)

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a key nor a head, so that nothing can be more than self-consistent."""
        return not self.is_pinned and not self.all_heads

    @property
    def all_heads(self) -> tuple[Note, ...]:
        """The kept heads, that of ``since`` included."""
        return self.heads if self.since is None else (*self.heads, self.since)

    @property
    def expected_origins(self) -> tuple[str, ...]:
        """The logs one expects to see, any of them; empty if any log will do."""
        return self.origins if self.origin is None else (self.origin,)

    def heads_of(self, origin: str) -> tuple[Note, ...]:
        """Return the kept heads of one log."""
        return tuple(head for head in self.all_heads if head.checkpoint().origin == origin)

    def pinned(self) -> list[str]:
        """Return each pinned key in words: name and fingerprint, as far as they are known."""
        named = [f"{vkey.name} {vkey.fingerprint[:16]}" for vkey in self.vkeys]
        return named + [f"the key with fingerprint {text[:16]}" for text in self.fingerprints]

    def naming(self, candidates: Iterable[VKey]) -> Trust:
        """Return this trust with the names of keys that were pinned by their fingerprint.

        A name tells apart nothing that the fingerprint does not, so it may come from the run.

        Args:
            candidates: Keys that the run names.
        """
        found = {vkey: None for vkey in candidates if vkey.fingerprint in self.fingerprints}
        if not found:
            return self
        rest = tuple(text for text in self.fingerprints if text not in {vkey.fingerprint for vkey in found})
        new = tuple(vkey for vkey in found if vkey not in self.vkeys)
        return replace(self, vkeys=(*self.vkeys, *new), fingerprints=rest)

    def describe(self, origin: str = "") -> str:
        """Say in words what was brought.

        Args:
            origin: The log that is judged. Heads of any other log are said to be of that log.
        """
        parts = [f"pinned key {vkey.name} ({vkey.fingerprint[:16]})" for vkey in self.vkeys]
        parts += [f"pinned key with fingerprint {text[:16]}" for text in self.fingerprints]
        by_log: dict[str, list[int]] = {}
        for statement in (head.checkpoint() for head in self.all_heads):
            by_log.setdefault(statement.origin, []).append(statement.size)
        for log, sizes in sorted(by_log.items(), key=lambda item: (item[0] != origin, item[0])):
            parts += _describe_heads(sorted(sizes), "" if log == origin else f" of the log {log}")
        if self.revocations:
            parts.append(counted(len(self.revocations), "revocation"))
        return " and ".join(parts) or "nothing from outside the run"

    def leaves_open(self) -> str:
        """Say in words what this knowledge cannot show; empty if a key and a head are there."""
        if self.is_empty:
            return "whether this is the run that was trained: all of it could have been made today"
        if not self.all_heads:
            return (
                "no kept head was given, so nothing here binds the operator: "
                "whoever holds the pinned key could have rewritten or shortened the run"
            )
        if not self.is_pinned:
            return "who signed this run: only a pinned public key shows that"
        return ""

    @classmethod
    def load(
        cls,
        keys: Sequence[str | Path] = (),
        heads: Sequence[str | Path] = (),
        origin: str | None = None,
        *,
        since: str | Path | None = None,
        allow_open: bool = False,
        allow_unanchored: bool = False,
    ) -> Trust:
        """Read keys, heads and trust files.

        Args:
            keys: Pinned keys: verifier keys as text (``name+hash+base64``) or files that hold one, public keys as PEM
                files, fingerprints (SHA-256 of the public key, 64 hex digits); or trust files (``.toml``).
            heads: Note files, or folders of them (such as the one that ``on_head`` fills).
            origin: The expected origin.
            since: A note file: the head from which on the log is to have only grown.
            allow_open: Whether a run that is not sealed yet may verify.
            allow_unanchored: Whether a run may verify with nothing from outside to compare it with.

        Raises:
            UsageError: If something is neither a key nor a file, or a trust file holds something else.
            ReadError: If a file cannot be read or parsed.
        """
        from auditlog.trust.trustfile import load_trust  # it builds a Trust

        trust = load_trust(keys, heads, since)
        return replace(trust, origin=origin, allow_open=allow_open, allow_unanchored=allow_unanchored)


def _describe_heads(sizes: Sequence[int], of_log: str) -> list[str]:
    if len(sizes) > _NAMED_HEADS:
        return [f"{len(sizes)} kept heads up to {sizes[-1]:,} entries{of_log}"]
    return [f"kept head of {size:,} entries{of_log}" for size in sizes]
