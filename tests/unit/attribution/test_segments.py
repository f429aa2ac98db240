"""Which token belongs to which sample: whole rows, stacked rows, packed documents, stated spans."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attribution.capture.batch import Announced, read_batch
from attribution.capture.segments import Segments, Span
from attribution.errors import CaptureError, SampleIdentityError

WIDTH = 3


def numbered(rows: int, length: int) -> Tensor:
    """Every entry another number, so that none can be taken for another."""
    return torch.arange(rows * length * WIDTH).view(rows, length, WIDTH)


def positions(*rows: list[int]) -> Tensor:
    """Rows of documents of the given lengths, ``(R, T)``."""
    return torch.tensor([[place for length in row for place in range(length)] for row in rows])


def test_whole_rows_stay_as_they_are() -> None:
    segments = Segments.whole_rows(4, 4)
    x = torch.randn(4, 5, 3)
    assert torch.equal(segments.by_sample(x, "m"), x)
    assert torch.equal(segments.by_sample(x.view(20, 3), "m"), x), "tokens of all rows behind one another"
    assert torch.equal(segments.by_sample(x[:, 0], "m"), x[:, :1])
    assert segments.by_sample(torch.randn(4, 2, 5, 3), "m").shape == (4, 10, 3)
    assert segments.slots() == ([0, 1, 2, 3], [0, 0, 0, 0])


def test_stacked_blocks_belong_to_one_sample_each() -> None:
    """Preference pairs: rows 0 to S are chosen, the others rejected."""
    segments = Segments.whole_rows(2, 4)
    x = numbered(4, 5)
    found = segments.by_sample(x, "m")
    assert torch.equal(found, torch.stack([torch.cat([x[0], x[2]]), torch.cat([x[1], x[3]])]))
    assert segments.owner(torch.tensor([0, 1, 2, 3]), torch.zeros(4, dtype=torch.long)).tolist() == [0, 1, 0, 1]
    assert torch.equal(segments.cut(x, 1), x[[1, 3]])


def test_half_precision_and_integers_come_back_as_the_formulas_need_them() -> None:
    segments = Segments.whole_rows(2, 2)
    assert segments.by_sample(torch.ones(2, 3, 1, dtype=torch.bfloat16), "m").dtype == torch.float32
    assert segments.by_sample(torch.ones(2, 3, 1, dtype=torch.long), "m").dtype == torch.long


def test_packed_documents_begin_where_positions_begin_anew() -> None:
    segments = Segments.packed(positions([3, 2], [1, 4]), 4)
    assert segments.spans == ((Span(0, 0, 3),), (Span(0, 3, 5),), (Span(1, 0, 1),), (Span(1, 1, 5),))
    assert segments.slots() == ([0, 0, 1, 1], [0, 1, 0, 1])
    x = numbered(2, 5)
    found = segments.by_sample(x, "m")
    assert found.shape == (4, 4, WIDTH)
    assert torch.equal(found[1], torch.cat([x[0, 3:5], torch.zeros(2, WIDTH, dtype=torch.long)]))
    assert torch.equal(segments.by_sample(x.view(10, WIDTH), "m"), found)


def test_documents_in_pairs_belong_to_one_sample_each() -> None:
    segments = Segments.packed(positions([2, 3], [4, 1]), 2)
    assert segments.spans == ((Span(0, 0, 2), Span(1, 0, 4)), (Span(0, 2, 5), Span(1, 4, 5)))


layouts = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)


@given(layouts)
def test_no_token_is_lost_or_counted_twice(documents: list[list[int]]) -> None:
    """For any packing, padded to one length by a last document: a row's sum over samples is its sum over tokens."""
    length = max(map(sum, documents))
    rows = [[*row, length - sum(row)] if sum(row) < length else row for row in documents]
    count = sum(map(len, rows))
    segments = Segments.packed(positions(*rows), count)
    x = numbered(len(rows), length) + 1
    found = segments.by_sample(x, "m")
    assert torch.equal(found.sum((0, 1)), x.sum((0, 1)))
    tokens = torch.cartesian_prod(torch.arange(len(rows)), torch.arange(length))
    owners = segments.owner(tokens[:, 0], tokens[:, 1])
    for sample in range(count):
        mine = x.view(-1, WIDTH)[owners == sample]
        assert torch.equal(segments.cut(x, sample)[0], mine)
        assert torch.equal(segments.cut(x.view(-1, WIDTH), sample), mine)
        assert torch.equal(found[sample, : len(mine)], mine)
        assert not found[sample, len(mine) :].any()


