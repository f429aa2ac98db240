"""Stored sketches as torch tensors, without a copy. The log's own package never imports torch, so this lives here."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def as_tensor(rows: NDArray[np.int8]) -> Tensor:
    """Return int8 rows ``(n, D)`` as a tensor over the same memory: of a block, the memory map of its shard.

    Reading from it reads the file. The map is read-only, so writing to the tensor ends the process: ``clone`` first.
    """
    view: Tensor = torch.utils.dlpack.from_dlpack(rows)
    return view
