"""A run's evidence as one file: what is written, and that two independent verifiers say the same about it.

Where a bundle is spoiled, the index is made anew afterwards unless the test says otherwise: it needs no key, so only
the log itself can show the change.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from auditlog.bundle import verify_gradtrail as verifier
from auditlog.bundle.export import export_run
from auditlog.bundle.proof import prove_entry
from auditlog.errors import FormatError, ReadError, StoreError, UsageError
from auditlog.format.notes import LogCheckpoint, Note, Signature, sign_note
from auditlog.format.records import EventKind
from auditlog.ledger.abandon import seal_abandoned
from auditlog.ledger.custody import CustodyLog, custody_head
from auditlog.ledger.ledger import RunLedger
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.keys import Signer
from tests.attacks import ledger_simulator
from tests.attacks.test_matrix import LEVELS, ROWS, Row
from tests.attacks.test_matrix import outcome as our_outcome
from tests.bundles import Bundle, check, check_as, check_with
from tests.support import LedgerSimulator, Plan, simulated_steps, write_sources
from tests.unit.auditlog.test_ranks import write as write_ranks

RECORDS, EVENTS, BATCHES, NOTES = (
    "records/000000.parquet",
    "events/000000.parquet",
    "batches.parquet",
    "checkpoints.parquet",
)
FILES = {"records": RECORDS, "events": EVENTS, "batches": BATCHES, "checkpoints": NOTES}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    """A clean sealed run: 219 entries; heads at 1, 37, 73, 109, 145, 181, 217, 218, 219."""
    return LedgerSimulator(tmp_path_factory.mktemp("bundles") / "original").write()


@pytest.fixture(scope="module")
def unpacked(original: LedgerSimulator, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.of(original.run, tmp_path_factory.mktemp("unpacked") / "bundle")


@pytest.fixture
def bundle(unpacked: Bundle, tmp_path: Path) -> Bundle:
    """A copy to spoil."""
    return Bundle(Path(shutil.copytree(unpacked.folder, tmp_path / "bundle")))


# --- what is written ------------------------------------------------------------------------------------------


def test_the_same_run_gives_the_same_bytes(original: LedgerSimulator, tmp_path: Path) -> None:
    one = export_run(original.run, tmp_path / "one.zip", payloads=True)
    copy = original.copy_to(tmp_path / "copy")
    two = export_run(copy.run, tmp_path / "two.zip", payloads=True)
    assert one.sha256 == two.sha256
    assert one.path.read_bytes() == two.path.read_bytes()


def test_members_are_stored_dated_alike_and_listed(original: LedgerSimulator, tmp_path: Path) -> None:
    made = export_run(original.run, tmp_path / "one.zip")
    with zipfile.ZipFile(made.path) as archive:
        infos = archive.infolist()
        index = json.loads(archive.read("index.json"))
        readme = archive.read("README.txt").decode()
    names = [info.filename for info in infos]
    assert names[:5] == ["README.txt", "verify_gradtrail.py", "manifest.json", RECORDS, EVENTS]
    assert names[-1] == "index.json"
    assert [member["name"] for member in index["members"]] == names[:-1]
    assert {(info.compress_type, info.date_time) for info in infos} == {(zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0))}
    assert not any(name.startswith(("sketches", "salts")) for name in names)
    assert index["payloads"] is False
    assert index["logs"] == [{"entries": 219, "origin": original.plan.origin, "path": "", "sealed": True}]
    assert original.signer.vkey.fingerprint in readme


def test_a_file_that_is_there_is_not_replaced_without_force(original: LedgerSimulator, tmp_path: Path) -> None:
    out = tmp_path / "out" / "one.zip"
    export_run(original.run, out)
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already"):
        export_run(original.run, out)
    assert out.read_bytes() == b"mine"
    export_run(original.run, out, force=True)
    assert zipfile.is_zipfile(out)
    assert [path.name for path in out.parent.iterdir()] == ["one.zip"]  # nothing is left of the writing


def test_a_bundle_is_not_written_into_the_run(original: LedgerSimulator, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="inside the run folder"):
        export_run(original.run, original.run / "out.zip")
    with pytest.raises(UsageError, match="is a folder"):
        export_run(original.run, tmp_path)
    with pytest.raises(ReadError, match="does not exist"):
        export_run(tmp_path / "nowhere", tmp_path / "out.zip")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_nothing(
    original: LedgerSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        export_run(original.run, tmp_path / "out.zip")
    assert list(tmp_path.iterdir()) == []


def test_export_and_prove_from_the_command_line(gradtrail, original: LedgerSimulator, tmp_path: Path) -> None:
    out, proof = tmp_path / "one.zip", tmp_path / "e.tlog-proof"
    code, said, _ = gradtrail("export", original.run, "-o", out)
    assert code == 0
    assert "no sketches" in said
    code, said, _ = gradtrail("export", original.run, "-o", out, "--force", "--json")
    assert json.loads(said)["sealed"] is True
    assert gradtrail("export", original.run, "-o", out)[0] == 2
    assert gradtrail("prove", original.run, 5, "-o", proof)[0] == 0
    assert gradtrail("prove", original.run, 5)[1] == proof.read_text(encoding="utf-8")
    code, _, error = gradtrail("prove", original.run, 5, "-o", proof)
    assert (code, "exists already" in error) == (2, True)
    assert gradtrail("prove", original.run, 500)[0] == 2
    for command in ("export", "prove"):
        assert "Example: gradtrail" in gradtrail(command, "--help")[1]


# --- clean bundles, and both verifiers -----------------------------------------------------------------------


@pytest.mark.parametrize(("level", "code"), [("none", 7), ("key", 0), ("head", 0)])
@pytest.mark.parametrize("payloads", [False, True])
def test_n07_a_clean_bundle_has_the_verdict_of_its_run(
    level: str, code: int, payloads: bool, original: LedgerSimulator, tmp_path: Path
) -> None:
    made = export_run(original.run, tmp_path / "one.zip", payloads=payloads)
    said = check_as(original, made.path, level)
    assert (said.code, said.codes) == (code, {"W_UNANCHORED"} if code else set())
    assert verify_run(original.run, original.trust(level)).exit_code == code
    assert any("sketches and salts" in point for point in said.not_checked) is not payloads
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(tmp_path / "folder")
    assert check_as(original, tmp_path / "folder", level) == said


def test_allow_unanchored_makes_it_a_note(original: LedgerSimulator, unpacked: Bundle) -> None:
    said = check(unpacked.folder, allow_unanchored=True)
    assert (said.code, [finding.level for finding in said.findings]) == (0, ["note"])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ledger_simulator.LedgerSimulator:
    """The run of the attack matrix, with the other runs that attackers put in its place."""
    folder = tmp_path_factory.mktemp("matrix")
    return ledger_simulator.LedgerSimulator(folder / "original").write().with_others(folder / "others")


NOT_INSIDE = {"B07": "saved weights", "K10": "", "B06 name an unknown projection": ""}
"""What a bundle or the single-file verifier does not know: weights, revocations, and the kinds of projections."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_was_done_to_a_run_is_found_in_its_bundle(
    row: Row, large: ledger_simulator.LedgerSimulator, tmp_path: Path
) -> None:
    """The whole matrix: an export hides nothing, and the two verifiers agree on finding and exit code."""
    sim = large.copy_to(tmp_path / "copy")
    if not row.custody:
        shutil.rmtree(sim.run / "custody")
    row.tamper(sim)
    try:
        path = export_run(sim.run, tmp_path / "one.zip", payloads=True).path
    except FormatError:  # what a bundle cannot hold is not exported
        assert {f.code for f in our_outcome(sim, sim.trust("key"))[0]} & {"E_SCHEMA", "E_ENCODING", "E_FORMAT"}
        return
    if any(row.id.startswith(known) for known in NOT_INSIDE):
        return
    for level in LEVELS:
        trust = row.brings(sim.trust(level), sim) if row.brings else sim.trust(level)
        said = check_with(trust, path)
        assert row.expected(level) & (said.codes or {"ok"}), (level, said.findings)
        assert said.code in row.exit_codes(level), (level, said.findings)  # as our own verifier is tested to say
        first = [finding for finding in said.findings if finding.code in row.expected(level)]
        entries = [place for place in row.at if isinstance(place, int)]
        assert not entries or {finding.seq for finding in first} & {*entries}, (level, said.findings)


