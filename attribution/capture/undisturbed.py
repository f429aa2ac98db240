"""Running a model outside of its training without a trace: random numbers and buffers are put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back, at the end, torch's, NumPy's and Python's random numbers and every buffer of the model.

    What a module counts in plain Python attributes is not seen.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    numpy_state, python_state = np.random.get_state(), random.getstate()
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    buffer.copy_(before)
                    module._buffers[name] = buffer
