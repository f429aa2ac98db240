"""Signed notes against the published examples of C2SP and Go, and what may not pass as a note."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from auditlog.errors import FormatError
from auditlog.format.notes import (
    AlgorithmError,
    LogCheckpoint,
    Note,
    Signature,
    SignatureCheck,
    VKey,
    check_key_name,
    sign_note,
)
from auditlog.trust.keys import Signer

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "c2sp-note.json").read_text(encoding="utf-8"))
VKEYS = {entry["name"]: VKey.parse(entry["vkey"]) for entry in VECTORS["vkeys"]}
SIGNER = Signer.generate("log.example/key")
OTHER = Signer.generate("log.example/key")  # one name, another key
TEXT = LogCheckpoint("log.example", 5, bytes(range(32))).text()


def published(entry: dict) -> bytes:
    return (entry["text"] + "\n" + "".join(line + "\n" for line in entry["lines"])).encode()


@pytest.mark.parametrize("entry", VECTORS["vkeys"], ids=lambda entry: entry["name"])
def test_published_verifier_keys(entry: dict) -> None:
    vkey = VKey.parse(entry["vkey"])
    assert (vkey.name, vkey.key_hash.hex(), str(vkey)) == (entry["name"], entry["hash"], entry["vkey"])
    material = base64.b64decode(entry["vkey"].split("+", 2)[2])
    assert vkey.key_hash == hashlib.sha256(vkey.name.encode() + b"\n" + material).digest()[:4]


@pytest.mark.parametrize("entry", VECTORS["notes"], ids=lambda entry: entry["signed_by"][0])
def test_published_notes_verify_and_keep_their_bytes(entry: dict) -> None:
    note = Note.parse(published(entry))
    assert (note.text, note.to_bytes()) == (entry["text"], published(entry))
    for name, vkey in VKEYS.items():
        assert note.signed_by(vkey) == (name in entry["signed_by"])


@pytest.mark.parametrize("entry", VECTORS["notes"], ids=lambda entry: entry["signed_by"][0])
def test_a_published_note_with_another_text_does_not_verify(entry: dict) -> None:
    note = Note.parse(published(entry).replace(b"is", b"was", 1))
    for name in entry["signed_by"]:
        assert note.check(VKEYS[name]) is SignatureCheck.BAD


def test_the_published_key_signs_the_published_bytes() -> None:
    """Ed25519 is deterministic, so signing must give the bytes that Go gives."""
    seed = base64.b64decode(VECTORS["signer"]["key"])[1:]
    private_key = Ed25519PrivateKey.from_private_bytes(seed)
    signer = Signer(VKEYS["PeterNeumann"], private_key.sign)
    entry = VECTORS["notes"][1]
    assert sign_note(entry["text"], signer).signatures[0].line() == entry["lines"][0]


@pytest.mark.parametrize("text", VECTORS["bad_vkeys"])
def test_published_bad_keys_are_refused(text: str) -> None:
    with pytest.raises(FormatError):
        VKey.parse(text)


def test_no_part_of_a_verifier_key_is_one() -> None:
    text = VECTORS["vkeys"][1]["vkey"]
    for first in range(len(text)):
        for end in range(first, len(text)):
            with pytest.raises(FormatError):
                VKey.parse(text[first:end])


def test_another_algorithm_is_named_and_refused() -> None:
    name, _, material = str(SIGNER.vkey).split("+", 2)
    downgraded = base64.b64encode(b"\x02" + base64.b64decode(material)[1:]).decode()
    with pytest.raises(AlgorithmError, match="algorithm 0x02 is not supported"):
        VKey.parse(f"{name}+00000000+{downgraded}")


def test_absent_bad_and_good_are_three_things() -> None:
    note = sign_note(TEXT, SIGNER)
    line = note.signatures[0]
    spoilt = Signature(line.name, line.key_hash, bytes(64))
    assert note.check(SIGNER.vkey) is SignatureCheck.GOOD
    assert note.check(OTHER.vkey) is SignatureCheck.ABSENT
    assert Note(TEXT, (spoilt,)).check(SIGNER.vkey) is SignatureCheck.BAD
    assert Note(TEXT, (line, spoilt)).check(SIGNER.vkey) is SignatureCheck.BAD  # a bad line outweighs a good one


def test_unknown_signatures_are_ignored() -> None:
    note = sign_note(TEXT, OTHER, SIGNER)
    assert note.signed_by(SIGNER.vkey)
    assert [signature.name for signature in note.signatures] == ["log.example/key"] * 2


def test_a_signature_by_another_key_of_the_same_name_is_not_believed() -> None:
    line = sign_note(TEXT, OTHER).signatures[0]
    forged = Note(TEXT, (Signature(line.name, SIGNER.vkey.key_hash, line.signature),))
    assert forged.check(SIGNER.vkey) is SignatureCheck.BAD


@given(
    st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp", "Zs"), exclude_characters="\n"), min_size=1),
    st.integers(0, 10**18),
    st.binary(min_size=32, max_size=32),
)
def test_checkpoints_and_notes_are_read_back(origin: str, size: int, root: bytes) -> None:
    statement = LogCheckpoint(origin, size, root)
    note = sign_note(statement.text(), SIGNER)
    parsed = Note.parse(note.to_bytes())
    assert (parsed, parsed.checkpoint()) == (note, statement)
    assert parsed.signed_by(SIGNER.vkey)


@given(st.integers(0, 10_000))
def test_no_bit_of_a_note_can_be_flipped_unseen(position: int) -> None:
    data = bytearray(sign_note(TEXT, SIGNER).to_bytes())
    data[position // 8 % len(data)] ^= 1 << position % 8
    try:
        note = Note.parse(bytes(data))
    except FormatError:
        return
    assert not note.signed_by(SIGNER.vkey)


GOOD = sign_note(TEXT, SIGNER).to_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        TEXT.encode(),
        TEXT.encode() + b"\n",
        GOOD[:-1],
        GOOD + b"\n",
        GOOD.replace(b"\n\n", b"\n"),
        GOOD.replace(b"\n", b"\r\n"),
        GOOD.replace("— ".encode(), b"- "),
        GOOD.replace(b"log.example/key ", b"log.example/key"),
        GOOD.replace(b"log.example/key ", b"log+key "),
        GOOD + b"trailing line\n",
        b"\xff" + GOOD,
        GOOD.replace(b"log.example\n", b"log\texample\n"),
        GOOD[: GOOD.rindex(b" ") + 1] + b"AAAA\n",
        b"x" * 1_000_001,
    ],
    ids=range(16),
)
def test_what_is_not_a_note_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        Note.parse(data)


ROOT_TEXT = base64.b64encode(bytes(32)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "log.example\n5\n",
        f"log.example\n5\n{ROOT_TEXT}",
        f"log.example\n5\n{ROOT_TEXT}\nextension\n",
        f"\n5\n{ROOT_TEXT}\n",
        f"log.example\n05\n{ROOT_TEXT}\n",
        f"log.example\n-5\n{ROOT_TEXT}\n",
        f"log.example\n5.0\n{ROOT_TEXT}\n",
        f"log.example\n٥\n{ROOT_TEXT}\n",
        "log.example\n5\nAAAA\n",
        "log.example\n5\nnot base64\n",
        f"log.example\n5\n{ROOT_TEXT[:-2]}B=\n",
    ],
)
def test_what_is_not_a_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        LogCheckpoint.parse(text)


@pytest.mark.parametrize("name", ["", "two words", "plus+", "line\n", "tab\t", "nbsp\u00a0"])
def test_names_that_would_break_a_signature_line_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="not a key name"):
        check_key_name(name)


@pytest.mark.parametrize("text", ["no newline", "bell\a\n", "tab\t\n"])
def test_texts_that_cannot_be_notes_are_not_signed(text: str) -> None:
    with pytest.raises(FormatError):
        sign_note(text, SIGNER)