def test_what_all_samples_share_is_not_cut() -> None:
    assert Segments.whole_rows(4, 4).cut(torch.randn(3, 2), 0) is None
    assert Segments.packed(positions([3, 2]), 2).cut(torch.randn(7), 0) is None


def test_stated_spans_are_taken_as_stated() -> None:
    segments = Segments.from_spans(torch.tensor([[0, 0, 2, 0], [0, 2, 5, 4], [1, 1, 5, 0]]), 2, 5)
    assert segments.spans == ((Span(0, 0, 2),), (Span(0, 2, 5, 4),), (Span(1, 1, 5),))
    x = numbered(2, 5)
    assert segments.by_sample(x, "m").sum() == x.sum() - x[1, 0].sum(), "padding belongs to nobody"


@pytest.mark.parametrize("span", [[2, 0, 1, 0], [0, 4, 6, 0], [0, 3, 3, 0], [0, -1, 2, 0]])
def test_spans_outside_of_the_batch_are_refused(span: list[int]) -> None:
    with pytest.raises(SampleIdentityError, match="outside of 2 x 5 tokens"):
        Segments.from_spans(torch.tensor([span]), 2, 5)


def test_layouts_that_do_not_fit_the_ids_are_refused() -> None:
    with pytest.raises(SampleIdentityError, match="3 ids and 4 rows"):
        Segments.whole_rows(3, 4)
    with pytest.raises(SampleIdentityError, match="mark 3 documents, the batch has 2 ids"):
        Segments.packed(positions([2, 2, 1]), 2)


def test_a_module_that_does_not_have_the_batch_in_front_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"module m: its batch has 3 rows"):
        Segments.whole_rows(4, 4).by_sample(torch.randn(3, 5, 2), "m")
    with pytest.raises(CaptureError, match=r"module m: .* does not have the 1 x 5 tokens"):
        Segments.packed(positions([3, 2]), 2).by_sample(torch.randn(1, 4, 2), "m")


# --- what a batch says about its layout ---------------------------------------------------------------------------


def layout_of(fields: dict[str, Tensor], announced: Announced | None = None, rows_per_sample: int = 1) -> Segments:
    batch = read_batch((), fields, announced or Announced())
    return batch.layout(rows_per_sample)[1]


def test_a_mask_beside_positions_means_padding_and_not_packing() -> None:
    fields = {
        "input_ids": torch.ones(1, 5, dtype=torch.long),
        "position_ids": positions([3, 2]),
        "sample_index": torch.arange(2),
    }
    assert layout_of(fields).is_packed
    padded = fields | {"attention_mask": torch.tensor([[1, 1, 1, 0, 0]]), "sample_index": torch.arange(1)}
    assert not layout_of(padded).is_packed


def test_a_mask_of_ones_lets_packed_documents_see_each_other() -> None:
    fields = {
        "input_ids": torch.ones(1, 5, dtype=torch.long),
        "position_ids": positions([3, 2]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
        "sample_index": torch.arange(2),
    }
    assert read_batch((), fields, Announced()).crosses_documents


def test_announced_spans_win_and_have_one_span_per_id() -> None:
    fields = {"input_ids": torch.ones(1, 5, dtype=torch.long), "sample_index": torch.arange(2)}
    spans = torch.tensor([[0, 0, 3, 0], [0, 3, 5, 0]])
    assert layout_of(fields, Announced(spans=spans)).spans == ((Span(0, 0, 3),), (Span(0, 3, 5),))
    with pytest.raises(SampleIdentityError, match="2 ids and 1 spans"):
        layout_of(fields, Announced(spans=spans[:1]))


def test_pairs_have_two_rows_per_id() -> None:
    fields = {"input_ids": torch.ones(4, 5, dtype=torch.long), "sample_index": torch.arange(2)}
    assert layout_of(fields, rows_per_sample=2).samples == 2
    with pytest.raises(SampleIdentityError, match="one id per row is needed"):
        layout_of(fields)
