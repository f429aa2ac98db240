"""Signed log checkpoints: the C2SP *signed-note* and *tlog-checkpoint* formats, Ed25519 only.

A note is text, a blank line, and one line per signature. Whoever holds a verifier key (``vkey``) checks it with
any tool that knows the format. Signatures by keys one does not know are ignored; a *bad* signature by a key one
does know spoils the note. Which keys to believe is not decided here, but in ``auditlog.trust``.

Source: https://c2sp.org/signed-note, https://c2sp.org/tlog-checkpoint.
"""

from __future__ import annotations

import base64
import binascii
import enum
import re
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from auditlog.errors import FormatError
from auditlog.format.digests import sha256

ED25519 = 0x01
HASH_BYTES = 32
SIGNATURE_PREFIX = "— "  # em dash and a space
MAX_NOTE_BYTES = 1_000_000

_KEY_HASH_BYTES = 4
_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")


class AlgorithmError(FormatError):
    """A key of another algorithm than Ed25519. There is no list of accepted algorithms to be talked down from."""


class SignatureCheck(enum.Enum):
    """What a note says about one key."""

    GOOD = "good"
    BAD = "bad"  # the key's line is there and does not verify
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class VKey:
    """A verifier key: a name and an Ed25519 public key of 32 bytes.

    Example:
        >>> key = VKey.parse("PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")
        >>> key.name, key.key_hash.hex()
        ('PeterNeumann', 'c74f20a3')
    """

    name: str
    public_key: bytes

    def __post_init__(self) -> None:
        check_key_name(self.name)
        if len(self.public_key) != HASH_BYTES:
            raise FormatError(f"key {self.name}: an Ed25519 public key has 32 bytes, not {len(self.public_key)}")

    @property
    def key_hash(self) -> bytes:
        """The first four bytes of ``SHA-256(name || 0x0a || 0x01 || public key)``: a hint, never a proof."""
        return sha256(self.name.encode(), b"\n", bytes([ED25519]), self.public_key)[:_KEY_HASH_BYTES]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public key in hex, for people to compare."""
        return sha256(self.public_key).hex()

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Return whether ``signature`` (64 bytes) is this key's over ``message``."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public_key).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def __str__(self) -> str:
        material = base64.b64encode(bytes([ED25519]) + self.public_key).decode()
        return f"{self.name}+{self.key_hash.hex()}+{material}"

    @classmethod
    def parse(cls, text: str) -> VKey:
        """Parse ``name+hash+base64``.

        Raises:
            FormatError: If it is not a verifier key, or if its hash does not belong to it.
            AlgorithmError: If its algorithm is not Ed25519.
        """
        name, plus, rest = text.strip().partition("+")
        key_hash, second_plus, encoded = rest.partition("+")
        if not (plus and second_plus):
            raise FormatError(f"not a verifier key (name+hash+base64): {_shorten(text)}")
        material = _decode(encoded, f"key {name}")
        if not material or material[0] != ED25519:
            found = f"0x{material[0]:02x}" if material else "none"
            raise AlgorithmError(f"key {name}: algorithm {found} is not supported; Ed25519 is 0x01")
        key = cls(name, material[1:])
        if key_hash != key.key_hash.hex():
            raise FormatError(f"key {name}: its hash is {key.key_hash.hex()}, the text says {_shorten(key_hash)}")
        return key


class NoteSigner(Protocol):
    """Whatever can sign a note; ``auditlog.trust.keys.Signer`` does."""

    @property
    def vkey(self) -> VKey:
        """The public half."""

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature over ``message``."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature line of a note."""

    name: str
    key_hash: bytes
    signature: bytes

    def line(self) -> str:
        """Return the line, without its newline."""
        return f"{SIGNATURE_PREFIX}{self.name} {base64.b64encode(self.key_hash + self.signature).decode()}"


