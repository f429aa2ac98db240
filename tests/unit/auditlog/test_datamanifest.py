"""The data manifest: what it fixes, and what it refuses by file and row."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError


def write(path: Path, *rows: object, tail: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(("\n".join(json.dumps(row) for row in rows) + tail).encode())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "b.jsonl", {"text": "three"}, {"text": "four"}, {"text": "five"}, tail="")
    write(tmp_path / "a.jsonl", {"text": "one", "n": 1}, {"text": "two"})
    return tmp_path


def test_samples_are_numbered_over_the_files_in_path_order(folder: Path) -> None:
    manifest = DataManifest.build(folder / "*.jsonl")
    assert [manifest.read_row(i)["text"] for i in range(manifest.rows)] == ["one", "two", "three", "four", "five"]
    source, row, version = manifest.locate(np.arange(5))
    assert source.tolist() == [0, 0, 1, 1, 1]
    assert row.tolist() == [0, 1, 0, 1, 2]
    assert version.tolist() == [0] * 5
    assert [s.path for s in manifest.block.sources] == ["a.jsonl", "b.jsonl"]


def test_digests_are_those_of_the_bytes(folder: Path) -> None:
    manifest = DataManifest.build([folder / "b.jsonl", folder / "a.jsonl", str(folder / "*.jsonl")])
    for source in manifest.block.sources:
        content = (folder / source.path).read_bytes()
        assert source.sha256 == hashlib.sha256(content).hexdigest()
        assert source.size_bytes == len(content)
    raw = b'{"text": "four"}'
    assert manifest.raw_row(3) == raw
    identity = hashlib.sha256((folder / "b.jsonl").read_bytes()).digest() + struct.pack("<Q", 1)
    assert manifest.identity(3) == identity + hashlib.sha256(raw).digest()


def test_only_a_newline_byte_ends_a_row(tmp_path: Path) -> None:
    """Unicode line separators inside a text, CRLF endings and a byte order mark move no row number."""
    rows = ['{"text": "one\u2028two\u0085three\x1c"}'.replace("\x1c", "\\u001c"), '{"text": "next"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode() + b"\r\n")
    manifest = DataManifest.build(tmp_path / "a.jsonl")
    assert manifest.rows == 2
    assert manifest.read_row(0)["text"] == "one\u2028two\u0085three\x1c"
    assert manifest.read_row(1)["text"] == "next"


def test_the_version_names_the_content_or_the_commit(folder: Path) -> None:
    (version,) = DataManifest.build(folder / "*.jsonl").block.versions
    digests = b"".join(hashlib.sha256((folder / n).read_bytes()).digest() for n in ("a.jsonl", "b.jsonl"))
    assert version.root == hashlib.sha256(digests).hexdigest()
    assert version.revision == f"sha256:{version.root[:16]}"
    assert DataManifest.build(folder / "*.jsonl", version="2026-11").block.versions[0].revision == "2026-11"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        return subprocess.run(
            ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    with pytest.raises(DataError, match="git cannot tell the commit"):
        DataManifest.build(folder / "*.jsonl", version="git")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "data")
    (version,) = DataManifest.build(folder / "*.jsonl", version="git").block.versions
    assert (version.kind, version.revision, version.dirty) == ("git", git("rev-parse", "HEAD"), False)
    write(folder / "a.jsonl", {"text": "edited"})
    assert DataManifest.build(folder / "*.jsonl", version="git").block.versions[0].dirty is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"bad\.jsonl: the file is empty"),
        (b"\n \n", r"bad\.jsonl: the file is empty"),
        (b'{"text": "ok"}\n{"text": "caf\xe9"}\n', r"bad\.jsonl: row 1 \(line 2\): not UTF-8: byte 0xe9"),
        (b'{"text": "ok"}\n\n{"text": 1}\n', r"bad\.jsonl: row 1 \(line 3\): no text in field 'text'"),
        (b'{"text": "ok"}\n{"text": \n', r"bad\.jsonl: row 1 \(line 2\): not JSON"),
        (b'["text"]\n', r"bad\.jsonl: row 0 \(line 1\): a JSON list"),
        (b'{"texts": "x"}\n', r"bad\.jsonl: row 0 \(line 1\): no text in field 'text'; its fields are \['texts'\]"),
        (b'{"text": ""}\n', r"bad\.jsonl: row 0 \(line 1\): no text in field 'text'"),
        (b'{"text": 5}\n', r"bad\.jsonl: row 0 \(line 1\): no text in field 'text'"),
    ],
)
def test_bad_files_are_refused_by_file_and_row_with_a_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        DataManifest.build(tmp_path / "bad.jsonl")
    assert caught.value.advice() or "a JSON list" in message


def test_no_file_and_no_such_row_are_said_so(folder: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        DataManifest.build(folder / "*.parquet")
    manifest = DataManifest.build(folder / "*.jsonl")
    for index in (-1, 5):
        with pytest.raises(DataError, match=f"sample_index {index} is outside the data manifest, which has 5 rows"):
            manifest.locate(np.array([0, index]))


def test_a_file_that_changes_later_is_noticed_whole_and_by_row(folder: Path) -> None:
    manifest = DataManifest.build(folder / "*.jsonl")
    manifest.check_unchanged()
    content = (folder / "b.jsonl").read_bytes()
    (folder / "b.jsonl").write_bytes(content.replace(b"four", b"4our"))
    with pytest.raises(DataError, match=r"b\.jsonl: changed after the data manifest was built"):
        manifest.check_unchanged()
    assert manifest.read_row(2)["text"] == "three"
    with pytest.raises(DataError, match=r"b\.jsonl: changed .* \(row 1 differs\)"):
        manifest.read_row(3)
    (folder / "b.jsonl").unlink()
    with pytest.raises(DataError, match=r"b\.jsonl: listed in the data manifest but cannot be read"):
        manifest.check_unchanged()
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read"):
        manifest.raw_row(2)
