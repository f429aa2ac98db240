"""Data as people keep it: each case is one that misled other tools, named by its number in our list."""

from __future__ import annotations

import collections
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attribution import dataset
from attribution.influence.sources import open_sources, text_previews
from auditlog import DataManifest, Signer, Trust, verify_run
from auditlog.datamanifest.identities import data_identities
from auditlog.errors import DataError
from auditlog.ledger.ledger import RunLedger
from tests.support import Plan, make_manifest, simulated_steps

ROWS = [{"text": f"row {i} ä\u2028", "n": i, "x": i / 2, "ok": i % 3 == 0, "tags": ["a", str(i)]} for i in range(40)]


@pytest.fixture(autouse=True)
def quiet_loader():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def load(kind: str, path: Path, folder: Path, **options: Any) -> datasets.Dataset:
    return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(folder / "cache"), **options)


def write_run(folder: Path, data: DataManifest) -> tuple[Path, Trust]:
    """Write a sealed run over the manifest's samples."""
    signer = Signer.generate("bank.example/audit")
    plan = Plan(steps=3)
    ledger = RunLedger.create(folder, make_manifest(data, signer, plan), data, signer)
    for entry in simulated_steps(data, plan):
        ledger.append_step(entry)
    ledger.seal({})
    return folder, Trust(vkeys=(signer.vkey,))


# --- C: the same data somewhere else, or in another container


def test_C11_links_are_followed_inside_the_base_and_recorded(tmp_path: Path) -> None:
    base = tmp_path / "data"
    write(base / "real" / "a.jsonl", jsonl(ROWS[:2]))
    write(base / "store" / "b.jsonl", jsonl(ROWS[2:4]))
    (base / "c.jsonl").symlink_to("store/b.jsonl")
    (base / "folder").symlink_to("real")
    manifest = DataManifest.build([base / "c.jsonl", base / "folder" / "*.jsonl"], base=base)
    assert [(s.path, s.link) for s in manifest.block.sources] == [
        ("c.jsonl", "store/b.jsonl"),
        ("folder/a.jsonl", "real/a.jsonl"),
    ]
    assert manifest.block.links == "inside"
    for name in ("z.jsonl", "d.jsonl", "e.jsonl", "f.jsonl"):
        (base / name).symlink_to("store/b.jsonl")
    assert [s.path for s in DataManifest.build(base / "*.jsonl").block.sources] == ["c.jsonl"], "each file once"
    manifest.check_unchanged()
    whole = DataManifest.build(base / "**" / "*.jsonl")
    assert [(s.path, s.link) for s in whole.block.sources] == [("real/a.jsonl", None), ("store/b.jsonl", None)]


def test_C11_a_link_out_of_the_base_and_a_circle_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "data"
    write(base / "a.jsonl", jsonl(ROWS[:2]))
    outside = write(tmp_path / "outside" / "b.jsonl", jsonl(ROWS))
    for name, target in (("b.jsonl", outside), ("folder", outside.parent)):
        (base / name).symlink_to(target)
        with pytest.raises(DataError, match="a link that leaves the base folder"):
            DataManifest.build(base / "**" / "*.jsonl")
        (base / name).unlink()
    (base / "one").mkdir()
    for links in ([("loop", ".")], [("one/up", "..")], [("x.jsonl", "y.jsonl"), ("y.jsonl", "x.jsonl")]):
        for name, target in links:
            (base / name).symlink_to(target)
        with pytest.raises(DataError, match=r"leads in a circle|leads to nothing or to itself"):
            DataManifest.build(base / "**" / "*.jsonl")
        for name, _ in links:
            (base / name).unlink()
    assert DataManifest.build(base / "**" / "*.jsonl").rows == 2


@pytest.mark.parametrize("swap", ["file", "folder"])
def test_C11_a_file_or_folder_exchanged_for_a_link_is_noticed(tmp_path: Path, swap: str) -> None:
    base = tmp_path / "data"
    write(base / "a.jsonl", jsonl(ROWS[:1]))
    path = write(base / "sub" / "b.jsonl", jsonl(ROWS))
    manifest = DataManifest.build(base / "**" / "*.jsonl")
    run, trust = write_run(tmp_path / "run", manifest)
    swapped = path if swap == "file" else path.parent
    swapped.rename(base / "elsewhere")
    swapped.symlink_to(base / "elsewhere")
    with pytest.raises(DataError, match=r"sub/b\.jsonl: changed .*it was no link and is a link to elsewhere"):
        manifest.check_unchanged()
    with pytest.raises(DataError, match=r"sub/b\.jsonl: changed .*it was no link and is a link to elsewhere"):
        verify_run(run, trust, data=base)