def crashed(folder: Path) -> LedgerSimulator:
    return LedgerSimulator(folder, Plan(steps=9, per_step=4)).write(seal=False)


def resumed(folder: Path) -> LedgerSimulator:
    """Two attempts: nine steps, then from step 6 on again."""
    sim = crashed(folder)
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    ledger = RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor)
    ledger.begin_attempt(6)
    for entry in list(simulated_steps(data, sim.plan))[6:]:
        ledger.append_step(entry)
    ledger.seal({})
    return sim


def with_loss(folder: Path) -> LedgerSimulator:
    """Entries that were signed are gone, and the run goes on all the same."""
    sim = crashed(folder)
    sim.truncate(21, checkpoints=True, head_files=False)
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    ledger = RunLedger.resume(sim.run, data, sim.signer, on_head=sim.auditor, accept_loss=True)
    ledger.begin_attempt(ledger.last_step)
    ledger.seal({})
    return sim


def abandoned(folder: Path) -> LedgerSimulator:
    sim = crashed(folder)
    seal_abandoned(sim.run, sim.signer)
    return sim


def with_custody(folder: Path) -> LedgerSimulator:
    sim = LedgerSimulator(folder, Plan(steps=6)).write()
    log = CustodyLog.open(sim.run, sim.signer)
    log.append(EventKind.QUERY, {"result": log.write_result("one", {"scores": [0.5]})})
    log.append(EventKind.REPORT, {"sha256": "ab" * 32})
    return sim


