"""Session certificates: what is signed, and what is refused before any signature is looked at."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from auditlog.errors import FormatError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.notes import AlgorithmError, check_key_name
from auditlog.trust.certificates import make_certificate, parse_certificate, session_name
from auditlog.trust.keys import Signer

SIGNER = Signer.generate("bank.example/audit")
SESSION = Signer.ephemeral(session_name("bank.example/run", 1))
ROOT = bytes(range(32))


def make() -> dict[str, Any]:
    return make_certificate(
        SIGNER,
        origin="bank.example/run",
        run_id="run-1",
        attempt=1,
        manifest_sha256="ab" * 32,
        first_size=0,
        first_root=ROOT,
        session_vkey=SESSION.vkey,
    )


def test_a_certificate_is_canonical_json_and_read_back() -> None:
    certificate = parse_certificate(json.loads(canonical_bytes(make())))
    assert certificate.is_signed(SIGNER.vkey)
    assert not certificate.is_signed(SESSION.vkey)
    assert (certificate.origin, certificate.attempt, certificate.first_root) == ("bank.example/run", 1, ROOT)
    assert (certificate.vkey, certificate.session_vkey) == (SIGNER.vkey, SESSION.vkey)


def test_the_signature_covers_tag_and_certificate_and_nothing_else() -> None:
    body = make()
    message = b"gradtrail/session/v0\n" + canonical_bytes(body["certificate"])
    assert SIGNER.vkey.verify(message, base64.b64decode(body["signature"]))


@pytest.mark.parametrize("name", sorted(make()["certificate"]))
def test_no_member_can_be_changed_under_the_signature(name: str) -> None:
    body = make()
    other = {"attempt": 2, "first_size": 9, "first_root": "00" * 32, "session_vkey": str(SIGNER.vkey)}
    body["certificate"][name] = other.get(name, "other")
    assert not parse_certificate(body).is_signed(SIGNER.vkey)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempt", "1"),
        ("attempt", -1),
        ("attempt", True),
        ("first_size", 1.5),
        ("first_root", "ab"),
        ("first_root", "zz" * 32),
        ("origin", None),
        ("session_vkey", "no key"),
        ("surprise", 1),
    ],
)
def test_a_malformed_certificate_is_refused(name: str, value: Any) -> None:
    body = make()
    body["certificate"][name] = value
    with pytest.raises(FormatError):
        parse_certificate(body)


@pytest.mark.parametrize("name", ["origin", "attempt", "session_vkey"])
def test_a_certificate_without_a_member_is_refused(name: str) -> None:
    body = make()
    del body["certificate"][name]
    with pytest.raises(FormatError, match=name):
        parse_certificate(body)


@pytest.mark.parametrize("change", [{"signature": "!"}, {"vkey": 1}, {"extra": 1}, {"certificate": []}], ids=str)
def test_a_malformed_frame_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        parse_certificate(make() | change)


def test_another_algorithm_is_told_from_other_faults() -> None:
    body = make()
    body["certificate"]["session_vkey"] = "evil+00000000+AmFiY2Q="
    with pytest.raises(AlgorithmError):
        parse_certificate(body)


def test_session_names_can_stand_in_notes() -> None:
    check_key_name(session_name("bank.example/run", 12))
