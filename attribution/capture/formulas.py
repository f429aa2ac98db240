"""How each kind of module gets its per-sample gradients, and how a module is recognised.

Recognised by class where torch or PEFT own the class, else by what the module computes (``elementwise_unit``), never
by a model's name. What no formula fits is recomputed sample by sample, which is exact too and costs a forward pass.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attribution.capture import per_sample
from attribution.capture.per_sample import Entries, Lookup, Part, Piece, Product, Room
from attribution.capture.recompute import CallShape, call_again, flatten_call, gradient_of
from attribution.capture.segments import Segments
from attribution.errors import CaptureError
from attribution.sketch.layout import flatten

try:
    from transformers.pytorch_utils import Conv1D
except ImportError:  # a plain torch loop needs no transformers

    class Conv1D(nn.Module):  # type: ignore[no-redef]
        """Stands in where transformers is not installed; no module is an instance of it."""


try:
    from peft.tuners.lora.dora import DoraLinearLayer
except ImportError:

    class DoraLinearLayer(nn.Module):  # type: ignore[no-redef]
        """Stands in where PEFT is not installed."""


class Work(NamedTuple):
    """One module's share of one backward pass.

    Attributes:
        kept: What ``Formula.keep`` asked for on the forward pass.
        output_grads: Gradient w.r.t. each output, ``None`` where none arrived.
        segments: Layout of the micro-batch.
        room: Gives memory to overwrite.
        needs_totals: Pieces must come with the sum over all samples, if that is not the sum of their own rows.
        factored: Names of the parameters whose gradients are not to be formed.
    """

    kept: Sequence[Any]
    output_grads: Sequence[Tensor | None]
    segments: Segments
    room: Room = per_sample.own_room
    needs_totals: bool = False
    factored: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Formula(ABC):
    """How one module's trainable parameters get their per-sample gradients.

    Attributes:
        name: The module's name in the model.
        module: The module.
        parameters: Names in the model of its trainable parameters, by their name within the module.
    """

    route: ClassVar[str] = "exact"
    kind: ClassVar[str] = ""

    name: str
    module: nn.Module
    parameters: Mapping[str, str]

    @abstractmethod
    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return what the backward pass needs; floating-point tensors are kept as saved tensors."""

    @abstractmethod
    def gradients(self, work: Work) -> Iterator[Part]:
        """Yield the per-sample gradients of every parameter in ``parameters``, float32."""

    def flops(self, tokens: int) -> int:
        """Return the floating-point operations that forming one sample's gradients takes, beyond folding them."""
        return 2 * tokens * sum(self.module.get_parameter(own).numel() for own in self.parameters)

    def bytes_moved(self, tokens: int) -> int | None:
        """Return the memory read and written for one sample in float32; ``None`` if the module's inside decides."""
        return None


@dataclass(frozen=True, slots=True)
class Linear(Formula):
    """``nn.Linear``, and Hugging Face's ``Conv1D``, which stores its weight transposed."""

    kind: ClassVar[str] = "linear"

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored ``(d_in, d_out)``."""
        return isinstance(self.module, Conv1D)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Keep the input where the weight is trained."""
        return [(*args, *kwargs.values())[0]] if "weight" in self.parameters else []

    def gradients(self, work: Work) -> Iterator[Part]:
        """Form ``Σ_t g_t x_tᵀ`` and ``Σ_t g_t``."""
        (grad,) = work.output_grads
        assert grad is not None
        g = work.segments.by_sample(grad, self.name)  # (S, T, d_out)
        if "weight" in self.parameters:
            x = work.segments.by_sample(work.kept[0], self.name)  # (S, T, d_in)
            if self.parameters["weight"] in work.factored:
                yield Product(self.parameters["weight"], *((x, g) if self.transposed else (g, x)))
            else:
                for start, values in per_sample.linear_weight(x, g, self.transposed, work.room):
                    yield Piece(self.parameters["weight"], values, start)
        if "bias" in self.parameters:
            yield Piece(self.parameters["bias"], per_sample.linear_bias(g))

    def bytes_moved(self, tokens: int) -> int | None:
        """Return input and output gradient read once, the product written and folded."""
        return 4 * (tokens * sum(self.module.weight.shape) + 2 * self.module.weight.numel())


