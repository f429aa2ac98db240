"""Opening a run folder: what is missing is named, nothing is created, and stored values come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from auditlog.datamanifest.identities import data_identities
from auditlog.errors import DataError, FormatError, ReadError
from auditlog.format.records import EventKind
from auditlog.ledger.reader import RunReader
from auditlog.ledger.verify_run import verify_run
from auditlog.trust.anchors import Trust
from tests.support import LedgerSimulator, Plan


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    return LedgerSimulator(tmp_path_factory.mktemp("reader") / "original", Plan(steps=3)).write()


@pytest.fixture
def sim(original: LedgerSimulator, tmp_path: Path) -> LedgerSimulator:
    return original.copy_to(tmp_path / "copy")


@pytest.mark.parametrize("state", ["missing", "empty folder", "file", "no database", "empty database", "no manifest"])
def test_what_is_no_run_folder_is_unreadable_and_nothing_is_created(
    state: str, sim: LedgerSimulator, tmp_path: Path
) -> None:
    run = sim.run
    if state == "missing":
        run = tmp_path / "nowhere"
    elif state == "empty folder":
        run = tmp_path / "empty"
        run.mkdir()
    elif state == "file":
        run = tmp_path / "file"
        run.write_text("a file")
    elif state == "no database":
        (run / "ledger.duckdb").unlink()
    elif state == "empty database":
        (run / "ledger.duckdb").write_bytes(b"")
    else:
        (run / "manifest.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ReadError) as caught:
        verify_run(run, Trust())
    assert caught.value.exit_code == 3
    assert str(run) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_reading_changes_no_byte(sim: LedgerSimulator) -> None:
    before = {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()}
    verify_run(sim.run, sim.trust("key"), data=sim.data_folder)
    assert {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"b":1,"a":2}', b""])
def test_a_manifest_that_does_not_parse_is_a_format_error(content: bytes, sim: LedgerSimulator) -> None:
    (sim.run / "manifest.json").write_bytes(content)
    with pytest.raises(FormatError):
        RunReader.open(sim.run)


def test_stored_things_come_back(original: LedgerSimulator) -> None:
    with RunReader.open(original.run) as reader:
        assert reader.manifest.origin == original.plan.origin
        assert reader.manifest.to_bytes() == reader.manifest_bytes
        assert len(reader.records()) == 24
        assert [event.kind for event in reader.events()] == [1, 2, 2, 2, 4, 7]
        assert len(reader.events(EventKind.STEP)) == 3
        assert sorted(reader.heads()) == [int(path.stem) for path in original.head_files()]
        assert reader.final_note is not None
        assert reader.final_note.to_bytes() == original.head_files()[-1].read_bytes()
        assert [len(block.rows) for block in reader.sketches().blocks(10)] == [9, 9, 6]


def test_an_unsealed_run_has_no_final_note(tmp_path: Path) -> None:
    sim = LedgerSimulator(tmp_path / "one", Plan(steps=2)).write(seal=False)
    with RunReader.open(sim.run) as reader:
        assert reader.final_note is None


def test_identities_from_the_source_files_are_those_of_the_data_manifest(original: LedgerSimulator) -> None:
    from auditlog.datamanifest import DataManifest

    data = DataManifest.build(original.data_folder / "*.jsonl")
    with RunReader.open(original.run) as reader:
        identity = data_identities(reader.manifest, original.data_folder)
    assert [identity(i) for i in range(data.rows)] == [data.identity(i) for i in range(data.rows)]


def test_a_missing_or_short_source_file_is_named(sim: LedgerSimulator) -> None:
    path = sim.data_folder / "part-1.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n")[0])
    with pytest.raises(DataError, match=r"part-1\.jsonl: 1 rows, the manifest says 9"):
        verify_run(sim.run, sim.trust("key"), data=sim.data_folder)
    path.unlink()
    with pytest.raises(DataError, match=r"part-1\.jsonl"):
        verify_run(sim.run, sim.trust("key"), data=sim.data_folder)


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "link/file"])
def test_an_event_cannot_make_the_reader_hash_a_file_outside_the_run(name: str, sim: LedgerSimulator) -> None:
    (sim.folder / "outside.txt").write_text("x")
    (sim.folder / "elsewhere").mkdir()
    (sim.folder / "elsewhere" / "file").write_text("x")
    (sim.run / "link").symlink_to(sim.folder / "elsewhere")
    path, _, file = name.rpartition("/")
    body = f'{{"files":[{{"name":"{file}","sha256":"{"0" * 64}","size_bytes":1}}],"path":"{path}","step":3}}'
    sim.sql(f"UPDATE events SET body = '{body}'::BLOB WHERE kind = 4")
    with RunReader.open(sim.run) as reader:
        assert set(reader.view().file_digests().values()) == {None}


def test_progress_is_told_how_far_it_is(original: LedgerSimulator) -> None:
    seen: list[int] = []
    verify_run(original.run, original.trust("key"), progress=seen.append)
    assert seen
    assert seen == sorted(seen)
    assert seen[-1] <= 30


def test_sketches_are_memory_mapped_not_loaded(original: LedgerSimulator) -> None:
    with RunReader.open(original.run) as reader:
        row = reader._shards.row(0, 0)
    assert isinstance(row, np.memmap)
