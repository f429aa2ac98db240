"""What the run manifest says of model, software and machine: facts read off, nothing declared."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from attribution.capture.formulas import route_of
from attribution.capture.modules import Tracking

_PACKAGES = ("gradtrail", "torch", "transformers", "peft", "accelerate", "datasets", "numpy", "duckdb")


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return the model's class, name, sizes and the digest of its frozen weights.

    ``frozen_sha256`` covers name, type, shape and bytes of every parameter and buffer that is not trained, in name
    order, so a replay can tell that it starts from the same base model wherever its files came from.
    """
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    digest, frozen = hashlib.sha256(), 0
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if name in trainable or not isinstance(tensor, torch.Tensor):
            continue
        hash_tensor(digest, name, tensor)
        frozen += tensor.numel()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    return {
        "class": type(base).__name__,
        "name": str(getattr(config, "name_or_path", "") or type(base).__name__),
        "adapter": type(model).__name__ if base is not model else None,
        "frozen_entries": frozen,
        "frozen_sha256": digest.hexdigest(),
        "trainable_entries": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    }


def hash_tensor(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    """Add a tensor's name, type, shape and bytes to a digest."""
    digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    raw = tensor.detach().contiguous().reshape(-1).cpu()
    digest.update(raw.view(torch.uint8).numpy().data)


def describe_tracking(tracking: Tracking, mode: str, factored: Collection[str] = ()) -> dict[str, Any]:
    """Return what is tracked and what is left out, by name.

    Args:
        tracking: The tracked modules.
        mode: How they are captured.
        factored: The parameters on the factored route.
    """
    return {
        "modules": len(tracking.formulas),
        "parameters": len(tracking.parameters),
        "trainable_entries": tracking.trainable_entries,
        "tracked_entries": tracking.tracked_entries,
        "coverage": tracking.coverage,
        "untracked": dict(sorted(tracking.untracked.items())),
        "reasons": dict(sorted(tracking.reasons.items())),
        "routes": dict(sorted(Counter(f"{f.kind}, {route_of(f, factored)}" for f in tracking.formulas).items())),
        "mode": mode,
    }


def describe_environment() -> dict[str, Any]:
    """Return Python, packages, platform, threads and the code's commit."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "torch_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "code": _code_revision(),
    }


def _code_revision() -> dict[str, Any] | None:
    """Return commit and dirty flag of the current folder's repository, or ``None`` outside of one."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
