"""Snapshots: the trained parameters and the optimizer's state, as safetensors, never as pickles."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attribution.errors import SketchMismatchError

TRAINABLE = "trainable.safetensors"


def save_snapshot(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    step: int,
    attempt: int = 1,
) -> dict[str, Any]:
    """Write a snapshot and return the body of its ``MODEL_CHECKPOINT`` event.

    Args:
        folder: A folder below the run, such as ``snapshots/final``; made if missing.
        parameters: Trainable parameters by name.
        optimizer: Its per-parameter tensors are saved by parameter *name*; may be ``None``.
        step: Optimizer steps so far.
        attempt: The attempt that took the last of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trainable = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
    save_file(trainable, folder / TRAINABLE, metadata={"format": "pt", "step": str(step)})
    save_file(
        {**_optimizer_tensors(parameters, optimizer), "rng/torch": torch.get_rng_state()},
        folder / "optimizer.safetensors",
    )
    state = {"step": step, "attempt": attempt, "groups": _groups(optimizer)}
    (folder / "state.json").write_text(json.dumps(state, sort_keys=True))
    files = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files.append({"name": path.name, "sha256": digest, "size_bytes": path.stat().st_size})
    return {"path": f"{folder.parent.name}/{folder.name}", "step": step, "attempt": attempt, "files": files}


def load_trainable(folder: Path, model: nn.Module) -> None:
    """Load a snapshot's trained parameters into ``model``, in place.

    Raises:
        SketchMismatchError: If the model's trainable parameters are not those of the snapshot.
    """
    saved = load_file(folder / TRAINABLE)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if {n: p.shape for n, p in parameters.items()} != {n: t.shape for n, t in saved.items()}:
        odd = sorted(set(parameters) ^ set(saved))[:3] or ["(shapes differ)"]
        raise SketchMismatchError(
            f"{folder}: the snapshot does not fit the model's trainable parameters: {', '.join(odd)}",
            "Build the model as it was trained: same base model, same adapter configuration.",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def _optimizer_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Return the optimizer's state tensors as ``parameter name/state name``; found by identity, never by order."""
    if optimizer is None:
        return {}
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return the plain settings of each parameter group."""
    if optimizer is None:
        return []
    plain = (int, float, bool, str, type(None), tuple, list)
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
