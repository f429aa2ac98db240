"""Which repeats fill batches: the loaders' own arithmetic is the reference."""

from __future__ import annotations

import sys
from itertools import chain, zip_longest

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from attribution.errors import RankError, UnsupportedSetupError
from attribution.training.padding import Loader, find_padding
from attribution.training.ranks import Ranks
from attribution.training.uses import Uses
from auditlog.trust.attempts import Attempt


def arrays(ids):
    return [[np.array(micro, np.int64) for micro in of_rank] for of_rank in ids]


def epoch_of_accelerate(rows: int, batch: int, ranks: int) -> list[list[list[int]]]:
    """Return the batches of each rank, as accelerate deals them out."""
    sampler = BatchSampler(SequentialSampler(range(rows)), batch, drop_last=False)
    return [list(BatchSamplerShard(sampler, ranks, rank)) for rank in range(ranks)]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 11, 12, 23])
@pytest.mark.parametrize(("batch", "ranks"), [(2, 2), (3, 2), (2, 4)])
def test_what_accelerate_fills_up_is_found_by_position_and_by_second_use(rows: int, batch: int, ranks: int) -> None:
    dealt = epoch_of_accelerate(rows, batch, ranks)
    used, found = np.zeros(rows, bool), [0, 0]
    steps = list(zip(*dealt, strict=True))
    for number, step in enumerate(steps, start=1):
        ids = arrays([[micro] for micro in step])
        at_end = number == len(steps)
        real = rows % (batch * ranks) or sys.maxsize
        by_position = find_padding(ids, None, Loader(0, at_end, real))
        by_use = find_padding(ids, used, Loader(0, at_end, None))
        for way, masks in enumerate((by_position, by_use)):
            found[way] += sum(int(mask.sum()) for of_rank in masks for mask in of_rank)
        used[list(chain(*step))] = True
    assert found == [len(steps) * batch * ranks - rows] * 2


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 15])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_what_torchs_sampler_fills_up_is_the_second_use(rows: int, ranks: int, batch: int) -> None:
    samplers = [DistributedSampler(range(rows), ranks, rank, shuffle=True) for rank in range(ranks)]
    dealt = [[list(s)[i : i + batch] for i in range(0, len(s), batch)] for s in samplers]
    used, real = np.zeros(rows, bool), []
    for step in zip_longest(*dealt, fillvalue=[]):
        ids = arrays([[micro] for micro in step])
        for of_rank, masks in zip(ids, find_padding(ids, used, None), strict=True):
            real += of_rank[0][~masks[0]].tolist()
        used[list(chain(*step))] = True
    assert sorted(real) == list(range(rows))


def test_before_the_end_of_a_loader_nothing_is_padding() -> None:
    ids = arrays([[[0, 0]], [[0, 1]]])
    masks = find_padding(ids, np.ones(2, bool), Loader(0, False, 1))
    assert not any(mask.any() for of_rank in masks for mask in of_rank)


def test_packed_rows_are_not_counted_as_samples() -> None:
    ids = arrays([[[0, 1, 2]], [[3, 4, 0]]])
    masks = find_padding(ids, np.zeros(5, bool), Loader(0, True, 2), is_packed=True)
    assert [mask.tolist() for of_rank in masks for mask in of_rank] == [[False] * 3, [False, False, True]]


def test_without_an_epoch_and_a_loader_nothing_is_known() -> None:
    masks = find_padding(arrays([[[0]], [[0]]]), None, None)
    assert not any(mask.any() for of_rank in masks for mask in of_rank)


def test_uses_follow_the_line_that_led_to_the_weights() -> None:
    uses = Uses(3)
    none = np.zeros(2, bool)
    for step in (1, 2, 3):
        uses.add(step, 0, np.array([0, 1]), none)
    assert uses.earlier(np.array([0, 1, 2])).tolist() == [3, 3, 0]
    uses.begin(Attempt(2, 1, 1))
    assert uses.earlier(np.array([0, 1, 2])).tolist() == [1, 1, 0]
    uses.add(2, 0, np.array([2, 0]), np.array([False, True]))  # sample 0 only fills the batch
    assert uses.earlier(np.array([0, 1, 2])).tolist() == [1, 1, 1]
    assert uses.in_epoch(0).tolist() == [True, True, True]
    uses.begin(Attempt(3, 1, 2))  # back to the line of attempt 1
    assert uses.earlier(np.array([0, 1, 2])).tolist() == [2, 2, 0]
    assert uses.in_epoch(0).tolist() == [True, True, False]
    assert not uses.in_epoch(1).any()


def test_processes_that_do_not_know_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedSetupError, match="2 processes were started"):
        Ranks.present()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.present() == Ranks(0, 1)


def test_alone_everything_is_done_at_once() -> None:
    assert Ranks().together(lambda: 3) == 3
    assert Ranks().gather("x") == ["x"]
    with pytest.raises(RankError):
        Ranks().together(_fail)


def _fail() -> None:
    raise RankError("no")
