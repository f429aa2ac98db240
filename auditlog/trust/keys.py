"""Signing keys: Ed25519, in a file, behind a command, or in memory only. The one place that sees a private key.

The *long-lived key* certifies sessions and seals; verifiers pin its public half. A *session key* is made in
memory and never written. No message, log line or exception of this file holds a passphrase or key bytes.
"""

from __future__ import annotations

import base64
import binascii
import getpass
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    pkcs12,
)

from auditlog.errors import FormatError, KeyFileError, UsageError
from auditlog.format.notes import VKey, check_key_name

KDF_ROUNDS = 600_000  # PBKDF2 rounds of a saved key; the library's default is 2,048
SIGNATURE_BYTES = 64
COMMAND_PREFIX = "command:"
COMMAND_TIMEOUT_S = 120  # long enough for somebody to touch a hardware key


class Signer:
    """An Ed25519 key that signs. Make one with ``generate``, ``ephemeral`` or ``load``.

    Args:
        vkey: The public half and the key's name.
        sign: Returns the 64-byte signature over a message.
        private_key: Held only by keys that may be saved.
    """

    def __init__(
        self, vkey: VKey, sign: Callable[[bytes], bytes], *, private_key: Ed25519PrivateKey | None = None
    ) -> None:
        self.vkey = vkey
        self._sign = sign
        self._private_key = private_key

    @property
    def name(self) -> str:
        """The name in the signature lines of this key."""
        return self.vkey.name

    def __repr__(self) -> str:
        return f"Signer({self.vkey})"

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature over ``message``."""
        return self._sign(message)

    @classmethod
    def generate(cls, name: str) -> Signer:
        """Make a new long-lived key called ``name``; ``save`` it or lose it."""
        private_key = Ed25519PrivateKey.generate()
        return cls(_public_half(private_key, name), private_key.sign, private_key=private_key)

    @classmethod
    def ephemeral(cls, name: str) -> Signer:
        """Make a session key: it lives in this process's memory, and ``save`` refuses it."""
        private_key = Ed25519PrivateKey.generate()
        return cls(_public_half(private_key, name), private_key.sign)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        passphrase: str | None = None,
        passphrase_file: Path | None = None,
        name: str | None = None,
        vkey: str | Path | None = None,
    ) -> Signer:
        """Open a signing key.

        Args:
            source: A PKCS#12 file (``.p12``, ``.pfx``), a PKCS#8 file (``.pem``), or ``command:KEY.vkey PROGRAM …``:
                the program gets the message on its standard input and prints the signature, raw or in base64.
            passphrase: Opens the file. Asked for on a terminal if neither it nor ``passphrase_file`` is given.
            passphrase_file: File that holds the passphrase on one line; private like a key.
            name: The key's name, where no ``.vkey`` file beside the key says it.
            vkey: The public half of a ``command:`` key, instead of the ``.vkey`` file named first in ``source``.

        Raises:
            KeyFileError: If the key is missing, readable by others, not Ed25519, or the passphrase is wrong.
        """
        text = str(source)
        if text.startswith(COMMAND_PREFIX):
            return _command_signer(cls, text.removeprefix(COMMAND_PREFIX), vkey)
        path = Path(source)
        data = _read_private_file(path, "key")
        secret = _passphrase(path, data, passphrase, passphrase_file)
        private_key = _decode_private_key(path, data, secret)
        public = _public_half(private_key, name or _stored_name(path))
        _check_sibling(path, public)
        return cls(public, private_key.sign, private_key=private_key)

    def save(self, path: Path, passphrase: str) -> Path:
        """Write the key as encrypted PKCS#12 (mode 0600) and its public half beside it (``.vkey``).

        Returns:
            The path of the ``.vkey`` file: what verifiers are given.

        Raises:
            KeyFileError: If this is a session key or a ``command:`` key, if a file is already there, or if the
                folder cannot be written to.
            UsageError: If the passphrase is empty or the name does not end in ``.p12``.
        """
        if self._private_key is None:
            raise KeyFileError(f"key {self.name} lives in memory or behind a command and is never written")
        if path.suffix not in (".p12", ".pfx"):
            raise UsageError(
                f"{path}: keys are saved as PKCS#12, so the name must end in .p12",
                "PEM files are read but not written: their usual encryption is weak (2,048 rounds).",
            )
        if not passphrase:
            raise UsageError("a long-lived key needs a passphrase")
        public_path = path.with_suffix(".vkey")
        for existing in (path, public_path):
            if existing.exists():
                raise KeyFileError(f"{existing} exists and is not overwritten", "Choose another name or move it away.")
        _write_new(path, _encode_private_key(self._private_key, self.name, passphrase), mode=0o600)
        _write_new(public_path, f"{self.vkey}\n".encode(), mode=0o644)
        return public_path


def read_vkey(path: Path) -> VKey:
    """Read a ``.vkey`` file.

    Raises:
        KeyFileError: If it is missing, unreadable or not a verifier key.
    """
    try:
        return VKey.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyFileError(f"public key {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, FormatError) as error:
        raise KeyFileError(f"public key {path}: {error}") from error


def read_passphrase(path: Path) -> str:
    """Read a passphrase from the one line of a private file.

    Raises:
        KeyFileError: If it is missing, readable by others or not text.
    """
    line = _read_private_file(path, "passphrase file").removesuffix(b"\n").removesuffix(b"\r")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise KeyFileError(f"passphrase file {path} is not text") from None


def _public_half(private_key: Ed25519PrivateKey, name: str) -> VKey:
    try:
        check_key_name(name)
    except FormatError as error:
        raise UsageError(str(error), "Use a name such as bank.example/audit.") from error
    return VKey(name, private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))