@dataclass(frozen=True, slots=True)
class Embedding(Formula):
    """``nn.Embedding``, also where a subclass multiplies its output by a constant."""

    kind: ClassVar[str] = "embedding"
    scale: float = 1.0

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Keep the ids."""
        return [(*args, *kwargs.values())[0]]

    def gradients(self, work: Work) -> Iterator[Part]:
        """Add each token's gradient to its row of the table."""
        (grad,) = work.output_grads
        assert grad is not None
        table = self.module.weight
        g = work.segments.by_sample(grad, self.name)  # (S, T, d)
        ids = work.segments.by_sample(work.kept[0][..., None], self.name)[..., 0]  # (S, T)
        g, ids, name = g if self.scale == 1.0 else g * self.scale, ids.to(g.device), self.parameters["weight"]
        if name in work.factored:
            yield Lookup(name, ids, per_sample.without_padding(ids, g, self.module.padding_idx))
        else:
            yield Entries(name, *per_sample.embedding_weight(ids, g, len(table), self.module.padding_idx))

    def flops(self, tokens: int) -> int:
        """Return one addition per token and feature."""
        return tokens * self.module.weight.shape[1]

    def bytes_moved(self, tokens: int) -> int | None:
        """Return the gradient, and a sign and a bucket for each of its entries."""
        return 4 * 3 * tokens * self.module.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Elementwise(Formula):
    """A module whose output is affine in a vector over features: ``y = (w + k) ∘ h(x) + b + r(x)``.

    Normalisations of every name, and DoRA's magnitude. ``h`` is what the module itself returns for a fitting vector,
    so neither its epsilon nor its way of rounding is assumed.

    Attributes:
        unit: Value of ``w`` for which ``y = h(x)`` without a bias; ``None`` takes the difference ``y(1) - y(0)``.
    """

    kind: ClassVar[str] = "elementwise"
    unit: float | None = None

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Keep the whole call if the vector is trained."""
        if "weight" not in self.parameters:
            return []
        leaves, shape = flatten_call(args, kwargs, self.module.weight.device.type)
        return [shape, *leaves]

    def gradients(self, work: Work) -> Iterator[Part]:
        """Form ``Σ_t g_t ∘ h_t`` and ``Σ_t g_t``."""
        (grad,) = work.output_grads
        assert grad is not None
        g = work.segments.by_sample(grad, self.name)  # (S, T, d)
        if "weight" in self.parameters:
            h = self._at(work, 1.0) - self._at(work, 0.0) if self.unit is None else self._at(work, self.unit)
            yield Piece(self.parameters["weight"], (g * work.segments.by_sample(h, self.name)).sum(1))
        if "bias" in self.parameters:
            yield Piece(self.parameters["bias"], g.sum(1))

    def flops(self, tokens: int) -> int:
        """Return the module's own pass, taken as five operations per entry, and the product with the gradient."""
        return (5 + 2) * tokens * self.module.weight.numel()

    def bytes_moved(self, tokens: int) -> int | None:
        """Return input, ``h`` and gradient."""
        return 4 * 3 * tokens * self.module.weight.numel()

    def _at(self, work: Work, value: float) -> Tensor:
        """Return the module's output for a constant vector and no bias."""
        shape, *leaves = work.kept
        other = {"weight": torch.full_like(self.module.weight, value)}
        if getattr(self.module, "bias", None) is not None:
            other["bias"] = torch.zeros_like(self.module.bias)
        (output,) = call_again(self.module, shape, leaves, other)
        assert output is not None
        return output


@dataclass(frozen=True, slots=True)
class Recomputed(Formula):
    """Any module at all: run again on one sample at a time, differentiated by autograd."""

    route: ClassVar[str] = "recomputed"
    kind: ClassVar[str] = "any module"

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Keep the whole call."""
        leaves, shape = flatten_call(args, kwargs, next(self.module.parameters()).device.type)
        return [shape, *leaves]

    def gradients(self, work: Work) -> Iterator[Part]:
        """Take autograd's gradient for one sample after the other."""
        shape: CallShape = work.kept[0]
        tensors = [leaf for leaf in work.kept[1:] if isinstance(leaf, Tensor)]
        if all(work.segments.cut(leaf, 0) is None for leaf in tensors):
            raise CaptureError(
                f"module {self.name}: no argument of its call has the batch's rows in front, so what it computes "
                "belongs to no sample",
                "A weight that is computed from others (weight_norm, another parametrization) has no gradient per "
                "sample here: remove the parametrization, or leave the module out with allow_untracked.",
            )
        if work.segments.is_ambiguous([leaf.shape for leaf in tensors]):
            raise CaptureError(
                f"module {self.name}: the batch has as many rows as tokens, so its two-dimensional argument may belong "
                "to rows or to tokens",
                "Pad this batch by one token, or leave the module out with allow_untracked.",
            )
        own = {name: self.module.get_parameter(name) for name in self.parameters}
        rerun = functools.partial(gradient_of, self.module, shape, work.kept[1:], work.output_grads, own, work.segments)
        totals = {name: flatten(grad)[0] for name, grad in rerun(None).items()} if work.needs_totals else {}
        for sample in range(work.segments.samples):
            for name, grad in rerun(sample).items():
                yield Piece(self.parameters[name], flatten(grad), first=sample, total=totals.get(name))

    def flops(self, tokens: int) -> int:
        """Return a forward and a backward pass of the module; the number of parameters used is not known."""
        return 6 * tokens * sum(p.numel() for p in self.module.parameters())