def test_C12_a_moved_project_verifies_and_a_renamed_file_is_called_renamed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write(home / "data" / "a.jsonl", jsonl(ROWS[:20]))
    write(home / "data" / "b.jsonl", jsonl(ROWS[20:]))
    manifest = DataManifest.build(home / "data" / "*.jsonl")
    run, trust = write_run(home / "run", manifest)
    assert str(tmp_path).encode() not in (run / "manifest.json").read_bytes()
    home.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert verify_run(moved / "run", trust, data=moved / "data").exit_code == 0
    again = DataManifest.build(moved / "data" / "*.jsonl")
    again.check_unchanged()
    assert again.block == manifest.block
    (moved / "data" / "b.jsonl").rename(moved / "data" / "renamed.jsonl")
    for check in (again.check_unchanged, lambda: verify_run(moved / "run", trust, data=moved / "data")):
        with pytest.raises(DataError, match=r"b\.jsonl: file renamed, content identical: it is renamed\.jsonl now"):
            check()
    (moved / "data" / "renamed.jsonl").write_bytes(b"x" * (moved / "data" / "renamed.jsonl").stat().st_size)
    with pytest.raises(DataError, match=r"b\.jsonl: listed in the data manifest but cannot be read"):
        again.check_unchanged()


def containers(folder: Path) -> dict[str, Path]:
    """Write the same rows in every container, some of them twice in another way."""
    table = pa.Table.from_pylist(ROWS)
    write(folder / "a.jsonl", jsonl(ROWS))
    write(folder / "b.jsonl.gz", gzip.compress(jsonl(ROWS), mtime=1))
    write(folder / "c.jsonl.gz", gzip.compress(jsonl(ROWS), 1, mtime=2))
    pq.write_table(table, folder / "d.parquet", row_group_size=7, version="1.0", compression="none")
    pq.write_table(table, folder / "e.parquet", data_page_version="2.0", use_dictionary=False, compression="zstd")
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    (arrow,) = (folder / "saved").glob("*.arrow")
    return {p.name: p for p in [*sorted(p for p in folder.iterdir() if p.is_file()), arrow]}


def test_C14_equal_rows_are_equal_whatever_they_are_packed_in(tmp_path: Path) -> None:
    manifests = {name: DataManifest.build(path) for name, path in containers(tmp_path).items()}
    manifests["memory"] = DataManifest.from_dataset(datasets.Dataset.from_list(ROWS))
    reference = manifests["a.jsonl"]
    for manifest in manifests.values():
        assert np.array_equal(manifest.values_sha256, reference.values_sha256)
        assert manifest.block.sources[0].content_sha256 == reference.block.sources[0].content_sha256
        assert reference.differences(manifest) == []
    files = [m.block.sources[0].sha256 for m in manifests.values()]
    assert len(set(files)) == len(files), "files are told apart all the same"
    expected = hashlib.sha256(b"".join(d.tobytes() for d in reference.values_sha256)).hexdigest()
    assert reference.block.sources[0].content_sha256 == expected
    assert [list(dataset(m)) for m in manifests.values()] == [list(dataset(reference))] * len(manifests)


@pytest.mark.parametrize(
    ("name", "repack", "said"),
    [
        ("b.jsonl.gz", lambda path: path.write_bytes(gzip.compress(jsonl(ROWS), mtime=9)), "all rows equal"),
        ("d.parquet", lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path), "all rows equal"),
        (
            "a.jsonl",
            lambda path: path.write_bytes(jsonl(ROWS).replace(b'": ', b'":  ')),
            "all rows' values equal; row 0 is the first written differently",
        ),
    ],
)
def test_C14_a_file_packed_again_is_told_from_a_changed_row(
    tmp_path: Path, name: str, repack: Callable[[Path], object], said: str
) -> None:
    path = containers(tmp_path / "data")[name]
    manifest = DataManifest.build(path)
    run, trust = write_run(tmp_path / "run", manifest)
    assert verify_run(run, trust, data=path.parent).exit_code == 0
    repack(path)
    with pytest.raises(DataError, match=f"container changed, {said}"):
        manifest.check_unchanged()
    with pytest.raises(DataError, match="container changed, all rows equal"):
        verify_run(run, trust, data=path.parent)


