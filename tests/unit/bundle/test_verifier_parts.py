"""The single-file verifier's own tree, JSON, keys and notes, against ours: two implementations of one text."""

from __future__ import annotations

import math
import random
import re
import struct
from pathlib import Path

import pytest

from auditlog.bundle import tables
from auditlog.bundle import verify_gradtrail as verifier
from auditlog.errors import FormatError
from auditlog.format.canonical import canonical_bytes, parse_canonical
from auditlog.format.digests import sha256
from auditlog.format.merkle import root_hash
from auditlog.format.notes import LogCheckpoint, Note, sign_note
from auditlog.format.records import RECORD, RECORD_BYTES
from auditlog.ledger.columns import TABLES
from auditlog.trust.certificates import make_certificate, parse_certificate
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import CODES, PRECEDENCE


def test_the_tree_is_that_of_rfc_6962_however_leaves_arrive() -> None:
    leaves = [sha256(bytes([i])) for i in range(70)]
    for size in range(71):
        tree: list[bytes | None] = []
        for first in range(0, size, 7):
            verifier.extend_tree(tree, leaves[first : min(first + 7, size)])
        assert verifier.tree_root(tree) == root_hash(leaves[:size])


def doubles() -> list[float]:
    rng = random.Random(0)
    drawn = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(3_000)]
    edges = [
        1e-7,
        9.99e-7,
        1e-6,
        1e-5,
        0.1,
        1e15,
        1e16,
        123456789012345680000.0,
        1e20,
        1e21,
        5e-324,
        1.7976931348623157e308,
    ]
    return [x for x in [*drawn, *edges, *(-x for x in edges)] if math.isfinite(x)]


def test_numbers_are_written_as_rfc_8785_writes_them() -> None:
    for value in doubles():
        assert verifier.shortest(value) == canonical_bytes(value).decode()
        body = canonical_bytes({"a": [value, value], "b": value})
        assert verifier.canonical_json(body) == parse_canonical(body)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"a": {"b": [1, "x:1.50,y", None, True, 0.5]}, "ä€": '\u0001\u001f\b\t\n\f\r"\\/', "😀": "\u007f\u2028"},
        {"big": 9007199254740991, "text": "1e5, 2.50]", "list": [[], {}, [1.5, 1e22]]},
    ],
)
def test_canonical_json_is_read(document: object) -> None:
    assert verifier.canonical_json(canonical_bytes(document)) == document


@pytest.mark.parametrize(
    "text",
    [
        '{"b":1,"a":2}', '{"a":1,"a":2}', '{"a": 1}', '{"a":1}\n', '{"a":1.0}', '{"a":1e5}', '{"a":1E22}', '{"a":-0}',
        '{"a":0.10}', '{"a":1e-07}', '{"a":NaN}', '{"a":-Infinity}', '{"a":"\\u0041"}', '{"a":"\\/"}',
        '{"a":"\\ud800"}',
        '{"a":12345678901234567891}', '{"a":01}', '{"a"', "", "\ufeff{}", "[" * 5_000, '{"a":-0.0}', '{"a":1.5e0}',
    ],
)  # fmt: skip
def test_json_in_any_other_form_is_refused_by_both(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        verifier.canonical_json(text.encode())
    with pytest.raises(FormatError):
        parse_canonical(text.encode())


def test_notes_and_signatures_are_read_as_we_read_them() -> None:
    signer, other = Signer.generate("bank.example/audit"), Signer.generate("bank.example/audit")
    note = sign_note(LogCheckpoint("bank.example/run", 7, bytes(range(32))).text(), signer)
    read = verifier.parse_note(note.to_bytes())
    assert (read.origin, read.size, read.root) == ("bank.example/run", 7, bytes(range(32)))
    assert read.state(verifier.parse_vkey(str(signer.vkey))) is True
    assert read.state(verifier.parse_vkey(str(other.vkey))) is None
    assert read.state(verifier.Key(None, signer.vkey.public_key)) is True  # as a PEM file gives it, without a name
    forged = Note(note.text.replace("\n7\n", "\n8\n"), note.signatures)
    assert verifier.parse_note(forged.to_bytes()).state(verifier.parse_vkey(str(signer.vkey))) is False


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("\n7\n", "\n07\n"),
        ("\n\n", "\n"),
        ("— ", "- "),
        ("\n7\n", "\n7\nextension\n"),
        ("=\n\n", "\n\n"),
        ("audit ", "au+dit "),
    ],
)
def test_a_malformed_note_is_refused_by_both(was: str, now: str) -> None:
    note = sign_note(LogCheckpoint("bank.example/run", 7, bytes(32)).text(), Signer.generate("bank.example/audit"))
    text = note.to_bytes().decode().replace(was, now, 1).encode()
    with pytest.raises(ValueError, match=r"."):
        verifier.parse_note(text)
    with pytest.raises(FormatError):
        Note.parse(text).checkpoint()


def test_a_key_of_another_algorithm_is_not_supported() -> None:
    text = str(Signer.generate("k").vkey)
    name, key_hash, encoded = text.split("+", 2)
    with pytest.raises(verifier.Unreadable, match="0x02"):
        verifier.parse_vkey(f"{name}+{key_hash}+Ag{encoded[2:]}")
    with pytest.raises(ValueError, match="verifier key"):
        verifier.parse_vkey(f"{name}+00000000+{encoded}")


def test_certificates_are_read_as_we_read_them() -> None:
    signer, session = Signer.generate("bank.example/audit"), Signer.ephemeral("bank.example/run/session/1")
    body = make_certificate(
        signer,
        origin="bank.example/räume",
        run_id="1",
        attempt=1,
        manifest_sha256="ab" * 32,
        first_size=0,
        first_root=bytes(32),
        session_vkey=session.vkey,
    )
    read = verifier.parse_certificate(body)
    assert read.is_signed
    assert parse_certificate(body).is_signed(signer.vkey)
    assert read.session.raw == session.vkey.public_key
    body["certificate"]["attempt"] = 2
    assert not verifier.parse_certificate(body).is_signed


def test_the_row_is_that_of_the_format() -> None:
    """156 bytes behind the tag, the same fields at the same offsets; the tables hold every hashed column."""
    assert verifier.ROW.itemsize == RECORD_BYTES + 1
    for name in RECORD.names or ():
        assert verifier.ROW.fields[name][1] == RECORD.fields[name][1] + 1  # type: ignore[index]
        assert verifier.ROW.fields[name][0] == RECORD.fields[name][0]  # type: ignore[index]
    for table, columns in TABLES.items():
        assert tables.schema(table).names == list(columns) == list(verifier.TABLES[table])
        assert tables.schema(table).types == [verifier.ARROW[kind] for kind in verifier.TABLES[table].values()]


def test_codes_have_the_exit_codes_of_our_own_verifier() -> None:
    assert {code: CODES[code] for code in verifier.EXIT_OF} == verifier.EXIT_OF
    assert tuple(verifier.CLASSES) == PRECEDENCE


def test_the_verifier_is_one_file_that_imports_nothing_of_ours() -> None:
    source = Path(verifier.__file__).read_text(encoding="utf-8")
    imported = set(re.findall(r"^(?:from|import) ([a-z0-9_]+)", source, re.MULTILINE))
    foreign = imported - set(__import__("sys").stdlib_module_names)
    assert foreign == {"numpy", "pyarrow", "cryptography"}
