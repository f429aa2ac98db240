"""Checks a gradtrail bundle without gradtrail: one file, written from FORMAT.md, independent of its own verifier.

    python verify_gradtrail.py BUNDLE.zip --key bank.vkey --head 00001024.note --origin bank.example/credit
    python verify_gradtrail.py --proof ENTRY.tlog-proof --key bank.vkey

Needs Python 3.11, cryptography, pyarrow and numpy (the columns come as numpy arrays). Believes nothing in the bundle:
hashes are computed again, signatures checked, all findings listed. Exit code: 0 verified, 2 wrong call, 3 cannot be
read, 4 integrity, 5 incomplete, 6 authenticity, 7 nothing from outside to compare with.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import struct
import sys
import zipfile
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

CLASSES = {  # exit code -> codes of findings, the weightiest first; what begins with N_ is a note
    3: "E_IO E_ENGINE E_FORMAT",
    6: "E_SIG E_KEY E_KEYREV E_BIND E_HEAD E_FORK",
    4: "E_SCHEMA E_ENCODING E_SEQ E_LEAF E_EVENT E_CHAIN E_BATCH E_ROOT E_ORPHAN E_CKPT_ORDER E_PAYLOAD E_OPENING"
    " E_BUNDLE",
    5: "E_TRUNC E_ROLLBACK E_UNSEALED E_GAP_STEP E_LOST E_LOSS_ACCEPTED E_ERASED",
    7: "W_UNANCHORED",
}
EXIT_OF = {code: number for number, codes in CLASSES.items() for code in codes.split()}
STATUS = {0: "VERIFIED", 3: "CANNOT READ", 4: "INTEGRITY", 5: "INCOMPLETE", 6: "AUTHENTICITY", 7: "UNANCHORED"}
MAX_LISTED, MAX_NOTE, MAX_MEMBER, MAX_ROWS, NO_END = 100, 1_000_000, 1 << 30, 1 << 18, 1 << 65
SESSION, STEP, MODEL_CHECKPOINT, RESUME, LOSS_ACCEPTED, SEAL, CUSTODY_OPENED, ERASURE = 1, 2, 4, 5, 6, 7, 32, 37
SHARD_ROWS = 8_192  # sketch rows per shard
COLUMNS = {  # of records: the fields in the order in which they are hashed, then the stored hash
    "records": "fmt:u2 seq:u8 step:u8 micro:u4 slot:u4 part:u2 epoch:u4 attempt:u2 flags:u2 source_id:u4 row:u8"
    " data_version_id:u4 ts_us:i8 loss:f4 n_tokens:u4 weight:f4 grad_norm:f4 shard:u4 shard_row:u4 scale_raw:f4"
    " scale_whitened:f4 sample_commit:V32 sketch_commit:V32 leaf:V32",
    "events": "fmt:u2 seq:u8 kind:u2 ts_us:i8 body:bytes leaf:V32",
    "batches": "batch:u8 first_seq:u8 entries:u8 chain:V32",
    "checkpoints": "size:u8 note:bytes",
}
TABLES = {table: dict(column.split(":") for column in columns.split()) for table, columns in COLUMNS.items()}
ARROW = {"u2": pa.uint16(), "u4": pa.uint32(), "u8": pa.uint64(), "i8": pa.int64(), "f4": pa.float32()}
ARROW |= {"V32": pa.binary(32), "bytes": pa.binary()}
FIELDS = [(name, kind if kind == "V32" else f"<{kind}") for name, kind in TABLES["records"].items() if name != "leaf"]
ROW = np.dtype([("tag", "u1"), *FIELDS])  # the tag byte in front of a row makes it a leaf
MEMBER = re.compile(
    r"README\.txt|verify_gradtrail\.py|index\.json|(?:(?:ranks/[1-9][0-9]{0,8}|custody)/)?(?:manifest\.json|(?:step_)?salts\.bin|"
    r"(?:records|events)/[0-9]{6}\.parquet|(?:batches|checkpoints)\.parquet|"
    r"heads/(?:lost/)?[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.note|(?:sketches|results)/[A-Za-z0-9][A-Za-z0-9._-]{0,119})"
)
FAULTS = (OSError, ValueError, EOFError, RuntimeError, MemoryError, OverflowError, struct.error, zipfile.BadZipFile)
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
NUMBER = re.compile(r"(?<=[:,\[])-?(?:[0-9]{16,}|[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)(?=[,}\]])")
NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '\|i1', 'fortran_order': False, 'shape': \((\d+), (\d+)\), \} *\n", re.S
)
AGAIN = "Fetch another copy and try again."


class Unreadable(Exception):  # noqa: N818
    """No statement about the content can be made. Arguments: what is wrong, what to do, the finding's code."""

    exit_code = 3

    def __str__(self) -> str:
        return str(self.args[0])

    def advice(self) -> str:
        """Return what to do next."""
        return str(self.args[1]) if len(self.args) > 1 else AGAIN


class Finding(NamedTuple):
    """One thing that is wrong, or with ``level="note"`` worth knowing."""

    code: str
    level: str
    message: str
    where: str
    seq: int | None


class Report:
    """What was found, looked at, and left open. ``log`` is the folder of the log that is looked at."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.checked: list[str] = []
        self.not_checked: list[str] = []
        self.log = ""
        self._count: Counter[str] = Counter()

    def add(self, code: str, where: str, text: str, seq: int | None = None) -> None:
        """Take a finding; beyond ``MAX_LISTED`` of one code no more are listed."""
        self._count[code] += 1
        if self._count[code] > MAX_LISTED:
            text, where, seq = "there are more findings of this kind, not listed one by one", "", None
        if self._count[code] <= MAX_LISTED + 1:
            name = f"{self.log.strip('/').replace('ranks/', 'rank ')}: " if self.log else ""
            level = "note" if code.startswith("N_") else "error"
            self.findings.append(Finding(code, level, name + text, self.log + where, seq))

    @property
    def exit_code(self) -> int:
        """The class of the weightiest finding; 0 without any."""
        found = {EXIT_OF[f.code] for f in self.findings if f.level == "error"}
        return next((number for number in CLASSES if number in found), 0)


# --- hashes, JSON, keys, notes ---


def sha256(*parts: bytes) -> bytes:
    """Return SHA-256 over the joined parts."""
    return hashlib.sha256(b"".join(parts)).digest()


def extend_tree(tree: list[bytes | None], nodes: Sequence[bytes]) -> None:
    """Add leaf hashes to an RFC 6962 tree, kept as the one open node of each height."""
    height, digest = 0, hashlib.sha256
    while nodes:
        if height == len(tree):
            tree.append(None)
        left = tree[height]
        nodes = nodes if left is None else [left, *nodes]
        tree[height] = nodes[-1] if len(nodes) % 2 else None
        nodes = [digest(b"\x01" + a + b).digest() for a, b in zip(nodes[:-1:2], nodes[1::2], strict=True)]
        height += 1


def tree_root(tree: list[bytes | None]) -> bytes:
    """Return the root of such a tree."""
    root = None
    for left in (node for node in tree if node is not None):
        root = left if root is None else sha256(b"\x01", left, root)
    return sha256() if root is None else root


def _chain(chain: bytes, leaves: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256
    for leaf in leaves:
        chain = digest(chain + leaf).digest()
    return chain


def _integer(text: str) -> int | float:
    return int(text) if len(text) < 16 or abs(float(text)) < 2**53 else float(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


DECODER = json.JSONDecoder(parse_int=_integer, parse_constant=_refuse)
ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def shortest(value: float) -> str:
    """Return a double as ECMAScript writes it."""
    text = repr(value)
    if "e" in text:
        text = format(Decimal(text), "f") if 1e-6 <= abs(value) < 1e21 else re.sub("e([+-])0", r"e\1", text)
    return text.removesuffix(".0")


def canonical_json(data: bytes) -> Any:
    """Parse RFC 8785 JSON; raises ``ValueError`` where the bytes are not in that one form."""
    text = data.decode("utf-8")
    plain = NUMBER.sub("0", text)  # fractions and long numbers are judged by themselves
    try:
        if ENCODER.encode(json.loads(plain)) != plain:
            raise ValueError("not in canonical form (RFC 8785)")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    odd = {token for token in NUMBER.findall(text) if token != shortest(float(token))}
    if odd and odd & {*NUMBER.findall(STRING.sub('""', text))}:
        raise ValueError(f"{min(odd)[:30]} is not the canonical form of a number")
    return DECODER.decode(text)


def whole(body: dict[str, Any], *names: str) -> Any:
    """Return members that must be whole numbers from 0 on."""
    for name in names:
        if type(body[name]) is not int or body[name] < 0:
            raise ValueError(name)
    return body[names[0]] if len(names) == 1 else tuple(body[name] for name in names)


def unbase64(text: str) -> bytes:
    """Decode base64 in its one canonical spelling; raises ``ValueError``."""
    data = base64.b64decode(text.encode("ascii"), validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("base64 with stray bits")
    return data


def _is_name(name: str) -> bool:
    return bool(name) and name.isprintable() and not any(c.isspace() or c == "+" for c in name)


class Key(NamedTuple):
    """An Ed25519 public key; ``name`` is ``None`` for one from a PEM file, which signs under any name."""

    name: str | None
    raw: bytes

    def hint(self, name: str) -> bytes:
        """Return the key hash that stands in a signature line."""
        return sha256(name.encode(), b"\n\x01", self.raw)[:4]

    def is_in(self, keys: Iterable[Key]) -> bool:
        """Return whether this key is one of those, as far as names are known."""
        return any(self.raw == key.raw and key.name in (None, self.name) for key in keys)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return whether the signature over ``message`` is this key's."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def __str__(self) -> str:
        return f"{self.name or 'PEM key'} ({sha256(self.raw).hex()[:16]})"


def parse_vkey(text: str) -> Key:
    """Parse ``name+hash+base64``; ``ValueError`` if it is none, ``Unreadable`` for another algorithm than Ed25519."""
    name, _, rest = text.strip().partition("+")
    hint, _, encoded = rest.partition("+")
    material = unbase64(encoded)
    if material and material[0] != 1:
        raise Unreadable(f"key {name}: algorithm 0x{material[0]:02x} is not supported; Ed25519 is 0x01")
    key = Key(name, material[1:])
    if not _is_name(name) or len(key.raw) != 32 or key.hint(name).hex() != hint:
        raise ValueError("not a verifier key (name+hash+base64)")
    return key


class Note(NamedTuple):
    """A signed log checkpoint: ``size`` entries of the log ``origin`` have the tree root ``root``."""

    data: bytes
    text: bytes
    origin: str
    size: int
    root: bytes
    signatures: list[tuple[str, bytes, bytes]]  # name, key hash, signature

    def state(self, key: Key) -> bool | None:
        """Return whether the key's signature holds; ``None`` if it did not sign. A bad line outweighs a good one."""
        own = [s for name, hint, s in self.signatures if key.name in (None, name) and hint == key.hint(name)]
        return all(key.verifies(signature, self.text) for signature in own) if own else None

    @property
    def signers(self) -> str:
        """The names that it is signed with."""
        return ", ".join(name for name, *_ in self.signatures)