# --- E: which row is which, and what it holds


def test_E02_neither_the_file_system_nor_later_files_move_a_row(tmp_path: Path) -> None:
    parts = {f"part-{i}.jsonl": jsonl(ROWS[4 * i : 4 * i + 4]) for i in range(10)}
    for name, content in reversed(parts.items()):
        write(tmp_path / "first" / name, content)
    for name in sorted(parts, key=lambda name: hashlib.md5(name.encode()).digest()):
        write(tmp_path / "second" / "deeper" / name, parts[name])
    first = DataManifest.build(tmp_path / "first" / "*.jsonl")
    second = DataManifest.build(tmp_path / "second" / "**" / "*.jsonl")
    assert [first.read_row(i) for i in range(40)] == ROWS == [second.read_row(i) for i in range(40)]
    assert first.block == second.block
    before = {first.identity(i): first.read_row(i) for i in range(40)}
    write(tmp_path / "first" / "late.jsonl", jsonl([{"text": "late"}] * 3))
    after = DataManifest.build(tmp_path / "first" / "*.jsonl")
    assert after.rows == 43
    assert {after.identity(i): after.read_row(i) for i in range(3, 43)} == before


LINES = (
    '{"text": "a\u2028b\u2029c\u0085d\u000b"}\r\n\n   \n'.replace("\u000b", "\\u000b").encode()
    + b'{"text": "'
    + b"y" * 20_000_000
    + b'"}\n\t\n{"text": "last"}'
)


def test_E03_rows_are_numbered_as_the_loader_numbers_them(tmp_path: Path) -> None:
    """Only a newline byte ends a row; a blank line is no row of JSON Lines, and one of a text."""
    path = write(tmp_path / "a.jsonl", LINES)
    manifest = DataManifest.build(path)
    loaded = load("json", path, tmp_path)
    assert manifest.rows == len(loaded) == 3
    assert [manifest.read_row(i) for i in range(3)] == list(loaded)
    assert manifest.read_row(2) == {"text": "last"}
    path = write(tmp_path / "a.txt", "a\u2028b\n\n \r\nc\u0085\x0cd\n\n".encode())
    manifest = DataManifest.build(path)
    loaded = load("text", path, tmp_path)
    assert [manifest.read_row(i) for i in range(manifest.rows)] == list(loaded)
    assert manifest.rows == 5


def test_E05_values_are_as_the_file_has_them_and_a_loaders_guesses_are_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "zero": 0.0, "one": 1, "day": "2024-01-02"}, {"text": "b", "zero": 1.0, "one": 2, "day": "x"}]
    manifest = DataManifest.build(write(tmp_path / "a.jsonl", jsonl(rows)))
    columns = dataset(manifest).features
    assert {name: columns[name].dtype for name in rows[0]} == {
        "text": "string", "zero": "float64", "one": "int64", "day": "string",
    }  # fmt: skip
    assert [type(manifest.read_row(0)[name]) for name in rows[0]] == [str, float, int, str]
    guessed = datasets.Dataset.from_list([{**row, "zero": int(row["zero"])} for row in rows])
    assert manifest.differences(DataManifest.from_dataset(guessed)) == [
        "row 0: 'zero': float here, int there",
        "row 1: 'zero': float here, int there",
    ]

    path = write(tmp_path / "b.csv", b'text,code,note\n"a\nb",001,NA\nc,,x\n')
    cells = DataManifest.build(path)
    assert list(dataset(cells).remove_columns("sample_index")) == [
        {"text": "a\nb", "code": "001", "note": "NA"},
        {"text": "c", "code": "", "note": "x"},
    ]
    assert cells.raw_row(0) == b'"a\nb",001,NA'
    loaded = load("csv", path, tmp_path)
    assert [row["text"] for row in loaded] == [row["text"] for row in dataset(cells)]
    assert cells.differences(DataManifest.from_dataset(loaded)) == [
        "row 0: 'code': str here, float there; 'note': str here, nothing there",
        "row 1: 'code': str here, nothing there",
    ]
    run, trust = write_run(tmp_path / "run", cells)
    assert verify_run(run, trust, data=tmp_path).exit_code == 0


MIXES = [
    (strategy, probabilities)
    for strategy in ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
    for probabilities in (None, [0.7, 0.3], [0.1, 0.9])
]


