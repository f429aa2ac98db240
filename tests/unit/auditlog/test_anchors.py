"""What verifiers bring: read from text, files and folders, and described for what it can and cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditlog.errors import FormatError, KeyFileError, ReadError, UsageError
from auditlog.format.notes import LogCheckpoint, Note, sign_note
from auditlog.trust.anchors import Trust
from auditlog.trust.keys import Signer

SIGNER = Signer.generate("bank.example/audit")


def head(size: int) -> Note:
    return sign_note(LogCheckpoint("bank.example/run", size, bytes(32)).text(), SIGNER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "signing.vkey").write_text(f"{SIGNER.vkey}\n")
    for size in (64, 128):
        (tmp_path / f"{size:08d}.note").write_bytes(head(size).to_bytes())
    return tmp_path


def test_a_key_as_text_and_as_a_file_give_the_same_trust(folder: Path) -> None:
    assert Trust.load([str(SIGNER.vkey)]) == Trust.load([folder / "signing.vkey"]) == Trust((SIGNER.vkey,))


def test_heads_come_from_files_and_from_folders(folder: Path) -> None:
    assert Trust.load(heads=[folder / "00000064.note"]).heads == (head(64),)
    assert Trust.load(heads=[folder]).heads == (head(64), head(128))


def test_what_is_neither_file_nor_key_is_named() -> None:
    with pytest.raises(UsageError, match="signing-key: neither a file nor a verifier key"):
        Trust.load(["signing-key"])


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [("bad.vkey", b"no key", KeyFileError), ("bad.vkey", b"\xff\xfe", KeyFileError)],
)
def test_a_bad_key_file_is_named(tmp_path: Path, name: str, content: bytes, error: type[Exception]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=name):
        Trust.load([tmp_path / name])


@pytest.mark.parametrize(
    "content", [b"no note", sign_note("not a checkpoint\n", SIGNER).to_bytes()], ids=["no note", "no checkpoint"]
)
def test_a_bad_head_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "head.note").write_bytes(content)
    with pytest.raises(FormatError, match=r"kept head .*head\.note"):
        Trust.load(heads=[tmp_path / "head.note"])


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"kept head .*head\.note: No such file"):
        Trust.load(heads=[tmp_path / "head.note"])


def test_an_empty_folder_of_heads_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \*\.note file"):
        Trust.load(heads=[tmp_path])


def test_an_origin_alone_anchors_nothing() -> None:
    assert Trust(origin="bank.example/run").is_empty
    assert not Trust((SIGNER.vkey,)).is_empty
    assert not Trust(heads=(head(1),)).is_empty


def test_trust_says_what_it_is_and_what_it_leaves_open() -> None:
    key, kept = (SIGNER.vkey,), (head(64),)
    assert Trust().describe() == "nothing from outside the run"
    assert SIGNER.vkey.fingerprint[:16] in Trust(key).describe()
    assert "kept head of 64 entries" in Trust(key, kept).describe()
    assert "5 kept heads up to 1,024 entries" in Trust(heads=tuple(head(1024 - i) for i in range(5))).describe()
    assert "nothing here binds the operator" in Trust(key).leaves_open()
    assert "who signed" in Trust(heads=kept).leaves_open()
    assert "made today" in Trust().leaves_open()
    assert Trust(key, kept).leaves_open() == ""
