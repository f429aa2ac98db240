"""The slow, obviously right way: autograd on one sample at a time. Tests and self-checks compare with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from attribution.sketch.layout import SketchLayout


def gradient(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradient of a scalar per parameter; zeros where it does not depend on one."""
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if part is None else part
        for (name, parameter), part in zip(parameters.items(), found, strict=True)
    }


def gradient_by_backward(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the same by ``loss.backward()``, for graphs that allow nothing else; ``.grad`` is ``None`` before it."""
    loss.backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def sketch_each(
    samples: int,
    loss_of: Callable[[int], Tensor],
    parameters: Mapping[str, nn.Parameter],
    layout: SketchLayout,
) -> Tensor:
    """Return ``(samples, D)``: the sketch of each sample's own gradient, from a separate backward pass each.

    Args:
        samples: How many.
        loss_of: Gives the summed token loss of sample ``i`` in a batch of one.
        parameters: The tracked parameters.
        layout: The sketch.
    """
    return torch.stack([layout.sketch(gradient(loss_of(i), parameters)) for i in range(samples)])