@pytest.mark.parametrize(("strategy", "probabilities"), MIXES)
def test_E06_use_counts_are_exact_whatever_a_mix_repeats_or_drops(
    tmp_path: Path, strategy: Any, probabilities: list[float] | None
) -> None:
    """Both sources number their rows from 0; the column still tells each use of each row apart."""
    write(tmp_path / "a.jsonl", jsonl([{"id": i, "text": f"a {i}"} for i in range(2)]))
    write(tmp_path / "b.jsonl", jsonl([{"id": i, "text": f"b {i}"} for i in range(7)]))
    manifest = DataManifest.build(tmp_path / "*.jsonl")
    rows = dataset(manifest)
    parts = [rows.filter(lambda row, letter=letter: row["text"].startswith(letter)) for letter in "ab"]
    mixed = datasets.interleave_datasets(parts, probabilities=probabilities, seed=3, stopping_strategy=strategy)
    used = collections.Counter(mixed["sample_index"])
    assert used == collections.Counter(
        index for text in mixed["text"] for index in range(9) if manifest.read_row(index)["text"] == text
    )
    joined = datasets.concatenate_datasets([*parts, parts[0]])
    assert collections.Counter(joined["sample_index"]) == {0: 2, 1: 2, **dict.fromkeys(range(2, 9), 1)}


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("probabilities", [None, [0.5, 0.3, 0.2]])
@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
def test_E06_an_empty_source_in_the_mix_gives_no_row_another_name(
    tmp_path: Path, strategy: Any, probabilities: list[float] | None
) -> None:
    """However the loader mixes here (it stops, repeats, or raises), each row it hands out says which one it is."""
    write(tmp_path / "a.jsonl", jsonl(ROWS[:3]))
    manifest = DataManifest.build(tmp_path / "a.jsonl")
    rows = dataset(manifest)
    parts = [rows.select([]), rows.select([0, 1]), rows.select([2])]
    try:
        mixed = list(datasets.interleave_datasets(parts, probabilities, seed=1, stopping_strategy=strategy))
    except (IndexError, ValueError):
        return
    assert all(manifest.read_row(row["sample_index"])["text"] == row["text"] for row in mixed)


def test_E06_equal_rows_of_two_sources_have_two_identities(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", jsonl(ROWS[:3]))
    write(tmp_path / "b.jsonl", jsonl([*ROWS[:3], ROWS[0]]))
    manifest = DataManifest.build(tmp_path / "*.jsonl")
    assert len({manifest.identity(i) for i in range(7)}) == 7
    source, row, _ = manifest.locate(np.arange(7))
    assert list(zip(source.tolist(), row.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 2),
        *((1, i) for i in range(4)),
    ]


def test_E08_a_dataset_is_named_by_its_values_and_not_by_its_fingerprint(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    first = DataManifest.from_dataset(rows)
    fingerprints = set()
    for number in range(10):
        rows.save_to_disk(tmp_path / str(number))
        rows = datasets.load_from_disk(tmp_path / str(number)).map(lambda row: row, keep_in_memory=True)
        fingerprints.add(rows._fingerprint)
        again = DataManifest.from_dataset(rows)
        assert again.block == first.block
        assert again.identity(39) == first.identity(39)
    shuffled = DataManifest.from_dataset(rows.shuffle(seed=1))
    assert shuffled.block.sources[0].content_sha256 != first.block.sources[0].content_sha256
    assert sorted(map(bytes, shuffled.values_sha256)) == sorted(map(bytes, first.values_sha256))


def test_E08_an_edited_arrow_file_is_noticed_under_the_same_fingerprint(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    loaded = datasets.load_from_disk(tmp_path / "saved")
    manifest = DataManifest.from_dataset(loaded)
    manifest.check_unchanged()
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    content = arrow.read_bytes()
    with arrow.open("r+b") as file:
        file.seek(content.index(b"row 17 "))
        file.write(b"ROW")
    edited = datasets.load_from_disk(tmp_path / "saved")
    assert edited._fingerprint == loaded._fingerprint
    for act in (manifest.check_unchanged, lambda: dataset(manifest), lambda: manifest.read_row(17)):
        with pytest.raises(DataError, match="row 17 differs"):
            act()
    assert manifest.read_row(16) == ROWS[16]


# --- F: no row and no column is left out


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "a.txt", "a.parquet"])
def test_F01_every_row_counts(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"row {i}"} for i in range(12_000)]
    path = tmp_path / name
    store(path, rows)
    manifest = DataManifest.build(path)
    late = [dict(row) for row in rows]
    late[11_000]["text"] = "row 11O00"
    swapped = [dict(row) for row in rows]
    swapped[5], swapped[10_500] = swapped[10_500], swapped[5]
    for changed, said in (
        (late, "row 11000 differs"),
        (swapped, "2 rows differ: 5, 10500"),
        (rows[:-1], "1 rows removed at the end, from row 11999"),
        ([*rows, {"text": "new"}], "1 rows added at the end, from row 12000"),
        (rows[1:], "11999 rows differ: 0, 1, 2, 3, 4, …; 1 rows removed"),
    ):
        store(path, changed)
        assert DataManifest.build(path).block.sources[0].content_sha256 != manifest.block.sources[0].content_sha256
        with pytest.raises(DataError, match=said):
            manifest.check_unchanged()
    store(path, late)
    with pytest.raises(DataError, match="row 11000 differs"):
        manifest.read_row(11_000)
    with pytest.raises(DataError, match="row 11000 differs"):
        dataset(manifest)


