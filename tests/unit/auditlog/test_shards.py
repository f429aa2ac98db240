"""Sketch shards: rows come back from where they were put, files are plain .npy at every moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from auditlog.errors import StoreError
from auditlog.ledger.shards import ShardReader, ShardWriter, cut_shards

WIDTH = 6


def rows(n: int, seed: int = 0) -> NDArray[np.int8]:
    return np.random.default_rng(seed).integers(-127, 128, (n, WIDTH)).astype(np.int8)


@pytest.mark.parametrize("pieces", [[1], [4], [5], [3, 3, 3], [1, 11, 2]])
def test_rows_come_back_from_their_places_over_shard_borders(pieces: list[int], tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WIDTH, shard_rows=4)
    expected = rows(sum(pieces))
    places = [writer.append(part) for part in np.split(expected, np.cumsum(pieces)[:-1])]
    writer.close(cut=True)
    shard = np.concatenate([place.shard for place in places])
    row = np.concatenate([place.row for place in places])
    np.testing.assert_array_equal(shard * 4 + row, np.arange(len(expected)))
    np.testing.assert_array_equal(ShardReader(tmp_path, WIDTH).rows(shard, row), expected)
    # Any numpy reads them without us.
    files = sorted((tmp_path / "sketches").glob("*.npy"))
    np.testing.assert_array_equal(np.vstack([np.load(file) for file in files]), expected)


def test_an_uncut_shard_is_a_valid_file_of_full_size(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WIDTH, shard_rows=4)
    writer.append(rows(1))
    writer.sync()
    loaded = np.load(tmp_path / "sketches/000000.npy")
    assert loaded.shape == (4, WIDTH)
    np.testing.assert_array_equal(loaded[1:], 0)
    writer.close(cut=False)


def test_a_refusing_disk_counts_nothing_and_the_same_rows_can_be_appended_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path, WIDTH, shard_rows=4)
    expected = rows(6)
    writer.append(expected[:3])
    pwrite = os.pwrite
    calls = iter([False, True])  # the disk fills up in the middle of the append

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if next(calls, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left") as caught:
            writer.append(expected[3:])
    assert "000001.npy" in str(caught.value)
    places = writer.append(expected[3:])
    writer.close(cut=True)
    assert (places.shard * 4 + places.row).tolist() == [3, 4, 5]
    np.testing.assert_array_equal(ShardReader(tmp_path, WIDTH).rows(places.shard, places.row), expected[3:])


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[: max(1, len(data) // 2)], at))
    writer = ShardWriter(tmp_path, WIDTH, shard_rows=8)
    expected = rows(3)
    # The header is written in one go; only rows are long enough to be cut by a real disk.
    monkeypatch.setattr(os, "pwrite", pwrite)
    writer.append(expected[:1])
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[: max(1, len(data) // 2)], at))
    places = writer.append(expected[1:])
    monkeypatch.setattr(os, "pwrite", pwrite)
    writer.close(cut=True)
    np.testing.assert_array_equal(ShardReader(tmp_path, WIDTH).rows(places.shard, places.row), expected[1:])


@pytest.mark.parametrize(("kept", "files"), [(0, 0), (3, 1), (4, 1), (5, 2)])
def test_cutting_leaves_exactly_the_rows_that_count(kept: int, files: int, tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WIDTH, shard_rows=4)
    expected = rows(10)
    writer.append(expected)
    writer.close(cut=False)
    cut_shards(tmp_path, WIDTH, kept, shard_rows=4)
    found = sorted((tmp_path / "sketches").glob("*.npy"))
    assert len(found) == files
    stored = np.vstack([np.load(path) for path in found]) if found else np.empty((0, WIDTH))
    np.testing.assert_array_equal(stored, expected[:kept])


@pytest.mark.parametrize("content", [None, b"", b"not numpy", b"\x93NUMPY\x01\x00"])
def test_what_is_no_shard_reads_as_missing(content: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "sketches").mkdir()
    if content is not None:
        (tmp_path / "sketches/000000.npy").write_bytes(content)
    reader = ShardReader(tmp_path, WIDTH)
    assert reader.row(0, 0) is None
    with pytest.raises(StoreError, match=r"000000\.npy"):
        reader.rows(np.zeros(1, np.uint32), np.zeros(1, np.uint32))


def test_a_shard_of_another_width_or_type_reads_as_missing(tmp_path: Path) -> None:
    (tmp_path / "sketches").mkdir()
    np.save(tmp_path / "sketches/000000.npy", np.zeros((4, WIDTH + 1), np.int8))
    np.save(tmp_path / "sketches/000001.npy", np.zeros((4, WIDTH), np.float32))
    reader = ShardReader(tmp_path, WIDTH)
    assert reader.row(0, 0) is None
    assert reader.row(1, 0) is None


def test_rows_of_another_shape_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, WIDTH)
    with pytest.raises(StoreError, match="expected int8"):
        writer.append(np.zeros((1, WIDTH + 1), np.int8))
