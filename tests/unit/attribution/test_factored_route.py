"""Which weights take the factored route, the map that follows from it, and the means it is whitened with."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from attribution.capture.factored import FactoredSums
from attribution.capture.formulas import Embedding, Work
from attribution.capture.modules import survey
from attribution.capture.moment import SecondMoment
from attribution.capture.per_sample import Lookup, Piece, Product
from attribution.capture.rank_one import Means, RankOne, squares_of_lookup, squares_of_product
from attribution.capture.segments import Segments
from attribution.capture.whitening import Whitening
from attribution.errors import SketchMismatchError
from attribution.sketch import rng, routes, two_sided
from attribution.sketch.layout import SketchLayout, flatten, unflatten
from attribution.sketch.sign_fold import SignFold, unwrapped, wrap
from attribution.sketch.two_sided import SideFold, TwoSidedFold
from attribution.training.plan import plan
from attribution.training.second_moments import SecondMoments
from auditlog.format.manifest import SketchBlock

SHAPES = {
    "h.0.q.weight": (300, 256),
    "h.0.k.weight": (300, 256),
    "h.1.q.weight": (300, 256),
    "h.0.norm.weight": (256,),
    "h.0.lora_A.weight": (8, 256),
}


def test_adapters_norms_and_small_matrices_stay_exact() -> None:
    for shape in [(8, 768), (8, 4096), (4096, 8), (64, 4096), (2, 768), (768,), (128, 128), (8, 300, 300)]:
        assert routes.buckets_of(shape) is None, shape


def test_the_weights_of_a_whole_model_are_folded_on_both_sides() -> None:
    for shape in [(768, 2304), (768, 768), (3072, 768), (576, 576), (192, 576), (1024, 768), (256, 256)]:
        assert routes.buckets_of(shape) == (64, 64), shape
    assert routes.buckets_of((50257, 768)) == (2048, 64)
    assert routes.buckets_of((576, 49152)) == (64, 2048)


def test_the_choice_is_the_stated_cost_model() -> None:
    """Eight times 16 T (r + c) + 2 T k k against (2 T + 16) r c, at 128 tokens."""
    assert routes.exact_flops((300, 200), 10) == (20 + 16) * 60_000
    assert routes.factored_flops((300, 200), (64, 32), 10) == 16 * 10 * 500 + 20 * 64 * 32
    least = next(d for d in range(64, 1000) if routes.buckets_of((d, d)))
    exact, factored = ((2 * 128 + 16) * d * d for d in (least - 1, least)), []
    for d in (least - 1, least):
        factored.append(8 * (16 * 128 * 2 * d + 2 * 128 * 64 * 64))
    below, above = exact
    assert below <= factored[0]
    assert above > factored[1]


def test_the_manifest_says_what_is_folded_and_the_map_is_rebuilt_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SketchLayout(SHAPES, dim=512, seed="s")
    block = layout.block()
    assert block.route == "factored"
    assert [p.buckets for p in block.parameters] == [(64, 64)] * 3 + [None, None]
    monkeypatch.setattr(routes, "BUCKETS", 32)  # a later version may choose otherwise
    again = SketchLayout.from_block(SketchBlock.model_validate_json(block.model_dump_json()))
    assert again.tables_sha256 == layout.tables_sha256
    gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    torch.testing.assert_close(again.sketch(gradients), layout.sketch(gradients))
    forged = block.model_copy(
        update={"parameters": tuple(p.model_copy(update={"buckets": None}) for p in block.parameters)}
    )
    with pytest.raises(SketchMismatchError):
        SketchLayout.from_block(forged)


def test_a_manifest_from_before_this_route_still_loads() -> None:
    small = {"a.weight": (4, 6)}
    document = json.loads(SketchLayout(small, dim=32).block().model_dump_json())
    for parameter in document["parameters"]:
        del parameter["buckets"]
    block = SketchBlock.model_validate_json(json.dumps(document))
    assert block.route == "exact"
    assert SketchLayout.from_block(block).maps["a.weight"].offset == block.parameters[0].offset


def test_the_digest_covers_the_sides() -> None:
    name, shape = "h.0.q.weight", (300, 256)
    digests = {
        SketchLayout({name: shape}, 512, "s", {name: buckets}).tables_sha256
        for buckets in (None, (64, 64), (64, 32), (32, 64), (16, 256))
    }
    assert len(digests) == 5


def test_modules_below_one_parent_fold_one_input_once_and_others_do_not() -> None:
    layout = SketchLayout(SHAPES, dim=512)
    for maps in (layout.maps, layout.to(torch.device("meta")).maps):
        q, k, other = (maps[f"h.{name}.weight"] for name in ("0.q", "0.k", "1.q"))
        assert q.columns is k.columns
        assert q.rows is k.rows
        assert other.columns is not q.columns
        assert q.core is not k.core
    assert q.rows.weights.is_meta
    assert q.core.signs.is_meta


def test_the_map_of_a_layout_is_its_own_tables_written_out() -> None:
    layout = SketchLayout(SHAPES, dim=512, seed="s")
    gradient = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    found = layout.sketch({"h.0.q.weight": gradient}).double().numpy()
    signs = [rng.signs(f"gradtrail/s/h.0/axis {axis}/{n} to 64", n).astype(float) for axis, n in enumerate((300, 256))]
    p, q = (np.eye(64)[np.arange(len(s)) % 64].T * s for s in signs)
    small = (p @ gradient.double().numpy() @ q.T).reshape(-1) * rng.signs("gradtrail/s/h.0.q.weight/signs", 4096)
    expected = np.zeros(512)
    np.add.at(expected, (rng.offset("gradtrail/s/h.0.q.weight/offset", 512) + np.arange(4096)) % 512, small)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_flattening_is_undone(shape: tuple[int, int]) -> None:
    matrix = torch.arange(15.0 if shape[0] * shape[1] == 15 else 16.0).view(shape)
    assert torch.equal(unflatten(flatten(matrix), shape)[0], matrix)


# --- means ---------------------------------------------------------------------------------------------------


def test_squares_are_those_of_every_tokens_outer_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attribution.capture.rank_one.STRETCH_ENTRIES", 40)
    source = torch.Generator().manual_seed(1)
    a, b = torch.randn(3, 4, 9, generator=source), torch.randn(3, 4, 7, generator=source)
    squares = sum(torch.outer(x, y) ** 2 for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True))
    found = squares_of_product(a, b)
    torch.testing.assert_close(found.rows, squares.mean(1))
    torch.testing.assert_close(found.columns, squares.mean(0))


def test_squares_of_a_lookup_are_those_of_the_one_hot_product() -> None:
    source = torch.Generator().manual_seed(2)
    numbers, b = torch.randint(0, 9, (3, 4), generator=source), torch.randn(3, 4, 7, generator=source)
    expected = squares_of_product(torch.nn.functional.one_hot(numbers, 9).float(), b)
    found = squares_of_lookup(numbers, b, 9)
    torch.testing.assert_close(found.rows, expected.rows)
    torch.testing.assert_close(found.columns, expected.columns)


def plain_fold(rows: int, columns: int) -> TwoSidedFold:
    """Every weight 1, so that a scaled map shows its factors."""
    sides = SideFold(torch.ones(rows), 4), SideFold(torch.ones(columns), 4)
    return TwoSidedFold(*sides, SignFold(torch.ones(16), 0, 16))


def factors(fold: TwoSidedFold) -> Tensor:
    return torch.outer(fold.rows.weights, fold.columns.weights)


def never() -> Means:
    raise AssertionError("the step's own gradient is not needed here")


def test_a_moment_of_rank_one_is_whitened_exactly() -> None:
    source = torch.Generator().manual_seed(3)
    v = torch.outer(torch.rand(6, generator=source) + 0.1, torch.rand(5, generator=source) + 0.1)
    moment = SecondMoment(v, 0.99, 1e-8, 4)
    found = factors(RankOne().scaled("w", plain_fold(6, 5), moment, never))
    torch.testing.assert_close(found, ((v / (1 - 0.99**4)).sqrt() + 1e-8).rsqrt(), rtol=1e-4, atol=0)


def test_moments_are_read_when_they_are_a_tenth_older() -> None:
    fold, rank_one, seen, last = plain_fold(6, 5), RankOne(), [], None
    for steps in range(1, 31):
        scaled = rank_one.scaled("w", fold, SecondMoment(torch.full((6, 5), float(steps)), 0.99, 1e-8, steps), never)
        if scaled is not last:
            seen.append(steps)
        last = scaled
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 21, 24, 27, 30]


def test_without_a_moment_the_steps_own_gradient_is_all_there_is() -> None:
    own = Means(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 3.0]))
    expected = (torch.outer(own.rows, own.columns) / 2.5).pow(-0.25)
    for value, steps in ((None, 0), (torch.zeros(2, 2), 1)):
        moment = SecondMoment(value, 0.5, 1e-8, steps)
        found = factors(RankOne().scaled("w", plain_fold(2, 2), moment, lambda: own))
        # of a moment of zeros, (1 - β₂) / (1 - β₂²) of the own gradient is left
        share = 1.0 if value is None else 0.5 / 0.75
        torch.testing.assert_close(found, expected * share**-0.25)


def test_rows_of_a_vocabulary_get_the_steps_own_gradient_as_well() -> None:
    v = torch.rand(20, 2, generator=torch.Generator().manual_seed(4)) + 0.5
    own = Means(torch.rand(20) + 5.0, torch.full((2,), 5.5))
    moment = SecondMoment(v, 0.9, 1e-8, 3)
    found = factors(RankOne().scaled("w", plain_fold(20, 2), moment, lambda: own))
    share = 0.1 / (1 - 0.9**4)
    earlier = v / (1 - 0.9**3)
    rows = (1 - share) * earlier.mean(1) + share * own.rows
    columns = (1 - share) * earlier.mean(0) + share * own.columns
    torch.testing.assert_close(found, (torch.outer(rows, columns) / rows.mean()).pow(-0.25))


def test_a_row_that_never_had_a_gradient_is_not_blown_up() -> None:
    v = torch.ones(4, 4)
    v[1], v[:, 2] = 0.0, 0.0
    found = factors(RankOne().scaled("w", plain_fold(4, 4), SecondMoment(v, 0.9, 1e-8, 50), never))
    enlarged = (0.75 / (1e-4 * 0.5625)) ** 0.25  # a used row's mean is 0.75, that of all entries 0.5625
    torch.testing.assert_close(found[1] / found[0], torch.full((4,), enlarged))
    torch.testing.assert_close(found[:, 2] / found[:, 0], torch.full((4,), enlarged))


def test_epsilon_bounds_what_a_moment_of_next_to_nothing_does() -> None:
    found = factors(
        RankOne().scaled("w", plain_fold(3, 3), SecondMoment(torch.full((3, 3), 1e-20), 0.9, 1e-3, 9), never)
    )
    torch.testing.assert_close(found, torch.full((3, 3), 1e-3**-0.5), rtol=1e-2, atol=0)


def test_what_was_read_is_kept_from_step_to_step() -> None:
    weight = nn.Parameter(torch.zeros(6, 5))
    optimizer = torch.optim.AdamW([weight])
    moments, fold, seen = SecondMoments(optimizer, {"w": weight}), plain_fold(6, 5), []
    for _ in range(13):
        weight.grad = torch.rand(6, 5)
        optimizer.step()
        moments.stepped(1.0)
        seen.append(moments.whitening().scaled("w", fold, never))
    assert [later is earlier for earlier, later in itertools.pairwise(seen)] == [False] * 10 + [True, False]


# --- one micro-batch -----------------------------------------------------------------------------------------


def test_gradients_that_had_to_be_formed_land_where_the_others_do() -> None:
    layout = SketchLayout({"w": (9, 7)}, 32, "s", {"w": (4, 4)})
    source = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, 3, 9, generator=source), torch.randn(2, 3, 7, generator=source)
    factored, formed = unwrapped(2, 32), unwrapped(2, 32)
    FactoredSums(factored, None, None).add(Product("w", a, b), layout.maps["w"])
    for sample, gradient in enumerate(torch.bmm(a.transpose(1, 2), b)):
        FactoredSums(formed, None, None).add(Piece("w", flatten(gradient), first=sample), layout.maps["w"])
    torch.testing.assert_close(wrap(factored), wrap(formed))
    assert not torch.equal(factored[0], factored[1])


def test_an_input_that_modules_share_is_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = SketchLayout(
        {"h.q.weight": (9, 7), "h.k.weight": (9, 7)}, 32, "s", dict.fromkeys(["h.q.weight", "h.k.weight"], (4, 4))
    )
    source = torch.Generator().manual_seed(6)
    x, gq, gk = torch.randn(2, 3, 7, generator=source), *torch.randn(2, 2, 3, 9, generator=source)
    folded = []
    plain = two_sided.fold_all
    monkeypatch.setattr(
        "attribution.capture.factored.fold_all", lambda v, sides: folded.append(v.data_ptr()) or plain(v, sides)
    )
    sums = unwrapped(2, 32)
    both = FactoredSums(sums, None, None)
    both.add(Product("h.q.weight", gq, x), layout.maps["h.q.weight"])
    both.add(Product("h.k.weight", gk, x.view(2, 3, 7)), layout.maps["h.k.weight"])
    assert folded == [gq.data_ptr(), x.data_ptr(), gk.data_ptr()]
    for sample in range(2):
        expected = layout.sketch({"h.q.weight": gq[sample].T @ x[sample], "h.k.weight": gk[sample].T @ x[sample]})
        torch.testing.assert_close(wrap(sums)[sample], expected)
    other = SketchLayout({"i.q.weight": (9, 7)}, 32, "s", {"i.q.weight": (4, 4)})
    alone = unwrapped(2, 32)
    FactoredSums(alone, None, None).add(Product("i.q.weight", gq, x), other.maps["i.q.weight"])
    before = wrap(sums)
    both.add(Product("i.q.weight", gq, x), other.maps["i.q.weight"])  # the same input, another parent's sides
    torch.testing.assert_close(wrap(sums) - before, wrap(alone))
    del folded[3:]
    both.forget()
    both.add(Product("h.k.weight", gk, x), layout.maps["h.k.weight"])
    assert len(folded) == 5


@pytest.mark.parametrize("shape", [(9, 7), (7, 9)])
def test_gradients_that_had_to_be_formed_are_whitened_by_the_squares_of_their_sum(shape: tuple[int, int]) -> None:
    layout = SketchLayout({"w": shape}, 32, "s", {"w": (4, 4)})
    gradients = torch.randn(3, *shape, generator=torch.Generator().manual_seed(7))
    total = gradients.sum(0)
    whitening = Whitening({"w": SecondMoment(None, 0.9, 1e-8, 0)}, share=0.5)
    raw, whitened = unwrapped(3, 32), unwrapped(3, 32)
    sums = FactoredSums(raw, whitened, whitening)
    for sample, gradient in enumerate(gradients):
        sums.add(Piece("w", flatten(gradient), first=sample, total=flatten(total)[0]), layout.maps["w"])
    v = (0.5 * total) ** 2
    root = (torch.outer(v.mean(1), v.mean(0)) / v.mean()).pow(-0.25)
    for sample, gradient in enumerate(gradients):
        torch.testing.assert_close(wrap(raw)[sample], layout.sketch({"w": gradient}))
        torch.testing.assert_close(wrap(whitened)[sample], layout.sketch({"w": gradient * root}))
    alone = unwrapped(3, 32)
    FactoredSums(unwrapped(3, 32), alone, whitening).add(Piece("w", gradients_flat(gradients)), layout.maps["w"])
    torch.testing.assert_close(wrap(alone), wrap(whitened))


def gradients_flat(gradients: Tensor) -> Tensor:
    return torch.cat([flatten(gradient) for gradient in gradients])


def test_a_row_of_padding_gets_nothing() -> None:
    table = nn.Embedding(9, 7, padding_idx=2)
    formula = Embedding("e", table, {"weight": "e.weight"}, scale=3.0)
    ids, g = torch.tensor([[2, 4], [5, 2]]), torch.randn(2, 2, 7, generator=torch.Generator().manual_seed(8))
    work = Work([ids], [g], Segments.whole_rows(2, 2, 2), factored={"e.weight"})
    (part,) = formula.gradients(work)
    assert isinstance(part, Lookup)
    assert torch.equal(part.numbers, ids)
    torch.testing.assert_close(part.of_columns, 3.0 * g * (ids != 2)[:, :, None])


# --- the plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["observe", "fused"])
def test_the_plan_says_what_the_factored_route_costs(mode: str) -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1))
    modules = {module.name: module for module in plan(survey(model), mode=mode, tokens=10)}
    fc = modules["transformer.h.0.mlp.c_fc"]
    assert (fc.route, fc.entries) == ("factored", 768 * 3072 + 3072)
    assert fc.flops == 2 * 10 * (768 + 3072) + 2 * 10 * 64 * 64 + 2 * 64 * 64 + 10 * 3072
    assert fc.bytes == 4 * (10 * (768 + 3072) + 2 * 64 * 64)
    table, head = modules["transformer.wte"], modules["lm_head"]
    assert table.flops == 2 * 10 * 768 + 2 * 10 * 64 + 2 * 2048 * 64
    assert table.bytes == 4 * (10 * 768 + 2 * 2048 * 64)
    assert head.flops == 2 * 10 * (50257 + 768) + 2 * 10 * 2048 * 64 + 2 * 2048 * 64
    assert modules["transformer.ln_f"].route == "exact"