def with_ranks(folder: Path) -> LedgerSimulator:
    return write_ranks(folder)


KINDS = (crashed, resumed, with_loss, abandoned, with_custody, with_ranks)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_both_verifiers_agree_about_runs_of_every_kind(kind: Callable[[Path], LedgerSimulator], tmp_path: Path) -> None:
    sim = kind(tmp_path / "one")
    paths = [export_run(sim.run, tmp_path / f"{n}.zip", payloads=bool(n)).path for n in (0, 1)]
    for level in LEVELS:
        ours = verify_run(sim.run, sim.trust(level))
        for path in paths:
            said = check_as(sim, path, level)
            assert said.code == ours.exit_code, (level, said.findings, ours.findings)
            assert said.codes == {finding.code for finding in ours.findings if finding.level == "error"}


def test_an_open_run_is_exported_and_says_so(tmp_path: Path) -> None:
    sim = crashed(tmp_path / "one")
    made = export_run(sim.run, tmp_path / "one.zip")
    assert not made.sealed
    assert b"NOT sealed" in zipfile.ZipFile(made.path).read("README.txt")
    assert check_as(sim, made.path, "key").codes == {"E_UNSEALED"}
    assert check_as(sim, made.path, "key", allow_open=True).code == 0


def test_allow_open_does_not_pass_a_seal_that_the_long_lived_key_did_not_sign(bundle: Bundle, original) -> None:
    rows = bundle.rows(NOTES)
    note = Note.parse(rows[-1]["note"])
    rows[-1]["note"] = Note(note.text, note.signatures[:1]).to_bytes()
    bundle.put(NOTES, rows)
    bundle.write("heads/00000219.note", rows[-1]["note"])
    assert check_as(original, bundle.reindex().folder, "key", allow_open=True).codes == {"E_UNSEALED"}


# --- one cell at a time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "column"), [(table, column) for table, columns in verifier.TABLES.items() for column in columns]
)
def test_c05_no_column_of_any_table_goes_unchecked(
    table: str, column: str, bundle: Bundle, original: LedgerSimulator
) -> None:
    """C05: one cell of each column, changed by its type, with the index made anew and without."""
    row = bundle.rows(FILES[table])[3]
    value = row[column]
    bundle.edit(
        FILES[table], 3, **{column: value[:-1] + bytes([value[-1] ^ 1]) if isinstance(value, bytes) else value + 1}
    )
    said = check_as(original, bundle.folder, "key")
    assert "E_BUNDLE" in said.codes  # its owner's index names another file
    assert FILES[table] in said.places
    said = check_as(original, bundle.reindex().folder, "key")
    assert said.code in (4, 6), said
    assert "E_BUNDLE" not in said.codes
    if "seq" in row:
        assert said.seqs & {row["seq"], row["seq"] + 1}
    else:
        assert f"{table}.parquet" in said.places


@pytest.mark.parametrize("column", ["step", "loss", "sample_commit", "leaf"])
def test_c13_an_emptied_cell_is_named(column: str, bundle: Bundle, original: LedgerSimulator) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(bundle.path(RECORDS))
    rows = table.to_pylist()
    rows[3][column] = None
    schema = table.schema.set(table.schema.get_field_index(column), table.schema.field(column).with_nullable(True))
    bundle.put(RECORDS, table.from_pylist(rows, schema))
    said = check_as(original, bundle.reindex().folder, "key")
    assert said.code == 4
    assert "E_ENCODING" in said.codes
    assert rows[3]["seq"] in said.seqs


