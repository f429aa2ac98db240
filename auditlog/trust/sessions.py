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
    """A session key and the tree sizes it may sign: ``first_size < size <= last_size``.

    ``certifier`` is the long-lived key whose certificate was found good; ``None`` where it was not.
    """

    attempt: int
    vkey: VKey
    first_size: int
    last_size: int
    certifier: VKey | None = None


@dataclass(slots=True)
class Authority:
    """The keys that may vouch for log checkpoints, and how far each may.

    ``long_lived`` are the pinned keys; without any, the key that the manifest names, which then shows no more
    than that the run agrees with itself. ``revoked_from`` gives the size up to which a revoked key is believed, by
    fingerprint.
    """

    long_lived: tuple[VKey, ...]
    is_pinned: bool
    sessions: list[Session] = field(default_factory=list)
    revoked_from: dict[str, int] = field(default_factory=dict)

    def judge(self, note: Note, size: int) -> tuple[list[Fault], bool]:
        """Judge the signatures of one log checkpoint.

        Returns:
            What is wrong with them, and whether the long-lived key signed it.
        """
        faults: list[Fault] = []
        rests_on: list[VKey | None] = []  # the long-lived keys that it is believed for
        has_long_lived = False
        for vkey in self.long_lived:
            state = note.check(vkey)
            if state is SignatureCheck.GOOD:
                has_long_lived = True
                rests_on.append(vkey)
            elif state is SignatureCheck.BAD:
                faults.append(_bad_signature(vkey))
        for session in self.sessions:
            state = note.check(session.vkey)
            if state is SignatureCheck.BAD:
                faults.append(_bad_signature(session.vkey))
            elif state is SignatureCheck.GOOD and session.first_size < size <= session.last_size:
                rests_on.append(session.certifier)
            elif state is SignatureCheck.GOOD:
                faults.append(_out_of_range(session))
        if not faults and not rests_on:
            faults.append(self._unknown_signer(note))
        faults += self._revoked(rests_on, size)
        return faults, has_long_lived

    def _revoked(self, rests_on: Sequence[VKey | None], size: int) -> list[Fault]:
        """Say so if all that a checkpoint rests on was revoked before it."""
        known = [vkey for vkey in rests_on if vkey is not None]
        gone = [vkey for vkey in known if size > self.revoked_from.get(vkey.fingerprint, size)]
        if not gone or len(gone) < len(known):
            return []
        vkey = gone[0]
        return [
            (
                "E_KEYREV",
                f"it rests on the key {vkey.name} {vkey.fingerprint[:16]}, which is not believed beyond size "
                f"{self.revoked_from[vkey.fingerprint]:,}: it was revoked",
            )
        ]

    def doubt(self, head: Note, certificates: Sequence[Certificate] = ()) -> str:
        """Return why a kept head cannot be believed; empty if a key that is known here signed it.

        A session key is known if the log, or a certificate that was kept with the head, shows that the long-lived
        key certified it for sizes from there on. Where its attempt ended is left open: the kept head may be over
        entries that are gone.
        """
        statement = head.checkpoint()
        kept = [
            Session(certificate.attempt, certificate.session_vkey, certificate.first_size, _NO_END, certificate.vkey)
            for certificate in certificates
            if certificate.origin == statement.origin and self._certifies(certificate)
        ]
        sessions = [session for session in (*self.sessions, *kept) if session.certifier is not None]
        known = [*self.long_lived, *(s.vkey for s in sessions if s.first_size < statement.size)]
        states = {vkey: head.check(vkey) for vkey in known}
        for vkey, state in states.items():
            if state is SignatureCheck.BAD:
                return _bad_signature(vkey)[1]
        if SignatureCheck.GOOD in states.values():
            return ""
        return f"cannot be checked: {_named(head)} is neither {self._kind()} nor certified in this log"

    def _certifies(self, certificate: Certificate) -> bool:
        return certificate.vkey in self.long_lived and certificate.is_signed(certificate.vkey)

    def _kind(self) -> str:
        return "pinned" if self.is_pinned else "the manifest's"

    def _unknown_signer(self, note: Note) -> Fault:
        expected = ", ".join(f"{v.name} (key hash {v.key_hash.hex()})" for v in self.long_lived) or "none by name"
        what = f"cannot be checked: {_named(note)} is neither certified in this run nor {self._kind()}"
        return "E_KEY", f"{what}; {'pinned' if self.is_pinned else 'named there'} is {expected}"