def formula_for(name: str, module: nn.Module, parameters: Mapping[str, str]) -> Formula | str:
    """Return how the module's parameters can be tracked, or why they cannot.

    Args:
        name: The module's name in the model.
        module: The module.
        parameters: Its trainable parameters: name within the module -> name in the model.
    """
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return Linear(name, module, parameters)
    if isinstance(module, Conv1D) and kind.forward is Conv1D.forward:
        return Linear(name, module, parameters)
    if isinstance(module, nn.Embedding) and (scale := _embedding_scale(module)) is not None:
        return Embedding(name, module, parameters, scale)
    if type(module) is DoraLinearLayer:
        return Elementwise(name, module, parameters)
    if set(parameters) <= {"weight", "bias"} and (unit := elementwise_unit(module)) is not None:
        return Elementwise(name, module, parameters, unit)
    return _why_not(module) or Recomputed(name, module, parameters)


def route_of(formula: Formula, factored: Collection[str]) -> str:
    """Return the route of a module's weight.

    Args:
        formula: The module's formula.
        factored: Parameters that are folded on both sides. Of one that has to be recomputed the whole gradient is.
    """
    is_factored = formula.parameters.get("weight") in factored and isinstance(formula, Linear | Embedding)
    return "factored" if is_factored else formula.route


def _why_not(module: nn.Module) -> str:
    """Return why a module cannot be run again on one sample alone; empty if it can."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return "batch normalisation mixes samples"
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return "it contains dropout, which cannot be repeated for one sample"
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase) and (part.dropout or not part.batch_first):
            return "it needs batch_first=True and dropout=0 to be run again for one sample"
        if isinstance(part, nn.Embedding) and (part.scale_grad_by_freq or part.max_norm is not None or part.sparse):
            return "an embedding with scale_grad_by_freq, max_norm or sparse gradients has no gradient per sample"
    return ""


def _embedding_scale(module: nn.Embedding) -> float | None:
    """Return the constant between a table's row and the module's output, or ``None`` if there is no such constant."""
    if module.scale_grad_by_freq or module.max_norm is not None or module.sparse:
        return None
    if type(module).forward is nn.Embedding.forward or module.weight.is_meta:
        return 1.0
    with torch.no_grad():
        ids = torch.arange(min(4, len(module.weight)), device=module.weight.device)[None]
        rows, output = module.weight[ids].double(), module(ids)
        if not isinstance(output, Tensor) or output.shape != rows.shape:
            return None
        scale = float((rows * output.double()).sum() / rows.square().sum())
        return scale if torch.allclose(output.double(), scale * rows, rtol=1e-2, atol=1e-6) else None


_units: dict[tuple[Any, ...], float | None] = {}


def elementwise_unit(module: nn.Module) -> float | None:
    """Return ``1 - k`` if the module computes ``(w + k) ∘ h(x) + b`` with ``k`` 0 or 1, else ``None``.

    Tried out on a copy with random numbers, so a normalisation is recognised whatever its class is called.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    is_leaf = not list(module.children()) and all(p is weight or p is bias for p in module.parameters())
    if not (is_leaf and isinstance(weight, Tensor) and weight.ndim == 1):
        return None
    key = (type(module), weight.shape, bias is not None, module.extra_repr())
    if key not in _units:
        _units[key] = _try_out(module)
    return _units[key]


@torch.no_grad()
def _try_out(module: nn.Module) -> float | None:
    trial = copy.deepcopy(module)
    trial = (trial.to_empty(device="cpu") if trial.weight.is_meta else trial.cpu()).float()
    generator = torch.Generator().manual_seed(0)

    def like(tensor: Tensor) -> Tensor:
        return torch.rand(tensor.shape, generator=generator) + 0.5

    x = torch.randn(2, 3, len(trial.weight), generator=generator)
    own_bias = getattr(trial, "bias", None)
    weight, bias = like(trial.weight), None if own_bias is None else like(own_bias)

    def run(w: Tensor, b: Tensor | None) -> Tensor | None:
        parameters = {"weight": w} if b is None else {"weight": w, "bias": b}
        try:
            output = torch.func.functional_call(trial, parameters, (x,))
        except Exception:  # whatever it is, it is not a map of one tensor of features
            return None
        return output if isinstance(output, Tensor) and output.shape == x.shape else None

    zero = None if bias is None else torch.zeros_like(bias)
    actual = run(weight, bias)
    for unit in (1.0, 0.0):
        h = run(torch.full_like(weight, unit), zero)
        if actual is None or h is None:
            return None
        expected = (weight + 1.0 - unit) * h + (0.0 if bias is None else bias)
        if h.abs().max() > 0 and torch.allclose(actual, expected, rtol=1e-4, atol=1e-5):
            return unit
    return None
