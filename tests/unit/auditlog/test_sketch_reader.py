"""Streaming sketches: against the entries that were written, and against filters written out record by record."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from auditlog.errors import ReadError, StoreError
from auditlog.ledger.reader import RunReader, open_sketches
from auditlog.ledger.sketch_reader import LogSketches, SketchReader
from tests.support import LedgerSimulator, Plan, simulated_steps, write_sources

FORMS = {"raw": ("raw",), "both": ("raw", "whitened")}


@pytest.fixture(scope="module", params=FORMS)
def sim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LedgerSimulator:
    folder = tmp_path_factory.mktemp("sketches") / request.param
    return LedgerSimulator(
        folder, Plan(steps=7, per_step=5, rows_per_file=(12, 9, 6), forms=FORMS[request.param])
    ).write()


def written(sim: LedgerSimulator) -> tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.void]]:
    """What went in: sketches ``(n, width)``, sample indices and records."""
    data = write_sources(sim.data_folder, sim.plan.rows_per_file)
    entries = list(simulated_steps(data, sim.plan))
    sketches, index = (np.concatenate([getattr(e, name) for e in entries]) for name in ("sketches", "index"))
    return sketches, index, np.concatenate([e.records for e in entries])


@pytest.mark.parametrize("span_rows", [1, 4, 6, 8_192])
def test_blocks_hold_what_was_written_in_ledger_order(span_rows: int, sim: LedgerSimulator) -> None:
    sketches, _, records = written(sim)
    reader = open_sketches(sim.run)
    blocks = list(reader.blocks(span_rows))
    assert (len(reader), reader.dim, reader.forms) == (35, 16, sim.plan.forms)
    assert max(len(block.span) for block in blocks) <= span_rows
    np.testing.assert_array_equal(np.concatenate([b.rows for b in blocks]), sketches)
    np.testing.assert_array_equal(np.concatenate([b.raw for b in blocks]), sketches[:, :16])
    np.testing.assert_array_equal(np.concatenate([b.whitened for b in blocks]), sketches[:, 16:])
    np.testing.assert_array_equal(np.concatenate([b.records for b in blocks])["loss"], records["loss"])
    np.testing.assert_array_equal(reader.records["loss"], records["loss"])


def test_rows_that_lie_together_are_a_view_of_the_file(sim: LedgerSimulator) -> None:
    first_step = open_sketches(sim.run).where(steps=[1])  # no consumed gradient lies between its rows
    (block,) = first_step.blocks()
    assert np.shares_memory(block.rows, block.span)
    assert isinstance(block.rows, np.memmap)
    (scattered,) = open_sketches(sim.run).blocks()
    assert not np.shares_memory(scattered.rows, scattered.span)


collections = st.one_of(
    st.sets(st.integers(-1, 25), max_size=6),
    st.builds(range, st.integers(-3, 25), st.integers(-3, 25)),
    st.builds(range, st.integers(-3, 25), st.integers(-3, 25), st.sampled_from([-3, -1, 2, 5])),
    st.just(range(2, 10**15)),
)
conditions = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(["sources", "data_versions", "steps", "samples"], collections)
)


@pytest.fixture(scope="module")
def opened(sim: LedgerSimulator) -> tuple[SketchReader, NDArray[np.int8], NDArray[np.int64], NDArray[np.void]]:
    return open_sketches(sim.run), *written(sim)


@given(conditions, st.sampled_from([3, 7, 8_192]))
@settings(max_examples=150, deadline=None)
def test_filters_keep_what_a_record_by_record_look_keeps(
    opened: tuple[SketchReader, NDArray[np.int8], NDArray[np.int64], NDArray[np.void]],
    wanted: dict[str, Collection[int]],
    span_rows: int,
) -> None:
    reader, sketches, index, records = opened
    fields = {"sources": "source_id", "data_versions": "data_version_id", "steps": "step"}
    values = {name: records[field] for name, field in fields.items()} | {"samples": index}
    kept = [i for i in range(35) if all(int(values[name][i]) in wanted[name] for name in wanted)]
    found = reader.where(**wanted)
    assert len(found) == len(kept)
    rows = np.concatenate([sketches[:0], *(block.rows for block in found.blocks(span_rows))])
    np.testing.assert_array_equal(rows, sketches[kept])


def test_filters_add_up(sim: LedgerSimulator) -> None:
    every = open_sketches(sim.run)
    at_once = every.where(steps=range(2, 5), sources=[0]).records
    np.testing.assert_array_equal(every.where(steps=range(2, 5)).where(sources=[0]).records, at_once)
    assert 0 < len(at_once) < 15


def test_stretches_without_a_wanted_sketch_are_never_asked_for(sim: LedgerSimulator) -> None:
    class Watched:
        def __init__(self) -> None:
            self.spans: list[tuple[int, int]] = []

        def span(self, number: int, first: int, stop: int) -> NDArray[np.int8]:
            self.spans.append((first, stop))
            return np.zeros((stop - first, 16), np.int8)

    shards = Watched()
    with RunReader.open(sim.run) as run:
        reader = SketchReader(run.manifest, [LogSketches(run.records(), shards)])  # type: ignore[arg-type]
    # Six rows a step: five samples and the consumed gradient.
    assert [len(b.records) for b in reader.where(steps=[1, 2, 6]).blocks(6)] == [5, 5, 5]
    assert shards.spans == [(0, 5), (6, 11), (30, 35)]


def test_places_in_any_order_give_the_right_rows(sim: LedgerSimulator) -> None:
    """No writer of ours leaves them so; a reader must not take it for granted."""
    sketches, _, _ = written(sim)
    order = np.random.default_rng(0).permutation(35)
    with RunReader.open(sim.run) as run:
        reader = SketchReader(run.manifest, [LogSketches(run.records()[order], run._shards)])
    for span_rows in (4, 8_192):
        np.testing.assert_array_equal(np.concatenate([b.rows for b in reader.blocks(span_rows)]), sketches[order])


def test_arrow_columns_are_the_records_and_both_forms(sim: LedgerSimulator) -> None:
    sketches, _, records = written(sim)
    table = open_sketches(sim.run).to_arrow(span_rows=8).read_all()
    table.validate(full=True)
    assert table.schema.field("raw").type == pa.list_(pa.int8(), 16)
    assert ("whitened" in table.column_names) == (sim.plan.forms == ("raw", "whitened"))
    for form, columns in zip(sim.plan.forms, (slice(16), slice(16, 32)), strict=False):
        values = np.array(table.column(form).to_pylist(), np.int8)
        np.testing.assert_array_equal(values, sketches[:, columns])
    for name in ("step", "source_id", "loss", "scale_raw", "scale_whitened"):
        np.testing.assert_array_equal(table.column(name).to_numpy(), records[name])


def test_arrow_of_nothing_has_the_same_columns(sim: LedgerSimulator) -> None:
    reader = open_sketches(sim.run)
    none = reader.where(steps=[])
    assert (len(none), list(none.blocks())) == (0, [])
    assert none.to_arrow().read_all().schema == reader.to_arrow().read_all().schema


def test_a_raw_only_block_that_lies_together_is_not_copied_for_arrow(tmp_path: Path) -> None:
    run = LedgerSimulator(tmp_path / "one", Plan(steps=2, forms=("raw",))).write().run
    (block,) = open_sketches(run).where(steps=[2]).blocks()
    assert block.to_arrow().column("raw").values.buffers()[1].address == block.rows.ctypes.data


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_missing_or_short_shard_is_named(damage: str, sim: LedgerSimulator, tmp_path: Path) -> None:
    run = sim.copy_to(tmp_path / "copy").run
    shard = run / "sketches/000000.npy"
    if damage == "missing":
        shard.unlink()
    else:
        np.save(shard, np.load(shard)[:34])  # the last sample's row is the 41st
    reader = open_sketches(run)
    if damage == "short":
        assert [len(b.rows) for b in reader.where(steps=range(1, 6)).blocks()] == [25]
    with pytest.raises(StoreError, match="missing or too short") as caught:
        list(reader.blocks())
    assert str(shard) in str(caught.value)


def test_what_is_no_run_is_a_read_error(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="does not exist"):
        open_sketches(tmp_path / "nothing")


def test_the_reader_works_on_after_the_run_is_closed_and_leaves_it_as_it_is(sim: LedgerSimulator) -> None:
    before: dict[Any, bytes] = {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()}
    with RunReader.open(sim.run) as run:
        reader = run.sketches()
    (block,) = reader.blocks()
    assert not block.span.flags.writeable
    assert {path: path.read_bytes() for path in sim.run.rglob("*") if path.is_file()} == before
