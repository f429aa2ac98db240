"""What a verifier brings from outside the run: pinned public keys, kept heads, the expected origin.

A key shows *who* signed; a kept head shows that nobody, the key's holder included, went back on what was handed
over. Each leaves something open that the other closes, and ``describe`` and ``leaves_open`` say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from auditlog.errors import FormatError, ReadError, UsageError
from auditlog.format.notes import Note, VKey
from auditlog.trust.keys import read_vkey


@dataclass(frozen=True, slots=True)
class Trust:
    """The verifier's own knowledge. Nothing in it may come from the folder that is verified.

    Args:
        vkeys: Pinned public keys of the long-lived keys.
        heads: Signed log checkpoints that were handed over while the log grew.
        origin: The log one expects to see. Alone it anchors nothing.
    """

    vkeys: tuple[VKey, ...] = ()
    heads: tuple[Note, ...] = ()
    origin: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a key nor a head, so that nothing can be more than self-consistent."""
        return not self.vkeys and not self.heads

    def describe(self) -> str:
        """Say in words what was brought."""
        keys = [f"pinned key {vkey.name} ({vkey.fingerprint[:16]})" for vkey in self.vkeys]
        heads = [f"kept head of {head.checkpoint().size:,} entries" for head in _by_size(self.heads)]
        if len(heads) > 3:
            heads = [f"{len(heads)} kept heads up to {_by_size(self.heads)[-1].checkpoint().size:,} entries"]
        return " and ".join(keys + heads) or "nothing from outside the run"

    def leaves_open(self) -> str:
        """Say in words what this knowledge cannot show; empty if a key and a head are there."""
        if self.is_empty:
            return "whether this is the run that was trained: all of it could have been made today"
        if not self.heads:
            return (
                "no kept head was given, so nothing here binds the operator: "
                "whoever holds the pinned key could have rewritten or shortened the run"
            )
        if not self.vkeys:
            return "who signed this run: only a pinned public key shows that"
        return ""

    @classmethod
    def load(
        cls, keys: Sequence[str | Path] = (), heads: Sequence[str | Path] = (), origin: str | None = None
    ) -> Trust:
        """Read keys and heads.

        Args:
            keys: Verifier keys as text (``name+hash+base64``) or files that hold one.
            heads: Note files, or folders of them (such as the one that ``on_head`` fills).
            origin: The expected origin.

        Raises:
            UsageError: If something is neither a key nor a file.
            ReadError: If a file cannot be read or parsed.
        """
        notes = [_read_head(path) for head in heads for path in _note_files(Path(head))]
        return cls(tuple(_read_key(key) for key in keys), tuple(notes), origin)


def _by_size(heads: Sequence[Note]) -> list[Note]:
    return sorted(heads, key=lambda head: head.checkpoint().size)


def _read_key(key: str | Path) -> VKey:
    path = Path(key)
    try:
        if path.is_file():
            return read_vkey(path)
    except OSError:  # a verifier key can be too long for a file name
        pass
    try:
        return VKey.parse(str(key))
    except FormatError as error:
        raise UsageError(
            f"{key}: neither a file nor a verifier key ({error})",
            "Give the .vkey file, or its one line of text: name+hash+base64.",
        ) from error


def _note_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted([*path.glob("*.note"), *path.glob("ranks/*/*.note")])
    if not files:
        raise UsageError(f"{path}: no *.note file in this folder", "Give the folder that holds the kept heads.")
    return files


def _read_head(path: Path) -> Note:
    try:
        note = Note.parse(path.read_bytes())
        note.checkpoint()
    except OSError as error:
        raise ReadError(f"kept head {path}: {error.strerror or error}") from error
    except FormatError as error:
        raise FormatError(f"kept head {path}: {error}") from error
    return note
