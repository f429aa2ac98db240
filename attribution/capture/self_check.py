"""The start-up self-check: on a few samples of the first batch, is what would be recorded what autograd says?

Runs before the first step, on the user's own model and batch, in evaluation mode (dropout would differ between a batch
and its samples alone). Touches neither ``.grad`` nor the random number generators. The loss is our own and separable
by sample, so the check covers capture, layout and sketch; what the loop's loss does is measured at every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from attribution.capture.batch import Batch
from attribution.capture.hooks import HookSet
from attribution.capture.micro_batch import MicroBatch
from attribution.capture.modules import Tracking, mixing_modules, unseen
from attribution.capture.oracle import gradient, gradient_by_backward
from attribution.capture.segments import Segments, Span
from attribution.errors import SelfCheckError, UnsupportedSetupError
from attribution.sketch.layout import SketchLayout

SAMPLES = 3
MANY_TOKENS = 256  # from this row length on two samples have to do
TOLERANCE, TOLERANCE_HALF = 1e-3, 5e-2
HOPELESS_HALF = 0.5  # in half precision a router may send a lone sample elsewhere; beyond this it is no rounding


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the self-check found.

    Attributes:
        samples: How many samples were compared.
        modules: Tracked modules that gradients reached, and how many there are.
        oracle_error: Largest relative error of a sample's sketch against autograd on that sample alone.
        sum_error: Relative error of the samples' sum against the batch's gradient.
        seconds: Wall time.
        confirmed: Both errors lie within the tolerance of the model's precision.
    """

    samples: int
    modules: tuple[int, int]
    oracle_error: float
    sum_error: float
    seconds: float
    confirmed: bool

    def summary(self) -> str:
        """Return what was found, in a line."""
        seen, every = self.modules
        return (
            f"self-check {'passed' if self.confirmed else 'could not confirm the sketches at this precision'}: "
            f"{self.samples} samples, {seen} of {every} modules, relative error {self.oracle_error:.1e} against each "
            f"sample alone and {self.sum_error:.1e} against the batch, {self.seconds:.1f} s"
        )

    def to_body(self) -> dict[str, Any]:
        """Return the body of the event that records it."""
        return {"notice": "self-check", **dataclasses.asdict(self), "modules": list(self.modules)}


def check(
    model: nn.Module,
    hooks: HookSet,
    tracking: Tracking,
    layout: SketchLayout,
    batch: Batch,
    segments: Segments,
    *,
    apart: bool = True,
) -> SelfCheck:
    """Compare a few samples' sketches with autograd, one sample at a time.

    Args:
        model: The model, hooks attached.
        hooks: Its hooks.
        tracking: Its tracked modules.
        layout: Where gradients land.
        batch: The first batch that is about to be trained on.
        segments: Its layout.
        apart: The samples do not see each other. If they are known to, only their sum is compared.

    Raises:
        SelfCheckError: If hooks do not fire, rows do not add up, or a sketch is not that sample's own.
        UnsupportedSetupError: If a module mixes the samples of a batch.
    """
    started = perf_counter()
    _refuse_mixing(model)
    part = _few(batch, segments, getattr(model, "config", None))
    with _undisturbed(model):
        try:
            found = _compare(model, hooks, tracking, layout, part, gradient, apart)
        except RuntimeError as error:
            if "incompatible with .grad()" not in str(error):
                raise
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise UnsupportedSetupError(
                    "reentrant gradient checkpointing cannot be checked under DistributedDataParallel",
                    "Use use_reentrant=False, or switch the check off: AuditMode(…, self_check=False).",
                ) from error
            found = _compare(model, hooks, tracking, layout, part, gradient_by_backward, apart)
    oracle_error, sum_error, modules, is_half = found
    _refuse_difference(oracle_error, sum_error, HOPELESS_HALF if is_half else TOLERANCE, part.segments.is_packed)
    return SelfCheck(
        samples=part.segments.samples,
        modules=(modules, len(tracking.formulas)),
        oracle_error=oracle_error,
        sum_error=sum_error,
        seconds=perf_counter() - started,
        confirmed=max(oracle_error, sum_error) <= (TOLERANCE_HALF if is_half else TOLERANCE),
    )


