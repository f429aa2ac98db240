"""The device-agnostic paths on a GPU: ``make test`` collects them where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import overhead, workloads
from gpu import checks
from tiny import make_batch, tiny_gpt2, tiny_lora

from attribution.capture.hooks import Mode

pytestmark = pytest.mark.gpu

both_models = pytest.mark.parametrize("make", [tiny_lora, tiny_gpt2])
both_modes = pytest.mark.parametrize("mode", ["observe", "fused"])


@both_models
@both_modes
def test_sketches_are_those_of_each_sample_alone(make: Any, mode: Mode) -> None:
    checks.capture_equals_autograd(make(), make_batch(), mode, "cuda")


@both_models
@both_modes
def test_samples_add_up_to_the_consumed_gradient(make: Any, mode: Mode) -> None:
    checks.samples_add_up(make(), make_batch(), mode, "cuda")


@both_models
def test_fused_gradients_are_the_plain_ones_but_for_rounding(make: Any) -> None:
    checks.fused_gradients_are_the_plain_ones(make(), make_batch(), "cuda")


@both_models
def test_observing_leaves_gradients_bit_identical(make: Any) -> None:
    checks.observing_leaves_gradients_bit_identical(make(), make_batch(), "cuda")


@both_modes
def test_no_module_makes_the_host_wait(mode: Mode) -> None:
    checks.waiting_does_not_grow_with_depth(checks.layered, make_batch(), mode, "cuda")


@both_modes
def test_a_run_in_bfloat16_is_recorded_and_closes(mode: Mode, tmp_path: Path) -> None:
    checks.a_recorded_run_closes("cuda", torch.bfloat16, mode, tmp_path)


def test_the_benchmarks_run_on_it(tmp_path: Path) -> None:
    (set_up,) = overhead.cuda(rows=2, tokens=8, sizes=("tiny",))
    checks.overhead_is_measured(set_up)
    checks.memory_is_measured(workloads.pythia_lora(tmp_path / "data", 2, 32, "tiny", "cuda", torch.bfloat16), tmp_path)
