"""Every way in which a loop takes an optimizer step: plainly, with a closure, or through a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attribution.errors import UnsupportedSetupError

# Called with the gradient scaler's scale (1 without one) and whether the scaler skips the step.
OnStep = Callable[[float, bool], None]


class OptimizerSteps:
    """Calls ``on_step`` at the moment at which the optimizer is about to consume the gradients.

    Args:
        optimizer: The optimizer; accelerate's wrapper is looked through.
        on_step: What to call.

    Raises:
        UnsupportedSetupError: If the optimizer evaluates the loss several times per step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, on_step: OnStep) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, torch.optim.LBFGS):
            raise UnsupportedSetupError(
                "LBFGS evaluates the loss several times per step, so no single gradient is consumed",
                "Use an optimizer that takes one gradient per step, such as SGD or AdamW.",
            )
        self._optimizer: torch.optim.Optimizer = inner
        self._on_step = on_step
        self._scale = 1.0
        self._fired = False
        self._handle = inner.register_step_pre_hook(self._before)
        _watched[id(inner)] = self
        torch.amp.GradScaler.step = _scaler_step  # type: ignore[method-assign]

    def remove(self) -> None:
        """Leave optimizer and scaler as they were."""
        self._handle.remove()
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
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._fire(optimizer)
            return None

        def evaluate() -> Any:
            loss = closure()
            self._fire(optimizer)
            return loss

        return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})

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


def gradient_scale(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor that ``p.grad`` still carries when the step begins.

    A fused optimizer takes the scale out itself and finds it in ``optimizer.grad_scale``.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)
