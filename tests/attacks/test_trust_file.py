"""``trust.toml``: what a verifier brings, in one file; and what is wrong in it, named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from auditlog.errors import FormatError, KeyFileError, ReadError, UsageError
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Revocation, Trust
from auditlog.trust.keys import Signer
from tests.attacks.ledger_simulator import KEPT, LedgerSimulator
from tests.support import ORIGIN

STRANGER = Signer.generate("bank.example/audit")


@pytest.fixture
def trust_folder(original: LedgerSimulator, tmp_path: Path) -> Path:
    """A verifier's own folder: heads with their certificate, and a file that names all of it."""
    folder = tmp_path / "verifier"
    shutil.copytree(original.auditor / "run", folder / "kept")
    (folder / "root.pem").write_bytes(tsa_root())
    (folder / "trust.toml").write_text(
        f"""
keys = ["{original.signer.vkey}", "{STRANGER.vkey.fingerprint}"]
origins = ["bank.example/other", "{ORIGIN}"]
heads = ["kept", "kept/{KEPT:08d}.note"]
tsa_roots = ["root.pem"]

[[revocations]]
key = "{STRANGER.vkey}"
size = 7
reason = "left the bank"
"""
    )
    return folder


def tsa_root() -> bytes:
    """Return a made-up certificate of a time-stamping authority."""
    from datetime import UTC, datetime

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding

    key, name = Ed25519PrivateKey.generate(), x509.Name.from_rfc4514_string("CN=tsa.example")
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2036, 1, 1, tzinfo=UTC))
        .sign(key, None)
    )
    return certificate.public_bytes(Encoding.PEM)


def test_a_trust_file_holds_all_that_a_verifier_brings(
    trust_folder: Path, original: LedgerSimulator, gradtrail: Callable[..., Any]
) -> None:
    trust = Trust.load([trust_folder / "trust.toml"])
    assert (trust.vkeys, trust.fingerprints) == ((original.signer.vkey,), (STRANGER.vkey.fingerprint,))
    assert trust.expected_origins == ("bank.example/other", ORIGIN)
    assert (len(trust.heads), len(trust.certificates), len(trust.tsa_roots)) == (20, 1, 1)
    assert trust.revocations == (Revocation(STRANGER.vkey.fingerprint, 7, reason="left the bank"),)
    done = gradtrail("verify", original.run, "--trust", trust_folder / "trust.toml")
    assert done.code == 0, done.out
    assert "20 kept heads up to 1,155 entries" in done.out
    assert "1 TSA roots were given and are unused" in done.out
    elsewhere = gradtrail("verify", original.run, "--trust", trust_folder / "trust.toml", "--origin", "bank.example/x")
    assert (elsewhere.code, "expected was bank.example/x" in elsewhere.out) == (6, True)


def test_options_add_to_a_trust_file(trust_folder: Path, original: LedgerSimulator) -> None:
    (trust_folder / "trust.toml").write_text(f'origins = ["{ORIGIN}"]\n')
    kept = original.auditor / "run" / f"{KEPT:08d}.note"
    trust = Trust.load([trust_folder / "trust.toml", str(original.signer.vkey)], [kept], since=kept)
    assert (trust.vkeys, len(trust.heads), trust.expected_origins) == ((original.signer.vkey,), 1, (ORIGIN,))
    assert trust.since == trust.heads[0]
    assert verify_run(original.run, trust).exit_code == 0


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ("keys = [", UsageError, "trust.toml"),
        ("key = []", UsageError, "unknown: key"),
        ("keys = 'one'", UsageError, "keys must be a list of texts"),
        ("keys = ['nonsense']", UsageError, "nonsense: neither a file nor a verifier key"),
        ("origins = [1]", UsageError, "origins must be a list of texts"),
        ("heads = ['nowhere.note']", ReadError, r"kept head .*nowhere\.note: No such file"),
        ("heads = ['.']", UsageError, r"no \*\.note file"),
        ("certificates = ['trust.toml']", FormatError, "session certificate"),
        ("tsa_roots = ['trust.toml']", FormatError, "not a certificate in PEM form"),
        ("revocations = [1]", UsageError, "revocations must be tables"),
        ("[[revocations]]\nkey = 'x'", UsageError, "without a proper size"),
        ("[[revocations]]\nkey = 'x'\nsize = -1", UsageError, "without a proper size"),
        ("[[revocations]]\nkey = 'x'\nsize = true", UsageError, "without a proper size"),
        ("[[revocations]]\nkey = 'x'\nsize = 1\nwhen = 2", UsageError, "without a proper when"),
        ("[[revocations]]\nkey = 'x'\nsize = 1", UsageError, "x: neither a file nor a verifier key"),
    ],
)
def test_what_is_wrong_in_a_trust_file_is_named(
    content: str, error: type[Exception], text: str, tmp_path: Path
) -> None:
    (tmp_path / "trust.toml").write_text(content)
    with pytest.raises(error, match=text):
        Trust.load([tmp_path / "trust.toml"])


def test_a_missing_trust_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"trust file .*nowhere\.toml: No such file"):
        Trust.load([tmp_path / "nowhere.toml"])


@pytest.mark.parametrize("content", [b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", b"-----BEGIN"])
def test_a_pem_file_that_holds_no_key_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_bytes(content)
    with pytest.raises(KeyFileError, match=r"bad\.pem"):
        Trust.load([tmp_path / "bad.pem"])


@pytest.mark.parametrize("content", [b"[1]", b'{"certificate": {}}', b"[" * 100_000])
def test_a_certificate_that_is_none_is_named(content: bytes, trust_folder: Path) -> None:
    (trust_folder / "kept" / "session-9.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"session certificate .*session-9\.json"):
        Trust.load([], [trust_folder / "kept"])
