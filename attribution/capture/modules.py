"""Which modules are tracked, and what share of the trainable parameters that covers.

Every trainable parameter is looked for in the module that owns it. What no formula covers and what cannot be
recomputed is named, with the reason, counted, and refused unless allowed: a gap must never be silent.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from attribution.capture.formulas import Formula, formula_for
from attribution.errors import CaptureError, CoverageGapError

# Modules that hold parameters without being called: whoever holds them uses them.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
# Modules that use their children's parameters without calling the children.
_OPAQUE = (nn.MultiheadAttention,)


@dataclass(frozen=True, slots=True)
class Tracking:
    """The tracked modules of a model and what they leave out.

    Attributes:
        formulas: One per tracked module, in the model's order.
        trainable: Every trainable parameter by name, in the model's own order.
        parameters: Those of them that are tracked.
        untracked: The others: name -> number of entries.
        reasons: Why each of them is not tracked.
    """

    formulas: tuple[Formula, ...]
    trainable: dict[str, nn.Parameter]
    parameters: dict[str, nn.Parameter]
    untracked: dict[str, int]
    reasons: dict[str, str]

    @property
    def left_out(self) -> list[nn.Parameter]:
        """The trainable parameters that are not tracked."""
        return [self.trainable[name] for name in self.untracked]

    @property
    def trainable_entries(self) -> int:
        """Entries of all trainable parameters."""
        return self.tracked_entries + sum(self.untracked.values())

    @property
    def tracked_entries(self) -> int:
        """Entries of the tracked parameters."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def coverage(self) -> float:
        """Share of trainable entries that is tracked, 0 to 1."""
        return self.tracked_entries / self.trainable_entries


def find_tracked(model: nn.Module, allow_untracked: Sequence[str] = ()) -> Tracking:
    """Return how every trainable parameter of ``model`` is tracked.

    Args:
        model: The model as it is trained, adapters in place.
        allow_untracked: Patterns (``fnmatch``) of parameters that may stay out of the sketches.

    Raises:
        CoverageGapError: If nothing is trainable, or parameters are left out that no pattern allows.
    """
    tracking = survey(model)
    if not tracking.trainable:
        raise CoverageGapError(
            "the model has no trainable parameter",
            "Attach audit mode after the adapter: AuditMode.attach(Trainer(model=get_peft_model(…), …), …).",
        )
    _refuse_gaps(tracking, allow_untracked)
    return tracking


def survey(model: nn.Module) -> Tracking:
    """Return what would be tracked, without refusing anything."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {id(p): name for name, p in trainable.items()}
    formulas, reasons = list[Formula](), dict[str, str]()
    for module_name, module, own in _owners(model):
        wanted = {inner: names[id(p)] for inner, p in own.items() if id(p) in names}
        if not wanted:
            continue
        formula = formula_for(module_name, module, wanted)
        if isinstance(formula, str):
            reasons |= dict.fromkeys(wanted.values(), f"{module_name} ({type(module).__name__}): {formula}")
        else:
            formulas.append(formula)
    # A parameter shared with a module that cannot be tracked would be captured in part only.
    formulas = [f for f in formulas if not set(f.parameters.values()) & reasons.keys()]
    owned = {name for formula in formulas for name in formula.parameters.values()}
    for name in trainable.keys() - owned - reasons.keys():
        reasons[name] = "it shares a module or a tensor with a parameter that cannot be tracked"
    return Tracking(
        formulas=tuple(formulas),
        trainable=trainable,
        parameters={name: p for name, p in trainable.items() if name in owned},
        untracked={name: p.numel() for name, p in trainable.items() if name not in owned},
        reasons={name: reasons[name] for name in trainable if name in reasons},
    )


def _owners(
    model: nn.Module, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Yield every module that is called and the parameters that it, and nobody below it, uses itself."""
    seen = set() if seen is None else seen
    if id(model) in seen:
        return
    seen.add(id(model))
    own = dict(model.named_parameters(recurse=isinstance(model, _OPAQUE)))
    for child_name, child in model.named_children():
        if isinstance(child, _CONTAINERS):
            own |= {f"{child_name}.{inner}": p for inner, p in child.named_parameters(recurse=False)}
    yield name, model, own
    if isinstance(model, _OPAQUE):
        return
    for child_name, child in model.named_children():
        if not isinstance(child, _CONTAINERS):
            yield from _owners(child, f"{name}.{child_name}" if name else child_name, seen)


def _refuse_gaps(tracking: Tracking, allowed: Sequence[str]) -> None:
    untracked = tracking.untracked
    gaps = [name for name in untracked if not any(fnmatch.fnmatch(name, pattern) for pattern in allowed)]
    if not gaps and tracking.parameters:
        return
    if not gaps:
        raise CoverageGapError("none of the trainable parameters can be tracked")
    share = sum(untracked[name] for name in gaps) / tracking.trainable_entries
    shown = "; ".join(f"{name}: {tracking.reasons[name]}" for name in gaps[:3])
    more = f"; and {len(gaps) - 3} more" if len(gaps) > 3 else ""
    raise CoverageGapError(
        f"{len(gaps)} trainable parameters ({share:.2%} of all entries) cannot be tracked: {shown}{more}",
        "Freeze them, or accept the gap, which is then signed into the run: "
        f"AuditMode(…, allow_untracked=[{gaps[0]!r}, …]).",
    )


def refuse_unseen(
    tracking: Tracking,
    arrived: Collection[str],
    names: Collection[str],
    when: str,
    error: type[CaptureError] = CaptureError,
) -> None:
    """Refuse gradients that no hook saw.

    Args:
        tracking: The tracked modules.
        arrived: Names of the modules, or of the parameters, that gradients reached.
        names: Parameters that have a gradient other than zero.
        when: Begins the message.
        error: What to raise.

    Raises:
        CaptureError: Naming the modules that use a parameter of which no gradient was seen although it has one.
    """
    seen = {name for f in tracking.formulas if f.name in arrived for name in f.parameters.values()} | set(arrived)
    blind = [f.name for f in tracking.formulas if set(f.parameters.values()) & (set(names) - seen)]
    if not blind:
        return
    total = len(tracking.formulas)
    shown = ", ".join(blind[:3]) + (f" and {len(blind) - 3} more" if len(blind) > 3 else "")
    raise error(
        f"{when}: captured {total - len(blind)} of {total} modules; parameters of {shown} have a gradient that no hook "
        "saw",
        "Is the batch passed to the audited model with its sample_index? Were adapters merged or switched, was the "
        "model compiled or wrapped before audit mode was attached, or are those weights read without calling the "
        "module? In that last case leave them out with allow_untracked.",
    )


def mixing_modules(model: nn.Module) -> list[str]:
    """Return the modules that mix a batch's samples as they stand: batch normalisation in training mode."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the modules that were compiled already, so that hooks added now might never run."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    ]