def parse_note(data: bytes) -> Note:
    """Parse a C2SP signed note that is a log checkpoint without extension lines; raises ``ValueError``."""
    head, blank, tail = data[: MAX_NOTE + 1].decode("utf-8").rpartition("\n\n")
    lines = head.split("\n")
    if len(data) > MAX_NOTE or not blank or not tail.endswith("\n") or len(lines) != 3 or not lines[0]:
        raise ValueError("not a signed log checkpoint of three lines")
    root = unbase64(lines[2])
    if not re.fullmatch(r"0|[1-9][0-9]{0,18}", lines[1]) or len(root) != 32 or min(map(ord, lines[0])) < 32:
        raise ValueError("origin, size or root are malformed")
    signatures = []
    for mark, _, rest in (line.partition(" ") for line in tail[:-1].split("\n")):
        name, _, encoded = rest.partition(" ")
        blob = unbase64(encoded)
        if mark != "—" or not _is_name(name) or len(blob) < 5:
            raise ValueError("a malformed signature line")
        signatures.append((name, blob[:4], blob[4:]))
    return Note(data, f"{head}\n".encode(), lines[0], int(lines[1]), root, signatures)


class Certificate(NamedTuple):
    """The body of a SESSION event: what was signed, for which session key, by whom, and whether that holds."""

    fields: dict[str, Any]
    session: Key
    signer: Key
    is_signed: bool


def parse_certificate(body: dict[str, Any]) -> Certificate:
    """Parse a session certificate; raises ``ValueError`` or ``KeyError``, ``Unreadable`` for another algorithm."""
    fields, names = body["certificate"], {"origin", "run_id", "manifest_sha256", "first_root", "session_vkey"}
    if set(body) != {"certificate", "signature", "vkey"} or set(fields) != names | {"attempt", "first_size"}:
        raise ValueError("other members than a certificate has")
    if not all(isinstance(text, str) for text in [body["vkey"], body["signature"], *(fields[n] for n in names)]):
        raise ValueError("a member is not text")
    if len(bytes.fromhex(fields["first_root"])) != 32 or not whole(fields, "attempt", "first_size"):
        raise ValueError("first_root is not 32 bytes")
    message = b"gradtrail/session/v0\n" + ENCODER.encode(fields).encode()  # text and whole numbers: this is RFC 8785
    session, signer = parse_vkey(fields["session_vkey"]), parse_vkey(body["vkey"])
    is_signed = signer.verifies(base64.b64decode(body["signature"], validate=True), message)
    return Certificate(fields, session, signer, is_signed)


class Trust(NamedTuple):
    """What the verifier brings from outside, and what they allow."""

    keys: list[Key]
    heads: list[tuple[str, Note]]
    origin: str | None = None
    allow_open: bool = False
    allow_unanchored: bool = False
    certificates: Sequence[Certificate] = ()  # handed over with the heads: they show whose a session key is


# --- the container ---


class Bundle:
    """The members of a bundle, in its zip file or in the folder that it was unpacked into."""

    def __init__(self, path: Path, report: Report) -> None:
        self.path, self.report = path, report
        self.members: dict[str, Any] = {}  # name -> what opens it
        self.archive: zipfile.ZipFile | None = None
        try:
            self._list_folder() if path.is_dir() else self._list_zip()
        except FileNotFoundError as error:
            raise Unreadable(f"{path} does not exist", "Name the zip or the unpacked folder.", "E_IO") from error
        except FAULTS as error:
            raise Unreadable(f"{path} cannot be read as a bundle: {error}", AGAIN, "E_ENGINE") from error
        if "manifest.json" not in self.members:
            raise Unreadable(f"{path} holds no manifest.json: not a bundle", "gradtrail export RUN writes one.")
        self.payloads = self._check_index()

    def _take(self, name: str, member: Any, is_link: bool) -> None:
        if is_link or not MEMBER.fullmatch(name):
            self.report.add("E_BUNDLE", name[:200], f"member {name[:200]!r} does not belong here, and was not opened")
        elif name in self.members:
            self.report.add("E_BUNDLE", name, f"member {name} is there twice")
        else:
            self.members[name] = member

    def _list_folder(self) -> None:
        for path in (path for path in sorted(self.path.rglob("*")) if path.is_symlink() or not path.is_dir()):
            self._take(path.relative_to(self.path).as_posix(), path, path.is_symlink() or not path.is_file())

    def _list_zip(self) -> None:
        self.archive, end = zipfile.ZipFile(self.path), 0
        with self.path.open("rb") as file:
            for info in sorted(self.archive.infolist(), key=lambda info: info.header_offset):
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise Unreadable(f"{self.path} was packed anew", "Unpack it, and name the folder instead.")
                if info.header_offset != end:
                    self.report.add("E_BUNDLE", info.filename, f"bytes before {info.filename!r} belong to no member")
                file.seek(info.header_offset + 26)
                end = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + info.file_size
                self._take(info.filename, info, info.external_attr >> 28 == 0o12)
            file.seek(-22, io.SEEK_END)
            if self.archive.start_dir != end or self.archive.comment or file.read(4) != b"PK\5\6":
                self.report.add("E_BUNDLE", self.path.name, "bytes behind the last member belong to none")

    def read(self, name: str) -> bytes:
        """Return a member; raises ``Unreadable``."""
        try:
            member = self.members[name]
            if (member.stat().st_size if self.archive is None else member.file_size) > MAX_MEMBER:
                raise ValueError("too large")
            return bytes(member.read_bytes() if self.archive is None else self.archive.read(member))
        except KeyError as error:
            raise Unreadable(f"member {name} is missing") from error
        except FAULTS as error:
            raise Unreadable(f"member {name} is damaged: {error}", AGAIN, "E_ENGINE") from error

    def names(self, folder: str) -> list[str]:
        """Return the members of one folder, in order."""
        return sorted(name for name in self.members if name.startswith(folder))

    def _check_index(self) -> bool:
        """Compare all members with the index, which nobody signed; return whether it says that payloads are inside."""
        damaged, found = [], {}
        for name in self.members:
            try:
                data = self.read(name)
                found[name] = (hashlib.sha256(data).hexdigest(), len(data))
            except Unreadable as error:
                damaged.append(str(error))
        if damaged:
            raise Unreadable("; ".join(damaged[:5]), AGAIN, "E_ENGINE")
        if found.pop("index.json", None) is None:
            self.report.add("E_BUNDLE", "index.json", "member index.json is missing")
            return "salts.bin" in found
        try:
            index = canonical_json(self.read("index.json"))
            if (index["format"], index["version"]) != ("gradtrail/bundle", 0):
                raise ValueError(f"format {index['format']!r} {index['version']!r} is not known")
            listed = {str(m["name"]): (m["sha256"], m["size"]) for m in index["members"]}
        except (KeyError, TypeError, ValueError) as error:
            raise Unreadable(f"index.json is not the index of a bundle: {error}") from error
        for name in sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name)):
            what = "is missing" if name not in found else "is another one" if name in listed else "is not listed"
            self.report.add("E_BUNDLE", name, f"member {name!r} {what}, compared with the index")
        self.report.checked.append(f"{len(found)} members are listed in the index, with their digests")
        return index["payloads"] is True

    def groups(self, names: Iterable[str], table: str) -> Iterator[dict[str, Any]]:
        """Yield the columns of one table by row groups: numbers and digests as arrays, blobs as a list of bytes."""
        columns = [(column, ARROW[kind]) for column, kind in TABLES[table].items()]
        for name in names:
            data = self.read(name)
            try:
                parquet = pq.ParquetFile(pa.BufferReader(data))
                present = [(field.name, field.type) for field in parquet.schema_arrow]
                for column, kind in sorted({*columns} ^ {*present}, key=str):
                    self.report.add("E_SCHEMA", name, f"{name}: column {column} ({kind}) is one too many or missing")
                if present != columns and {*present} == {*columns}:
                    self.report.add("E_SCHEMA", name, f"{name}: its columns stand in another order, or twice")
                for i in range(parquet.num_row_groups):
                    if parquet.metadata.row_group(i).num_rows > MAX_ROWS:
                        raise ValueError("a row group is too large")
                    cells = parquet.read_row_group(i, use_threads=False)
                    yield {column: self._column(name, cells, column, kind) for column, kind in TABLES[table].items()}
            except (*FAULTS, pa.ArrowException) as error:
                raise Unreadable(f"{name} is no readable Parquet: {str(error)[:200]}", AGAIN, "E_ENGINE") from error

    def _column(self, name: str, cells: pa.Table, column: str, kind: str) -> Any:
        """Return one column; cells that have no place in the format are reported and read as zeros."""
        is_there = len(cells.schema.get_all_field_indices(column)) == 1  # otherwise the schema is reported
        found = cells.column(column).combine_chunks() if is_there else pa.nulls(cells.num_rows, ARROW[kind])
        try:
            found = found.cast(ARROW[kind])
        except pa.ArrowException:
            found = pa.nulls(cells.num_rows, ARROW[kind])
        if found.null_count:
            row = found.is_null().index(True).as_py()
            seq = cells.column("seq")[row].as_py() if "seq" in cells.column_names else None
            self.report.add("E_ENCODING", name, f"{name}: {column} is NULL or no value of the format", seq)
            found = found.fill_null({"V32": bytes(32), "bytes": b""}.get(kind, 0))
        if kind == "V32":
            return np.frombuffer(found.buffers()[1] or b"", "V32", len(found), found.offset * 32)
        return found.to_pylist() if kind == "bytes" else found.to_numpy(zero_copy_only=False)