def store(path: Path, rows: list[dict[str, str]]) -> None:
    texts = [row["text"] for row in rows]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    elif path.suffix in (".csv", ".txt"):
        path.write_text("\n".join([*(["text"] if path.suffix == ".csv" else []), *texts]) + "\n")
    else:
        path.write_bytes(gzip.compress(jsonl(rows), 1) if path.suffix == ".gz" else jsonl(rows))


def test_F01_every_column_counts(tmp_path: Path) -> None:
    columns = {
        "text": ["a"] * 3,
        "flag": [True, False, True],
        "day": np.array(["2024-01-02", "2024-01-03", "2024-01-04"], "datetime64[D]"),
        "at": np.array([1, 2, 3], "datetime64[ns]"),
        "deep": [[{"x": [1.0]}], [], [{"x": []}]],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    manifest = DataManifest.build(tmp_path / "a.parquet")
    other = {
        "flag": [True, True, True],
        "day": np.array(["2024-01-02", "2024-01-05", "2024-01-04"], "datetime64[D]"),
        "at": np.array([1, 3, 3], "datetime64[ns]"),
        "deep": [[{"x": [1.0]}], [{"x": None}], [{"x": []}]],
    }
    for name, column in other.items():
        pq.write_table(pa.table({**columns, name: column}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match="row 1 differs"):
            manifest.check_unchanged()


# --- a dataset in memory


def test_a_dataset_in_memory_is_a_manifest_like_any_other(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "score": datasets.Value("float32"),
        }
    )
    rows = datasets.Dataset.from_dict(
        {"text": list("abcdef"), "label": [0, 1] * 3, "score": [0.1] * 6}, features=features, split="train"
    )
    rows.info.dataset_name = "credit"
    chosen = rows.shuffle(seed=2).select(range(1, 5))
    manifest = DataManifest.from_dataset(chosen, revision="main", description="loans")
    (source,), (version,) = manifest.block.sources, manifest.block.versions
    assert (source.path, source.format, source.rows) == ("hub:credit/train", "dataset", 4)
    assert source.sha256 == source.content_sha256
    assert (version.kind, version.revision, version.dirty) == ("hub", "main", None)
    assert dataset(manifest).features["label"] == features["label"]
    assert dataset(manifest)["sample_index"] == [0, 1, 2, 3]
    assert [manifest.read_row(i) for i in range(4)] == list(chosen)
    assert manifest.locate(np.array([3]))[1].tolist() == [3]
    assert manifest.identity(2)[:32].hex() == source.sha256
    run, trust = write_run(tmp_path / "run", manifest)
    assert verify_run(run, trust).exit_code == 0
    with pytest.raises(DataError, match="was a dataset in memory, not a file"):
        verify_run(run, trust, data=tmp_path)


def test_what_the_loader_recorded_of_its_downloads_is_kept_and_must_fit_the_revision() -> None:
    rows = datasets.Dataset.from_list(ROWS)
    commit = "0123456789" * 4
    rows.info.download_checksums = {
        f"hf://datasets/org/name@{commit}/a.parquet": {"num_bytes": 5, "checksum": "ab" * 32},
        "/home/somebody/b.parquet": {"num_bytes": 6, "checksum": None},
    }
    version = DataManifest.from_dataset(rows, revision=commit, name="org/name").block.versions[0]
    assert [(f.path, f.digest, f.size_bytes) for f in version.files] == [
        ("b.parquet", None, 6),
        (f"hf://datasets/org/name@{commit}/a.parquet", f"sha256:{'ab' * 32}", 5),
    ]
    assert DataManifest.from_dataset(rows).block.versions[0].kind == "files"
    with pytest.raises(DataError, match=f"the dataset's own record names {commit}"):
        DataManifest.from_dataset(rows, revision="f" * 40)


def test_what_cannot_be_read_twice_or_is_not_one_dataset_is_refused() -> None:
    rows = datasets.Dataset.from_list(ROWS)
    with pytest.raises(DataError, match="IterableDataset cannot be read by row number") as caught:
        DataManifest.from_dataset(rows.to_iterable_dataset())
    assert "revision=" in caught.value.advice()
    with pytest.raises(DataError, match=r"the splits \['train'\]"):
        DataManifest.from_dataset(datasets.DatasetDict(train=rows))
    with pytest.raises(DataError, match="no text in field 'prompt'"):
        DataManifest.from_dataset(rows, text_fields=("prompt",))
    assert DataManifest.from_dataset(rows.remove_columns("text"), text_fields=()).rows == 40


def test_files_of_several_formats_make_one_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", jsonl([{"text": "a", "n": 1}]))
    pq.write_table(pa.table({"text": ["b", "c"], "m": pa.array([1, 2], pa.int8())}), tmp_path / "b.parquet")
    write(tmp_path / "c.txt", b"d\ne\n")
    write(tmp_path / "d.csv.gz", gzip.compress(b"text\nf\n"))
    rows = dataset(DataManifest.build(tmp_path / "*"))
    assert "".join(rows["text"]) == "abcdef"
    assert rows["sample_index"] == list(range(6))
    assert rows["n"] == [1, *[None] * 5]
    assert rows.features["m"].dtype == "int8"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "txt", "jsonl.gz", "csv.gz", "parquet", "arrow"])
