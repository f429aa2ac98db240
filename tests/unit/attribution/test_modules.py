"""Which parameters are tracked, by which module, and how what is left is named."""

from __future__ import annotations

import pytest
import torch
from setups import models
from tiny import tiny_llama, tiny_lora
from torch import Tensor, nn

from attribution.capture.formulas import Linear, Recomputed
from attribution.capture.modules import compiled_modules, find_tracked, mixing_modules, survey
from attribution.errors import CoverageGapError


class Scaled(nn.Module):
    """Bare parameters in a container, beside a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(4))})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gains[0] * self.gains[1] + self.named["shift"]


class Counted(nn.Embedding):
    """A table whose gradient depends on the whole batch."""

    def __init__(self) -> None:
        super().__init__(9, 4, scale_grad_by_freq=True)


class TiedToCounted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.other, self.head = Counted(), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.other(self.table(ids)))


@pytest.mark.parametrize(
    "make", [tiny_llama, tiny_lora, models.gpt2, models.mixtral, models.gpt_oss, models.attention, Scaled]
)
def test_every_trainable_parameter_belongs_to_a_module_exactly_as_often_as_it_is_used(make: type[nn.Module]) -> None:
    model = make()
    tracking = find_tracked(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert tracking.parameters.keys() == tracking.trainable.keys() == trainable
    assert tracking.coverage == 1
    assert not tracking.reasons
    by_place = [(formula.name, own) for formula in tracking.formulas for own in formula.parameters]
    assert len(by_place) == len(set(by_place))


def test_a_weight_of_two_modules_appears_once_and_is_captured_at_both() -> None:
    tracking = find_tracked(models.gpt2())
    assert [name for name in tracking.parameters if "wte" in name or "head" in name] == ["transformer.wte.weight"]
    users = [f.name for f in tracking.formulas if "transformer.wte.weight" in f.parameters.values()]
    assert users == ["transformer.wte", "lm_head"]


def test_parameters_in_a_container_belong_to_the_module_that_uses_them() -> None:
    formulas = {formula.name: formula for formula in find_tracked(Scaled()).formulas}
    assert formulas.keys() == {"", "inner"}
    assert isinstance(formulas[""], Recomputed)
    assert set(formulas[""].parameters) == {"gains.0", "gains.1", "named.shift"}


def test_a_module_that_does_not_call_its_children_is_tracked_as_a_whole() -> None:
    formulas = {formula.name: formula for formula in find_tracked(models.attention()).formulas}
    inside = formulas["body.attention"]
    assert isinstance(inside, Recomputed)
    assert set(inside.parameters) == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    assert "body.attention.out_proj" not in formulas


def test_what_cannot_be_tracked_is_refused_by_name_and_with_the_reason_unless_allowed() -> None:
    model = models.mlp(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(CoverageGapError, match=r"2 trainable parameters \(16.16%") as caught:
        find_tracked(model)
    assert "batch normalisation mixes samples" in str(caught.value)
    assert "allow_untracked=['body.1.weight'" in caught.value.advice()
    tracking = find_tracked(model, ["*.1.*"])
    assert tracking.untracked == {"body.1.weight": 8, "body.1.bias": 8}
    assert tracking.coverage == pytest.approx(1 - 16 / 99)
    assert [tuple(p.shape) for p in tracking.left_out] == [(8,), (8,)]


def test_a_gap_that_is_allowed_in_part_is_refused_for_the_rest() -> None:
    model = models.mlp(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(CoverageGapError, match=r"1 trainable parameters .*body\.1\.bias"):
        find_tracked(model, ["*.1.weight"])


def test_a_weight_shared_with_a_module_that_cannot_be_tracked_is_not_tracked_at_all() -> None:
    tracking = survey(TiedToCounted())
    assert set(tracking.untracked) == {"table.weight"}
    assert "scale_grad_by_freq" in tracking.reasons["table.weight"]
    assert [formula.name for formula in tracking.formulas] == ["other"]


def test_nothing_trainable_and_nothing_trackable_are_told_apart() -> None:
    with pytest.raises(CoverageGapError, match="no trainable parameter"):
        find_tracked(tiny_llama().requires_grad_(False))
    with pytest.raises(CoverageGapError, match="none of the trainable parameters can be tracked"):
        find_tracked(models.mlp(nn.BatchNorm1d(4)), ["*"])


def test_frozen_modules_and_frozen_parts_are_left_out() -> None:
    model = models.relu_in_place()
    model.body[0].weight.requires_grad_(False)
    model.body[2].requires_grad_(False)
    (formula,) = find_tracked(model).formulas
    assert isinstance(formula, Linear)
    assert formula.parameters == {"bias": "body.0.bias"}


def test_modules_that_mix_samples_or_are_compiled_are_found() -> None:
    model = models.mlp(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    assert mixing_modules(model.train()) == ["body.1"]
    assert mixing_modules(model.eval()) == []
    assert compiled_modules(model) == []
    model.body[0].compile(backend="eager")
    assert compiled_modules(model) == ["body.0"]