def _compare(
    model: nn.Module,
    hooks: HookSet,
    tracking: Tracking,
    layout: SketchLayout,
    part: _Part,
    gradient_of: Callable[[Tensor, Mapping[str, nn.Parameter]], dict[str, Tensor]],
    apart: bool,
) -> tuple[float, float, int, bool]:
    """Return the errors against each sample alone and against the batch, modules seen, and if in half precision."""
    micro = MicroBatch(torch.arange(part.segments.samples), part.segments, None, layout)
    with hooks.aside(micro):
        outputs = _run_hooked(part, model, hooks)
        losses = [part.loss(outputs, i) for i in range(part.segments.samples)]
        whole = gradient_of(torch.stack(losses).sum(), tracking.parameters)
    summed = layout.sketch(whole)
    captured = micro.close()
    _refuse_silence(tracking, micro.arrived, {name for name, grad in whole.items() if bool(grad.any())})
    sketch = torch.zeros_like(summed)[None] if captured is None else captured.sketch
    sum_error = float((sketch.sum(0) - summed).norm() / _size(summed[None]))
    oracle_error = 0.0
    if apart:
        with hooks.silent():
            alone = [part.alone(i) for i in range(part.segments.samples)]
            oracle = torch.stack(
                [layout.sketch(gradient_of(one.loss(one.run(model), 0), tracking.parameters)) for one in alone]
            )
        oracle_error = float(((sketch - oracle).norm(dim=1) / _size(oracle)).max())
    return oracle_error, sum_error, len(micro.arrived), micro.is_half


@dataclass(frozen=True, slots=True)
class _Part:
    """A few samples of a batch, to be run as they stand."""

    fields: Mapping[str, Any]
    others: tuple[Any, ...]
    segments: Segments

    def run(self, model: nn.Module) -> Tensor:
        """Return what the model computes for them: logits, or whatever floating-point tensor comes first."""
        output = model(*self.others, **self.fields)
        leaves = [output] if isinstance(output, Tensor) else _values(output)
        found = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad and t.ndim > 1]
        if not found:
            raise SelfCheckError(
                "the model returns no tensor with a leading batch dimension that depends on a trained parameter",
                "Return logits from forward, or switch the check off: AuditMode(…, self_check=False).",
            )
        return found[0]

    def loss(self, outputs: Tensor, sample: int) -> Tensor:
        """Return a loss of one sample that no other sample enters."""
        if outputs.ndim > 1 and self.segments.is_packed and outputs.shape[1] == self.segments.length - 1:
            outputs = nn.functional.pad(outputs, (0, 1))  # one log-probability less than tokens
        mine = self.segments.cut(outputs, sample)
        if mine is None:
            raise SelfCheckError(
                f"the model's output {tuple(outputs.shape)} does not have the batch's rows or tokens in front",
                "Return one output per row or token, or switch the check off: AuditMode(…, self_check=False).",
            )
        return (mine.float() + 1).square().sum() / (2 * (outputs.shape[-1] if outputs.ndim > 2 else 1))

    def alone(self, sample: int) -> _Part:
        """Return one sample as a batch of its own."""

        def own(value: Any) -> Any:
            cut = self.segments.cut(value, sample) if isinstance(value, Tensor) else None
            return value if cut is None else cut

        if self.segments.spans is None:
            rows = self.segments.rows // self.segments.samples
            alone = Segments.whole_rows(1, rows)
        else:
            length = sum(span.end - span.start for span in self.segments.spans[sample])
            alone = Segments(1, 1, ((Span(0, 0, length),),), length)
        return _Part({k: own(v) for k, v in self.fields.items()}, tuple(own(v) for v in self.others), alone)


