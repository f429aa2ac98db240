"""Every format that a source may have: where a row begins and ends, what it holds, and what is refused by name."""

from __future__ import annotations

import datetime as dt
import gzip
import hashlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError


def build(folder: Path, name: str, content: bytes, **options: Any) -> DataManifest:
    (folder / name).write_bytes(content)
    return DataManifest.build(folder / name, **options)


def raw_rows(manifest: DataManifest) -> list[bytes]:
    return [manifest.raw_row(index) for index in range(manifest.rows)]


def read_rows(manifest: DataManifest) -> list[dict[str, Any]]:
    return [manifest.read_row(index) for index in range(manifest.rows)]


CSV = b'text,n\r\n"a ""quoted"" one\r\nover two lines",NA\r\n\r\n  \r\n5" pipe,001\r\n"x,y",'


@pytest.mark.parametrize(
    ("name", "content", "rows", "values"),
    [
        (
            "a.jsonl",
            b'\xef\xbb\xbf{"text": "one"}\r\n \t\r\n\n{"text": "two\xe2\x80\xa8\xc2\x85"}\n{"text": "x"}',
            [b'\xef\xbb\xbf{"text": "one"}\r', b'{"text": "two\xe2\x80\xa8\xc2\x85"}', b'{"text": "x"}'],
            [{"text": "one"}, {"text": "two\u2028\u0085"}, {"text": "x"}],
        ),
        (
            "a.txt",
            b"\xef\xbb\xbfone\r\n\n \nb\rc\xe2\x80\xa9\n\xef\xbb\xbf\n\n",
            [b"\xef\xbb\xbfone\r", b"", b" ", b"b\rc\xe2\x80\xa9", b"\xef\xbb\xbf", b""],
            [{"text": text} for text in ("one", "", " ", "b\rc\u2029", "\ufeff", "")],
        ),
        (
            "a.csv",
            CSV,
            [b'"a ""quoted"" one\r\nover two lines",NA\r', b'5" pipe,001\r', b'"x,y",'],
            [
                {"text": 'a "quoted" one\r\nover two lines', "n": "NA"},
                {"text": '5" pipe', "n": "001"},
                {"text": "x,y", "n": ""},
            ],
        ),
        (
            "a.tsv",
            b"\xef\xbb\xbf\ttext\n1\ta,b\n",
            [b"1\ta,b"],
            [{"Unnamed: 0": "1", "text": "a,b"}],
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_text_formats(
    tmp_path: Path, name: str, content: bytes, rows: list[bytes], values: list[dict[str, Any]], packed: bool
) -> None:
    stored = gzip.compress(content[:9], mtime=0) + gzip.compress(content[9:]) if packed else content
    manifest = build(tmp_path, name + ".gz" * packed, stored)
    assert raw_rows(manifest) == rows
    assert read_rows(manifest) == values == list(manifest.source_rows(0))
    assert [digest.tobytes() for digest in manifest.row_sha256] == [hashlib.sha256(raw).digest() for raw in rows]
    (source,) = manifest.block.sources
    assert source.sha256 == hashlib.sha256(stored).hexdigest()
    assert source.size_bytes == len(stored)
    assert source.format == {"a.txt": "text"}.get(name, name[2:]) + ".gz" * packed
    manifest.check_unchanged()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "the file is empty"),
        ("a.txt", b"ok\ncaf\xe9\n", r"a\.txt: row 1 \(line 2\): not UTF-8: byte 0xe9"),
        ("a.csv", b"", "the file is empty"),
        ("a.csv", b"text,n\r\n", "the file is empty"),
        ("a.csv", b"text,n\na,1\nb\n", r"a\.csv: row 1 \(line 3\): 1 cells, the header has 2"),
        ("a.csv", b'text,n\n"a\nb",1\nb,2,3\n', r"a\.csv: row 1 \(line 4\): 3 cells, the header has 2"),
        ("a.csv", b'text,n\na,1\n"b,2\nc,3\n', r"a\.csv: the record that begins on line 3 is not CSV"),
        ("a.csv", b'text,n\n"a"b,1\n', r"a\.csv: the record that begins on line 2 is not CSV"),
        ("a.csv", b"text,n\na\rb,1\n", r"a\.csv: the record that begins on line 2 is not CSV"),
        ("a.csv", b"text,text\na,1\n", "two columns are called 'text'"),
        ("a.csv", b"text,n\n\xff,1\n", r"a\.csv: line 2: not UTF-8: byte 0xff"),
        ("a.csv", b"text,n\n,1\n", r"a\.csv: row 0 \(line 2\): no text in field 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl: row 0 \(line 1\): no canonical form"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0)[:-10], r"a\.jsonl\.gz: not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0) + b"rubbish", r"a\.jsonl\.gz: not a whole gzip file"),
        ("a.jsonl.gz", b'{"text": "a"}\n', r"a\.jsonl\.gz: not a whole gzip file"),
        ("a.csv.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet: not readable as parquet"),
        ("a.arrow", b"no table", r"a\.arrow: not readable as arrow"),
        ("a.xlsx", b"PK", r"a\.xlsx: the ending says nothing about the format"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(tmp_path, name, content)


def test_a_long_line_and_a_long_cell_are_rows_like_any_other(tmp_path: Path) -> None:
    long = "x" * 300_000
    manifest = build(tmp_path, "a.csv", f"text,n\n{long},1\n".encode())
    assert manifest.read_row(0) == {"text": long, "n": "1"}


TABLE = pa.table(
    {
        "text": pa.array(["a", "b\u2028"]),
        "flag": pa.array([True, None]),
        "day": pa.array([dt.date(2024, 1, 2), dt.date(1969, 12, 31)]),
        "at": pa.array([1_700_000_000_000_000_001, None], pa.timestamp("ns")),
        "local": pa.array([5, 6], pa.timestamp("ms", tz="Europe/Berlin")),
        "hour": pa.array([7, 8], pa.time32("s")),
        "took": pa.array([1, 2], pa.duration("us")),
        "price": pa.array([Decimal("1.50"), Decimal("-0.05")]),
        "blob": pa.array([b"\x00\xff", b""]),
        "half": pa.array([0.5, None], pa.float16()),
        "word": pa.array(["x", "y"]).dictionary_encode(),
        "tree": pa.array([[{"n": 1, "when": dt.date(1970, 1, 2)}, None], []]),
        "pair": pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        "map": pa.array([[("k", dt.date(1970, 1, 3))], None], pa.map_(pa.string(), pa.date32())),
    }
)


def expected(second: bool) -> bytes:
    """The second row exercises nulls; written out by hand."""
    rows = (
        {
            "at": {"$timestamp": "1700000000000000001"}, "blob": {"$bytes": "00ff"}, "day": {"$date": "19724"},
            "flag": True, "half": {"$float": "3fe0000000000000"}, "hour": {"$time": "7000000000"},
            "local": {"$timestamp": "5000000 Europe/Berlin"}, "map": [{"key": "k", "value": {"$date": "2"}}],
            "pair": [1, 2], "price": {"$decimal": "1.50"}, "text": "a", "took": {"$duration": "1000"},
            "tree": [{"n": 1, "when": {"$date": "1"}}, None], "word": "x",
        },
        {
            "blob": {"$bytes": ""}, "day": {"$date": "-1"}, "hour": {"$time": "8000000000"},
            "local": {"$timestamp": "6000000 Europe/Berlin"}, "price": {"$decimal": "-0.05"}, "text": "b\u2028",
            "took": {"$duration": "2000"}, "tree": [], "word": "y",
        },
    )  # fmt: skip
    return json.dumps(rows[second], ensure_ascii=False, separators=(",", ":")).encode()


def test_a_tables_row_is_the_canonical_json_of_its_values(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=1)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    with pa.OSFile(str(tmp_path / "c.arrow"), "wb") as sink, pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    manifest = DataManifest.build([tmp_path / "*.parquet", tmp_path / "*.arrow"])
    assert raw_rows(manifest) == [expected(False), expected(True)] * 3
    assert [s.format for s in manifest.block.sources] == ["parquet", "arrow", "arrow"]
    assert len({s.content_sha256 for s in manifest.block.sources}) == 1
    assert manifest.read_row(0)["day"] == dt.date(2024, 1, 2)
    assert manifest.read_row(5)["tree"] == []
    manifest.check_unchanged()


def test_rows_of_a_slice_are_those_of_the_slice(tmp_path: Path) -> None:
    """Nested arrays keep their children whole when they are sliced."""
    pq.write_table(pa.concat_tables([TABLE, TABLE]).slice(1, 2), tmp_path / "a.parquet")
    assert raw_rows(DataManifest.build(tmp_path / "a.parquet")) == [expected(True), expected(False)]


def test_a_table_without_rows_is_empty_and_one_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(TABLE.slice(0, 0), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="the file is empty"):
        DataManifest.build(tmp_path / "a.parquet")
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="two columns have one name"):
        DataManifest.build(tmp_path / "a.parquet")


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    pq.write_table(TABLE.select(["text"]), tmp_path / "year=2024" / "a.parquet")
    assert DataManifest.build(tmp_path / "*" / "*.parquet").read_row(0) == {"text": "a"}


def test_a_row_that_is_gone_is_named(tmp_path: Path) -> None:
    for name, stub in (("a.parquet", None), ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0))):
        if stub is None:
            pq.write_table(TABLE, tmp_path / name)
            manifest = DataManifest.build(tmp_path / name)
            pq.write_table(TABLE.slice(0, 1), tmp_path / name)
        else:
            manifest = build(tmp_path, name, gzip.compress(b'{"text": "a"}\n{"text": "b"}\n', mtime=0))
            (tmp_path / name).write_bytes(stub)
        with pytest.raises(DataError, match=rf"{name}: .*row 1"):
            manifest.raw_row(1)
        with pytest.raises(DataError, match=r"1 rows, there were 2|row 1"):
            list(manifest.source_rows(0))
