"""Session certificates: how a long-lived key vouches for the key of one attempt.

The certificate is the body of the SESSION event that opens an attempt. It names the log, the manifest, the size
and root from which the attempt goes on, and the session key. The signature covers a domain tag and the canonical
JSON of the ``certificate`` member, so it can never be mistaken for a signature over a log checkpoint.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from auditlog.errors import FormatError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.notes import HASH_BYTES, NoteSigner, VKey

SESSION_TAG = b"gradtrail/session/v0\n"
FIRST_ATTEMPT = 1

_FIELDS = {"origin", "run_id", "attempt", "manifest_sha256", "first_size", "first_root", "session_vkey"}


@dataclass(frozen=True, slots=True)
class Certificate:
    """A parsed session certificate. Its signature has *not* been checked: see ``is_signed``.

    ``vkey`` is the key it says it was signed with; whether that key deserves belief is the verifier's business.
    """

    origin: str
    run_id: str
    attempt: int
    manifest_sha256: str
    first_size: int
    first_root: bytes
    session_vkey: VKey
    vkey: VKey
    signature: bytes
    signed_bytes: bytes

    def is_signed(self, vkey: VKey) -> bool:
        """Return whether the signature is by ``vkey``."""
        return vkey.verify(self.signed_bytes, self.signature)


def session_name(origin: str, attempt: int) -> str:
    """Return the name of an attempt's session key."""
    return f"{origin}/session/{attempt}"


def make_certificate(
    signer: NoteSigner,
    *,
    origin: str,
    run_id: str,
    attempt: int,
    manifest_sha256: str,
    first_size: int,
    first_root: bytes | str,
    session_vkey: VKey | str,
) -> dict[str, Any]:
    """Return the body of a SESSION event, signed by the long-lived key ``signer``.

    Args:
        signer: The long-lived key.
        origin: The log's origin.
        run_id: The manifest's run id.
        attempt: 1 for a fresh run, one more at each resume.
        manifest_sha256: SHA-256 of the manifest's canonical bytes, hex.
        first_size: Entries in the log before this event; it is the event's own ``seq``.
        first_root: Tree root over those entries, bytes or hex.
        session_vkey: Public half of the attempt's session key.
    """
    certificate = {
        "origin": origin,
        "run_id": run_id,
        "attempt": attempt,
        "manifest_sha256": manifest_sha256,
        "first_size": first_size,
        "first_root": first_root if isinstance(first_root, str) else first_root.hex(),
        "session_vkey": str(session_vkey),
    }
    signature = signer.sign(SESSION_TAG + canonical_bytes(certificate))
    return {
        "certificate": certificate,
        "vkey": str(signer.vkey),
        "signature": base64.b64encode(signature).decode(),
    }


def parse_certificate(body: dict[str, Any]) -> Certificate:
    """Parse the body of a SESSION event; checks its form, not its signature.

    Raises:
        FormatError: If a member is missing, unknown or malformed, or a key's algorithm is not supported.
    """
    if set(body) != {"certificate", "vkey", "signature"} or not isinstance(body["certificate"], dict):
        raise FormatError("session certificate: members must be certificate, vkey and signature")
    fields = body["certificate"]
    if set(fields) != _FIELDS:
        odd = sorted(set(fields) ^ _FIELDS)
        raise FormatError(f"session certificate: missing or unknown: {', '.join(odd)}")
    for name, kind in (("attempt", int), ("first_size", int)):
        if type(fields[name]) is not kind or fields[name] < 0:
            raise FormatError(f"session certificate: {name} is not a number: {fields[name]!r}")
    texts = [body["vkey"], body["signature"], *(fields[n] for n in sorted(_FIELDS - {"attempt", "first_size"}))]
    if not all(isinstance(text, str) for text in texts):
        raise FormatError("session certificate: a member that should be text is not")
    try:
        first_root = bytes.fromhex(fields["first_root"])
        signature = base64.b64decode(body["signature"], validate=True)
    except (ValueError, binascii.Error) as error:
        raise FormatError(f"session certificate: first_root or signature: {error}") from error
    if len(first_root) != HASH_BYTES:
        raise FormatError("session certificate: first_root is not 32 bytes")
    return Certificate(
        origin=fields["origin"],
        run_id=fields["run_id"],
        attempt=fields["attempt"],
        manifest_sha256=fields["manifest_sha256"],
        first_size=fields["first_size"],
        first_root=first_root,
        session_vkey=VKey.parse(fields["session_vkey"]),
        vkey=VKey.parse(body["vkey"]),
        signature=signature,
        signed_bytes=SESSION_TAG + canonical_bytes(fields),
    )