def _few(batch: Batch, segments: Segments, config: Any) -> _Part:
    """Return the first samples of a batch; packed rows are checked whole."""
    if segments.spans is not None:
        # Models keep packed documents apart only without a cache, which evaluation mode may switch on.
        without = {"use_cache": False} if hasattr(config, "use_cache") else {}
        return _Part({**batch.fields, **without}, batch.others, segments)
    token_ids = batch.token_ids
    few = 2 if token_ids is not None and token_ids.shape[-1] > MANY_TOKENS else SAMPLES
    few = min(few, segments.samples)
    blocks = segments.rows // segments.samples

    def first(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or len(value) != segments.rows:
            return value
        return value.unflatten(0, (blocks, segments.samples))[:, :few].flatten(0, 1)

    fields = {key: first(value) for key, value in batch.fields.items()}
    return _Part(fields, tuple(map(first, batch.others)), Segments.whole_rows(few, few * blocks))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, with gradients put aside; put modes, gradients and random numbers back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        model.eval()
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in gradients:
                parameter.grad = grad
            model.train(modes[0][1])  # some modules drop what they cached in evaluation mode
            for module, mode in modes:
                module.training = mode


def _values(output: Any) -> list[Any]:
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    first = [named.get("logits"), named.get("log_probs")]
    rest = list(output) if isinstance(output, tuple | list) else list(named.values())
    return [value for value in (*first, *rest) if value is not None]


def _size(sketches: Tensor) -> Tensor:
    """Return the norm of each row; 1 where nothing arrived."""
    norm = sketches.norm(dim=1)
    return torch.where(norm > 0, norm, torch.ones_like(norm))


def _refuse_mixing(model: nn.Module) -> None:
    mixing = mixing_modules(model)
    if mixing:
        raise UnsupportedSetupError(
            f"{mixing[0]} normalises over the batch, so there is no gradient per sample ({len(mixing)} such modules)",
            "Put batch normalisation into evaluation mode after model.train(), or use a norm over features.",
        )


def _run_hooked(part: _Part, model: nn.Module, hooks: HookSet) -> Tensor:
    """Run the model with hooks at work; say so if only that makes it fail."""
    try:
        return part.run(model)
    except (RuntimeError, ValueError, IndexError) as error:
        if "incompatible with .grad()" in str(error):
            raise
        with hooks.silent():
            part.run(model)  # fails too if the fault is the model's own
        raise UnsupportedSetupError(
            f"the model fails as soon as audit mode looks at it: {str(error).splitlines()[0]}",
            "One embedding for a whole batch that is repeated afterwards (prompt tuning) cannot be told apart by "
            "sample. Leave it out: allow_untracked=['*prompt_encoder*'].",
        ) from error


def _refuse_silence(tracking: Tracking, arrived: set[str], names: set[str]) -> None:
    blind = unseen(tracking, arrived, names)
    if not blind:
        return
    total = len(tracking.formulas)
    shown = ", ".join(blind[:3]) + (f" and {len(blind) - 3} more" if len(blind) > 3 else "")
    raise SelfCheckError(
        f"captured {total - len(blind)} of {total} modules: parameters of {shown} have a gradient that no hook saw",
        "Their weights are read without calling the module, or the model was compiled, merged or wrapped before. "
        "Attach audit mode first, with adapters active and unmerged, or leave those out with allow_untracked.",
    )


def _refuse_difference(oracle_error: float, sum_error: float, limit: float, is_packed: bool) -> None:
    if sum_error > limit:
        raise SelfCheckError(
            f"the samples' gradients do not add up to the batch's: relative error {sum_error:.2g}",
            "A tracked module is used in a way that its hook does not see (its weight is read directly, or it runs "
            "compiled). Leave it out with allow_untracked, or report the model's class to us.",
        )
    if oracle_error > limit:
        what = "documents of one row see each other" if is_packed else "samples of one batch influence each other"
        raise SelfCheckError(
            f"{what}: a sample's sketch in the batch differs from its own by {oracle_error:.2g}",
            "Use an attention implementation that keeps packed documents apart (position_ids that restart, no "
            "attention_mask), or do not pack."
            if is_packed
            else "Look for operations over the batch dimension; leave their modules out with allow_untracked.",
        )
