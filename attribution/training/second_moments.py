"""Adam's second moments, found in the optimizer by each parameter's identity, never by order."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attribution.capture.moment import SecondMoment
from attribution.capture.rank_one import RankOne
from attribution.capture.whitening import Whitening
from attribution.errors import UnsupportedSetupError
from auditlog.errors import UsageError

Form = Literal["raw", "whitened"]
RAW: tuple[Form, ...] = ("raw",)
BOTH: tuple[Form, ...] = ("raw", "whitened")
VALUE = "exp_avg_sq"  # torch's name for v, and that of whoever derives from its Adam


class SecondMoments:
    """What whitening needs of an optimizer, step by step.

    Args:
        optimizer: An optimizer of Adam's type.
        parameters: The tracked parameters by name.

    Attributes:
        optimizer: The optimizer.

    Raises:
        UnsupportedSetupError: If a parameter group has no second moment's settings.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self._parameters = optimizer, parameters
        groups = self._groups()
        if not all(is_adam_type(groups[id(p)]) for p in parameters.values()):
            raise _no_moment(optimizer)
        self._share, self._rank_one = 1.0, RankOne()
        self._present: Whitening | None = None

    def whitening(self) -> Whitening:
        """Return what the coming step's micro-batches are whitened with."""
        if self._present is None:
            self._present = Whitening(self._moments(), self._share, self._rank_one)
        return self._present

    def stepped(self, share: float) -> float:
        """Take note of a step.

        Args:
            share: What became of a micro-batch's own gradient on its way into the optimizer; the next estimate.

        Returns:
            The factor that the step's whitened sketches lack: 1, unless it was the first step.
        """
        assumed, self._present = self._present, None
        if not share > 0:  # also NaN: nothing was consumed
            return 1.0
        self._share = share
        return (assumed.share / share) ** 0.5 if assumed is not None and assumed.is_first else 1.0

    def _groups(self) -> dict[int, dict[str, Any]]:
        """Return each parameter's group; ``load_state_dict`` makes new ones."""
        return {id(p): group for group in self.optimizer.param_groups for p in group["params"]}

    def _moments(self) -> dict[str, SecondMoment]:
        groups = self._groups()
        known = {name: (self.optimizer.state.get(p, {}), groups[id(p)]) for name, p in self._parameters.items()}
        steps = _counts({name: _count(*pair) for name, pair in known.items() if pair[0]})
        return {name: self._moment(name, *pair, steps.get(name, 0)) for name, pair in known.items()}

    def _moment(self, name: str, state: Mapping[str, Any], group: Mapping[str, Any], steps: int) -> SecondMoment:
        value = state.get(VALUE)
        if state and (not isinstance(value, Tensor) or value.shape != self._parameters[name].shape):
            raise _no_moment(self.optimizer)
        return SecondMoment(value, float(group["betas"][1]), float(group["eps"]), steps)


def check_forms(forms: Sequence[Form]) -> tuple[Form, ...]:
    """Return the forms to store, in the order in which they are stored.

    Raises:
        UsageError: If they are neither the raw form alone nor both.
    """
    if tuple(forms) not in (RAW, BOTH):
        raise UsageError(f"forms={forms!r}: the raw form alone, {RAW}, or both, {BOTH}")
    return tuple(forms)


def is_adam_type(settings: Mapping[str, Any]) -> bool:
    """Tell whether a parameter group's settings, or an optimizer's defaults, are those of a second moment."""
    betas, eps = settings.get("betas"), settings.get("eps")
    has_decay = isinstance(betas, tuple | list) and len(betas) == 2
    return has_decay and isinstance(eps, float) and not settings.get("amsgrad")


def keeps_second_moment(kind: type[Any], settings: Mapping[str, Any], device: torch.device) -> bool:
    """Try an optimizer's class out on two numbers: does it keep ``v`` as whitening reads it?

    Args:
        kind: The optimizer's class.
        settings: What it would be made with, or its defaults.
        device: Where the model is; some optimizers work on one kind only.
    """
    if not is_adam_type(settings):
        return False
    accepted = inspect.signature(kind).parameters
    parameter = nn.Parameter(torch.ones(2, device=device))
    try:
        trial = kind([parameter], **{name: value for name, value in settings.items() if name in accepted})
        getattr(trial, "train", lambda: None)()
        parameter.grad = torch.ones_like(parameter)
        trial.step()
        moment = SecondMoments(trial, {"trial": parameter}).whitening().moments["trial"]
    except Exception:  # whatever it needs beyond this, it is none of the plain kind
        return False
    return moment.value is not None and moment.steps == 1


def _count(state: Mapping[str, Any], group: Mapping[str, Any]) -> Any:
    """Return a parameter's own step count; some optimizers count once per group."""
    return state.get("step", group.get("step", group.get("k")))


def _counts(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return step counts as integers; those that are tensors are read together, with one wait for a GPU."""
    tensors = {name: count for name, count in counts.items() if isinstance(count, Tensor)}
    plain = {name: int(count or 0) for name, count in counts.items() if name not in tensors}
    if not tensors:
        return plain
    values = torch.stack(list(tensors.values())).flatten().tolist()
    return plain | {name: int(value) for name, value in zip(tensors, values, strict=True)}


def _no_moment(optimizer: torch.optim.Optimizer) -> UnsupportedSetupError:
    return UnsupportedSetupError(
        f"{type(optimizer).__name__} keeps no second moment that whitened sketches could be made with",
        "Record the raw form only: AuditMode(…, forms=('raw',)).",
    )
