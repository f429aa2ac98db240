"""Reading what a verifier brings: keys in three spellings, note files, and ``trust.toml``, which holds all of it.

    keys = ["bank.example/audit+…", "auditor.pem", "<fingerprint: 64 hex digits>"]
    origins = ["bank.example/credit/2026-12"]
    heads = ["kept/00000768.note", "kept/credit"]
    certificates = ["kept/session-1.3f09a1c2.json"]
    tsa_roots = ["tsa.pem"]

    [[revocations]]
    key = "bank.example/audit+…"
    size = 256
    origin = "bank.example/credit/2026-12"
    reason = "the key was copied"

Every member may be left out, none may be unknown. Paths count from the file's own folder. TOML is parsed by the
standard library; what is read here is believed by whoever gives it, so it must not lie in the run's folder.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from cryptography.x509 import load_pem_x509_certificates

from auditlog.errors import FormatError, KeyFileError, ReadError, UsageError
from auditlog.format.digests import sha256
from auditlog.format.notes import Note, VKey
from auditlog.trust.anchors import Revocation, Trust
from auditlog.trust.certificates import Certificate, parse_certificate
from auditlog.trust.keys import read_vkey

SUFFIX = ".toml"
CERTIFICATES = "session-*.json"  # beside the notes that ``on_head`` hands to a folder

_FINGERPRINT = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_LISTS = ("keys", "origins", "heads", "certificates", "tsa_roots")
_REVOCATION = {"key": str, "size": int, "origin": str, "reason": str}
_MAX_FILE_BYTES = 1_000_000

_T = TypeVar("_T")
_Pins = tuple[list[VKey], list[str]]  # keys that are known by name, fingerprints of the others


def load_trust(keys: Sequence[str | Path], heads: Sequence[str | Path], since: str | Path | None) -> Trust:
    """Return the trust that keys, trust files and notes make together.

    Raises:
        UsageError: If something is neither a key nor a file, or a trust file holds something else.
        ReadError: If a file cannot be read or parsed.
    """
    pins: _Pins = ([], [])
    trust = Trust()
    for key in keys:
        if str(key).endswith(SUFFIX):
            trust = _joined(trust, read_trust_file(Path(key)))
        else:
            _add_pin(pins, key)
    notes, certificates = _read_heads(list(map(Path, heads)))
    given = Trust(tuple(pins[0]), notes, fingerprints=tuple(pins[1]), certificates=certificates)
    return _joined(given, trust, since=None if since is None else _read_head(Path(since)))


def read_trust_file(path: Path) -> Trust:
    """Read a ``trust.toml``.

    Raises:
        UsageError: If a member is unknown or not what it should be.
        ReadError: If the file, or one that it names, is missing or does not parse.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReadError(f"trust file {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"trust file {path}: {error}", "It must be TOML.") from error
    unknown = sorted(document.keys() - {*_LISTS, "revocations"})
    if unknown:
        raise UsageError(f"trust file {path}: unknown: {', '.join(unknown)}", f"Known are {', '.join(_LISTS)}.")
    texts = {name: _texts(path, name, document.get(name, [])) for name in _LISTS}
    pins: _Pins = ([], [])
    for key in texts["keys"]:
        _add_pin(pins, key, path.parent)
    notes, certificates = _read_heads([path.parent / name for name in texts["heads"]])
    certificates += tuple(_read_certificate(path.parent / name) for name in texts["certificates"])
    return Trust(
        vkeys=tuple(pins[0]),
        heads=notes,
        origins=tuple(texts["origins"]),
        fingerprints=tuple(pins[1]),
        certificates=certificates,
        revocations=tuple(_revocation(path, table) for table in _tables(path, document.get("revocations", []))),
        tsa_roots=tuple(der for name in texts["tsa_roots"] for der in _read_roots(path.parent / name)),
    )


def _joined(one: Trust, other: Trust, since: Note | None = None) -> Trust:
    return Trust(
        vkeys=_once((*one.vkeys, *other.vkeys)),
        heads=(*one.heads, *other.heads),
        origins=_once((*one.origins, *other.origins)),
        fingerprints=_once((*one.fingerprints, *other.fingerprints)),
        certificates=_once((*one.certificates, *other.certificates)),
        since=since,
        revocations=_once((*one.revocations, *other.revocations)),
        tsa_roots=_once((*one.tsa_roots, *other.tsa_roots)),
    )


def _once(things: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(things))


# --- keys -----------------------------------------------------------------------------------------------------


def _add_pin(pins: _Pins, key: str | Path, folder: Path = Path()) -> None:
    pin = _read_pin(key, folder)
    if isinstance(pin, VKey):
        pins[0].append(pin)
    else:
        pins[1].append(pin)


def _read_pin(key: str | Path, folder: Path) -> VKey | str:
    """Return a pinned key: by name, or as the fingerprint of one whose name is not known."""
    fingerprint = _FINGERPRINT.fullmatch(str(key).strip())
    if fingerprint is not None:
        return fingerprint[1].lower()
    path = folder / key
    try:
        if path.is_file():
            return _pem_fingerprint(path) if _is_pem(path) else read_vkey(path)
    except OSError:  # a verifier key can be too long for a file name
        pass
    try:
        return VKey.parse(str(key))
    except FormatError as error:
        raise UsageError(
            f"{key}: neither a file nor a verifier key ({error})",
            "Give a .vkey file or its one line (name+hash+base64), a public key as PEM, a fingerprint (64 hex "
            "digits), or a trust file (.toml).",
        ) from error


def _is_pem(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"-----BEGIN")


def _pem_fingerprint(path: Path) -> str:
    """Return the fingerprint of the public key in a PEM file, which has no name."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise KeyFileError(f"public key {path}: not a public key in PEM form") from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(f"public key {path}: not an Ed25519 key")
    return sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hex()


# --- heads and certificates -----------------------------------------------------------------------------------


def _read_heads(paths: Sequence[Path]) -> tuple[tuple[Note, ...], tuple[Certificate, ...]]:
    """Return the notes in files and folders, and the session certificates beside those in folders."""
    notes = [_read_head(file) for path in paths for file in _note_files(path)]
    folders = [folder for path in paths if path.is_dir() for folder in (path, *path.glob("ranks/*"))]
    certificates = [_read_certificate(file) for folder in folders for file in sorted(folder.glob(CERTIFICATES))]
    return tuple(notes), tuple(certificates)


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


def _read_certificate(path: Path) -> Certificate:
    """Read a session certificate: the body of a SESSION event as it was handed over."""
    data = _read_file(path, "session certificate")
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise FormatError("not a JSON object")
        return parse_certificate(body)
    except (ValueError, RecursionError, FormatError) as error:
        raise FormatError(f"session certificate {path}: {error}") from error


def _read_roots(path: Path) -> list[bytes]:
    data = _read_file(path, "TSA root")
    try:
        return [root.public_bytes(Encoding.DER) for root in load_pem_x509_certificates(data)]
    except ValueError as error:
        raise FormatError(f"TSA root {path}: not a certificate in PEM form") from error


def _read_file(path: Path, what: str) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise FormatError(f"{what} {path}: too large to be one")
        return path.read_bytes()
    except OSError as error:
        raise ReadError(f"{what} {path}: {error.strerror or error}") from error


# --- trust.toml -----------------------------------------------------------------------------------------------


def _texts(path: Path, name: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise UsageError(f"trust file {path}: {name} must be a list of texts")
    return value


def _tables(path: Path, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise UsageError(f"trust file {path}: revocations must be tables", "Write [[revocations]] above each.")
    return value


def _revocation(path: Path, table: dict[str, Any]) -> Revocation:
    wrong = [name for name, kind in _REVOCATION.items() if type(table.get(name, kind())) is not kind]
    odd = sorted(table.keys() - _REVOCATION) + wrong
    missing = [name for name in ("key", "size") if name not in table]
    if odd or missing or table["size"] < 0:
        what = ", ".join(odd or missing or ["size"])
        raise UsageError(
            f"trust file {path}: a revocation without a proper {what}",
            "It has key (a verifier key or a fingerprint) and size (a whole number); origin and reason if you like.",
        )
    pin = _read_pin(table["key"], path.parent)
    fingerprint = pin if isinstance(pin, str) else pin.fingerprint
    return Revocation(fingerprint, table["size"], table.get("origin", ""), table.get("reason", ""))
