"""The two kinds of log entry: *records* (one sample used once) and *events* (everything else).

A record is a packed little-endian row of 156 bytes. An event is a short row that holds the digest of its
body; the body itself is canonical JSON. FORMAT.md describes both byte by byte.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from auditlog.format.digests import leaf_hash, sha256

FORMAT_VERSION: Final = 0

RECORD = np.dtype(
    [
        ("fmt", "<u2"),
        ("seq", "<u8"),  # position in the log
        ("step", "<u8"),  # optimizer step, from 1
        ("micro", "<u4"),  # micro-batch within the step
        ("slot", "<u4"),  # row within the micro-batch
        ("part", "<u2"),  # segment within the row; 0 unless packed
        ("epoch", "<u4"),
        ("attempt", "<u2"),  # rises at each resume
        ("flags", "<u2"),
        ("source_id", "<u4"),
        ("row", "<u8"),  # row within the source file, from 0
        ("data_version_id", "<u4"),
        ("ts_us", "<i8"),  # microseconds since 1970-01-01 UTC, the operator's clock
        ("loss", "<f4"),  # the sample's own summed token loss, nats
        ("n_tokens", "<u4"),  # tokens that carry loss
        ("weight", "<f4"),  # factor with which its summed-loss gradient entered p.grad, before clipping
        ("grad_norm", "<f4"),  # norm of the raw sketch before int8
        ("shard", "<u4"),
        ("shard_row", "<u4"),
        ("scale_raw", "<f4"),
        ("scale_whitened", "<f4"),
        ("sample_commit", "V32"),
        ("sketch_commit", "V32"),
    ]
)
RECORD_BYTES = RECORD.itemsize
assert RECORD_BYTES == 156

FLOAT_FIELDS = ("loss", "weight", "grad_norm", "scale_raw", "scale_whitened")

_EVENT_ROW = struct.Struct("<HQHq32s")


class Flag(enum.IntFlag):
    """What is special about one record."""

    NOT_FINITE = 1  # loss or sketch is not finite; the sketch is stored as zeros
    NO_LOSS_TOKEN = 2
    PADDED_DUPLICATE = 4
    NOT_SEPARABLE = 8
    UNIT_UNKNOWN = 16  # the loss is not plain cross-entropy, so the sketch keeps the trained loss's scale


class EventKind(enum.IntEnum):
    """What an event says. Values from 32 on belong to the custody log."""

    SESSION = 1
    STEP = 2
    DATA_VERSION = 3
    MODEL_CHECKPOINT = 4
    RESUME = 5
    LOSS_ACCEPTED = 6
    SEAL = 7
    NOTICE = 8  # what the recorder wants to have said: untracked parameters, self-check, log trouble
    CUSTODY_OPENED = 32
    QUERY = 33
    REPORT = 34
    REPLAY = 35
    VALIDATION = 36
    ERASURE = 37
    ROTATION = 38
    ANCHOR = 39


@dataclass(frozen=True, slots=True)
class Event:
    """One event as it stands in the log."""

    seq: int
    kind: int
    ts_us: int
    body: bytes
    fmt: int = FORMAT_VERSION

    def row(self) -> bytes:
        """Return the 52 packed bytes that are hashed into the log."""
        return _EVENT_ROW.pack(self.fmt, self.seq, self.kind, self.ts_us, sha256(self.body))

    def leaf(self) -> bytes:
        """Return the RFC 6962 leaf hash of the row."""
        return leaf_hash(self.row())

    def json(self) -> dict[str, Any]:
        """Parse the body. Not for ``CUSTODY_OPENED``, whose body is the text of a note."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


def canonical_floats(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Give every NaN one bit pattern (0x7fc00000), in place; returns ``rows``."""
    for name in FLOAT_FIELDS:
        column = rows[name]
        column[np.isnan(column)] = np.float32(np.nan)
    return rows


def record_leaves(rows: NDArray[np.void]) -> list[bytes]:
    """Return the leaf hash of each packed record, in order.

    Args:
        rows: ``(n,)`` array of dtype ``RECORD``.
    """
    packed = np.ascontiguousarray(rows, dtype=RECORD).tobytes()
    return [leaf_hash(packed[i : i + RECORD_BYTES]) for i in range(0, len(packed), RECORD_BYTES)]
