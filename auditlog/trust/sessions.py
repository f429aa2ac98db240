"""Who may sign what: the long-lived key over sessions and seal, each session key over its own stretch of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from auditlog.errors import FormatError
from auditlog.format.digests import sha256
from auditlog.format.manifest import RunManifest
from auditlog.format.notes import AlgorithmError, Note, SignatureCheck, VKey
from auditlog.trust.anchors import Trust
from auditlog.trust.certificates import FIRST_ATTEMPT, Certificate, parse_certificate
from auditlog.trust.facts import SessionFact
from auditlog.trust.verdict import Finding
from auditlog.trust.walk import Walk

Fault = tuple[str, str]  # code of a finding and what is wrong with the signature

_NO_END = 1 << 62


@dataclass(frozen=True, slots=True)
class Session:
    """A session key and the tree sizes it may sign: ``first_size < size <= last_size``."""

    attempt: int
    vkey: VKey
    first_size: int
    last_size: int


@dataclass(slots=True)
class Authority:
    """The keys that may vouch for log checkpoints, and how far each may.

    ``long_lived`` are the pinned keys; without any, the key that the manifest names, which then shows no more
    than that the run agrees with itself.
    """

    long_lived: tuple[VKey, ...]
    is_pinned: bool
    sessions: list[Session] = field(default_factory=list)

    def judge(self, note: Note, size: int) -> tuple[list[Fault], bool]:
        """Judge the signatures of one log checkpoint.

        Returns:
            What is wrong with them, and whether the long-lived key signed it.
        """
        faults: list[Fault] = []
        vouched = has_long_lived = False
        for vkey in self.long_lived:
            state = note.check(vkey)
            has_long_lived |= state is SignatureCheck.GOOD
            if state is SignatureCheck.BAD:
                faults.append(_bad_signature(vkey))
        for session in self.sessions:
            state = note.check(session.vkey)
            if state is SignatureCheck.BAD:
                faults.append(_bad_signature(session.vkey))
            elif state is SignatureCheck.GOOD and session.first_size < size <= session.last_size:
                vouched = True
            elif state is SignatureCheck.GOOD:
                faults.append(_out_of_range(session))
        if not (faults or vouched or has_long_lived):
            faults.append(self._unknown_signer(note))
        return faults, has_long_lived

    def _unknown_signer(self, note: Note) -> Fault:
        found = ", ".join(f"{s.name} (key hash {s.key_hash.hex()})" for s in note.signatures)
        expected = ", ".join(f"{v.name} (key hash {v.key_hash.hex()})" for v in self.long_lived) or "none"
        kind = "pinned key" if self.is_pinned else "manifest's key"
        return "E_KEY", f"signed by {found}; that is neither a session key of this run nor the {kind}, {expected}"


def check_sessions(
    facts: Sequence[SessionFact], walk: Walk, manifest: RunManifest, manifest_bytes: bytes, trust: Trust
) -> tuple[Authority, list[Finding]]:
    """Check every session certificate and say which keys may sign which log checkpoints."""
    findings = _check_manifest_key(manifest, trust)
    if trust.origin is not None and trust.origin != manifest.origin:
        message = f"this is the log {manifest.origin}; expected was {trust.origin}"
        findings.append(Finding("E_BIND", message, "manifest.json"))
    authority = Authority(trust.vkeys or _claimed_keys(manifest), bool(trust.vkeys))
    expected_manifest = sha256(manifest_bytes).hex()
    for number, fact in enumerate(facts):
        certificate = _parse(fact, findings)
        if certificate is None:
            continue
        last_size = facts[number + 1].seq if number + 1 < len(facts) else _NO_END
        attempt = FIRST_ATTEMPT + number
        session = Session(certificate.attempt, certificate.session_vkey, fact.seq, last_size)
        authority.sessions.append(session)
        findings += _check_signer(fact, certificate, authority)
        findings += _check_binding(fact, certificate, manifest, expected_manifest, attempt)
        findings += _check_start(fact, certificate, walk)
    return authority, findings


def _claimed_keys(manifest: RunManifest) -> tuple[VKey, ...]:
    try:
        return (VKey.parse(manifest.vkey),)
    except FormatError:
        return ()


def _check_manifest_key(manifest: RunManifest, trust: Trust) -> list[Finding]:
    try:
        named = VKey.parse(manifest.vkey)
    except AlgorithmError as error:
        return [Finding("E_FORMAT", f"the manifest's key: {error}", "manifest.json")]
    except FormatError as error:
        return [Finding("E_KEY", f"the manifest's key: {error}", "manifest.json")]
    if trust.vkeys and named not in trust.vkeys:
        return [_other_key("the manifest names", named, trust.vkeys, "manifest.json")]
    return []


def _parse(fact: SessionFact, findings: list[Finding]) -> Certificate | None:
    try:
        return parse_certificate(fact.body)
    except AlgorithmError as error:
        findings.append(Finding("E_FORMAT", f"session certificate, entry {fact.seq}: {error}", "events", fact.seq))
    except FormatError as error:
        findings.append(Finding("E_EVENT", f"entry {fact.seq}: {error}", "table events", fact.seq))
    return None


def _check_binding(
    fact: SessionFact, certificate: Certificate, manifest: RunManifest, manifest_sha256: str, attempt: int
) -> list[Finding]:
    pairs = (
        ("origin", certificate.origin, manifest.origin),
        ("run id", certificate.run_id, manifest.run_id),
        ("SHA-256 of the manifest", certificate.manifest_sha256, manifest_sha256),
    )
    findings = [
        Finding(
            "E_BIND",
            f"session certificate, entry {fact.seq}: it was signed for {name} {signed}, this run has {present}",
            "manifest.json",
            fact.seq,
        )
        for name, signed, present in pairs
        if signed != present
    ]
    if certificate.attempt != attempt:
        message = f"session certificate, entry {fact.seq}: attempt {certificate.attempt}, expected {attempt}"
        findings.append(Finding("E_EVENT", message, "table events", fact.seq))
    return findings


def _check_start(fact: SessionFact, certificate: Certificate, walk: Walk) -> list[Finding]:
    """Compare the place where the attempt says it goes on with the place where it stands."""
    what = f"session certificate, entry {fact.seq}"
    if certificate.first_size != fact.seq:
        message = f"{what}: the attempt starts after {certificate.first_size} entries, yet {fact.seq} stand before it"
        return [Finding("E_EVENT", message, "table events", fact.seq)]
    root = walk.roots.get(fact.seq)
    if root is None or certificate.first_root in (root, walk.logged_roots.get(fact.seq)):
        return []
    message = f"{what}: the attempt goes on from another root than the {fact.seq} entries before it have"
    return [Finding("E_ROOT", message, "table events", fact.seq)]


def _check_signer(fact: SessionFact, certificate: Certificate, authority: Authority) -> list[Finding]:
    what = f"session certificate, entry {fact.seq}"
    if authority.is_pinned and certificate.vkey not in authority.long_lived:
        return [_other_key(f"{what} names", certificate.vkey, authority.long_lived, "table events", fact.seq)]
    if not certificate.is_signed(certificate.vkey):
        message = f"{what}: the signature of {certificate.vkey.name} does not verify"
        return [Finding("E_SIG", message, "table events", fact.seq)]
    if authority.long_lived and certificate.vkey not in authority.long_lived:
        message = f"{what}: it is not signed by the key that the manifest names ({authority.long_lived[0].name})"
        return [Finding("E_SIG", message, "table events", fact.seq)]
    return []


def _other_key(who: str, found: VKey, expected: Sequence[VKey], where: str, seq: int | None = None) -> Finding:
    pinned = ", ".join(f"{vkey.name} {vkey.fingerprint[:16]}" for vkey in expected)
    message = f"{who} the key {found.name} {found.fingerprint[:16]}; pinned is {pinned}"
    hint = "If the operator changed keys, ask for the new public key by another way than this folder."
    return Finding("E_KEY", message, where, seq, hint=hint)


def _bad_signature(vkey: VKey) -> Fault:
    return "E_SIG", f"the signature of {vkey.name} (key hash {vkey.key_hash.hex()}) does not verify"


def _out_of_range(session: Session) -> Fault:
    last = f" to {session.last_size}" if session.last_size < _NO_END else " on"
    sizes = f"sizes from {session.first_size + 1}{last}"
    return "E_KEYREV", f"signed by the session key of attempt {session.attempt}, which may sign {sizes} only"
