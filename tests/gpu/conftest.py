"""These tests need a CUDA device; without one they are not collected at all."""

from __future__ import annotations

import torch

collect_ignore = [] if torch.cuda.is_available() else ["test_on_gpu.py"]