def test_verify_opens_every_sample_of_every_format(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data" / f"a.{kind}"
    path.parent.mkdir()
    if kind == "arrow":
        table = pa.table({"text": list("abcdefgh")})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "tsv":
        path.write_text("text\tn\n" + "a\t1\n" * 8)
    elif kind == "csv.gz":
        path.write_bytes(gzip.compress(b'text\n"a\nb"\n' + b"c\n" * 7))
    else:
        store(path, [{"text": letter} for letter in "abcdefgh"])
    manifest = DataManifest.build(path)
    run, trust = write_run(tmp_path / "run", manifest)
    verdict = verify_run(run, trust, data=path.parent)
    assert verdict.exit_code == 0
    assert not any("source data" in point for point in verdict.not_checked)


def test_previews_open_every_format_and_say_what_is_not_the_recorded_file(tmp_path: Path) -> None:
    store(tmp_path / "a.parquet", [{"text": "a"}, {"text": "b"}])
    store(tmp_path / "b.csv", [{"text": "c"}])
    data = DataManifest.build(tmp_path / "*")
    manifest = make_manifest(data, Signer.generate("bank.example/audit"), Plan())
    assert "".join(text_previews(open_sources(manifest, tmp_path))(i) for i in range(3)) == "abc"
    pq.write_table(pq.read_table(tmp_path / "a.parquet"), tmp_path / "a.parquet", compression="gzip")
    with pytest.raises(DataError, match=r"a\.parquet: not the file that .* \(container changed, all rows equal\)"):
        open_sources(manifest, tmp_path)
    memory = DataManifest.from_dataset(datasets.Dataset.from_list([{"x": 1}]), text_fields=())
    assert text_previews(memory)(0) == "{'x': 1}"
    with pytest.raises(DataError, match="was a dataset in memory"):
        open_sources(make_manifest(memory, Signer.generate("bank.example/audit"), Plan()), tmp_path)


def test_a_manifest_of_somebody_else_opens_nothing_outside_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "outside.jsonl", jsonl(ROWS))
    data = DataManifest.build(write(tmp_path / "data" / "a.jsonl", jsonl(ROWS)))
    for name in ("../outside.jsonl", str(tmp_path / "outside.jsonl")):
        source = data.block.sources[0].model_copy(update={"path": name})
        manifest = make_manifest(data, Signer.generate("bank.example/audit"), Plan())
        block = data.block.model_copy(update={"sources": (source,)})
        manifest = manifest.model_copy(update={"data": block})
        for opened in (data_identities, open_sources):
            with pytest.raises(DataError, match=r"relative and stay in their folder|outside the base folder"):
                opened(manifest, tmp_path / "data")
