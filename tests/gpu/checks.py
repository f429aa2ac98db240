"""What must hold on every device, as functions of the device: ``test_on_gpu`` runs them on a GPU, and
``unit/benchmarks/test_device_checks`` runs the same code on the CPU, so that nothing but the device is new there.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import memory, overhead, workloads
from tiny import VOCABULARY, sample_loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from attribution.capture.conservation import conserve
from attribution.capture.hooks import HookSet, Mode
from attribution.capture.micro_batch import Captured
from attribution.capture.modules import find_tracked
from attribution.capture.oracle import sketch_each
from attribution.sketch.layout import SketchLayout
from attribution.training.audit_mode import AuditMode
from auditlog.ledger.reader import RunReader
from auditlog.trust.keys import Signer

RTOL = 1e-4  # float32, as on the CPU
EXACT = "highest"  # a GPU may round the factors of a matrix product to ten bits otherwise
DIM = 1024
# Operations that a GPU's host must wait for.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::_unique2"}


@dataclass(slots=True)
class Rig:
    """A model on a device with hooks on it.

    Attributes:
        model: In training mode.
        mode: Capture mode.
        device: Where it is.
    """

    model: nn.Module
    mode: Mode
    device: str

    def __post_init__(self) -> None:
        torch.set_float32_matmul_precision(EXACT)
        self.model = self.model.to(self.device).train()

    @contextmanager
    def hooked(self) -> Iterator[HookSet]:
        tracking = find_tracked(self.model)
        shapes = {name: tuple(p.shape) for name, p in tracking.parameters.items()}
        layout = SketchLayout(shapes, DIM).to(torch.device(self.device))
        hooks = HookSet(self.model, tracking, layout, mode=self.mode)
        hooks.attach()
        try:
            yield hooks
        finally:
            hooks.detach()

    def on(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch as a loader hands it over: ids stay with the host."""
        return {name: t if name == "sample_index" else t.to(self.device) for name, t in batch.items()}

    def step(self, batch: dict[str, Tensor]) -> tuple[Captured, SketchLayout, dict[str, Tensor]]:
        """Take a backward pass; returns what was captured, the layout and the parameters' gradients."""
        self.model.zero_grad()
        with self.hooked() as hooks:
            self.model(**self.on(batch)).loss.backward()
            ((captured,), _) = hooks.take()
            layout = hooks._layout
        return captured, layout, {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def capture_equals_autograd(model: nn.Module, batch: dict[str, Tensor], mode: Mode, device: str) -> None:
    """Each sample's sketch is that of its own gradient, from a backward pass of its own."""
    rig = Rig(model, mode, device)
    captured, layout, _ = rig.step(batch)
    placed = rig.on(batch)
    parameters = {n: p for n, p in rig.model.named_parameters() if p.requires_grad}
    loss_of = functools.partial(sample_loss, rig.model, placed)
    want = sketch_each(len(batch["input_ids"]), loss_of, parameters, layout)
    worst = ((captured.sketch - want).norm(dim=1) / want.norm(dim=1)).max()
    assert float(worst) < RTOL, f"sketches differ by {float(worst):.1e}"
    losses = torch.stack([loss_of(row).detach() for row in range(len(want))])
    torch.testing.assert_close(captured.loss, losses, rtol=1e-5, atol=1e-5)
    assert captured.sample_index.tolist() == batch["sample_index"].tolist()
    assert captured.flags.eq(0).all()


def samples_add_up(model: nn.Module, batch: dict[str, Tensor], mode: Mode, device: str) -> None:
    """The samples' weighted sketches are the sketch of the gradient that the optimizer gets."""
    captured, layout, gradients = Rig(model, mode, device).step(batch)
    closing = conserve(captured.expected, layout.sketch(gradients))
    assert abs(closing.factor - 1) < RTOL
    assert closing.residual < RTOL


def fused_gradients_are_the_plain_ones(model: nn.Module, batch: dict[str, Tensor], device: str) -> None:
    """Mode ``fused`` gives the optimizer what plain training gives it, but for rounding."""
    rig = Rig(model, "fused", device)
    _, _, found = rig.step(batch)
    found = {name: gradient.clone() for name, gradient in found.items()}
    rig.model.zero_grad()
    rig.model(**{k: v for k, v in rig.on(batch).items() if k != "sample_index"}).loss.backward()
    want = {name: p.grad for name, p in rig.model.named_parameters() if p.grad is not None}
    assert found.keys() == want.keys()
    for name, reference in want.items():
        assert (found[name] - reference).norm() <= 1e-5 * reference.norm() + 1e-7, name


def observing_leaves_gradients_bit_identical(model: nn.Module, batch: dict[str, Tensor], device: str) -> None:
    """Mode ``observe`` changes nothing at all."""
    rig = Rig(model, "observe", device)
    _, _, found = rig.step(batch)
    found = {name: gradient.clone() for name, gradient in found.items()}
    rig.model.zero_grad()
    rig.model(**{k: v for k, v in rig.on(batch).items() if k != "sample_index"}).loss.backward()
    for name, parameter in rig.model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, found[name]), name