def parse_manifest(name: str, data: bytes) -> dict[str, Any]:
    """Parse what is needed of a manifest; raises ``Unreadable``."""
    try:
        manifest: dict[str, Any] = canonical_json(data)
        if (manifest["format"], manifest["fmt"]) != ("gradtrail/run", 0):
            raise ValueError(f"format {manifest['format']!r}, version {manifest['fmt']!r}")
        if not all(isinstance(manifest[n], str) for n in ("origin", "run_id", "vkey")):
            raise ValueError("origin, run_id or vkey is no text")
        sources = manifest["data"]["sources"]
        places = sorted(whole(s, "source_id", "first_index", "rows", "data_version_id") for s in sources)
        manifest["sources"] = np.array([*places, (2**40, 0, 0, 0)], np.uint64).T
        manifest["paths"] = {s["source_id"]: str(s["path"]) for s in sources}
        manifest["width"] = whole(manifest["sketch"], "dim") * len(manifest["sketch"]["forms"])
        whole(manifest, "rank", "world_size")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unreadable(f"{name} is no manifest of a known form: {error}", "Restore it from a copy.") from error
    return manifest


# --- one log ---


class Event(NamedTuple):
    """One event: the hash of its row, and the hash that stands beside it."""

    seq: int
    kind: int
    body: bytes
    leaf: bytes
    kept: bytes


