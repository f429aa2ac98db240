"""A small real run folder, written in well under a second, and one method per way to tamper with it.

The runs are written by the real ``RunLedger`` with real keys; only the sketches come from a random generator
instead of a model (their sums still conserve). Tamperings that need a database use duckdb directly, as an
attacker would.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from auditlog.datamanifest import DataManifest
from auditlog.format.chain import LogState
from auditlog.format.digests import sha256
from auditlog.format.manifest import DataVersion, RunManifest, SketchBlock, SketchParameter
from auditlog.format.notes import Note
from auditlog.format.records import RECORD, Event, EventKind, record_leaves
from auditlog.ledger.ledger import RunLedger, StepEntry
from auditlog.trust.anchors import Trust
from auditlog.trust.certificates import Certificate, parse_certificate
from auditlog.trust.keys import Signer

ORIGIN = "bank.example/credit/2026-12"
SNAPSHOT = "snapshots/final/trainable.safetensors"


@dataclass(frozen=True)
class Plan:
    """How large a simulated run is and what makes it differ from others."""

    steps: int = 24
    per_step: int = 8
    steps_per_head: int = 4
    rows_per_file: tuple[int, ...] = (12, 9)
    dim: int = 16
    forms: tuple[str, ...] = ("raw", "whitened")
    origin: str = ORIGIN
    run_id: str = "run-1"
    seed: int = 0


def write_sources(folder: Path, rows_per_file: tuple[int, ...]) -> DataManifest:
    """Write JSONL files and return their manifest; every second file belongs to a second data version."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(rows_per_file):
        lines = [json.dumps({"text": f"file {number} row {row}: ä"}, ensure_ascii=False) for row in range(rows)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = DataManifest.build(folder / "*.jsonl")
    first = data.block.versions[0]
    second = DataVersion(data_version_id=1, kind="label", revision="second", root=first.root)
    sources = tuple(s.model_copy(update={"data_version_id": s.source_id % 2}) for s in data.block.sources)
    data.block = data.block.model_copy(update={"sources": sources, "versions": (first, second)})
    data._version = np.array([s.data_version_id for s in sources], dtype=np.int64)
    return data


def make_manifest(data: DataManifest, signer: Signer, plan: Plan) -> RunManifest:
    """Return a run manifest for simulated sketches."""
    return RunManifest(
        run_id=plan.run_id,
        origin=plan.origin,
        created_us=1_764_550_000_123_457,
        vkey=str(signer.vkey),
        data=data.block,
        sketch=SketchBlock(
            kind="rolled-sign-fold",
            dim=plan.dim,
            forms=plan.forms,
            seed="simulated",
            tables_sha256="0" * 64,
            route="exact",
            parameters=(SketchParameter(name="w", shape=(4, 4), offset=0),),
        ),
        model={"name": "none", "files": []},
        tracking={"tracked": ["w"], "untracked": []},
        training={"planned_steps": plan.steps},
        environment={"python": "3"},
    )


def quantise(z: NDArray[np.float64]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return int8 rows and their scales: ``z ~ scale * q`` with ``q`` in [-127, 127]."""
    scale = (np.abs(z).max(axis=1) / 127).astype(np.float32)
    safe = np.where(scale > 0, scale, 1)[:, None]
    return np.rint(z / safe).astype(np.int8), scale


def simulated_steps(data: DataManifest, plan: Plan) -> Iterator[StepEntry]:
    """Yield steps whose samples add up to the consumed gradient, clipped to half in every third step."""
    rng = np.random.default_rng(plan.seed)
    n, halves = plan.per_step, len(plan.forms)
    for step in range(1, plan.steps + 1):
        index = rng.integers(0, data.rows, n)
        f = 0.5 if step % 3 == 0 else 1.0
        weight = np.full(n, 1 / n, np.float32)
        forms = [rng.normal(size=(n, plan.dim)) for _ in range(halves)]
        rows, scales = zip(*(quantise(z) for z in forms), strict=True)
        total = [quantise(f * (weight[:, None] * z).sum(axis=0, keepdims=True)) for z in forms]
        records = np.zeros(n, RECORD)
        records["step"], records["slot"] = step, np.arange(n)
        records["source_id"], records["row"], records["data_version_id"] = data.locate(index)
        records["loss"] = rng.gamma(2.0, size=n)
        records["n_tokens"], records["weight"] = rng.integers(1, 50, n), weight
        records["grad_norm"] = np.linalg.norm(forms[0], axis=1)
        for name, scale in zip(("scale_raw", "scale_whitened"), scales, strict=False):
            records[name] = scale
        gradient_scales = [float(scale[0]) for _, scale in total] + [0.0]
        yield StepEntry(
            records=records,
            index=index.astype(np.int64),
            sketches=np.hstack(rows),
            gradient=np.hstack([q[0] for q, _ in total]),
            gradient_scales=(gradient_scales[0], gradient_scales[1]),
            body={"step": step, "lr": [1e-3], "f": f, "residual": 1e-7, "skipped": False},
        )


def step_on(data: DataManifest, step: int, index: list[int]) -> StepEntry:
    """Return one step that used these samples and no others."""
    entry = list(simulated_steps(data, Plan(steps=step, per_step=len(index))))[-1]
    entry.index[:] = index
    entry.records["source_id"], entry.records["row"], entry.records["data_version_id"] = data.locate(entry.index)
    return entry


def dataset_notice(absent: Sequence[int], *, rows: int = 21, named: int = 1_000) -> dict[str, Any]:
    """Return the body of a notice that says which samples a trainer's dataset lacks."""
    held = rows - len(absent)
    first = sorted(absent)[:named]
    return {"notice": "dataset", "rows": held, "distinct": held, "absent": len(absent), "absent_first": first}


class LedgerSimulator:
    """A sealed run in ``<folder>/run``, its heads handed to ``<folder>/auditor``, and ways to spoil it.

    Args:
        folder: Where everything goes.
        plan: Size and identity of the run.
        signer: The long-lived key; a fresh one unless given.
    """

    def __init__(self, folder: Path, plan: Plan | None = None, *, signer: Signer | None = None) -> None:
        self.folder = folder
        self.plan = plan or Plan()
        self.signer = signer or Signer.generate("bank.example/audit")
        self.run = folder / "run"
        self.data_folder = folder / "data"
        self.auditor = folder / "auditor"

    def start(self) -> tuple[RunLedger, DataManifest]:
        """Create the run folder and return its open ledger."""
        data = write_sources(self.data_folder, self.plan.rows_per_file)
        manifest = make_manifest(data, self.signer, self.plan)
        return RunLedger.create(self.run, manifest, data, self.signer, on_head=self.auditor), data

    def write(self, *, seal: bool = True) -> LedgerSimulator:
        """Write the whole run."""
        ledger, data = self.start()
        for entry in simulated_steps(data, self.plan):
            ledger.append_step(entry)
            if entry.body["step"] % self.plan.steps_per_head == 0:
                ledger.flush()
        self._snapshot(ledger)
        if seal:
            ledger.seal({})
        else:
            ledger.close_unsealed()
        return self

    def copy_to(self, folder: Path) -> LedgerSimulator:
        """Return a copy of everything in another folder, to be spoiled there."""
        shutil.copytree(self.folder, folder)
        return LedgerSimulator(folder, self.plan, signer=self.signer)

    def again(self, folder: Path, *, signer: Signer | None = None, **changes: Any) -> LedgerSimulator:
        """Write another run: same key and plan but for ``changes``."""
        plan = dataclasses.replace(self.plan, **changes)
        return LedgerSimulator(folder, plan, signer=signer or self.signer).write()

    # --- trust ------------------------------------------------------------------------------------------------

    def kept_heads(self) -> list[Path]:
        """Return the heads that were handed over, smallest first."""
        return sorted((self.auditor / "run").glob("*.note"))

    def trust(self, level: str) -> Trust:
        """Return what a verifier brings: ``none``, ``key`` (with origin) or ``head`` (a kept head as well)."""
        if level == "none":
            return Trust()
        if level == "key":
            return Trust(vkeys=(self.signer.vkey,), origin=self.plan.origin)
        kept = Note.parse(self.kept_heads()[-2].read_bytes())
        return Trust((self.signer.vkey,), (kept,), self.plan.origin, certificates=self.certificates())

    def certificates(self) -> tuple[Certificate, ...]:
        """Return the session certificates that were handed over with the heads."""
        files = sorted((self.auditor / "run").glob("session-*.json"))
        return tuple(parse_certificate(json.loads(path.read_bytes())) for path in files)

    def trust_key_only(self) -> Trust:
        """Return the pinned key and nothing else."""
        return Trust(vkeys=(self.signer.vkey,))

    # --- looking ----------------------------------------------------------------------------------------------

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return rows of the run's database."""
        with duckdb.connect(str(self.run / "ledger.duckdb"), read_only=True) as con:
            return con.execute(sql).fetchall()

    def entries(self) -> int:
        """Number of entries stored."""
        return sum(self.query(f"SELECT count(*) FROM {table}")[0][0] for table in ("records", "events"))

    # --- tampering --------------------------------------------------------------------------------------------

    def sql(self, *statements: str) -> None:
        """Run SQL against the database, as somebody with write access would."""
        with duckdb.connect(str(self.run / "ledger.duckdb")) as con:
            for statement in statements:
                con.execute(statement)

    def truncate(self, size: int, *, checkpoints: bool, head_files: bool) -> None:
        """Drop all entries from ``size`` on, with or without what was signed over them."""
        self.sql(
            f"DELETE FROM records WHERE seq >= {size}",
            f"DELETE FROM events WHERE seq >= {size}",
            f"DELETE FROM batches WHERE first_seq >= {size}",
        )
        if checkpoints:
            self.sql(f"DELETE FROM checkpoints WHERE size > {size}")
        if head_files:
            for path in self.head_files():
                if int(path.stem) > size:
                    path.unlink()

    def head_files(self) -> list[Path]:
        """Return the files in ``heads/``."""
        return sorted((self.run / "heads").glob("*.note"))

    def rewrite_unsigned(self) -> None:
        """Recompute every value that needs no key: ``seq`` without gaps, leaf hashes, chain values, batches."""
        with duckdb.connect(str(self.run / "ledger.duckdb")) as con:
            rows, events = _load(con)
            order = [(int(row["seq"]), 0, i) for i, row in enumerate(rows)]
            order = sorted(order + [(event.seq, 1, i) for i, event in enumerate(events)])
            state = LogState((self.run / "manifest.json").read_bytes())
            chains = []
            leaves: dict[tuple[int, int], bytes] = {}
            for seq, (_, kind, i) in enumerate(order):
                if kind == 0:
                    rows[i]["seq"] = seq
                    leaf = record_leaves(rows[i : i + 1])[0]
                else:
                    events[i] = dataclasses.replace(events[i], seq=seq)
                    leaf = events[i].leaf()
                leaves[kind, i] = leaf
                state.append(leaf)
                chains.append(state.chain)
            _store(con, rows, events, leaves)
            batches = con.execute("SELECT batch, first_seq, entries FROM batches ORDER BY batch").fetchall()
            for batch, first, count in batches:
                count = count if batch < len(batches) - 1 else len(order) - first
                chain = chains[min(first + count, len(chains)) - 1]
                con.execute("UPDATE batches SET chain=?, entries=? WHERE batch=?", [chain, count, batch])

    def swap_sketches(self, first: int, second: int) -> None:
        """Exchange the stored sketch rows of two records, given by ``seq``."""
        path = self.run / "sketches" / "000000.npy"
        (one,), (two,) = (self.query(f"SELECT shard_row FROM records WHERE seq={seq}")[0] for seq in (first, second))
        rows = np.load(path, mmap_mode="r+")
        rows[[one, two]] = rows[[two, one]]
        rows.flush()

    def flip(self, name: str, position: float) -> None:
        """Invert one byte of a file of the run, ``position`` of the way through it."""
        path = self.run / name
        content = bytearray(path.read_bytes())
        content[int(len(content) * position)] ^= 0xFF
        path.write_bytes(content)

    def edit_manifest(self, change: dict[str, Any]) -> None:
        """Change fields of ``manifest.json`` and keep it canonical."""
        path = self.run / "manifest.json"
        document = json.loads(path.read_bytes()) | change
        path.write_bytes(json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())

    def swap_salts(self, first: int, second: int) -> None:
        """Exchange the salts of two samples."""
        salts = np.memmap(self.run / "salts.bin", np.uint8, mode="r+").reshape(-1, 32)
        salts[[first, second]] = salts[[second, first]]
        salts.flush()

    def erase_salt(self, index: int) -> None:
        """Overwrite a sample's salt with zeros."""
        salts = np.memmap(self.run / "salts.bin", np.uint8, mode="r+").reshape(-1, 32)
        salts[index] = 0
        salts.flush()

    def _snapshot(self, ledger: RunLedger) -> None:
        path = self.run / SNAPSHOT
        path.parent.mkdir(parents=True)
        path.write_bytes(b"weights " * 64)
        files = [{"name": path.name, "sha256": sha256(path.read_bytes()).hex(), "size_bytes": path.stat().st_size}]
        body = {"path": "snapshots/final", "step": self.plan.steps, "files": files}
        ledger.append_event(EventKind.MODEL_CHECKPOINT, body)


def _load(con: duckdb.DuckDBPyConnection) -> tuple[NDArray[np.void], list[Event]]:
    names = RECORD.names or ()
    stored = con.execute(f"SELECT {', '.join(names)} FROM records ORDER BY seq, rowid").fetchall()
    rows = np.array([tuple(np.void(v) if isinstance(v, bytes) else v for v in row) for row in stored], RECORD)
    events = con.execute("SELECT seq, kind, ts_us, body, fmt FROM events ORDER BY seq, rowid").fetchall()
    return rows, [Event(*event) for event in events]


def _store(
    con: duckdb.DuckDBPyConnection, rows: NDArray[np.void], events: list[Event], leaves: dict[tuple[int, int], bytes]
) -> None:
    con.execute("BEGIN")
    con.execute("DELETE FROM records")
    con.execute("DELETE FROM events")
    for i, row in enumerate(rows):
        values = [v.tobytes() if isinstance(v, np.void) else v.item() for v in row]
        con.execute(f"INSERT INTO records VALUES ({', '.join('?' * (len(values) + 1))})", [*values, leaves[0, i]])
    for i, e in enumerate(events):
        values = [e.fmt, e.seq, e.kind, e.ts_us, e.body, leaves[1, i]]
        con.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", values)
    con.execute("COMMIT")