@pytest.mark.parametrize("change", ["widen", "drop", "add", "order", "double"])
def test_c14_columns_are_those_of_the_format(change: str, bundle: Bundle, original: LedgerSimulator) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(bundle.path(RECORDS))
    step = table.schema.get_field_index("step")
    spoiled = {
        "widen": lambda: table.set_column(step, "step", table["step"].cast(pa.float64())),
        "drop": lambda: table.drop_columns(["epoch"]),
        "add": lambda: table.append_column("note", pa.array(["x"] * len(table))),
        "order": lambda: table.select([*reversed(table.column_names)]),
        "double": lambda: table.append_column("step", table["step"]),
    }[change]()
    bundle.put(RECORDS, spoiled)
    said = check_as(original, bundle.reindex().folder, "key")
    assert said.code == 4
    assert "E_SCHEMA" in said.codes
    assert RECORDS in said.places


# --- members ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spoiling:
    id: str
    spoil: Callable[[Bundle, LedgerSimulator], None]
    codes: str
    code: int
    where: str
    reindex: bool = True


def add(name: str, content: bytes = b"x") -> Callable[[Bundle, LedgerSimulator], None]:
    return lambda bundle, sim: bundle.write(name, content)


def remove(*names: str) -> Callable[[Bundle, LedgerSimulator], None]:
    return lambda bundle, sim: [bundle.path(name).unlink() for name in names][:0]


def rows_of(bundle: Bundle, table: str, keep: Callable[[dict[str, object]], bool]) -> None:
    bundle.put(FILES[table], [row for row in bundle.rows(FILES[table]) if keep(row)])


def drop(table: str, **cell: int) -> Callable[[Bundle, LedgerSimulator], None]:
    """Remove the row that has this cell."""
    ((column, value),) = cell.items()
    return lambda bundle, sim: rows_of(bundle, table, lambda row: row[column] != value)


def truncate(bundle: Bundle, sim: LedgerSimulator) -> None:
    """Go back to an older signed checkpoint, everything newer removed."""
    for table, name in (("records", "seq"), ("events", "seq"), ("batches", "first_seq")):
        rows_of(bundle, table, lambda row, name=name: row[name] < 109)
    rows_of(bundle, "checkpoints", lambda row: row["size"] <= 109)
    for path in bundle.path("heads").iterdir():
        if int(path.stem) > 109:
            path.unlink()


def other_run(**changes: object) -> Callable[[Bundle, LedgerSimulator], None]:
    def spoil(bundle: Bundle, sim: LedgerSimulator) -> None:
        made = dict(changes)
        signer = Signer.generate("bank.example/audit") if made.pop("signer", "") == "other" else None
        other = sim.again(bundle.folder.with_name("other"), signer=signer, **made)
        shutil.rmtree(bundle.folder)
        Bundle.of(other.run, bundle.folder)

    return spoil


def swap_order(bundle: Bundle, sim: LedgerSimulator) -> None:
    rows = bundle.rows(RECORDS)
    rows[3], rows[4] = rows[4], rows[3]
    bundle.put(RECORDS, rows)


def resign(bundle: Bundle, sim: LedgerSimulator) -> None:
    """Sign a log checkpoint with a key of one's own that bears the session key's name."""
    rows = bundle.rows(NOTES)
    note = Note.parse(rows[3]["note"])
    rows[3]["note"] = sign_note(note.text, Signer.ephemeral(note.signatures[0].name)).to_bytes()
    bundle.put(NOTES, rows)
    bundle.write(f"heads/{rows[3]['size']:08d}.note", rows[3]["note"])


def flip_signature(bundle: Bundle, sim: LedgerSimulator) -> None:
    rows = bundle.rows(NOTES)
    note = Note.parse(rows[3]["note"])
    first = note.signatures[0]
    bad = Signature(first.name, first.key_hash, first.signature[:-1] + bytes([first.signature[-1] ^ 1]))
    rows[3]["note"] = Note(note.text, (bad,)).to_bytes()
    bundle.put(NOTES, rows)
    bundle.write(f"heads/{rows[3]['size']:08d}.note", rows[3]["note"])


def edit_certificate(bundle: Bundle, sim: LedgerSimulator) -> None:
    rows = bundle.rows(EVENTS)
    rows[0]["body"] = rows[0]["body"].replace(b'"attempt":1', b'"attempt":2')
    bundle.put(EVENTS, rows)


def edit_manifest(bundle: Bundle, sim: LedgerSimulator) -> None:
    text = bundle.path("manifest.json").read_bytes()
    bundle.write("manifest.json", text.replace(b'"seed":"simulated"', b'"seed":"another"'))


def edit_note_file(bundle: Bundle, sim: LedgerSimulator) -> None:
    bundle.write("heads/00000073.note", bundle.path("heads/00000109.note").read_bytes())


