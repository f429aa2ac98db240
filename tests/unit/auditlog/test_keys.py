"""Keys: what is written can be opened and signs alike; what must not be opened is refused without telling secrets."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from auditlog.errors import Error, KeyFileError, UsageError
from auditlog.trust.keys import KDF_ROUNDS, Signer, read_vkey

PASSPHRASE = "correct horse"
NAME = "bank.example/audit"
MESSAGE = b"a message\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Signer]:
    path = tmp_path_factory.mktemp("keys") / "signing.p12"
    signer = Signer.generate(NAME)
    signer.save(path, PASSPHRASE)
    return path, signer


def write_pem(path: Path, key: object, *, passphrase: str | None = None, mode: int = 0o600) -> Path:
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))  # type: ignore[attr-defined]
    path.chmod(mode)
    return path


def test_a_saved_key_opens_and_signs_alike(saved: tuple[Path, Signer]) -> None:
    path, signer = saved
    loaded = Signer.load(path, passphrase=PASSPHRASE)
    assert (loaded.vkey, loaded.name) == (signer.vkey, NAME)
    assert loaded.sign(MESSAGE) == signer.sign(MESSAGE)
    assert signer.vkey.verify(MESSAGE, loaded.sign(MESSAGE))
    assert not signer.vkey.verify(MESSAGE + b"!", loaded.sign(MESSAGE))


def test_a_saved_key_is_private_and_its_public_half_is_not(saved: tuple[Path, Signer]) -> None:
    path, signer = saved
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_suffix(".vkey").stat().st_mode & 0o777 == 0o644
    assert read_vkey(path.with_suffix(".vkey")) == signer.vkey


def test_a_saved_key_is_stretched_with_many_rounds(saved: tuple[Path, Signer]) -> None:
    """The round count stands in the file as a DER integer, once for the key and once for its MAC."""
    path, _ = saved
    assert KDF_ROUNDS >= 600_000
    der_integer = b"\x02\x03" + KDF_ROUNDS.to_bytes(3, "big")
    assert path.read_bytes().count(der_integer) >= 1


def test_openssl_opens_a_saved_key(saved: tuple[Path, Signer]) -> None:
    path, signer = saved
    command = ["openssl", "pkcs12", "-in", str(path), "-nodes", "-nocerts", "-passin", f"pass:{PASSPHRASE}"]
    text = subprocess.run(command, capture_output=True, check=True).stdout
    key = load_pem_private_key(text[text.index(b"-----BEGIN") :], None)
    assert isinstance(key, Ed25519PrivateKey)
    assert key.sign(MESSAGE) == signer.sign(MESSAGE)


def test_keys_are_never_overwritten(saved: tuple[Path, Signer]) -> None:
    path, _ = saved
    with pytest.raises(KeyFileError, match="exists and is not overwritten"):
        Signer.generate(NAME).save(path, PASSPHRASE)


@pytest.mark.parametrize("passphrase", ["wrong", ""])
def test_a_wrong_passphrase_is_refused_without_repeating_it(saved: tuple[Path, Signer], passphrase: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        Signer.load(saved[0], passphrase=passphrase)
    text = f"{caught.value} {caught.value.advice()} {caught.value.__cause__}"
    assert "passphrase" in text
    assert PASSPHRASE not in text
    assert "wrong" not in text.replace("wrong passphrase", "")
    assert caught.value.exit_code == 3


def test_a_passphrase_comes_from_a_private_file(saved: tuple[Path, Signer], tmp_path: Path) -> None:
    file = tmp_path / "passphrase"
    file.write_text(PASSPHRASE + "\n")
    file.chmod(0o600)
    assert Signer.load(saved[0], passphrase_file=file).vkey == saved[1].vkey
    file.chmod(0o640)
    with pytest.raises(KeyFileError, match="open to others"):
        Signer.load(saved[0], passphrase_file=file)


def test_without_a_terminal_nobody_is_asked(saved: tuple[Path, Signer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(KeyFileError, match="needs a passphrase"):
        Signer.load(saved[0])


def test_on_a_terminal_the_passphrase_is_asked_for(saved: tuple[Path, Signer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: PASSPHRASE)
    assert Signer.load(saved[0]).vkey == saved[1].vkey


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_pem(tmp_path / "key.pem", Ed25519PrivateKey.generate(), mode=mode)
    with pytest.raises(KeyFileError, match="open to others") as caught:
        Signer.load(path, name=NAME)
    assert caught.value.advice() == f"chmod 600 {path}"


@pytest.mark.parametrize("passphrase", [None, PASSPHRASE])
def test_pem_keys_are_read(tmp_path: Path, passphrase: str | None) -> None:
    key = Ed25519PrivateKey.generate()
    path = write_pem(tmp_path / "key.pem", key, passphrase=passphrase)
    assert Signer.load(path, passphrase=passphrase, name=NAME).sign(MESSAGE) == key.sign(MESSAGE)


def test_a_passphrase_for_a_key_that_has_none_is_named(tmp_path: Path) -> None:
    path = write_pem(tmp_path / "key.pem", Ed25519PrivateKey.generate())
    with pytest.raises(KeyFileError, match="is not encrypted"):
        Signer.load(path, passphrase=PASSPHRASE, name=NAME)


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    path = write_pem(tmp_path / "key.pem", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(KeyFileError, match="not an Ed25519 key"):
        Signer.load(path, name=NAME)


@pytest.mark.parametrize("content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key.p12"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError):
        Signer.load(path, passphrase="x", name=NAME)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"nokey\.p12: No such file"):
        Signer.load(tmp_path / "nokey.p12")


def test_a_key_without_a_name_is_refused(tmp_path: Path) -> None:
    path = write_pem(tmp_path / "key.pem", Ed25519PrivateKey.generate())
    with pytest.raises(KeyFileError, match="has no name"):
        Signer.load(path)


def test_a_public_half_of_another_key_is_refused(tmp_path: Path) -> None:
    path = write_pem(tmp_path / "key.pem", Ed25519PrivateKey.generate())
    path.with_suffix(".vkey").write_text(f"{Signer.generate(NAME).vkey}\n")
    with pytest.raises(KeyFileError, match="is not the public half"):
        Signer.load(path)


def test_a_session_key_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="never written"):
        Signer.ephemeral("bank.example/run/session/1").save(tmp_path / "session.p12", PASSPHRASE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "passphrase"), [("key.pem", PASSPHRASE), ("key.p12", "")])
def test_weak_ways_to_save_are_refused(tmp_path: Path, name: str, passphrase: str) -> None:
    with pytest.raises(UsageError):
        Signer.generate(NAME).save(tmp_path / name, passphrase)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_breaks_notes_is_refused() -> None:
    with pytest.raises(UsageError, match="not a key name"):
        Signer.generate("two words")


def test_nothing_of_a_key_is_printed() -> None:
    signer = Signer.generate(NAME)
    assert repr(signer) == f"Signer({signer.vkey})"


# --- a key behind a command -------------------------------------------------------------------------------


@pytest.fixture
def device(tmp_path: Path) -> tuple[Path, str]:
    """A 'device': a script that signs what it reads, and the public key of what it signs with."""
    key = write_pem(tmp_path / "device.pem", Ed25519PrivateKey.generate())
    signer = Signer.load(key, name=NAME)
    (tmp_path / "device.vkey").write_text(f"{signer.vkey}\n")
    script = tmp_path / "sign.py"
    script.write_text(
        "import sys, base64\n"
        "from cryptography.hazmat.primitives.serialization import load_pem_private_key\n"
        f"key = load_pem_private_key(open({str(key)!r}, 'rb').read(), None)\n"
        "signature = key.sign(sys.stdin.buffer.read())\n"
        "out = base64.b64encode(signature) + b'\\n' if 'text' in sys.argv else signature\n"
        "sys.stdout.buffer.write(out[:10] if 'short' in sys.argv else out)\n"
        "sys.exit(4 if 'fail' in sys.argv else 0)\n"
    )
    return tmp_path / "device.vkey", f"{sys.executable} {script}"


@pytest.mark.parametrize("form", ["", " text"])
def test_a_command_signs(device: tuple[Path, str], form: str) -> None:
    vkey, program = device
    signer = Signer.load(f"command:{vkey} {program}{form}")
    assert signer.vkey.verify(MESSAGE, signer.sign(MESSAGE))
    given = Signer.load(f"command:{program}{form}", vkey=vkey)
    assert given.sign(MESSAGE) == signer.sign(MESSAGE)


@pytest.mark.parametrize(
    ("form", "message"), [(" fail", "exit code 4"), (" short", "printed 10 bytes"), (" short text", "printed 10")]
)
def test_a_command_that_fails_is_named(device: tuple[Path, str], form: str, message: str) -> None:
    vkey, program = device
    with pytest.raises(KeyFileError, match=message):
        Signer.load(f"command:{vkey} {program}{form}").sign(MESSAGE)


def test_a_device_with_another_key_is_noticed_at_once(device: tuple[Path, str]) -> None:
    _, program = device
    with pytest.raises(KeyFileError, match="is not by"):
        Signer.load(f"command:{program}", vkey=str(Signer.generate(NAME).vkey)).sign(MESSAGE)


@pytest.mark.parametrize("source", ["command:", "command:sign", "command:key.vkey", "command:'open"])
def test_a_command_without_a_key_or_a_program_is_refused(source: str) -> None:
    with pytest.raises(Error):
        Signer.load(source)


def test_a_missing_program_is_named(device: tuple[Path, str]) -> None:
    with pytest.raises(KeyFileError, match="no-such-program"):
        Signer.load(f"command:{device[0]} no-such-program").sign(MESSAGE)
