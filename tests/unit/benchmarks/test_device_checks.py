"""The checks that run on a GPU, on the CPU: here the reference is the same, and only the device is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import overhead, workloads
from gpu import checks
from tiny import make_batch, tiny_gpt2, tiny_lora
from training_fixtures import one_thread
from transformers import LlamaForCausalLM

from attribution.capture.hooks import HookSet, Mode

__all__ = ["one_thread"]

both_models = pytest.mark.parametrize("make", [tiny_lora, tiny_gpt2])
both_modes = pytest.mark.parametrize("mode", ["observe", "fused"])


@both_models
@both_modes
def test_sketches_are_those_of_each_sample_alone(make: Any, mode: Mode) -> None:
    checks.capture_equals_autograd(make(), make_batch(), mode, "cpu")


@both_models
@both_modes
def test_samples_add_up_to_the_consumed_gradient(make: Any, mode: Mode) -> None:
    checks.samples_add_up(make(), make_batch(), mode, "cpu")


@both_models
def test_fused_gradients_are_the_plain_ones_but_for_rounding(make: Any) -> None:
    checks.fused_gradients_are_the_plain_ones(make(), make_batch(), "cpu")


@both_models
def test_observing_leaves_gradients_bit_identical(make: Any) -> None:
    checks.observing_leaves_gradients_bit_identical(make(), make_batch(), "cpu")


@both_modes
def test_no_module_makes_the_host_wait(mode: Mode) -> None:
    checks.waiting_does_not_grow_with_depth(checks.layered, make_batch(), mode, "cpu")


def test_a_module_that_reads_a_number_back_is_seen_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive = HookSet._arrive

    def and_look(hooks: HookSet, call: Any, gradients: Any) -> None:
        float(gradients[0].sum())
        arrive(hooks, call, gradients)

    monkeypatch.setattr(HookSet, "_arrive", and_look)
    with pytest.raises(AssertionError, match="waits"):
        checks.waiting_does_not_grow_with_depth(checks.layered, make_batch(), "observe", "cpu")


def test_a_layered_model_has_the_depth_that_it_is_asked_for() -> None:
    model = checks.layered(3)
    base = model.get_base_model()
    assert isinstance(base, LlamaForCausalLM)
    assert base.config.num_hidden_layers == len(base.model.layers) == 3


@both_modes
def test_a_run_in_bfloat16_is_recorded_and_closes(mode: Mode, tmp_path: Path) -> None:
    checks.a_recorded_run_closes("cpu", torch.bfloat16, mode, tmp_path)


def test_the_benchmarks_for_a_gpu_run_on_tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_QUICK", "1")
    (set_up,) = overhead.cuda(rows=2, tokens=8, device="cpu", sizes=("tiny",))
    checks.overhead_is_measured(set_up)
    checks.memory_is_measured(workloads.pythia_lora(tmp_path / "data", 2, 32, "tiny"), tmp_path)
