"""Tensors kept from the forward pass for the backward pass, the way autograd keeps a module's own input.

A closure would hold them whatever happens. A *saved tensor* of a node in the graph is recomputed under gradient
checkpointing, moved by offloading, and shares its memory with everybody who saved the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attribution.errors import CaptureError


class Node:
    """A node of the autograd graph that saves one tensor and computes nothing.

    The product with an empty anchor (a leading dimension of size 0) that requires a gradient saves its other factor.
    A custom autograd function does the same at several times the cost.
    """

    __slots__ = ("_grad_fn",)

    def __init__(self, tensor: Tensor, anchor: Tensor) -> None:
        self._grad_fn: Any = (tensor * anchor).grad_fn

    def tensor(self) -> Tensor:
        """Return the saved tensor; under checkpointing it is recomputed here."""
        saved: Tensor = self._grad_fn._saved_self
        return saved


def anchor(device: torch.device) -> Tensor:
    """Return the other factor: it broadcasts with every tensor of up to eight dimensions."""
    return torch.empty(0, *[1] * 8, device=device, requires_grad=True)


def keep(leaves: Sequence[Any], anchor: Tensor) -> list[Any]:
    """Return the leaves with every floating-point tensor replaced by a node that saves it."""
    return [Node(leaf, anchor) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]


def take(cell: list[list[Any]]) -> list[Any]:
    """Return what ``keep`` put into the cell, tensors again, and drop the nodes.

    Raises:
        CaptureError: If it was taken before.
    """
    if not cell:
        raise CaptureError(
            "a second backward pass reached the same forward pass",
            "Run the forward pass again before each backward pass, or add the losses and call backward once.",
        )
    return [leaf.tensor() if isinstance(leaf, Node) else leaf for leaf in cell.pop()]
