"""Which modules are tracked, and what share of the trainable parameters that covers.

A module is tracked when its per-sample gradient has an exact formula here: ``nn.Linear`` and Hugging Face's
``Conv1D`` (which covers LoRA's A and B matrices), weight and bias. Anything else that is trainable is named,
counted, and refused unless allowed: a gap must never be silent.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attribution.errors import CoverageGapError

try:
    from transformers.pytorch_utils import Conv1D
except ImportError:  # a plain torch loop needs no transformers

    class Conv1D(nn.Module):  # type: ignore[no-redef]
        """Stands in where transformers is not installed; no module is an instance of it."""


@dataclass(frozen=True, slots=True)
class TrackedModule:
    """One module whose gradients are sketched.

    Attributes:
        name: Its name in the model.
        module: The module.
        weight: Name of its trainable weight, or ``None`` if the weight is frozen.
        bias: Name of its trainable bias, or ``None``.
        transposed: The weight is stored ``(d_in, d_out)``, as ``Conv1D`` does.
    """

    name: str
    module: nn.Module
    weight: str | None
    bias: str | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class Tracking:
    """The tracked modules of a model and what they leave out."""

    modules: tuple[TrackedModule, ...]
    trainable: dict[str, nn.Parameter]  # by name, in the model's own order
    parameters: dict[str, nn.Parameter]  # those of them that are tracked
    untracked: dict[str, int]  # the others: name -> number of entries

    @property
    def left_out(self) -> list[nn.Parameter]:
        """The trainable parameters that are not tracked."""
        return [self.trainable[name] for name in self.untracked]

    @property
    def trainable_entries(self) -> int:
        """Number of trainable entries."""
        return sum(p.numel() for p in self.trainable.values())

    @property
    def tracked_entries(self) -> int:
        """Number of trainable entries whose gradients are sketched."""
        return self.trainable_entries - sum(self.untracked.values())

    @property
    def coverage(self) -> float:
        """Share of the trainable entries that is tracked, 0 to 1."""
        return self.tracked_entries / self.trainable_entries


def find_tracked(model: nn.Module, allow_untracked: Sequence[str] = ()) -> Tracking:
    """Find every module whose trainable parameters have a formula.

    Args:
        model: The model as it is trained, adapters in place.
        allow_untracked: Patterns (``fnmatch``) of parameters that may stay out of the sketches.

    Raises:
        CoverageGapError: If nothing is trainable, or parameters are left out that no pattern allows.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise CoverageGapError(
            "the model has no trainable parameter",
            "Attach audit mode after the adapter: AuditMode.attach(Trainer(model=get_peft_model(…), …), …).",
        )
    names = {id(p): name for name, p in trainable.items()}
    modules, users = list[TrackedModule](), dict[str, int]()
    for module_name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in names:
                users[names[id(parameter)]] = users.get(names[id(parameter)], 0) + 1
        tracked = _as_tracked(module_name, module, names)
        if tracked is not None:
            modules.append(tracked)
    counts = dict[str, int]()
    for tracked in modules:
        for name in (tracked.weight, tracked.bias):
            if name is not None:
                counts[name] = counts.get(name, 0) + 1
    # A parameter shared with a module that has no formula would be captured in part only.
    owned = {name for name, count in counts.items() if count == users[name]}
    modules = [m for m in modules if {m.weight, m.bias} - {None} <= owned]
    untracked = {name: p.numel() for name, p in trainable.items() if name not in owned}
    _refuse_gaps(untracked, trainable, allow_untracked)
    return Tracking(
        modules=tuple(modules),
        trainable=trainable,
        parameters={name: p for name, p in trainable.items() if name in owned},
        untracked=untracked,
    )


def _as_tracked(name: str, module: nn.Module, names: dict[int, str]) -> TrackedModule | None:
    """Return the module's description if it has a formula and something to train."""
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    is_conv1d = isinstance(module, Conv1D) and type(module).forward is Conv1D.forward
    if not (is_linear or is_conv1d):
        return None
    weight = names.get(id(module.weight))
    bias = names.get(id(module.bias)) if isinstance(module.bias, torch.Tensor) else None
    if weight is None and bias is None:
        return None
    return TrackedModule(name=name, module=module, weight=weight, bias=bias, transposed=is_conv1d)


def _refuse_gaps(untracked: dict[str, int], trainable: dict[str, nn.Parameter], allowed: Sequence[str]) -> None:
    gaps = [name for name in untracked if not any(fnmatch.fnmatch(name, pattern) for pattern in allowed)]
    if not gaps and len(untracked) < len(trainable):
        return
    if not gaps:
        raise CoverageGapError("none of the trainable parameters can be tracked")
    share = sum(untracked[name] for name in gaps) / sum(p.numel() for p in trainable.values())
    shown = ", ".join(gaps[:5]) + (f" and {len(gaps) - 5} more" if len(gaps) > 5 else "")
    raise CoverageGapError(
        f"{len(gaps)} trainable parameters ({share:.2%} of all entries) have no per-sample formula: {shown}",
        "Freeze them, or accept the gap, which is then signed into the run: "
        f"AuditMode(…, allow_untracked=[{gaps[0]!r}, …]).",
    )
