"""Records and events, byte for byte: the packed rows against struct, field by field as FORMAT.md lists them."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import auditlog.format.records as records
from auditlog.format.records import RECORD, RECORD_BYTES, Event, EventKind, canonical_floats, record_leaves

RECORD_STRUCT = struct.Struct("<HQQIIHIHHIQIqfIffIIff32s32s")
FORMAT = (Path(records.__file__).parents[1] / "FORMAT.md").read_text(encoding="utf-8")

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
I64, F32 = st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False)
DIGEST = st.binary(min_size=32, max_size=32)
ROW = st.tuples(
    *(U16, U64, U64, U32, U32, U16, U32, U16, U16, U32, U64, U32, I64, F32, U32, F32, F32, U32, U32, F32, F32),
    *(DIGEST, DIGEST),
)


@given(st.lists(ROW, max_size=5))
def test_a_record_is_hashed_over_its_156_packed_bytes(rows: list[tuple]) -> None:
    array = np.array([(*row[:-2], np.void(row[-2]), np.void(row[-1])) for row in rows], dtype=RECORD)
    packed = [RECORD_STRUCT.pack(*row) for row in rows]
    assert array.tobytes() == b"".join(packed)
    assert record_leaves(array) == [hashlib.sha256(b"\x00" + row).digest() for row in packed]


def test_leaves_do_not_depend_on_the_memory_layout() -> None:
    rows = np.zeros(6, RECORD)
    rows["seq"] = np.arange(6)
    assert record_leaves(rows[::2]) == record_leaves(rows)[::2]


@given(U16, U64, U16, I64, st.binary(max_size=60))
def test_an_event_is_hashed_over_its_52_packed_bytes(fmt: int, seq: int, kind: int, ts_us: int, body: bytes) -> None:
    event = Event(seq, kind, ts_us, body, fmt)
    row = struct.pack("<HQHq", fmt, seq, kind, ts_us) + hashlib.sha256(body).digest()
    assert (event.row(), event.leaf()) == (row, hashlib.sha256(b"\x00" + row).digest())


def test_an_event_body_is_json() -> None:
    assert Event(0, EventKind.NOTICE, 0, b'{"text":"hello"}').json() == {"text": "hello"}


def test_every_nan_gets_one_bit_pattern_and_other_values_keep_theirs() -> None:
    rows = np.zeros(3, RECORD)
    rows["loss"] = np.array([0xFFC00001, 0x7F800000, 0x80000000], np.uint32).view(np.float32)  # NaN, inf, -0
    canonical_floats(rows)
    assert rows["loss"].copy().view(np.uint32).tolist() == [0x7FC00000, 0x7F800000, 0x80000000]


def test_format_md_lists_every_field_at_its_offset() -> None:
    listed = re.findall(r"^\| (\d+) \| `(\w+)` \| (\w+(?:\[32\])?) \|", FORMAT, re.MULTILINE)
    kinds = {"<u2": "u16", "<u4": "u32", "<u8": "u64", "<i8": "i64", "<f4": "f32", "|V32": "bytes[32]"}
    assert RECORD.fields is not None
    expected = [(str(RECORD.fields[n][1]), n, kinds[RECORD[n].str]) for n in RECORD.names or ()]
    assert listed[: len(expected)] == expected
    assert RECORD_STRUCT.size == RECORD_BYTES == 156


@pytest.mark.parametrize("kind", EventKind, ids=lambda kind: kind.name)
def test_format_md_lists_every_event_kind(kind: EventKind) -> None:
    assert re.search(rf"^\| {kind.value} \| `{kind.name}` \|", FORMAT, re.MULTILINE)


def test_bodies_in_format_md_are_json() -> None:
    for block in re.findall(r"```json\n(.*?)```", FORMAT, re.DOTALL):
        json.loads(block)
