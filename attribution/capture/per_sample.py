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


def linear_weight(activations: Tensor, output_grads: Tensor, transposed: bool = False) -> Tensor:
    """Return each sample's weight gradient.

    The product is formed with the shorter side first, which on a CPU is twice as fast for LoRA's tall B matrix; the
    returned tensor is a transposed view where that is not the weight's own order.

    Args:
        activations: Module input, ``(B, T, d_in)`` float32.
        output_grads: Gradient of the loss w.r.t. the module output, ``(B, T, d_out)`` float32.
        transposed: The weight is stored ``(d_in, d_out)``.

    Returns:
        ``(B, d_out, d_in)``, or ``(B, d_in, d_out)`` if transposed.

    Example:
        >>> x, g = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]])
        >>> linear_weight(x, g)
        tensor([[[3., 6.]]])
    """
    rows, columns = (activations, output_grads) if transposed else (output_grads, activations)
    if rows.shape[-1] > columns.shape[-1]:
        return torch.bmm(columns.transpose(1, 2), rows).transpose(1, 2)
    return torch.bmm(rows.transpose(1, 2), columns)


def linear_bias(output_grads: Tensor) -> Tensor:
    """Return each sample's bias gradient, ``(B, d_out)``, from ``(B, T, d_out)``."""
    return output_grads.sum(1)