def _stored_name(path: Path) -> str:
    public_path = path.with_suffix(".vkey")
    if not public_path.exists():
        raise KeyFileError(
            f"key {path} has no name: {public_path} is missing", "Put the .vkey file back beside it, or give a name."
        )
    return read_vkey(public_path).name


def _check_sibling(path: Path, public: VKey) -> None:
    """Refuse a key whose ``.vkey`` file belongs to another key: verifiers would pin the wrong one."""
    public_path = path.with_suffix(".vkey")
    if public_path.exists() and read_vkey(public_path).public_key != public.public_key:
        raise KeyFileError(f"{public_path} is not the public half of {path}")


def _read_private_file(path: Path, what: str) -> bytes:
    """Read a file that nobody else may read. The mode is taken from the open file, not from its name."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # Pipes (process substitution) have no meaningful mode.
            if os.name == "posix" and stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise KeyFileError(f"{what} {path} is open to others (mode {mode:04o})", f"chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise KeyFileError(f"{what} {path}: {error.strerror or error}") from error


def _passphrase(path: Path, data: bytes, passphrase: str | None, passphrase_file: Path | None) -> bytes | None:
    if passphrase is not None:
        return passphrase.encode()
    if passphrase_file is not None:
        return read_passphrase(passphrase_file).encode()
    is_locked = b"-----BEGIN PRIVATE KEY-----" not in data
    if not is_locked:
        return None
    if not sys.stdin.isatty():
        raise KeyFileError(f"key {path} needs a passphrase", "Give --passphrase-file FILE, or run it on a terminal.")
    return getpass.getpass(f"Passphrase of {path}: ").encode()


def _decode_private_key(path: Path, data: bytes, secret: bytes | None) -> Ed25519PrivateKey:
    is_pem = data.lstrip().startswith(b"-----BEGIN")
    try:
        key = load_pem_private_key(data, secret) if is_pem else pkcs12.load_key_and_certificates(data, secret)[0]
    # The libraries' own messages are dropped on purpose: they may quote what they were given.
    except ValueError:
        raise KeyFileError(f"key {path}: wrong passphrase, or not a key file") from None
    except TypeError:
        needed = "is not encrypted, yet a passphrase was given" if secret is not None else "needs a passphrase"
        raise KeyFileError(f"key {path} {needed}") from None
    except UnsupportedAlgorithm:
        raise KeyFileError(f"key {path}: its algorithm or encryption is not supported") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"key {path} is not an Ed25519 key", "gradtrail keygen makes one.")
    return key


def _encode_private_key(private_key: Ed25519PrivateKey, name: str, passphrase: str) -> bytes:
    encryption = (
        PrivateFormat.PKCS12.encryption_builder()
        .kdf_rounds(KDF_ROUNDS)
        .key_cert_algorithm(pkcs12.PBES.PBESv2SHA256AndAES256CBC)
        .hmac_hash(SHA256())
        .build(passphrase.encode())
    )
    return pkcs12.serialize_key_and_certificates(name.encode(), private_key, None, None, encryption)


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    """Create ``path`` with exactly ``mode``, synced to disk; never follows or replaces what is there."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask is
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror or error}") from error


def _command_signer(cls: type[Signer], command: str, vkey: str | Path | None) -> Signer:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise KeyFileError(f"command signer: {error}") from error
    if vkey is None:
        if len(words) < 2 or not words[0].endswith(".vkey"):
            raise KeyFileError(
                "command signer: its public key is not known",
                "Write command:KEY.vkey PROGRAM ARGUMENT…: first the file with the public key, then the program.",
            )
        public, words = read_vkey(Path(words[0])), words[1:]
    else:
        public = read_vkey(vkey) if isinstance(vkey, Path) else VKey.parse(vkey)
    if not words:
        raise KeyFileError("command signer: no program named after 'command:'")

    def sign(message: bytes) -> bytes:
        signature = _run_signing_command(words, message)
        # A device that holds another key must be noticed now, not by the auditor.
        if not public.verify(message, signature):
            raise KeyFileError(f"command signer {words[0]}: its signature is not by {public}")
        return signature

    return cls(public, sign)


def _run_signing_command(words: list[str], message: bytes) -> bytes:
    try:
        done = subprocess.run(words, input=message, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = "no answer in time" if isinstance(error, subprocess.TimeoutExpired) else error.strerror or str(error)
        raise KeyFileError(f"command signer {words[0]}: {reason}") from None
    if done.returncode != 0:
        raise KeyFileError(f"command signer {words[0]}: exit code {done.returncode}")
    if len(done.stdout) == SIGNATURE_BYTES:
        return done.stdout
    try:
        signature = base64.b64decode(done.stdout.strip(), validate=True)
    except (binascii.Error, ValueError):
        signature = b""
    if len(signature) != SIGNATURE_BYTES:
        raise KeyFileError(
            f"command signer {words[0]}: printed {len(done.stdout)} bytes that are no Ed25519 signature",
            "It must print 64 raw bytes or their base64, and nothing else.",
        )
    return signature
