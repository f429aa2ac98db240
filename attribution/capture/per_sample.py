"""Exact per-sample gradients of a linear map from its input and its output's gradient. Pure functions.

For ``y = x Wᵀ + b`` sample ``i`` has ``∂L/∂W = Σ_t g_it x_itᵀ`` and ``∂L/∂b = Σ_t g_it`` (Goodfellow 2015,
arXiv:1510.01799). ``t`` runs over the tokens of the sample's row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attribution.errors import CaptureError


def by_sample(tensor: Tensor, samples: int, module: str) -> Tensor:
    """View activations or gradients as ``(B, T, d)`` float32.

    Args:
        tensor: ``(B, d)``, ``(B, …, d)`` or ``(B * T, d)`` with a row's tokens next to each other.
        samples: ``B``.
        module: Name for the error message.

    Raises:
        CaptureError: If the leading dimension is not a multiple of ``B``.
    """
    if tensor.ndim == 3 and tensor.shape[0] == samples and tensor.dtype is torch.float32:
        return tensor
    rows = tensor.shape[0]
    if rows == samples:
        shaped = tensor.reshape(samples, -1, tensor.shape[-1])
    elif tensor.ndim == 2 and rows % samples == 0:
        shaped = tensor.reshape(samples, rows // samples, tensor.shape[-1])
    else:
        raise CaptureError(
            f"module {module}: its batch has {rows} rows {tuple(tensor.shape)}, the micro-batch has {samples} samples",
            "The module mixes or reorders samples. Freeze it, or leave it out with allow_untracked.",
        )
    return shaped.float()


def linear_weight(
    activations: Tensor, output_grads: Tensor, transposed: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return each sample's weight gradient, flattened as the sketch takes it: the shorter side first.

    That order is also the faster one to compute: for LoRA's tall B matrix it takes half the time on a CPU.

    Args:
        activations: Module input, ``(B, T, d_in)`` float32.
        output_grads: Gradient of the loss w.r.t. the module output, ``(B, T, d_out)`` float32.
        transposed: The weight is stored ``(d_in, d_out)``.
        out: ``(B, d_in * d_out)`` float32 to write into.

    Returns:
        ``(B, d_in * d_out)``: row by row of the stored weight, or column by column if it has more rows than columns.

    Example:
        >>> x, g = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]])
        >>> linear_weight(x, g)
        tensor([[3., 6.]])
    """
    first, second = (activations, output_grads) if transposed else (output_grads, activations)
    if first.shape[2] > second.shape[2]:
        first, second = second, first
    if out is not None:
        out = out.view(len(first), first.shape[2], second.shape[2])
    return torch.bmm(first.transpose(1, 2), second, out=out).flatten(1)


def linear_bias(output_grads: Tensor) -> Tensor:
    """Return each sample's bias gradient, ``(B, d_out)``, from ``(B, T, d_out)``."""
    return output_grads.sum(1)
