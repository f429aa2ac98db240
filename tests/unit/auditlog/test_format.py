"""FORMAT.md is true: its worked example is computed here a second time, with hashlib and struct and nothing of ours.

The same values must then come out of the package. Tables of finding codes are compared as well.
"""

from __future__ import annotations

import base64
import doctest
import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import auditlog.format.merkle
import auditlog.format.notes
import auditlog.format.records as records
from auditlog.format.chain import LogState
from auditlog.format.notes import LogCheckpoint, Note, VKey, sign_note
from auditlog.format.records import RECORD, Event, EventKind, record_leaves
from auditlog.trust.keys import Signer
from auditlog.trust.verdict import CODES

FORMAT = (Path(records.__file__).parents[1] / "FORMAT.md").read_text(encoding="utf-8")

SEED = bytes(range(32))
GENESIS = b'{"example":true}'
BODY = b'{"text":"hello"}'
TS_US = 1_764_547_200_123_457
SALT = bytes([0xAA]) * 32
SKETCH = bytes([1, 0x7F, 0x81, 0])  # int8 1, 127, -127, 0
RECORD_VALUES = {
    "fmt": 0,
    "seq": 1,
    "step": 1,
    "micro": 0,
    "slot": 3,
    "part": 0,
    "epoch": 0,
    "attempt": 1,
    "flags": 0,
    "source_id": 2,
    "row": 41,
    "data_version_id": 1,
    "ts_us": TS_US,
    "loss": 1.5,
    "n_tokens": 7,
    "weight": 0.125,
    "grad_norm": 2.0,
    "shard": 0,
    "shard_row": 3,
    "scale_raw": 0.0625,
    "scale_whitened": 0.0,
}


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def example() -> dict[str, str]:
    """Compute the worked example from nothing but this page's rules."""
    event_row = struct.pack("<HQHq", 0, 0, 8, TS_US) + sha(BODY)
    identity = sha(b"file") + struct.pack("<Q", 41) + sha(b"row")
    sample_commit = sha(b"\x10", SALT, identity)
    sketch_commit = sha(b"\x11", SALT, struct.pack("<ff", 0.0625, 0.0), SKETCH)
    record_row = struct.pack("<HQQIIHIHHIQIqfIffIIff", *RECORD_VALUES.values()) + sample_commit + sketch_commit
    leaves = [sha(b"\x00", event_row), sha(b"\x00", record_row)]
    start = sha(b"gradtrail/genesis/v0\n", GENESIS)
    chains = [sha(start, leaves[0])]
    chains.append(sha(chains[0], leaves[1]))
    root = sha(b"\x01", leaves[0], leaves[1])
    private_key = Ed25519PrivateKey.from_private_bytes(SEED)
    material = b"\x01" + private_key.public_key().public_bytes_raw()
    key_hash = sha(b"log.example/key\n", material)[:4]
    text = f"log.example\n2\n{base64.b64encode(root).decode()}\n"
    signature = private_key.sign(text.encode())
    return {
        "genesis document": GENESIS.decode(),
        "chain_-1": start.hex(),
        "event body": BODY.decode(),
        "event row": event_row.hex(),
        "leaf_0": leaves[0].hex(),
        "chain_0": chains[0].hex(),
        "salt": SALT.hex(),
        "identity": identity.hex(),
        "sample_commit": sample_commit.hex(),
        "sketch": SKETCH.hex(),
        "sketch_commit": sketch_commit.hex(),
        "record row": record_row.hex(),
        "leaf_1": leaves[1].hex(),
        "chain_1": chains[1].hex(),
        "root": root.hex(),
        "seed": SEED.hex(),
        "vkey": f"log.example/key+{key_hash.hex()}+{base64.b64encode(material).decode()}",
        "signature line": f"— log.example/key {base64.b64encode(key_hash + signature).decode()}",
    }


def test_the_worked_example_holds() -> None:
    block = FORMAT.split("## 16. Worked example")[1].split("```")[1]
    assert dict(re.findall(r"^(.+?) += (.+)$", block, re.MULTILINE)) == example()


def test_the_package_gives_the_worked_example() -> None:
    expected = example()
    row = np.zeros(1, RECORD)
    for name, value in RECORD_VALUES.items():
        row[name] = value
    row["sample_commit"] = np.void(bytes.fromhex(expected["sample_commit"]))
    row["sketch_commit"] = np.void(bytes.fromhex(expected["sketch_commit"]))
    event = Event(0, EventKind.NOTICE, TS_US, BODY)
    state = LogState(GENESIS)
    state.extend([event.leaf(), *record_leaves(row)])
    signer = Signer(VKey.parse(expected["vkey"]), Ed25519PrivateKey.from_private_bytes(SEED).sign)
    note = sign_note(LogCheckpoint("log.example", 2, state.root()).text(), signer)
    assert row.tobytes().hex() == expected["record row"]
    assert (event.row().hex(), state.chain.hex()) == (expected["event row"], expected["chain_1"])
    assert (state.root().hex(), note.signatures[0].line()) == (expected["root"], expected["signature line"])
    assert Note.parse(note.to_bytes()).signed_by(VKey.parse(expected["vkey"]))


def test_every_finding_code_is_listed_under_its_exit_code() -> None:
    for code, exit_code in CODES.items():
        assert re.search(rf"^\| {exit_code} \|.*`{code}`", FORMAT, re.MULTILINE), code


@pytest.mark.parametrize("module", [auditlog.format.merkle, auditlog.format.notes], ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module: object) -> None:
    outcome = doctest.testmod(module)  # type: ignore[arg-type]
    assert (outcome.failed, outcome.attempted > 0) == (0, True)
