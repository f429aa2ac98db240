"""The start-up self-check: on a few samples of the first batch, is what would be recorded what autograd says?

Runs before the first step, on the user's own model and batch, with dropout switched off (it would differ between a
batch and its samples alone). Touches neither ``.grad`` nor buffers nor random number generators. The loss is our own
and separable by sample, so the check covers capture, layout and sketch; what the loop's loss does is measured at every
step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from attribution.capture.batch import Batch, with_fields
from attribution.capture.hooks import HookSet
from attribution.capture.micro_batch import MicroBatch
from attribution.capture.modules import Tracking, mixing_modules, refuse_unseen
from attribution.capture.oracle import gradient, gradient_by_backward
from attribution.capture.segments import Segments, Span
from attribution.capture.undisturbed import undisturbed
from attribution.errors import SelfCheckError, UnsupportedSetupError
from attribution.sketch.layout import SketchLayout

SAMPLES = 2  # enough to show an exchange, a leak or a mixture
TOLERANCE, TOLERANCE_HALF = 1e-3, 5e-2
HOPELESS_HALF = 0.5  # in half precision a router may send a lone sample elsewhere; beyond this it is no rounding


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the self-check found.

    Attributes:
        samples: How many samples were compared.
        modules: Tracked modules that gradients reached, and how many there are.
        oracle_error: Largest relative error of a sample's sketch against autograd on that sample alone; ``None`` if
            samples see each other, so that only their sum was compared.
        sum_error: Relative error of the samples' sum against the batch's gradient.
        seconds: Wall time.
        confirmed: Both errors lie within the tolerance of the model's precision.
        mode: In which the model trains: ``"training"``, here with dropout switched off, or ``"evaluation"``.
        seen: The names of those modules; not part of the event.
    """

    samples: int
    modules: tuple[int, int]
    oracle_error: float | None
    sum_error: float
    seconds: float
    confirmed: bool
    mode: str
    seen: frozenset[str] = frozenset()

    def summary(self) -> str:
        """Return what was found, in a line."""
        seen, every = self.modules
        alone = "" if self.oracle_error is None else f"{self.oracle_error:.1e} against each sample alone and "
        result = (
            "passed"
            if self.confirmed
            else (
                "could not confirm the sketches (half precision, or random numbers or a mixture that only training has)"
            )
        )
        return (
            f"self-check {result}: {self.samples} samples, {seen} of {every} modules, relative error {alone}"
            f"{self.sum_error:.1e} against the batch, in {self.mode} mode, {self.seconds:.1f} s"
        )

    def to_body(self) -> dict[str, Any]:
        """Return the body of the event that records it."""
        body = {"notice": "self-check", **dataclasses.asdict(self), "modules": list(self.modules)}
        del body["seen"]
        return body


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
    part = _few(batch, segments)
    rig = _Rig(model, hooks, tracking, layout, part, apart)
    found = rig.compare(training=model.training)
    if not found.is_close:
        # Training may draw random numbers that no dropout draws; then evaluation mode says whether capture is right.
        judged = rig.compare(training=False) if model.training else found
        limit = HOPELESS_HALF if judged.is_half else TOLERANCE
        _refuse_difference(judged.oracle_error, judged.sum_error, limit, part.segments.is_packed)
    return SelfCheck(
        samples=part.segments.samples,
        modules=(len(found.seen), len(tracking.formulas)),
        oracle_error=found.oracle_error,
        sum_error=found.sum_error,
        seconds=perf_counter() - started,
        confirmed=found.is_close,
        mode="training" if model.training else "evaluation",
        seen=found.seen,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What one comparison gave."""

    oracle_error: float | None
    sum_error: float
    seen: frozenset[str]
    is_half: bool

    @property
    def is_close(self) -> bool:
        """Whether rounding explains both errors; false where one is not finite."""
        limit = TOLERANCE_HALF if self.is_half else TOLERANCE
        return self.sum_error <= limit and (self.oracle_error is None or self.oracle_error <= limit)


@dataclass(frozen=True, slots=True)
class _Rig:
    """Everything that a comparison needs."""

    model: nn.Module
    hooks: HookSet
    tracking: Tracking
    layout: SketchLayout
    part: _Part
    apart: bool

    def compare(self, *, training: bool) -> _Found:
        """Compare in training mode without dropout, or in evaluation mode."""
        with _undisturbed(self.model, training):
            try:
                return self._compare(gradient)
            except RuntimeError as error:
                if "incompatible with .grad()" not in str(error):
                    raise
                if torch.distributed.is_available() and torch.distributed.is_initialized():
                    raise UnsupportedSetupError(
                        "reentrant gradient checkpointing cannot be checked under DistributedDataParallel",
                        "Use use_reentrant=False, or switch the check off: AuditMode(…, self_check=False).",
                    ) from error
                return self._compare(gradient_by_backward)

    def _compare(self, gradient_of: Callable[[Tensor, Mapping[str, nn.Parameter]], dict[str, Tensor]]) -> _Found:
        part, parameters, layout = self.part, self.tracking.parameters, self.layout
        micro = MicroBatch(torch.arange(part.segments.samples), part.segments, None, layout)
        with self.hooks.aside(micro):
            outputs = _run_hooked(part, self.model, self.hooks)
            losses = [part.loss(outputs, i) for i in range(part.segments.samples)]
            whole = gradient_of(torch.stack(losses).sum(), parameters)
        captured, summed = micro.close(), layout.sketch(whole)
        names = {name for name, grad in whole.items() if bool(grad.any())}
        refuse_unseen(self.tracking, micro.arrived, names, "self-check", SelfCheckError)
        sketch = torch.zeros_like(summed)[None] if captured is None else captured.sketch
        oracle_error = None
        if self.apart:
            with self.hooks.silent():
                alone = [part.alone(i) for i in range(part.segments.samples)]
                oracle = torch.stack(
                    [layout.sketch(gradient_of(one.loss(one.run(self.model), 0), parameters)) for one in alone]
                )
            oracle_error = float(((sketch - oracle).norm(dim=1) / _size(oracle)).max())
        sum_error = float((sketch.sum(0) - summed).norm() / _size(summed[None]))
        return _Found(oracle_error, sum_error, frozenset(micro.arrived), micro.is_half)


@dataclass(frozen=True, slots=True)
class _Part:
    """A few samples of a batch, to be run as they stand."""

    fields: Mapping[str, Any]
    others: tuple[Any, ...]
    segments: Segments
    mapping: Any  # the whole batch, if the model takes it as one argument

    def run(self, model: nn.Module) -> Tensor:
        """Return what the model computes for them: logits, or whatever floating-point tensor comes first."""
        if self.mapping is None:
            output = model(*self.others, **self.fields)
        else:
            output = model(with_fields(self.mapping, self.fields))
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
            alone = Segments.whole_rows(1, rows, self.segments.length)
        else:
            length = sum(span.end - span.start for span in self.segments.spans[sample])
            alone = Segments(1, 1, ((Span(0, 0, length),),), length)
        return _Part(
            {k: own(v) for k, v in self.fields.items()}, tuple(own(v) for v in self.others), alone, self.mapping
        )


def _few(batch: Batch, segments: Segments) -> _Part:
    """Return the first samples of a batch; packed rows are checked whole."""
    if segments.spans is not None:
        return _Part(batch.fields, batch.others, segments, batch.mapping)
    few = min(SAMPLES, segments.samples)
    blocks = segments.rows // segments.samples

    def first(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or len(value) != segments.rows:
            return value
        return value.unflatten(0, (blocks, segments.samples))[:, :few].flatten(0, 1)

    fields = {key: first(value) for key, value in batch.fields.items()}
    return _Part(
        fields,
        tuple(map(first, batch.others)),
        Segments.whole_rows(few, few * blocks, segments.length),
        batch.mapping,
    )


@contextmanager
def _undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """Switch dropout off, or to evaluation mode, with gradients put aside; put everything back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    dropout = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and 0 < value < 1 and (_is_dropout(module) or "dropout" in name)
    ]
    with undisturbed(model), torch.enable_grad():
        if not training:
            model.eval()
        for module, name, _ in dropout:
            setattr(module, name, 0.0)
        for config in caching:  # evaluation mode may switch caches on, and some models write into them in place
            config.use_cache = False
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for config in caching:
                config.use_cache = True
            for module, name, rate in dropout:
                setattr(module, name, rate)
            for parameter, grad in gradients:
                parameter.grad = grad
            model.train(modes[0][1])  # some modules drop what they cached in evaluation mode
            for module, mode in modes:
                module.training = mode


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


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


def _refuse_difference(oracle_error: float | None, sum_error: float, limit: float, is_packed: bool) -> None:
    if not math.isfinite(sum_error + (oracle_error or 0.0)):
        raise SelfCheckError(
            "the model's output or gradient is not finite on the first batch",
            "Look at the weights and the first rows; to train all the same: AuditMode(…, self_check=False).",
        )
    if sum_error > limit:
        raise SelfCheckError(
            f"the samples' gradients do not add up to the batch's: relative error {sum_error:.2g}",
            "A tracked module is used in a way that its hook does not see (its weight is read directly, or it runs "
            "compiled). Leave it out with allow_untracked, or report the model's class to us.",
        )
    if oracle_error is not None and oracle_error > limit:
        what = "documents of one row see each other" if is_packed else "samples of one batch influence each other"
        raise SelfCheckError(
            f"{what}: a sample's sketch in the batch differs from its own by {oracle_error:.2g}",
            "Use an attention implementation that keeps packed documents apart (position_ids that restart, no "
            "attention_mask), or do not pack."
            if is_packed
            else "Look for operations over the batch dimension; leave their modules out with allow_untracked.",
        )
