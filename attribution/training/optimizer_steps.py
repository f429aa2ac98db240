"""Every way in which a loop takes an optimizer step: plainly, with a closure, or through a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from attribution.errors import CaptureError, UnsupportedSetupError

# Called with the gradient scaler's scale (1 without one) and whether the scaler skips the step.
OnStep = Callable[[float, bool], None]


class OptimizerSteps:
    """Calls ``on_step`` at the moment at which the optimizer is about to consume the gradients.

    Args:
        optimizer: The optimizer; accelerate's wrapper is looked through.
        parameters: The trainable parameters by name.
        on_step: What to call.

    Raises:
        UnsupportedSetupError: If the optimizer evaluates the loss several times per step, or does not hold every
            trainable parameter.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], on_step: OnStep
    ) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, torch.optim.LBFGS):
            raise UnsupportedSetupError(
                "LBFGS evaluates the loss several times per step, so no single gradient is consumed",
                "Use an optimizer that takes one gradient per step, such as SGD or AdamW.",
            )
        if not isinstance(inner, torch.optim.Optimizer):
            raise UnsupportedSetupError(
                f"{type(inner).__name__} is no torch.optim.Optimizer, so its steps cannot be seen",
                "Derive it from torch.optim.Optimizer, and call super().__init__.",
            )
        _refuse_partial(inner, parameters)
        self._optimizer: torch.optim.Optimizer = inner
        self._parameters = {id(p) for p in parameters.values()}
        self._is_inside = False  # a wrapped optimizer may take the step for the one that is followed
        self._on_step = on_step
        self._scale = 1.0
        self._fired = False
        self._handles = [
            inner.register_step_pre_hook(self._before),
            inner.register_step_post_hook(self._after),
            register_optimizer_step_pre_hook(self._refuse_other),
        ]
        _watched[id(inner)] = self
        torch.amp.GradScaler.step = _scaler_step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave optimizer and scaler as they were."""
        for handle in self._handles:
            handle.remove()
        _watched.pop(id(self._optimizer), None)
        if not _watched:
            torch.amp.GradScaler.step = _plain_scaler_step  # type: ignore[method-assign]

    def through_scaler(self, scaler: torch.amp.GradScaler, plain: Callable[[], Any]) -> Any:
        """Take the scaler's own step: it knows the scale, and may leave the optimizer out."""
        self._scale, self._fired = scaler.get_scale(), False
        try:
            result = plain()
            if not self._fired:
                self._on_step(self._scale, True)
            return result
        finally:
            self._scale = 1.0

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_inside = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._fire(optimizer)
            return None

        def evaluate() -> Any:
            loss = closure()
            self._fire(optimizer)
            return loss

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._is_inside = False

    def _refuse_other(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse the step of another optimizer that moves the audited parameters."""
        if optimizer is self._optimizer or self._is_inside:
            return
        if any(id(p) in self._parameters and p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            raise CaptureError(
                f"another optimizer ({type(optimizer).__name__}) is about to move parameters that are audited under "
                f"{type(self._optimizer).__name__}",
                "Say so before its first step: audit.follow(optimizer). Two optimizers at once are not supported.",
            )

    def _fire(self, optimizer: torch.optim.Optimizer) -> None:
        self._fired = True
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        self._on_step(self._scale, found_inf is not None and bool(found_inf))


_watched: dict[int, OptimizerSteps] = {}  # by the optimizer's id
_plain_scaler_step = torch.amp.GradScaler.step


def _scaler_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    watching = _watched.get(id(optimizer))
    if watching is None or not scaler.is_enabled():
        return _plain_scaler_step(scaler, optimizer, *args, **kwargs)
    return watching.through_scaler(scaler, lambda: _plain_scaler_step(scaler, optimizer, *args, **kwargs))


def _refuse_partial(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in parameters.items() if id(p) not in held]
    if left_out:
        raise UnsupportedSetupError(
            f"{len(left_out)} trainable parameters are in no group of {type(optimizer).__name__}: "
            + ", ".join(left_out[:3]),
            "Freeze them (requires_grad_(False)), or let one optimizer hold everything that is trained.",
        )


def gradient_scale(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor that ``p.grad`` still carries when the step begins.

    A fused optimizer takes the scale out itself and finds it in ``optimizer.grad_scale``.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)