def edit_index(**members: object) -> Callable[[Bundle, LedgerSimulator], None]:
    def spoil(bundle: Bundle, sim: LedgerSimulator) -> None:
        index = json.loads(bundle.path("index.json").read_bytes()) | members
        bundle.write("index.json", json.dumps(index, sort_keys=True, separators=(",", ":")).encode())

    return spoil


def spoil_sketch(bundle: Bundle, sim: LedgerSimulator) -> None:
    content = bytearray(bundle.path("sketches/000000.npy").read_bytes())
    content[128 + 3] ^= 1
    bundle.write("sketches/000000.npy", bytes(content))


def spoil_salt(bundle: Bundle, sim: LedgerSimulator) -> None:
    content = bundle.path("salts.bin").read_bytes()
    bundle.write("salts.bin", content[32:64] + content[:32] + content[64:])


SPOILINGS = [
    Spoiling("a member too many", add("evidence2.json"), "E_BUNDLE", 4, "evidence2.json"),
    Spoiling("what a Mac leaves", add("__MACOSX/._index.json"), "E_BUNDLE", 4, "__MACOSX"),
    Spoiling("a head that the index lacks", add("heads/x.note"), "E_BUNDLE", 4, "heads/x.note", reindex=False),
    Spoiling("a head that is no note", add("heads/x.note"), "E_CKPT_ORDER", 4, "heads/x.note"),
    Spoiling("a head removed, the index left", remove("heads/00000073.note"), "E_BUNDLE", 4, "000073", reindex=False),
    Spoiling("a head removed", remove("heads/00000073.note"), "E_LOST", 5, "00000073.note"),
    Spoiling("a head exchanged", edit_note_file, "E_CKPT_ORDER", 4, "00000073.note"),
    Spoiling("all records removed", remove(RECORDS), "E_SEQ", 4, "entries 1 to 8"),
    Spoiling("all events removed", remove(EVENTS), "E_SEQ", 6, "entries 0 to 0"),
    Spoiling("a record removed", drop("records", seq=30), "E_SEQ", 4, "entries 30 to 30"),
    Spoiling("a step removed", drop("events", seq=18), "E_SEQ", 4, "entries 18 to 18"),
    Spoiling("a batch row removed", drop("batches", batch=3), "E_LOST", 4, "batches.parquet"),
    Spoiling("a checkpoint removed", drop("checkpoints", size=73), "E_LOST", 5, "00000073"),
    Spoiling("rows in another order", swap_order, "E_SEQ", 4, "records"),
    Spoiling("back to an older checkpoint", truncate, "E_UNSEALED|E_ROLLBACK", 5, "109"),
    Spoiling("signed again with another key", resign, "E_KEY", 6, "checkpoints.parquet row 3"),
    Spoiling("a signature flipped", flip_signature, "E_SIG", 6, "checkpoints.parquet row 3"),
    Spoiling("the certificate edited", edit_certificate, "E_SIG", 6, "entry 0"),
    Spoiling("the manifest edited", edit_manifest, "E_BIND", 6, "manifest_sha256"),
    Spoiling("another run's manifest key", other_run(signer="other"), "E_KEY", 6, "pinned"),
    Spoiling("another run's bundle", other_run(origin="bank.example/x", run_id="x"), "E_BIND", 6, "bank.example/x"),
    Spoiling("a second run under one name", other_run(seed=9, run_id="run-2"), "E_FORK", 6, "kept head"),
    Spoiling("cut and sealed again", other_run(steps=12), "E_ROLLBACK", 5, "kept head"),
    Spoiling("the index names another version", edit_index(version=1), "E_FORMAT", 3, "index.json", reindex=False),
    Spoiling("the index is of something else", edit_index(format="x"), "E_FORMAT", 3, "index.json", reindex=False),
    Spoiling("no index", remove("index.json"), "E_BUNDLE", 4, "index.json", reindex=False),
    Spoiling("no manifest", remove("manifest.json"), "E_FORMAT", 3, "manifest.json"),
    Spoiling("no batches", remove(BATCHES), "E_FORMAT", 3, "batches.parquet"),
    Spoiling("a manifest of another format", add("manifest.json", b"{}"), "E_FORMAT", 3, "manifest.json"),
    Spoiling("a table that is no Parquet", add(RECORDS, b"PAR1" * 9), "E_ENGINE", 3, RECORDS),
    Spoiling("a sketch changed", spoil_sketch, "E_PAYLOAD", 4, "sketches/000000.npy row 0"),
    Spoiling("two salts exchanged", spoil_salt, "E_OPENING", 4, "salt"),
    Spoiling("the salts removed", remove("salts.bin"), "E_ERASED", 5, "salts.bin"),
    Spoiling("the sketches removed", remove("sketches/000000.npy"), "E_ERASED", 5, "sketches/000000.npy"),
]  # fmt: skip