class Log:
    """One log of a bundle, checked: a run's or a rank's, or with ``opening`` (a final note) a run's custody log."""

    def __init__(self, bundle: Bundle, folder: str, trust: Trust, opening: Note | None = None) -> None:
        self.bundle, self.folder, self.trust, self.opening, self.report = bundle, folder, trust, opening, bundle.report
        self.report.log, self.add = folder, bundle.report.add
        self.genesis = opening.data if opening else bundle.read(f"{folder}manifest.json")
        self.manifest = {} if opening else parse_manifest(f"{folder}manifest.json", self.genesis)
        self.origin: str = f"{opening.origin}/custody" if opening else self.manifest["origin"]
        self.final: Note | None = None
        self.seal: dict[str, Any] = {}
        self.sealed = False
        # the pass over the entries
        self.position = self.records = self.snapshots = self.opened = self.anchors = 0
        self.tree: list[bytes | None] | None = []
        self.chains = [sha256(b"gradtrail/genesis/v0\n", self.genesis)]  # of the rows; then others it may go on from
        self.roots: dict[int, bytes] = {}
        self.bad = NO_END  # the first entry that is known to be wrong
        # what the entries say
        self.sessions: list[tuple[int, dict[str, Any]]] = []
        self.lines = {1: (0, 0)}  # attempt -> attempt and step that it goes on from
        self.resumed: set[int] = set()
        self.losses: list[tuple[int, int, list[tuple[int, bytes]], Any]] = []  # seq, size, heads, missing steps
        self.seals: list[tuple[int, dict[str, Any]]] = []
        self.open_steps: dict[tuple[int, int], list[int]] = {}  # attempt, step -> first record, records
        self.steps: dict[int, array[int]] = {}  # attempt -> its steps
        self.uses: dict[int, tuple[array[int], array[int]]] = {}  # attempt -> steps, records of each
        self.last_step = (0, 0)  # attempt and step
        self.tail: Any = None  # the records of the step that a row group ends in
        # what the commitments open to
        self.shard: tuple[int, Any] = (-1, None)
        self.unopened: list[tuple[Any, ...]] = []  # what, seq, sample, place, what is hashed, commitment
        self.odd: list[tuple[Any, ...]] = []  # gradients that do not open: what, place, text, seq
        self.missing: dict[tuple[Any, ...], tuple[str, int, int]] = {}  # what is not there -> in words, entry, number
        self.present: dict[tuple[Any, ...], int] = {}  # what could have been erased and is there -> first entry
        self.erased: dict[tuple[Any, ...], int] = {}  # of a custody log: what it says was erased -> its entry
        self.salts, self.step_salts = (self._read_salts(f"{folder}{name}.bin") for name in ("salts", "step_salts"))
        for check in (self._read_checkpoints, self._read_batches, self._walk, self._check_sessions):
            check()
        for check in (self._check_checkpoints, self._check_kept, self._check_end, self._check_files):
            check()
        entries = f"{self.position:,} entries: order, hashes, chain of {len(self.blocks) - 1:,} batches"
        self.report.checked.append(f"{self.origin}: {entries}, {len(self.stored):,} signed checkpoints")

    def _read_salts(self, name: str) -> Any:
        salts = self.bundle.read(name) if name in self.bundle.members else b""
        return np.frombuffer(salts[: len(salts) // 32 * 32], "V32")

    # tables

    def _table(self, table: str) -> Iterator[dict[str, Any]]:
        return self.bundle.groups(self.bundle.names(f"{self.folder}{table}/"), table)

    def _small(self, table: str) -> list[tuple[Any, ...]]:
        groups = list(self.bundle.groups([f"{self.folder}{table}.parquet"], table))
        columns = [[c if isinstance(c, list) else c.tolist() for c in group.values()] for group in groups]
        return [row for group in columns for row in zip(*group, strict=True)]

    def _read_checkpoints(self) -> None:
        self.stored: list[tuple[str, Note]] = []  # place and note
        largest = -1
        for number, (size, data) in enumerate(self._small("checkpoints")):
            where = f"checkpoints.parquet row {number}"
            try:
                note = parse_note(data)
            except ValueError as error:
                self.add("E_SIG", where, f"log checkpoint {number} (size {size:,}): {error}")
                continue
            if note.size != size or note.size <= largest:
                text = f"its row says {size:,}, its note {note.size:,}, the note before it {largest:,}"
                self.add("E_CKPT_ORDER", where, f"log checkpoint {number}: {text}")
            largest = note.size
            self.stored.append((where, note))
        notes = [note for _, note in [*self.stored, *self.trust.heads]]
        self.wanted = {note.size for note in notes if note.origin == self.origin}
        self.covered = max((note.size for _, note in self.stored), default=0)

    def _read_batches(self) -> None:
        self.blocks: list[tuple[int, int, bytes | None]] = []  # end, first, chain; without one: covered by no batch
        at = number = self.block = 0
        for row, (batch, first, entries, chain) in enumerate(self._small("batches")):
            if (batch, first) != (number, at) or not entries:
                text = f"row {row} is batch {batch} from entry {first} ({entries}); expected is {number} from {at}"
                self.add("E_LOST" if batch > number and first > at else "E_BATCH", f"batches.parquet row {row}", text)
            number = batch + 1
            if entries and first >= at:
                self.blocks += [(first, at, None)] if first > at else []
                at = first + entries
                self.blocks.append((at, first, chain))
        self.blocks.append((NO_END, at, None))

    def _events(self) -> Iterator[Event]:
        last = -1
        for group in self._table("events"):
            columns = [c if isinstance(c, list) else c.tolist() for c in group.values()]
            for fmt, seq, kind, ts_us, body, kept in zip(*columns, strict=True):
                leaf = sha256(b"\x00", struct.pack("<HQHq", fmt, seq, kind, ts_us), sha256(body))
                if leaf != kept:
                    self._bad(seq, "E_EVENT", "events", f"event {seq} does not give the hash stored beside it")
                if fmt:
                    self.add("E_EVENT", "events", f"event {seq}: its format version is {fmt}", seq)
                if seq < last:
                    self.add("E_SEQ", "events", f"event {seq} stands behind event {last}", seq)
                last = seq
                yield Event(seq, kind, body, leaf, kept)

    # the pass over all entries

    def _bad(self, seq: int, code: str, where: str, text: str) -> None:
        self.bad = min(self.bad, seq)
        self.add(code, where, text, seq)

    def _walk(self) -> None:
        events = self._events()
        upcoming = next(events, None)
        nothing = {name: np.zeros(0, kind) for name, kind in TABLES["records"].items()}
        groups, is_last = self._table("records"), False
        while not is_last or upcoming is not None:
            group = nothing if is_last else next(groups, nothing)
            is_last = is_last or group is nothing
            if (np.diff(group["seq"].astype(np.int64)) < 0).any():
                self.add("E_SEQ", "records", "records do not stand in the order of their numbers")
                order = np.argsort(group["seq"], kind="stable")
                group = {name: column[order] for name, column in group.items()}
            chunk: list[Event] = []
            end = NO_END if is_last else int(group["seq"][-1]) if len(group["seq"]) else 0
            while upcoming is not None and upcoming.seq < end and not (is_last and len(chunk) > 10_000):
                chunk.append(upcoming)
                upcoming = next(events, None)
            self._take(group, chunk)
        for end, first, chain in self.blocks[self.block :]:
            if chain is not None:
                text = f"the batch from entry {first} to {end - 1} is cut: the log ends after {self.position:,}"
                self.add("E_LOST", "batches.parquet", text)
            elif end == NO_END and first < min(self.position, self.covered):
                self.add("E_BATCH", "batches.parquet", f"entries from {first} on belong to no batch", first)

    def _describe(self, row: Any) -> str:
        path = self.manifest.get("paths", {}).get(int(row["source_id"]), "unknown source")
        return f"record {row['seq']} (step {row['step']}, {path} row {row['row']})"

    def _take(self, group: dict[str, Any], events: list[Event]) -> None:
        """Take a row group of records, and the events that stand before its last record."""
        rows = np.zeros(len(group["seq"]), ROW)
        for name, _ in FIELDS:
            rows[name] = group[name]
        packed, width, digest = rows.tobytes(), ROW.itemsize, hashlib.sha256
        leaves = [digest(packed[i : i + width]).digest() for i in range(0, len(packed), width)]
        kept = leaves
        if b"".join(leaves) != group["leaf"].tobytes():
            kept = group["leaf"].tolist()
            for row in (rows[i] for i, leaf in enumerate(leaves) if leaf != kept[i]):
                text = f"{self._describe(row)} does not give the hash stored beside it"
                self._bad(int(row["seq"]), "E_LEAF", "records", text)
        is_same = kept is leaves and all(event.leaf == event.kept for event in events)
        events.sort(key=lambda event: event.seq)
        numbers = np.array([event.seq for event in events], np.uint64)
        places = np.searchsorted(rows["seq"], numbers)
        self.wanted |= {event.seq for event in events if event.kind == SESSION}
        merged: list[bytes] = []
        merged_kept: list[bytes] = []
        for start, place, event in zip([0, *places.tolist()], places.tolist(), events, strict=False):
            merged += [*leaves[start:place], event.leaf]
            merged_kept += [] if is_same else [*kept[start:place], event.kept]
        last = int(places[-1]) if events else 0
        merged += leaves[last:]
        merged_kept = merged if is_same else [*merged_kept, *kept[last:]]
        sequence = np.insert(rows["seq"], places, numbers)
        if (sequence == np.arange(self.position, self.position + len(sequence), dtype=np.uint64)).all():
            self._feed(merged, merged_kept)
        else:
            self._feed_broken(sequence.tolist(), merged, merged_kept)
        self._check_records(rows, numbers[[event.kind == STEP for event in events]] if events else numbers, events)

    def _feed_broken(self, sequence: list[int], leaves: list[bytes], kept: list[bytes]) -> None:
        """Take entries with holes or doubles among them."""
        run: list[int] = []
        for i, seq in enumerate([*sequence, NO_END]):
            if seq < self.position + len(run):
                self._bad(seq, "E_SEQ", "records, events", f"entry {seq} is there twice, or too late")
                continue
            if seq > self.position + len(run):
                self._feed([leaves[j] for j in run], [kept[j] for j in run])
                run = []
                if seq < NO_END:
                    self._skip_to(seq)
            run.append(i)

    def _skip_to(self, seq: int) -> None:
        """Go on behind a hole: the tree ends here, the chain is taken up at the next stored value."""
        text = f"entries {self.position} to {seq - 1} are missing ({seq - self.position:,})"
        self._bad(self.position, "E_SEQ", "records, events", text)
        self.tree, self.chains, self.position = None, [], seq
        while self.blocks[self.block][0] <= seq:
            end, _, chain = self.blocks[self.block]
            self.chains = [chain] if chain and end == seq else []
            self.block += 1

    def _feed(self, leaves: list[bytes], kept: list[bytes]) -> None:
        """Take entries that follow each other; ``kept`` are the hashes stored beside them."""
        start, end = self.position, self.position + len(leaves)
        cuts = {end} | {size for size in self.wanted if start <= size <= end}
        for block_end, *_ in self.blocks[self.block :]:
            if block_end > end:
                break
            cuts.add(block_end)
        for cut in sorted(cuts):
            part, part_kept = leaves[self.position - start : cut - start], kept[self.position - start : cut - start]
            chains = [_chain(chain, part) for chain in self.chains]
            if kept is not leaves and part != part_kept:
                chains += [_chain(chain, part_kept) for chain in self.chains]
            self.chains, self.position = chains[:4], cut
            if self.tree is not None:
                extend_tree(self.tree, part)
                if cut in self.wanted:
                    self.roots[cut] = tree_root(self.tree)
            if cut == self.blocks[self.block][0]:
                self._close_block(*self.blocks[self.block])

    def _close_block(self, end: int, first: int, chain: bytes | None) -> None:
        """Compare the chain with the stored value; whatever leads there from an earlier fault is no new one."""
        self.block += 1
        if chain is None:
            if first < self.covered:
                self.add("E_BATCH", "batches.parquet", f"entries {first} to {end - 1} belong to no batch", first)
        elif not self.chains or chain in self.chains:
            self.chains = [chain]
        else:
            why = "or the stored value before it" if first else "or what the chain starts from (the manifest)"
            text = f"the batch of entries {first} to {end - 1} does not lead to its stored chain value: an entry, {why}"
            self._bad(first, "E_CHAIN", "batches.parquet", f"{text}, was changed")
            self.chains = [self.chains[0], chain]

    # what the entries say

    def _check_records(self, rows: Any, step_ends: Any, events: list[Event]) -> None:
        """Judge records by columns, then take steps and events in their order."""
        self.records += len(rows)
        waiting: list[tuple[int, ...]] = []
        if len(rows) and self.opening:
            self.add("E_EVENT", "records", "a custody log holds no records", int(rows["seq"][0]))
        elif len(rows):
            samples = self._check_values(rows)
            self._check_doubles(rows)
            if self.bundle.payloads:
                self._open_sketches(rows, samples)
            changes = np.flatnonzero((np.diff(rows["step"]) != 0) | (np.diff(rows["attempt"]) != 0)) + 1
            starts = np.union1d(np.append(changes, 0), np.searchsorted(rows["seq"], step_ends)).astype(np.int64)
            starts = starts[starts < len(rows)]
            counts = np.diff(np.append(starts, len(rows)))
            columns = [*(rows[name][starts] for name in ("attempt", "step", "seq")), counts]
            waiting = list(zip(*(column.tolist() for column in columns), strict=True))[::-1]
        for event in events:
            while waiting and waiting[-1][2] < event.seq:
                self._take_uses(*waiting.pop())
            self._take_event(event)
        while waiting:
            self._take_uses(*waiting.pop())

    def _check_values(self, rows: Any) -> Any:
        """Judge each record by itself; return the sample that it is about, -1 where the manifest knows none."""
        ids, firsts, counts, versions = self.manifest["sources"]
        at = np.searchsorted(ids, rows["source_id"].astype(np.uint64))
        is_known = (ids[at] == rows["source_id"]) & (rows["row"] < counts[at])
        wrong = {
            "its format version is not 0": rows["fmt"] != 0,
            "the manifest has no such source file or row": ~is_known,
            "the manifest gives its file another data version": is_known & (versions[at] != rows["data_version_id"]),
        }
        for name in (name for name, kind in FIELDS if kind == "<f4"):
            bits = rows[name].copy().view(np.uint32)
            wrong[f"{name} is a NaN in another form than the canonical one"] = np.isnan(rows[name]) & (
                bits != 0x7FC00000
            )
        for what, flags in wrong.items():
            for row in rows[flags][:MAX_LISTED]:
                self.add("E_ENCODING", "records", f"{self._describe(row)}: {what}", int(row["seq"]))
        return np.where(is_known, (firsts[at] + rows["row"]).astype(np.int64), -1)

    def _check_doubles(self, rows: Any) -> None:
        """No sample use stands twice; within a step uses normally rise, so only other steps are searched."""
        names = ["attempt", "step", "micro", "slot", "part"]
        rows = rows[["seq", *names]]
        rows = rows if self.tail is None else np.concatenate([self.tail, rows])
        same = (np.diff(rows["step"]) == 0) & (rows["attempt"][1:] == rows["attempt"][:-1])
        place = rows["micro"].astype(np.uint64) << np.uint64(32) | rows["slot"]
        rises = (place[1:] > place[:-1]) | ((place[1:] == place[:-1]) & (rows["part"][1:] > rows["part"][:-1]))
        edges = [0, *(np.flatnonzero(~same) + 1).tolist(), len(rows)]
        for at in sorted({int(np.searchsorted(edges, i, "right")) for i in np.flatnonzero(same & ~rises)}):
            step = rows[edges[at - 1] : edges[at]]
            step = step[np.sort(np.unique(step["seq"], return_index=True)[1])]
            _, first, again = np.unique(step[names], return_index=True, return_inverse=True)
            for row in step[first[again] != np.arange(len(step))][:MAX_LISTED]:
                self.add("E_SEQ", "records", f"record {row['seq']} is logged a second time", int(row["seq"]))
        self.tail = rows[edges[-2] :].copy()

    def _take_uses(self, attempt: int, step: int, first: int, count: int) -> None:
        if attempt != len(self.sessions):
            text = f"record {first} says attempt {attempt} and stands in attempt {len(self.sessions)}"
            self.add("E_EVENT", "records", text, first)
        if step <= (self.steps.get(attempt) or [0])[-1]:
            self.add("E_SEQ", "records", f"record {first} belongs to step {step}, which was closed before it", first)
        self.open_steps.setdefault((attempt, step), [first, 0])[1] += count
        for column, value in zip(self.uses.setdefault(attempt, (array("Q"), array("Q"))), (step, count), strict=True):
            column.append(value)

    def _take_event(self, event: Event) -> None:
        seq, kind = event.seq, event.kind
        try:
            if seq == 0 and kind != (CUSTODY_OPENED if self.opening else SESSION):
                raise ValueError("it is not the event that opens a log")
            if kind not in (range(32, 40) if self.opening else range(1, 9)) or (kind == CUSTODY_OPENED and seq):
                raise ValueError(f"kind {kind} does not belong there")
            if kind != CUSTODY_OPENED:
                body = canonical_json(event.body)
                if not isinstance(body, dict):
                    raise ValueError("its body is no JSON object")
                self._say(seq, kind, body)
            elif self.opening and event.body != self.opening.data:
                self.add("E_BIND", "events", "it was opened for another run: not with this run's final note", seq)
        except (KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
            self.add("E_EVENT", "events", f"event {seq} (kind {kind}) is not in form: {error}", seq)

    def _say(self, seq: int, kind: int, body: dict[str, Any]) -> None:
        """Take what an event says; raises ``KeyError``, ``TypeError`` or ``ValueError`` for a member out of form."""
        if kind == SESSION:
            self.sessions.append((seq, body))
        elif kind == STEP:
            self._end_step(seq, *whole(body, "attempt", "step", "first_seq", "records"))
            if self.bundle.payloads and body.get("gradient") is not None:
                self._open_gradient(seq, whole(body, "attempt", "step"), body["gradient"])
        elif kind == ERASURE:
            erased = [("sample", *whole(each, "source_id", "row")) for each in body["samples"]]
            erased += [("gradient", *whole(each, "attempt", "step")) for each in body["gradients"]]
            self.erased |= dict.fromkeys([*erased, *(("result", name) for name in body["results"])], seq)
        elif kind == RESUME:
            self._resume(seq, body, *whole(body, "attempt", "from_attempt", "from_step"))
        elif kind == LOSS_ACCEPTED:
            heads = [(whole(head, "size"), bytes.fromhex(head["root"])) for head in body["heads"]]
            steps = body["missing_steps"]
            self.losses.append((seq, whole(body, "size"), heads, steps and whole(steps, "first", "last")))
        elif kind == SEAL:
            self.seals.append((seq, body))
        elif kind == MODEL_CHECKPOINT:
            self.snapshots += len([f"{body['path']}/{file['name']} {file['sha256']}" for file in body["files"]])
        elif self.opening and self.bundle.payloads and isinstance(body.get("result"), dict):
            self._open_result(seq, str(body["result"]["file"]), str(body["result"]["commitment"]))

    def _end_step(self, seq: int, attempt: int, step: int, first: int, records: int) -> None:
        what = f"step {step} (event {seq})"
        found_first, found = self.open_steps.pop((attempt, step), (first, 0))
        if (found, found_first) != (records, first):
            text = f"counts {records} records from entry {first}; the log holds {found} from {found_first}"
            self.add("E_GAP_STEP", "events", f"{what} {text}", seq)
        if attempt != len(self.sessions):
            self.add("E_EVENT", "events", f"{what} says attempt {attempt}, stands in {len(self.sessions)}", seq)
        done = max((steps[-1] for steps in self.steps.values()), default=0)
        expected = self.lines[attempt][1] + 1 if attempt in self.lines else min(done + 1, step)
        expected = self.last_step[1] + 1 if self.last_step[0] == attempt else expected
        if step != expected or not step:
            self.add("E_GAP_STEP", "events", f"{what}: step {expected} was expected", seq)
        self.last_step = (attempt, step)
        self.steps.setdefault(attempt, array("Q")).append(step)

    def _resume(self, seq: int, body: dict[str, Any], attempt: int, parent: int, step: int) -> None:
        number = len(self.sessions)
        is_placed = attempt == number and attempt not in self.resumed and number not in self.steps
        self.resumed.add(number)
        if not is_placed or not ((number, parent) == (1, 0) or 1 <= parent < number):
            text = f"RESUME event {seq}: attempt {attempt} from {parent} cannot be said here, in attempt {number}"
            self.add("E_EVENT", "events", text, seq)
            return
        reached = max([*self.steps.get(parent, ()), self.lines.get(parent, (0, 0))[1]])
        self.lines[number] = (parent, step)
        if step > reached:
            is_said = any(missing == (reached + 1, step) for *_, missing in self.losses)
            text = f"attempt {number} goes on from step {step}; steps from {reached + 1} on are not in the log"
            self.add("E_LOSS_ACCEPTED" if is_said else "E_GAP_STEP", "events", text, seq)
        records, steps = self._live()
        gone = (sum(sum(n) for _, n in self.uses.values()) - records, sum(map(len, self.steps.values())) - steps)
        if gone != whole(body, "superseded_records", "superseded_steps"):
            text = f"RESUME event {seq}: {gone[0]} records and {gone[1]} steps no longer count, it says otherwise"
            self.add("E_GAP_STEP", "events", text, seq)

    def _live(self) -> tuple[int, int]:
        """Return how many records and steps so far lie on the line back from the last attempt."""
        bound, at, until = NO_END, max(self.lines), dict[int, int]()
        while at in self.lines and at not in until:
            until[at], (at, step) = bound, self.lines[at]
            bound = min(bound, step)
        uses = ((a, s, n) for a, columns in self.uses.items() for s, n in zip(*columns, strict=True))
        records = sum(n for a, s, n in uses if s <= until.get(a, -1))
        return records, sum(s <= until.get(a, -1) for a, steps in self.steps.items() for s in steps)

    # what the commitments open to

    def _sketch(self, seq: int, shard: int, row: int) -> bytes | None:
        name = f"sketches/{shard:06d}.npy"
        if shard != self.shard[0]:
            data, width = b"", self.manifest["width"]
            if self.folder + name in self.bundle.members:
                data = self.bundle.read(self.folder + name)
            head = NPY.match(data)
            fits = head and 0 < width == int(head[2]) and len(data) >= head.end() + int(head[1]) * width
            rows = np.frombuffer(data, np.int8, int(head[1]) * width, head.end()) if head and fits else None
            self.shard = (shard, None if rows is None else rows.reshape(-1, width))
        if self.shard[1] is not None and row < len(self.shard[1]):
            return bytes(self.shard[1][row].tobytes())
        self._lack(("shard", shard), f"{name}: a sketch", seq)
        return None

    def _lack(self, what: tuple[Any, ...], words: str, seq: int) -> None:
        _, first, count = self.missing.get(what, (words, seq, 0))
        self.missing[what] = (words, first, count + 1)

    def _open_sketches(self, rows: Any, samples: Any) -> None:
        scales = np.stack([rows["scale_raw"], rows["scale_whitened"]], axis=1).astype("<f4")
        names = ("seq", "shard", "shard_row", "sketch_commit", "source_id", "row")
        columns = [*(rows[name].tolist() for name in names), samples.tolist()]
        for i, (seq, shard, row, commitment, *place, sample) in enumerate(zip(*columns, strict=True)):
            if sample < 0:
                continue
            what = ("sample", *place)
            salt = self.salts[sample].tobytes() if sample < len(self.salts) else bytes(32)
            sketch = self._sketch(seq, shard, row)
            if not any(salt):
                self._lack(what, f"salts.bin: the salt of sample {sample}", seq)
            if any(salt) or (sketch or b"").strip(b"\0"):
                self.present.setdefault(what, seq)
            if any(salt) and sketch is not None:
                self.opened += 1
                hashed = scales[i].tobytes() + sketch
                if sha256(b"\x11", salt, hashed) != commitment and len(self.unopened) <= MAX_LISTED:
                    place_of_sketch = f"sketches/{shard:06d}.npy row {row}"
                    self.unopened.append((what, seq, sample, place_of_sketch, hashed, commitment))

    def _open_gradient(self, seq: int, step: tuple[int, ...], gradient: dict[str, Any]) -> None:
        shard, row = whole(gradient, "shard", "row")
        sketch, number, what = self._sketch(seq, shard, row), shard * SHARD_ROWS + row, ("gradient", *step)
        salt = self.step_salts[number].tobytes() if number < len(self.step_salts) else bytes(32)
        if any(salt) or (sketch or b"").strip(b"\0"):
            self.present[what] = seq
        if not any(salt):
            self._lack(what, f"step_salts.bin: the salt of step {step[1]}'s gradient", seq)
            return
        values = [float("nan") if gradient[n] is None else gradient[n] for n in ("scale_raw", "scale_whitened")]
        scales = struct.pack("<ff", *values)
        if sketch is not None and sha256(b"\x12", salt, scales, sketch).hex() != gradient["commitment"]:
            text = f"event {seq}: the stored sketch of the step's gradient is not the committed one"
            self.odd.append((what, f"sketches/{shard:06d}.npy row {row}", text, seq))

    def _open_result(self, seq: int, file: str, commitment: str) -> None:
        names = [self.folder + re.sub(r"\.json$", ".salt", file), self.folder + file]
        if not re.fullmatch(r"results/[a-z0-9][a-z0-9._-]{0,99}\.json", file):
            raise ValueError(f"a result outside results/: {file!r}")
        if any(name in self.bundle.members for name in names):
            self.present["result", file] = seq
        if not all(name in self.bundle.members for name in names):
            self._lack(("result", file), f"{file}: a result or its salt", seq)
        elif sha256(b"\x13", *map(self.bundle.read, names)).hex() != commitment:
            self.add("E_EVENT", file, f"{file} is not what entry {seq} committed to", seq)

    def _check_payloads(self, erased: Collection[tuple[Any, ...]]) -> None:
        for _, place, text, seq in (odd for odd in self.odd if odd[0] not in erased):
            self.add("E_PAYLOAD", place, text, seq)
        unopened = [each for each in self.unopened if each[0] not in erased]
        salts = {sample: self.salts[sample].tobytes() for _, _, sample, *_ in unopened}
        for _, seq, sample, place, hashed, commitment in unopened:
            owner = next((s for s, salt in salts.items() if sha256(b"\x11", salt, hashed) == commitment), None)
            if owner is not None:
                self.add("E_OPENING", "salts.bin", f"record {seq}: its sample {sample} has sample {owner}'s salt", seq)
            else:
                text = f"record {seq}: the stored sketch, or the salt of its sample {sample}, is not the committed one"
                self.add("E_PAYLOAD", place, text, seq)

    def settle(self, erased: dict[tuple[Any, ...], int]) -> None:
        """Report what is gone and was not erased, and what was erased and is not gone."""
        self.report.log = self.folder
        self._check_payloads(erased)
        for what, (words, seq, count) in self.missing.items():
            if what not in erased:
                text = f"{words} is missing without an erasure event, first for entry {seq} ({count} uses)"
                self.add("E_ERASED", words.split(":")[0], text, seq)
        for what in sorted(self.present.keys() & erased.keys()):
            text = f"{what[0]} {', '.join(map(str, what[1:]))} was erased under custody entry {erased[what]}; it is "
            text += "still there"
            self.add("E_ERASED", what[0], text, self.present[what])
        gone = self.missing.keys() & erased.keys()
        if gone:
            self.report.checked.append(f"{self.origin}: {len(gone)} salts are gone, as the custody log says")

    # who signed what

    def _check_sessions(self) -> None:
        """Find the keys that may sign: the long-lived ones, and each attempt's over its stretch of the log."""
        self.may_sign = [(key, -1, NO_END) for key in self.trust.keys]  # sizes above the first, up to the second
        self.known = list(self.trust.keys)  # those that may have signed kept heads
        if not self.opening:
            self._check_manifest_key()
        self.long_lived = [key for key, *_ in self.may_sign]
        self.known = [*self.long_lived, *certified(self.trust, self.origin, self.long_lived)]
        for number, (seq, body) in enumerate(self.sessions, 1):
            what = f"session certificate (entry {seq})"
            try:
                fields, session, signer, is_signed = parse_certificate(body)
            except (Unreadable, KeyError, TypeError, ValueError) as error:
                code = "E_FORMAT" if isinstance(error, Unreadable) else "E_EVENT"
                self.add(code, "events", f"{what}: {error}", seq)
                continue
            end = self.sessions[number][0] if number < len(self.sessions) else NO_END
            self.may_sign.append((session, seq, end))
            if not signer.is_in(self.long_lived):
                code = "E_KEY" if self.trust.keys else "E_SIG"
                self.add(code, "events", f"{what}: by {signer}, not by {', '.join(map(str, self.long_lived))}", seq)
            elif not is_signed:
                self.add("E_SIG", "events", f"{what}: the signature of {signer} does not verify", seq)
            elif fields["origin"] == self.origin:
                self.known.append(session)
            run = {"origin": self.origin, "run_id": self.manifest.get("run_id")}
            run["manifest_sha256"] = sha256(self.genesis).hex()
            for name in (name for name, value in run.items() if fields[name] != value):
                self.add("E_BIND", "events", f"{what}: it was signed for another {name}", seq)
            if (fields["attempt"], fields["first_size"]) != (number, seq):
                self.add("E_EVENT", "events", f"{what}: it does not stand where its attempt starts", seq)
            elif self.roots.get(seq, b"").hex() not in ("", fields["first_root"]):
                self.add("E_ROOT", "events", f"{what}: the entries before it have another root", seq)
            if number > 1 and number not in self.resumed:
                self.add("E_EVENT", "events", f"attempt {number} does not say from where it goes on", seq)

    def _check_manifest_key(self) -> None:
        try:
            named = parse_vkey(self.manifest["vkey"])
            if self.trust.keys and not named.is_in(self.trust.keys):
                pinned = ", ".join(map(str, self.trust.keys))
                self.add("E_KEY", "manifest.json", f"the manifest names the key {named}; pinned is {pinned}")
            self.may_sign = self.may_sign or [(named, -1, NO_END)]
        except (Unreadable, ValueError) as error:
            code = "E_FORMAT" if isinstance(error, Unreadable) else "E_KEY"
            self.add(code, "manifest.json", f"the manifest's key: {error}")
        if self.trust.origin not in (None, self.origin):
            text = f"this is the log {self.origin}; expected was {self.trust.origin}"
            self.add("E_BIND", "manifest.json", text)

    def _check_checkpoints(self) -> None:
        good, failed, beyond = 0, [], 0
        for where, note in self.stored:
            if note.origin != self.origin:
                self.add("E_BIND", where, f"a log checkpoint of {note.origin} stands in the log {self.origin}")
            elif note.size > self.position:
                beyond = max(beyond, note.size)
            elif self.roots.get(note.size, note.root) != note.root:
                failed.append((where, note.size))
            elif not failed and note.size in self.roots:
                good = max(good, note.size)
            if not self.opening or self.trust.keys:
                self._check_signatures(where, note)
        if failed:
            where, size = failed[0]
            text = f"the log checkpoint of {size:,} entries has another root than they have: a change lies in entries "
            text += f"{good:,} to {size - 1:,} (nor do {len(failed) - 1} later ones hold)"
            self._bad(good, "E_ROOT", where, text)
        if beyond:
            text = f"the log ends after {self.position:,} entries; {beyond:,} were signed"
            self.add("E_TRUNC", "records, events", text, self.position)

    def _check_signatures(self, where: str, note: Note) -> None:
        states = [(note.state(key), first < note.size <= end, key, first, end) for key, first, end in self.may_sign]
        for state, is_inside, key, first, end in states:
            if state is False:
                self.add("E_SIG", where, f"log checkpoint of {note.size:,}: the signature of {key} does not verify")
            elif state and not is_inside:
                text = f"log checkpoint of {note.size:,}: {key} may sign sizes from {first + 1} to {end} only"
                self.add("E_KEYREV", where, text)
        if all(state is None for state, *_ in states):
            self.add(
                "E_KEY", where, f"log checkpoint of {note.size:,}: signed by {note.signers}: no key that may sign it"
            )

    def _check_kept(self) -> None:
        """Compare the heads that were kept elsewhere. One that no known key signed shows nothing but that."""
        told = [(size, head) for seq, size, heads, _ in self.losses if size in (seq, seq - 1) for head in heads]
        self.accepted = {head for size, head in told if head[0] > size}
        for name, note in self.trust.heads:
            root, what = self.roots.get(note.size), f"the kept head {name} ({note.size:,} entries)"
            if run_of(note.origin) != run_of(self.origin):
                self.add("E_BIND", name, f"{what} is of {note.origin}, this log is {self.origin}")
            if note.origin != self.origin:
                continue
            if (note.size, note.root) in self.accepted and root != note.root:
                self.add("E_LOSS_ACCEPTED", name, f"{what}: its last entries were lost; that was accepted")
            elif is_believed(name, note, self.known, self.report):
                self.anchors += 1
                if note.size > self.position:
                    self.add("E_ROLLBACK", name, f"{what} is longer than the log ({self.position:,})", self.position)
                elif root not in (None, note.root) and self.bad < note.size:
                    self.add("E_ROOT", name, f"{what} has another root than the entries as they stand")
                elif root not in (None, note.root):
                    self.add("E_FORK", name, f"the log agrees with itself, but not with {what}")

    # how it ends

    def _check_end(self) -> None:
        notes = {note.size: note for _, note in self.stored}
        seq, self.seal = next(((seq, body) for seq, body in self.seals if seq + 1 in notes), (-1, {}))
        self.final = notes[seq + 1] if seq >= 0 else None
        self.sealed = self.final is not None and any(self.final.state(key) for key in self.long_lived)
        if self.final and not self.sealed:
            text = f"the seal (entry {seq}) does not carry the long-lived key's signature"
            self.add("E_UNSEALED", "checkpoints.parquet", text)
        elif not self.final and not self.opening:
            is_allowed = self.trust.allow_open and self.covered > 0 and not self.seals
            text = f"the run has no seal; signed log checkpoints cover {self.covered:,} of {self.position:,} entries"
            self.add("N_OPEN" if is_allowed else "E_UNSEALED", "checkpoints.parquet", text)
        end = seq + 1 if self.final else self.covered
        if (self.final or self.opening) and self.position > end:
            self.add("E_ORPHAN", "records, events", f"entries from {end} on stand behind all that is signed", end)
        for at, size, heads, _ in self.losses:
            if size not in (at, at - 1):
                self.add("E_EVENT", "events", f"LOSS_ACCEPTED event {at} stands elsewhere than it says", at)
            elif heads:
                text = f"entries {size} to {max(heads)[0] - 1} were signed and lost; that was accepted at entry {at}"
                self.add("E_LOSS_ACCEPTED", "events", text, at)
        self._check_counts(seq)

    def _check_counts(self, seq: int) -> None:
        """Compare the seal's counts, and look at records whose step has no event."""
        counts = {"records": {self.records}, "attempts": {len(self.sessions)}}
        counts["steps"] = {sum(map(len, self.steps.values())), len(set().union(*self.steps.values()))}
        if len(self.lines) == len(self.sessions):
            counts |= {f"live_{n}": {count} for n, count in zip(("records", "steps"), self._live(), strict=True)}
        for name, values in counts.items():
            if self.seal.get(name) is not None and self.seal[name] not in values:
                text = f"the seal counts {self.seal[name]} {name}; the log holds {max(values)}"
                self.add("E_GAP_STEP", "events", text, seq)
        is_finished = self.sealed and self.seal.get("reason") != "abandoned"
        for (attempt, step), (first, count) in self.open_steps.items():
            last = (self.steps.get(attempt) or [step - 1])[-1]
            is_tail = step == last + 1 and not (is_finished and attempt == len(self.sessions))
            text = f"{count} records of step {step} (from entry {first}) have no step event"
            self.add("N_OPEN_STEP" if is_tail else "E_GAP_STEP", "records", text, first)

    def _check_files(self) -> None:
        """The notes in heads/ are those of the table, byte for byte; a crash may leave the last one in one only."""
        prefix, extra = f"{self.folder}heads/", []
        files = {name.removeprefix(prefix): self.bundle.read(name) for name in self.bundle.names(prefix)}
        notes = {f"{note.size:08d}.note": note for _, note in self.stored}
        for name, data in files.items():
            try:
                note = parse_note(data)
            except ValueError as error:
                self.add("E_CKPT_ORDER", f"heads/{name}", f"heads/{name} is no signed log checkpoint: {error}")
                continue
            if name in notes and notes[name].data != data:
                self.add("E_CKPT_ORDER", f"heads/{name}", f"heads/{name} is not the note of the table")
            elif name not in notes and not (name.startswith("lost/") and (note.size, note.root) in self.accepted):
                extra += [name] if note.size <= self.position else []
                if note.size > self.position:
                    text = f"heads/{name} has {note.size:,} entries, the log has {self.position:,}"
                    self.add("E_TRUNC", f"heads/{name}", text, self.position)
        missing, last = [name for name in notes if name not in files], list(notes)[-1:]
        for names, what, is_crash in (
            (missing, "missing in heads/", missing == last),
            (extra, "in heads/ and not in the table", len(extra) == 1),
        ):
            if names:
                code = "N_HEAD" if is_crash and not self.sealed and not self.opening else "E_LOST"
                self.add(code, "heads/", f"{len(names)} notes are {what}, the first is {names[0]}")


def certified(trust: Trust, origin: str, keys: Sequence[Key]) -> list[Key]:
    """Return the session keys of a log that certificates kept with the heads vouch for."""
    good = (c for c in trust.certificates if c.is_signed and c.signer.is_in(keys) and c.fields["origin"] == origin)
    return [certificate.session for certificate in good]


def is_believed(name: str, note: Note, known: Sequence[Key], report: Report) -> bool:
    """Return whether a known key signed a kept head and no known key's signature on it is bad; report it otherwise."""
    states = {note.state(key) for key in known}
    if True in states and False not in states:
        return True
    why = "a signature does not verify" if False in states else "no key is known that signed it: it cannot be checked"
    report.add("E_HEAD", name, f"the kept head {name} by {note.signers} shows nothing and was not compared: {why}")
    return False


def run_of(origin: str) -> str:
    """Return the run that a log belongs to: its custody log, one of its ranks, or itself."""
    return re.sub(r"/rank/[0-9]+$", "", origin.removesuffix("/custody"))


# --- bundles and proofs ---


def verify_bundle(path: Path, trust: Trust, report: Report) -> None:
    """Verify a bundle: the run's log, those of its other ranks, and its custody log."""
    bundle = Bundle(path, report)
    run, elsewhere = Log(bundle, "", trust), trust._replace(origin=None)
    logs, erased = [run], {}
    for rank in range(1, run.manifest["world_size"]) if not run.manifest["rank"] else ():
        if bundle.names(f"ranks/{rank}/"):
            logs.append(Log(bundle, f"ranks/{rank}/", elsewhere))
            check_rank(run, logs[-1], rank)
        else:
            report.add("E_LOST", f"ranks/{rank}/", f"the log of rank {rank} is missing")
            check_absent(run, f"{run.origin}/rank/{rank}")
        report.log = ""
    if bundle.names("custody/") and run.sealed and run.final:
        before = len(report.findings)
        custody = Log(bundle, "custody/", elsewhere, run.final)
        # One in which anything is wrong excuses nothing.
        erased = {} if any(f.code[0] == "E" for f in report.findings[before:]) else custody.erased
        logs.append(custody)
        report.not_checked += [] if trust.keys else ["who signed the custody log: no key was given"]
        report.not_checked.append("whether acts were cut off the end of the custody log, without a kept head of it")
    else:
        check_absent(run, f"{run.origin}/custody")
        report.not_checked.append("what was done with the run after its seal: no custody log that can be read")
    for log in logs:
        log.settle(erased)
    report.log = ""
    check_anchors(run.anchors > 0, trust, report)
    if run.manifest["rank"]:
        report.not_checked.append("the other ranks of this run: the bundle holds the log of one")
    if run.snapshots:
        report.not_checked.append(f"{run.snapshots} files of saved weights, which a bundle never holds")
    if bundle.payloads:
        report.checked.append(f"{run.opened:,} stored sketches were compared with their commitments")
    else:
        report.not_checked.append("sketches and salts: the bundle was written without them")
    report.not_checked.append("whether the rows of the source files are those that were committed")
    report.not_checked.append("whether the trainer wrote the truth, and whether the sketches are of the gradients")


def check_absent(run: Log, origin: str) -> None:
    """A kept head of a log that is not there shows that it was."""
    known = [*run.long_lived, *certified(run.trust, origin, run.long_lived)]
    for name, note in run.trust.heads:
        if note.origin == origin and is_believed(name, note, known, run.report):
            run.add("E_ROLLBACK", name, f"the kept head {name} is of {origin}, which is not here", 0)


def check_rank(run: Log, log: Log, rank: int) -> None:
    """Compare a rank's log with the run that it belongs to."""
    found = {name: log.manifest.get(name) for name in ("run_id", "origin", "rank", "world_size", "data", "sketch")}
    expected = {name: run.manifest.get(name) for name in found} | {"origin": f"{run.origin}/rank/{rank}", "rank": rank}
    for name in (name for name in found if found[name] != expected[name]):
        log.add("E_BIND", "manifest.json", f"its {name} is not the one that rank 0 asks for")
    if not run.final:
        return
    ranks = run.seal.get("ranks") if isinstance(run.seal.get("ranks"), list) else []
    named = next((r for r in ranks or () if isinstance(r, dict) and r.get("rank") == rank), None)
    if named is None:
        log.add("E_LOST", "events", "the seal of rank 0 does not name its final checkpoint")
    elif log.final is None or not log.sealed:
        log.add("E_TRUNC", "events", f"it has no end; rank 0 sealed {named.get('size')} entries", log.position)
    elif (named.get("origin"), named.get("size"), named.get("root")) != (*log.final[2:4], log.final.root.hex()):
        log.add("E_BIND", "checkpoints.parquet", "it does not end as rank 0 sealed it: this is another log")


def check_anchors(has_head: bool, trust: Trust, report: Report) -> None:
    """Say what the verifier's own knowledge leaves open; without any, this is no verification."""
    if not trust.keys and not has_head:
        text = "it agrees with itself at best: neither a key nor a head from outside was given that is about this log"
        report.add("N_UNANCHORED" if trust.allow_unanchored else "W_UNANCHORED", "", text)
    elif not has_head:
        report.not_checked.append("whether the key's holder rewrote or shortened the run: no kept head was given")
    elif not trust.keys:
        report.not_checked.append("who signed this run: no key was given")


def verify_proof(path: Path, trust: Trust, report: Report) -> None:
    """Verify a proof that one entry is in a log: C2SP tlog-proof, the entry and its session's certificate as extra."""
    try:
        head, _, tail = path.read_bytes().decode("utf-8").partition("\n\n")
        title, extra, index, *lines = head.split("\n")
        if title != "c2sp.org/tlog-proof@v1" or not re.fullmatch(r"index (0|[1-9][0-9]*)", index):
            raise ValueError("not a c2sp.org/tlog-proof@v1 with an entry as extra data")
        document, seq, hashes = canonical_json(unbase64(extra.removeprefix("extra "))), int(index[6:]), lines
        note, row, body = parse_note(tail.encode()), bytes.fromhex(document["row"]), document.get("body")
        session = parse_certificate(document["session"]) if document.get("session") else None
        siblings, size = [unbase64(line) for line in hashes], ROW.itemsize - 1 if body is None else 52
        if (document["format"], document["fmt"], len(row)) != ("gradtrail/proof", 0, size):
            raise ValueError("its extra data is not an entry of a known form")
    except FileNotFoundError as error:
        raise Unreadable(f"{path} does not exist", "Name the .tlog-proof file.", "E_IO") from error
    except (KeyError, TypeError, *FAULTS) as error:
        raise Unreadable(f"{path} is no proof: {error}", "gradtrail prove RUN SEQ writes one.") from error
    if struct.unpack_from("<Q", row, 2)[0] != seq:
        report.add("E_SEQ", "index", f"the proof is about entry {seq}, the row inside is of another entry", seq)
    if body is not None and hashlib.sha256(body.encode()).digest() != row[20:]:
        report.add("E_EVENT", "extra", f"event {seq}: the body inside is not the one of the row", seq)
    node, position, last = sha256(b"\x00", row), seq, note.size - 1
    for sibling in siblings:  # RFC 9162, section 2.1.3.2
        is_right = bool(position & 1) or position == last
        node = sha256(b"\x01", sibling, node) if is_right else sha256(b"\x01", node, sibling)
        while is_right and position and not position & 1:
            position, last = position >> 1, last >> 1
        position, last = position >> 1, last >> 1 if last else -1
    if not 0 <= seq < note.size or last != 0 or node != note.root:
        report.add(
            "E_ROOT", "path", f"the path does not lead from entry {seq} to the root of {note.size:,} entries", seq
        )
    if trust.origin not in (None, note.origin):
        report.add("E_BIND", "checkpoint", f"this is the log {note.origin}; expected was {trust.origin}")
    states = {note.state(key) for key in trust.keys}
    if session:
        states.add(note.state(session.session))
        is_known = not trust.keys or session.signer.is_in(trust.keys)
        if not is_known or not session.is_signed:
            report.add(
                "E_SIG" if is_known else "E_KEY", "extra", f"session certificate by {session.signer}: does not hold"
            )
        if session.fields["origin"] != note.origin or not session.fields["first_size"] < note.size:
            report.add("E_BIND", "extra", "the session certificate is for another log, or for a later part of it")
    if False in states:
        report.add("E_SIG", "checkpoint", "a signature of the log checkpoint does not verify")
    elif True not in states and (trust.keys or session):
        report.add("E_KEY", "checkpoint", f"the log checkpoint is signed by {note.signers}: no key that may")
    kept = [
        head for _, head in trust.heads if (head.origin, head.size, head.root) == (note.origin, note.size, note.root)
    ]
    check_anchors(bool(kept), trust, report)
    report.checked.append(f"entry {seq} of {note.origin}, as it was with {note.size:,} entries: {body or row.hex()}")
    report.not_checked.append("all other entries of the log, and whether it was sealed: only the bundle shows that")


def read_trust(options: argparse.Namespace) -> Trust:
    """Read keys and heads from the command line; raises ``Unreadable``, ``ValueError`` for what is neither."""
    keys, heads, certificates = [], [], []
    for text in options.key:
        try:
            text = Path(text).read_text(encoding="utf-8") if "+" not in text or Path(text).is_file() else text
        except (OSError, ValueError) as error:
            raise Unreadable(f"key {text}: {error}", "Give the .vkey or PEM file, or the key's text.") from error
        if "-----BEGIN" in text:
            public = load_pem_public_key(text.encode())
            if not isinstance(public, Ed25519PublicKey):
                raise ValueError("the PEM file holds no Ed25519 public key")
            keys.append(Key(None, public.public_bytes(Encoding.Raw, PublicFormat.Raw)))
        else:
            keys.append(parse_vkey(text))
    for path in options.head:
        files = (
            [file for kind in ("*.note", "session-*.json") for file in path.rglob(kind)] if path.is_dir() else [path]
        )
        for file in sorted(files):
            try:
                if file.suffix == ".json":
                    certificates.append(parse_certificate(json.loads(file.read_bytes())))
                else:
                    heads.append((file.name, parse_note(file.read_bytes())))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise Unreadable(f"kept head {file}: {error}", "Give a .note file, or a folder of them.") from error
    return Trust(keys, heads, options.origin, options.allow_open, options.allow_unanchored, certificates)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="the zip file, or the folder it was unpacked into")
    parser.add_argument("--proof", type=Path, metavar="FILE", help="verify the proof of one entry instead of a bundle")
    parser.add_argument("--key", action="append", default=[], help="pinned public key: text, .vkey or PEM")
    parser.add_argument("--head", action="append", default=[], type=Path, metavar="NOTE", help="head kept elsewhere")
    parser.add_argument("--origin", metavar="NAME", help="the log that one expects to see")
    parser.add_argument("--allow-open", action="store_true", help="do not object to a run without a seal")
    parser.add_argument("--allow-unanchored", action="store_true", help="do not object to having neither key nor head")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args(arguments)
    if (options.bundle is None) == (options.proof is None):
        parser.error("name a bundle, or a proof with --proof")
    report, hint = Report(), ""
    try:
        trust = read_trust(options)
    except ValueError as error:
        parser.error(str(error))
    except Unreadable as error:
        print(f"{error}. {error.advice()}", file=sys.stderr)
        return error.exit_code
    try:
        (verify_proof if options.proof else verify_bundle)(options.proof or options.bundle, trust, report)
    except Unreadable as error:
        report.add(error.args[2] if len(error.args) > 2 else "E_FORMAT", "", str(error))
        report.not_checked.append("everything that was not reached because of that")
        hint = error.advice()
    except Exception as error:
        print(f"a fault of this program, so no verdict: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    show(report, hint, as_json=options.json)
    return report.exit_code


def show(report: Report, hint: str, *, as_json: bool) -> None:
    """Print the verdict. Text from the bundle is printed without control characters."""
    code = report.exit_code
    if as_json:
        document = {"schema": "gradtrail/bundle-verdict", "status": STATUS[code], "exit_code": code, "hint": hint}
        document |= {"findings": [finding._asdict() for finding in report.findings]}
        print(json.dumps(document | {"checked": report.checked, "not_checked": report.not_checked}, indent=2))
        return
    lines = [f"{STATUS[code]} · exit {code}", *(f"  checked      {line}" for line in report.checked)]
    lines += [f"  {f.code:12} {f.message} [{f.where}]" for f in report.findings]
    lines += [f"  not checked  {line}" for line in report.not_checked] + ([f"  → {hint}"] if hint else [])
    for line in lines:
        print("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line))


if __name__ == "__main__":
    sys.exit(main())