@dataclass(frozen=True, slots=True)
class LogCheckpoint:
    """A statement about a log: ``size`` entries of the log called ``origin`` have the tree root ``root``.

    Example:
        >>> print(LogCheckpoint("example.org/run", 0, bytes(32)).text(), end="")
        example.org/run
        0
        AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
    """

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """Return the three lines that are signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    @classmethod
    def parse(cls, text: str) -> LogCheckpoint:
        """Parse the three lines. Extension lines are refused: this log writes none, and nobody could check them.

        Raises:
            FormatError: If the text is not a checkpoint.
        """
        lines = text.split("\n")
        if len(lines) != 4 or lines[3] or not lines[0]:
            raise FormatError("not a log checkpoint: three lines expected (origin, size, root)")
        origin, size, root = lines[:3]
        if not _SIZE.fullmatch(size):
            raise FormatError(f"log checkpoint of {origin}: size {_shorten(size)} is not a plain decimal number")
        digest = _decode(root, f"log checkpoint of {origin}")
        if len(digest) != HASH_BYTES:
            raise FormatError(f"log checkpoint of {origin}: the root has {len(digest)} bytes, not {HASH_BYTES}")
        return cls(origin, int(size), digest)


@dataclass(frozen=True, slots=True)
class Note:
    """A text with its signatures. ``text`` ends with a newline."""

    text: str
    signatures: tuple[Signature, ...]

    def to_bytes(self) -> bytes:
        """Return the note as it stands in a ``.note`` file."""
        lines = "".join(f"{signature.line()}\n" for signature in self.signatures)
        return f"{self.text}\n{lines}".encode()

    def checkpoint(self) -> LogCheckpoint:
        """Parse the text as a log checkpoint; raises ``FormatError`` if it is something else."""
        return LogCheckpoint.parse(self.text)

    def check(self, vkey: VKey) -> SignatureCheck:
        """Say whether ``vkey`` signed this note. One bad line of a key outweighs a good one."""
        lines = [s for s in self.signatures if s.name == vkey.name and s.key_hash == vkey.key_hash]
        if not lines:
            return SignatureCheck.ABSENT
        message = self.text.encode()
        good = all(vkey.verify(message, line.signature) for line in lines)
        return SignatureCheck.GOOD if good else SignatureCheck.BAD

    def signed_by(self, vkey: VKey) -> bool:
        """Return whether ``vkey`` signed this note and the signature holds. ``check`` tells *bad* from *absent*."""
        return self.check(vkey) is SignatureCheck.GOOD

    @classmethod
    def parse(cls, data: bytes) -> Note:
        """Parse a note; checks its form, no signature.

        Raises:
            FormatError: If the bytes are not a signed note.
        """
        text, signature_lines = _split_note(data)
        if not signature_lines:
            raise FormatError("signed note: no signature line")
        return cls(text, tuple(_parse_signature(line) for line in signature_lines))


def sign_note(text: str, *signers: NoteSigner) -> Note:
    """Return ``text`` with one signature line per signer, in the order given.

    Raises:
        FormatError: If the text cannot be a note: it must end with a newline and hold no other control character.
    """
    _check_text(text)
    message = text.encode()
    return Note(text, tuple(Signature(s.vkey.name, s.vkey.key_hash, s.sign(message)) for s in signers))


def check_key_name(name: str) -> None:
    """Raise ``FormatError`` unless ``name`` can stand in a signature line: not empty, no space, no plus sign."""
    if not name or "+" in name or not name.isprintable() or any(c.isspace() for c in name):
        raise FormatError(f"not a key name (no spaces, no '+', not empty): {name!r}")


def _split_note(data: bytes) -> tuple[str, list[str]]:
    if len(data) > MAX_NOTE_BYTES:
        raise FormatError(f"signed note: {len(data):,} bytes are too many to be one")
    try:
        whole = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("signed note: not UTF-8") from error
    head, blank, tail = whole.rpartition("\n\n")
    if not blank or not tail.endswith("\n"):
        raise FormatError("signed note: no blank line between text and signatures, or the last newline is missing")
    text = head + "\n"
    _check_text(text)
    return text, tail[:-1].split("\n")


def _check_text(text: str) -> None:
    if not text.endswith("\n"):
        raise FormatError("signed note: the text must end with a newline")
    if any(ord(c) < 0x20 and c != "\n" for c in text):
        raise FormatError("signed note: the text holds a control character")


def _parse_signature(line: str) -> Signature:
    name, space, encoded = line.removeprefix(SIGNATURE_PREFIX).partition(" ")
    if not line.startswith(SIGNATURE_PREFIX) or not space:
        raise FormatError(f"signed note: not a signature line: {_shorten(line)}")
    check_key_name(name)
    blob = _decode(encoded, f"signature of {name}")
    if len(blob) <= _KEY_HASH_BYTES:
        raise FormatError(f"signed note: the signature of {name} is too short")
    return Signature(name, blob[:_KEY_HASH_BYTES], blob[_KEY_HASH_BYTES:])


def _decode(encoded: str, what: str) -> bytes:
    """Decode base64, in its one canonical spelling."""
    try:
        data = base64.b64decode(encoded.encode("ascii"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"{what}: not base64: {_shorten(encoded)}") from error
    if base64.b64encode(data).decode() != encoded:
        raise FormatError(f"{what}: base64 with stray bits: {_shorten(encoded)}")
    return data


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
