"""Pieces that wait are sketched as if each had been sketched at once, whatever happens to the gradients meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_batch, tiny_lora

from attribution.capture import burst as burst_module
from attribution.capture.burst import Burst
from attribution.capture.hooks import HookSet
from attribution.capture.micro_batch import MicroBatch
from attribution.capture.modules import find_tracked
from attribution.capture.moment import SecondMoment
from attribution.capture.per_sample import Piece
from attribution.capture.segments import Segments
from attribution.capture.whitening import Whitening
from attribution.sketch.layout import SketchLayout
from attribution.training.second_moments import SecondMoments

SHAPES = {"wide": (3, 50), "tall": (40, 5), "bias": (7,), "conv": (4, 3, 2, 2)}
CPU = torch.device("cpu")


def void(value: object) -> None:
    """Let a hook return nothing."""


def whitening(seed: int) -> Whitening:
    """Moments of different groups, one of them not there yet."""
    random = torch.Generator().manual_seed(seed)
    values = {name: torch.rand(shape, generator=random) for name, shape in SHAPES.items()}
    moments = {
        "wide": SecondMoment(values["wide"], 0.9, 1e-8, 3),
        "tall": SecondMoment(values["tall"], 0.9, 1e-8, 3),
        "bias": SecondMoment(None, 0.9, 1e-3, 0),
        "conv": SecondMoment(values["conv"].double(), 0.99, 1e-3, 7),
    }
    return Whitening(moments, 0.7)


def micro_batch(layout: SketchLayout, samples: int, whiten: Whitening | None) -> MicroBatch:
    return MicroBatch(torch.arange(samples), Segments.whole_rows(samples, samples), None, layout, whiten)


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.sampled_from(list(SHAPES)), max_size=12),
    seed=st.integers(0, 10**6),
    samples=st.integers(1, 4),
    is_whitened=st.booleans(),
    limit=st.integers(1, 2000),
)
def test_a_burst_is_the_sum_of_its_pieces(
    names: list[str], seed: int, samples: int, is_whitened: bool, limit: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    layout = SketchLayout(SHAPES, 64, str(seed))
    whiten = whitening(seed) if is_whitened else None
    together, apart = (micro_batch(layout, samples, whiten) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(burst_module, "POOL_ENTRIES", limit)
        waiting = Burst(CPU)
        for name in names:
            values = torch.randn(samples, layout.shapes[name].numel(), generator=random)
            apart.add(Piece(name, values))
            room = waiting.room(samples, 1, values.shape[1])
            waiting.add(together, Piece(name, room.copy_(values[:, None]).view_as(values)))
        waiting.work_off()
    torch.testing.assert_close(together.sums, apart.sums)
    if together.whitened_sums is not None and apart.whitened_sums is not None:
        torch.testing.assert_close(together.whitened_sums, apart.whitened_sums)


def test_room_is_given_once_per_burst_and_then_again() -> None:
    layout = SketchLayout({"wide": (3, 50)}, 64, "0")
    waiting, micro = Burst(CPU), micro_batch(layout, 2, None)
    first, second = waiting.room(2, 3, 50), waiting.room(2, 3, 50)
    assert first.shape == (2, 3, 50)
    assert second.data_ptr() == first.data_ptr() + 4 * first.numel()
    waiting.add(micro, Piece("wide", first.fill_(1.0).view(2, 150)))
    waiting.work_off()
    assert waiting.room(2, 3, 50).data_ptr() == first.data_ptr()
    waiting.add(micro, Piece("wide", first.view(2, 150)))
    waiting.forget()
    before = micro.sums.clone()
    waiting.work_off()
    assert torch.equal(micro.sums, before)


def test_micro_batches_in_one_burst_keep_to_themselves() -> None:
    layout = SketchLayout({"wide": (3, 50)}, 64, "0")
    waiting, micros = Burst(CPU), [micro_batch(layout, 2, None) for _ in range(2)]
    for number in (0, 1, 0):
        waiting.add(micros[number], Piece("wide", torch.full((2, 150), 1.0 + number)))
    waiting.work_off()
    torch.testing.assert_close(micros[0].sums, micros[1].sums)


@pytest.mark.parametrize("meddle", [torch.Tensor.zero_, lambda grad: grad.mul_(1e3), lambda grad: grad.data.fill_(7.0)])
def test_what_happens_to_a_gradient_while_pieces_wait_changes_no_sketch(
    meddle: Callable[[torch.Tensor], object],
) -> None:
    def sketches(is_meddled: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        torch.manual_seed(0)
        model = tiny_lora().train()
        tracking = find_tracked(model)
        layout = SketchLayout({n: tuple(p.shape) for n, p in tracking.parameters.items()}, 256)
        hooks = HookSet(model, tracking, layout, mode="fused")
        moments = SecondMoments(torch.optim.AdamW(tracking.parameters.values()), tracking.parameters)
        hooks.whitening = moments.whitening
        hooks.attach()
        if is_meddled:
            for parameter in tracking.parameters.values():
                parameter.register_post_accumulate_grad_hook(lambda p: void(meddle(p.grad)))
        model(**make_batch()).loss.backward()
        ((captured,), _) = hooks.take()
        hooks.detach()
        return captured.sketch, captured.whitened

    for found, want in zip(sketches(True), sketches(False), strict=True):
        assert found is not None
        assert torch.equal(found, want)


def test_settings_that_a_loaded_state_brings_count() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.5))
    moments = SecondMoments(optimizer, {"w": weight})
    state = optimizer.state_dict()
    state["param_groups"][0]["betas"] = (0.9, 0.25)
    optimizer.load_state_dict(state)
    assert moments.whitening().moments["w"].decay == 0.25