def waits(rig: Rig, batch: dict[str, Tensor]) -> int:
    """Return how often the host waits for the device in a forward and backward pass, beyond the plain ones."""
    placed = rig.on(batch)
    plain = {name: t for name, t in placed.items() if name != "sample_index"}
    without = _counted(rig.device, lambda: rig.model(**plain).loss.backward())
    with rig.hooked() as hooks:
        rig.model(**placed).loss.backward()  # what is found out once, at the first batch, is no part of a step
        hooks.take()
        audited = _counted(rig.device, lambda: rig.model(**placed).loss.backward())
        hooks.take()
    return audited - without


def waiting_does_not_grow_with_depth(
    make: Callable[[int], nn.Module], batch: dict[str, Tensor], mode: Mode, device: str
) -> None:
    """No module makes the host wait: a model of twice the layers waits as often."""
    shallow, deep = (waits(Rig(make(layers), mode, device), batch) for layers in (2, 4))
    assert shallow == deep, f"{shallow} waits with two layers, {deep} with four"


def layered(layers: int) -> nn.Module:
    """Return a tiny Llama of this depth with LoRA on every linear layer, B non-zero."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=2
    )
    return workloads.with_lora(LlamaForCausalLM(config))


def a_recorded_run_closes(device: str, dtype: torch.dtype, mode: Mode, folder: Path) -> None:
    """A run on this device records every sample, and its steps close as well as the precision allows."""
    workload = workloads.pythia_lora(folder / "data", 3, 12, "tiny", device, dtype)
    optimizer = workload.optimizer(1e-3)
    signer = Signer.generate("bank.example/audit")
    options: dict[str, Any] = {
        "run": folder / "run",
        "signer": signer,
        "mode": mode,
        "on_head": lambda name, note: None,
    }
    with AuditMode(workload.model, optimizer, workload.manifest, **options) as audit:
        for batch in workload.batches:
            workload.model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.recorder.open_steps == 0
    with RunReader.open(folder / "run") as reader:
        records = reader.records()
        assert sorted(reader.sample_index(records).tolist()) == list(range(12))
        assert (records["grad_norm"] > 0).all()
        assert reader.final_note is not None


def overhead_is_measured(set_up: overhead.SetUp) -> None:
    """Every figure of a set-up is there and finite, and audit mode is seen to take time."""
    found = overhead.figures(set_up)
    for mode in set_up.modes:
        name = set_up.figure(mode)
        figure = f"{name}.net" if mode == "fused" else name
        low, high = found[f"{figure}.interval"]
        assert low <= found[figure] <= high
        assert found[f"{name}.gross"] > 0
        assert (found[f"{name}.replaced"] > 0) == (mode == "fused")
        assert found[f"{name}.writer_cpu"] > 0
        assert all(math.isfinite(value) for key, value in found.items() if isinstance(value, float))


def memory_is_measured(workload: workloads.Workload, folder: Path) -> None:
    """Both kinds of step have a peak with and without audit mode."""
    for kind, name in memory.FIGURES.items():
        table = memory.figures(kind, workload, folder / kind)[f"tables.{name}"]
        assert min(*table["plain_peak_mb"], *table["audited_peak_mb"]) > 0


def _counted(device: str, work: Callable[[], Any]) -> int:
    if device == "cpu":
        with _Waits() as seen:
            work()
        return int(seen.count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waited: list[Any] = [each for each in caught if "synchroniz" in str(each.message)]
    return len(waited)


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that would make a GPU's host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.name().partition(".")[0] in WAITS
        return func(*args, **(kwargs or {}))