def check_sessions(
    facts: Sequence[SessionFact], walk: Walk, manifest: RunManifest, manifest_bytes: bytes, trust: Trust
) -> tuple[Authority, list[Finding]]:
    """Check every session certificate and say which keys may sign which log checkpoints."""
    findings = _check_manifest_key(manifest, trust)
    expected = trust.expected_origins
    if expected and manifest.origin not in expected:
        message = f"this is the log {manifest.origin}; expected was {' or '.join(expected)}"
        findings.append(Finding("E_BIND", message, "manifest.json"))
    long_lived = trust.vkeys if trust.is_pinned else claimed_keys(manifest)
    authority = Authority(long_lived, trust.is_pinned, revoked_from=revoked_from(trust, manifest.origin))
    expected_manifest = sha256(manifest_bytes).hex()
    for number, fact in enumerate(facts):
        certificate = _parse(fact, findings)
        if certificate is None:
            continue
        last_size = facts[number + 1].seq if number + 1 < len(facts) else _NO_END
        attempt = FIRST_ATTEMPT + number
        faults = _check_signer(fact, certificate, authority, trust)
        is_certified = not faults and certificate.origin == manifest.origin
        certifier = certificate.vkey if is_certified else None
        authority.sessions.append(
            Session(certificate.attempt, certificate.session_vkey, fact.seq, last_size, certifier)
        )
        findings += faults
        findings += _check_binding(fact, certificate, manifest, expected_manifest, attempt)
        findings += _check_start(fact, certificate, walk)
    return authority, findings


def revoked_from(trust: Trust, origin: str) -> dict[str, int]:
    """Return the last size up to which each revoked key is believed in the log ``origin``, by fingerprint."""
    limits: dict[str, int] = {}
    for revocation in trust.revocations:
        limit = revocation.limit(origin)
        if limit is not None:
            limits[revocation.fingerprint] = min(limit, limits.get(revocation.fingerprint, limit))
    return limits


def named_keys(manifest: RunManifest, facts: Sequence[SessionFact]) -> list[VKey]:
    """Return the long-lived keys that a run names, in its manifest and its certificates; believed for nothing."""
    named = list(claimed_keys(manifest))
    for fact in facts:
        try:
            named.append(parse_certificate(fact.body).vkey)
        except FormatError:  # reported where the certificates are checked
            continue
    return named


def claimed_keys(manifest: RunManifest) -> tuple[VKey, ...]:
    """Return the key that the manifest names; nothing if it does not parse, which is reported elsewhere."""
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
    if trust.is_pinned and named not in trust.vkeys:
        return [_other_key("the manifest names", named, trust, "manifest.json")]
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


def _check_signer(fact: SessionFact, certificate: Certificate, authority: Authority, trust: Trust) -> list[Finding]:
    what = f"session certificate, entry {fact.seq}"
    if authority.is_pinned and certificate.vkey not in authority.long_lived:
        return [_other_key(f"the {what}, names", certificate.vkey, trust, "table events", fact.seq)]
    if not certificate.is_signed(certificate.vkey):
        message = f"{what}: the signature of {certificate.vkey.name} does not verify"
        return [Finding("E_SIG", message, "table events", fact.seq)]
    if authority.long_lived and certificate.vkey not in authority.long_lived:
        message = f"{what}: it is not signed by the key that the manifest names ({authority.long_lived[0].name})"
        return [Finding("E_SIG", message, "table events", fact.seq)]
    return []


def _other_key(who: str, found: VKey, trust: Trust, where: str, seq: int | None = None) -> Finding:
    key = f"{found.name} {found.fingerprint[:16]}"
    message = f"cannot be checked: key {key}, which {who}, is not pinned; pinned is {', '.join(trust.pinned())}"
    hint = "If the operator uses several keys, ask for the public key by another way than this folder, and pin it too."
    return Finding("E_KEY", message, where, seq, hint=hint)


def _named(note: Note) -> str:
    keys = [f"{s.name} (key hash {s.key_hash.hex()})" for s in note.signatures]
    return f"key {keys[0]}" if len(keys) == 1 else f"each of the keys {', '.join(keys)}"


def _bad_signature(vkey: VKey) -> Fault:
    return "E_SIG", f"the signature of {vkey.name} (key hash {vkey.key_hash.hex()}) does not verify"


def _out_of_range(session: Session) -> Fault:
    last = f" to {session.last_size}" if session.last_size < _NO_END else " on"
    sizes = f"sizes from {session.first_size + 1}{last}"
    return "E_KEYREV", f"signed by the session key of attempt {session.attempt}, which may sign {sizes} only"