@pytest.mark.parametrize("case", SPOILINGS, ids=lambda case: case.id)
def test_a_spoiled_bundle_is_found_and_named(case: Spoiling, bundle: Bundle, original: LedgerSimulator) -> None:
    case.spoil(bundle, original)
    if case.reindex:
        bundle.reindex()
    said = check_as(original, bundle.folder, "head")
    assert said.codes & {*case.codes.split("|")}, said
    assert said.code == case.code, said
    assert case.where in said.places


@pytest.mark.parametrize(
    "name",
    ["../evil.py", "/etc/passwd", "heads/../../x.note", "C:\\x", "heads/a b.note", "ranks/0/manifest.json", "a/"],
)
def test_a_member_with_an_unsafe_name_is_refused_and_not_opened(
    name: str, bundle: Bundle, original: LedgerSimulator, tmp_path: Path
) -> None:
    said = check_as(original, bundle.pack(tmp_path / "one.zip", [(name, b"x")]), "key")
    assert (said.code, said.codes) == (4, {"E_BUNDLE"})
    assert "was not opened" in said.places


def test_a_member_that_is_there_twice_is_named(bundle: Bundle, original: LedgerSimulator, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        path = bundle.pack(tmp_path / "one.zip", [(RECORDS, b"x")])
    said = check_as(original, path, "key")
    assert "E_BUNDLE" in said.codes
    assert f"{RECORDS} is there twice" in said.places


def test_a_link_in_the_folder_is_not_followed(bundle: Bundle, original: LedgerSimulator, tmp_path: Path) -> None:
    shutil.move(bundle.path(RECORDS), tmp_path / "records")
    bundle.path(RECORDS).symlink_to(tmp_path / "records")
    said = check_as(original, bundle.folder, "key")
    assert {"E_BUNDLE", "E_SEQ"} <= said.codes


@pytest.mark.parametrize("place", ["front", "end"])
def test_bytes_outside_all_members_are_named(place: str, original: LedgerSimulator, tmp_path: Path) -> None:
    path = export_run(original.run, tmp_path / "one.zip").path
    path.write_bytes(b"x" * 9 + path.read_bytes() if place == "front" else path.read_bytes() + b"x" * 9)
    said = check_as(original, path, "key")
    assert (said.code, said.codes) == (4, {"E_BUNDLE"})


def test_damage_is_exit_3_and_never_called_an_edit(original: LedgerSimulator, tmp_path: Path) -> None:
    """Cut off, or one byte flipped in the data of any member: no verdict, and advice."""
    path = export_run(original.run, tmp_path / "one.zip", payloads=True).path
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        places = [info.header_offset + 30 + len(info.filename) + info.file_size // 2 for info in archive.infolist()]
    spoiled = [content[:at] for at in (0, 10, len(content) // 2, len(content) - 30)]
    spoiled += [content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :] for at in places]
    for data in spoiled:
        path.write_bytes(data)
        said = check_as(original, path, "head")
        assert said.code == 3, said
        assert said.codes == {"E_ENGINE"}
        assert "tamper" not in said.places.lower()


def test_a_bundle_that_was_packed_anew_asks_to_be_unpacked(
    bundle: Bundle, original: LedgerSimulator, tmp_path: Path
) -> None:
    said = check_as(original, bundle.pack(tmp_path / "one.zip", method=zipfile.ZIP_DEFLATED), "key")
    assert said.code == 3
    assert "packed anew" in said.places


def test_no_flipped_byte_is_taken_for_a_verified_other_content(original: LedgerSimulator, tmp_path: Path) -> None:
    """Flips all over the file, headers and directory included: VERIFIED only where every member is still the same."""
    path = export_run(original.run, tmp_path / "one.zip").path
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        start = archive.start_dir
    for at in [*range(0, start, start // 40), *range(start, len(content), 53)]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x21]) + content[at + 1 :])
        if check_as(original, path, "head").code == 0:
            with zipfile.ZipFile(path) as archive:
                assert {name: archive.read(name) for name in archive.namelist()} == members


# --- heads, ranks, custody -------------------------------------------------------------------------------------


def test_a_kept_head_with_a_bad_signature_shows_nothing_about_length(
    original: LedgerSimulator, unpacked: Bundle
) -> None:
    """It names a longer log; were it believed, the run would look cut."""
    note = Note.parse(original.kept_heads()[-2].read_bytes())
    forged = Note(LogCheckpoint(original.plan.origin, 9_999, bytes(32)).text(), note.signatures)
    said = check(unpacked.folder, keys=[original.signer.vkey], heads=[forged])
    assert (said.code, said.codes) == (6, {"E_HEAD"})
    assert check(unpacked.folder, heads=[forged]).codes == {"E_HEAD", "W_UNANCHORED"}  # nor does it anchor anything


def test_a_head_of_another_log_is_named(original: LedgerSimulator, unpacked: Bundle) -> None:
    other = sign_note(LogCheckpoint("bank.example/other", 3, bytes(32)).text(), original.signer)
    assert check(unpacked.folder, keys=[original.signer.vkey], heads=[other]).codes == {"E_BIND"}


@pytest.mark.parametrize("change", ["remove", "exchange", "cut"])
def test_the_log_of_another_rank_is_part_of_the_run(change: str, tmp_path: Path) -> None:
    sim = with_ranks(tmp_path / "one")
    bundle = Bundle.of(sim.run, tmp_path / "bundle")
    folder, expected = bundle.path("ranks/2"), {"remove": "E_LOST", "exchange": "E_BIND", "cut": "E_TRUNC"}[change]
    if change == "remove":
        shutil.rmtree(folder)
    elif change == "exchange":
        shutil.rmtree(folder)
        shutil.copytree(bundle.path("ranks/1"), folder)
    else:
        last = bundle.rows("ranks/2/checkpoints.parquet")[-1]["size"]
        bundle.put("ranks/2/checkpoints.parquet", bundle.rows("ranks/2/checkpoints.parquet")[:-1])
        bundle.path(f"ranks/2/heads/{last:08d}.note").unlink()
    said = check_as(sim, bundle.reindex().folder, "key")
    assert expected in said.codes
    assert "ranks/2" in said.places


@pytest.mark.parametrize("change", ["cut", "edit", "other"])
def test_the_custody_log_is_verified_and_its_head_binds(change: str, tmp_path: Path) -> None:
    sim = with_custody(tmp_path / "one")
    head = custody_head(sim.run)
    assert head is not None
    bundle = Bundle.of(sim.run, tmp_path / "bundle")
    events, notes = "custody/events/000000.parquet", "custody/checkpoints.parquet"
    if change == "cut":
        bundle.put(events, bundle.rows(events)[:-1])
        bundle.put("custody/batches.parquet", bundle.rows("custody/batches.parquet")[:-1])
        bundle.put(notes, bundle.rows(notes)[:-1])
        bundle.path("custody/heads/00000003.note").unlink()
    elif change == "edit":
        bundle.edit(events, 2, body=b'{"sha256":"00"}')
    else:
        other = with_custody(tmp_path / "two")
        shutil.rmtree(bundle.path("custody"))
        shutil.copytree(Bundle.of(other.run, tmp_path / "other").path("custody"), bundle.path("custody"))
    said = check(bundle.reindex().folder, keys=[sim.signer.vkey], heads=[head])
    assert {"cut": "E_ROLLBACK", "edit": "E_EVENT", "other": "E_BIND"}[change] in said.codes
    assert "custody" in said.places


# --- proofs ----------------------------------------------------------------------------------------------------


def prove(sim: LedgerSimulator, seq: int, path: Path) -> Path:
    path.write_text(prove_entry(sim.run, seq), encoding="utf-8")
    return path


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = verifier.main([*map(str, arguments)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("seq", [0, 1, 9, 100, 217, 218])
def test_every_entry_can_be_proved(seq: int, original: LedgerSimulator, tmp_path: Path, capsys) -> None:
    path = prove(original, seq, tmp_path / "e.tlog-proof")
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines[0] == "c2sp.org/tlog-proof@v1"
    assert lines[2] == f"index {seq}"
    code, said = verify(capsys, "--proof", path, "--key", original.signer.vkey, "--origin", original.plan.origin)
    assert code == 0, said
    assert verify(capsys, "--proof", path)[0] == 7
    assert verify(capsys, "--proof", path, "--key", Signer.generate("bank.example/audit").vkey)[0] == 6
    assert verify(capsys, "--proof", path, "--key", original.signer.vkey, "--origin", "x")[0] == 6


def test_an_entry_of_an_open_run_is_proved_through_its_session(tmp_path: Path, capsys) -> None:
    sim = crashed(tmp_path / "one")
    path = prove(sim, 5, tmp_path / "e.tlog-proof")
    assert verify(capsys, "--proof", path, "--key", sim.signer.vkey)[0] == 0
    text = path.read_text(encoding="utf-8").replace("index 5", "index 6")
    path.write_text(text, encoding="utf-8")
    code, said = verify(capsys, "--proof", path, "--key", sim.signer.vkey, "--json")
    assert code == 4
    assert {finding["code"] for finding in json.loads(said)["findings"]} == {"E_SEQ", "E_ROOT"}


@pytest.mark.parametrize(
    ("was", "now", "code"),
    [
        ("extra ", "extra A", 3),
        ("@v1", "@v2", 3),
        ("\n\n", "\n", 3),
        ("\n219\n", "\n218\n", 6),
        ("index ", "index 0", 3),
    ],
)
def test_a_proof_that_was_changed_is_refused(
    was: str, now: str, code: int, original: LedgerSimulator, tmp_path: Path, capsys
) -> None:
    path = prove(original, 5, tmp_path / "e.tlog-proof")
    path.write_text(path.read_text(encoding="utf-8").replace(was, now, 1), encoding="utf-8")
    assert verify(capsys, "--proof", path, "--key", original.signer.vkey)[0] == code
    path.write_bytes(b"\xff")
    assert verify(capsys, "--proof", path, "--key", original.signer.vkey)[0] == 3


def test_what_does_not_hold_cannot_be_proved(original: LedgerSimulator, tmp_path: Path) -> None:
    sim = original.copy_to(tmp_path / "copy")
    sim.sql("UPDATE records SET step = step + 1 WHERE seq = 5")
    with pytest.raises(FormatError, match="nothing can be proved"):
        prove_entry(sim.run, 100)


# --- the program -----------------------------------------------------------------------------------------------


def test_the_program_runs_without_gradtrail(original: LedgerSimulator, tmp_path: Path) -> None:
    """As an auditor would: from the unpacked bundle, on a machine that has no gradtrail and no database."""
    bundle = Bundle.of(original.run, tmp_path / "bundle")
    (tmp_path / "bank.vkey").write_text(f"{original.signer.vkey}\n")
    code = (
        "import runpy, sys\n"
        "for name in ('auditlog', 'duckdb', 'pydantic', 'rfc8785', 'torch'): sys.modules[name] = None\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    program = [sys.executable, "-I", "-c", code, str(bundle.path("verify_gradtrail.py")), str(bundle.folder)]
    done = subprocess.run(
        [*program, "--key", str(tmp_path / "bank.vkey"), "--head", str(original.auditor / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("VERIFIED · exit 0")
    assert "not checked" in done.stdout


def test_n13_a_key_as_text_file_and_pem_gives_one_verdict(
    original: LedgerSimulator, unpacked: Bundle, tmp_path: Path, capsys
) -> None:
    public = Ed25519PublicKey.from_public_bytes(original.signer.vkey.public_key)
    (tmp_path / "key.pem").write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    (tmp_path / "key.vkey").write_text(f"{original.signer.vkey}\n")
    outputs = {verify(capsys, unpacked.folder, "--key", key) for key in (
        original.signer.vkey, tmp_path / "key.vkey", tmp_path / "key.pem"
    )}  # fmt: skip
    assert len(outputs) == 1
    assert next(iter(outputs))[0] == 0


def test_wrong_calls_and_missing_files(unpacked: Bundle, tmp_path: Path, capsys) -> None:
    for arguments in ([], [unpacked.folder, "--proof", "x"], [unpacked.folder, "--key", "a+b+c"], ["--what"]):
        with pytest.raises(SystemExit) as left:
            verifier.main([*map(str, arguments)])
        assert left.value.code == 2
    capsys.readouterr()
    for arguments in (
        [tmp_path / "nowhere.zip"], [tmp_path], ["--proof", tmp_path / "nowhere"],
        [unpacked.folder, "--key", tmp_path / "nowhere.vkey"], [unpacked.folder, "--head", tmp_path / "nowhere.note"],
    ):  # fmt: skip
        assert verifier.main([*map(str, arguments)]) == 3
    assert "Traceback" not in capsys.readouterr().err
    code, said = verify(capsys, unpacked.folder, "--json")
    assert (code, json.loads(said)["status"]) == (7, "UNANCHORED")


def test_text_from_a_bundle_cannot_colour_the_verdict(bundle: Bundle, original: LedgerSimulator, capsys) -> None:
    bundle.write("heads/\x1b[32mVERIFIED.note", b"x")
    code, said = verify(capsys, bundle.folder, "--key", original.signer.vkey)
    assert code == 4
    assert "\x1b" not in said
