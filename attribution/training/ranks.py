"""The processes of one training run: what they must tell each other so that their ledgers fit together.

A process that fails alone would leave the others waiting. Where all of them do the same thing outside of training
(opening, checking, resuming, sealing) they therefore fail together. In the middle of a step a process can only raise:
``torchrun`` then ends the others, and a lost connection ends whoever waits for it. Either way the run stays open.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, device, nn
from torch.nn.parallel import DistributedDataParallel

from attribution.errors import RankError, UnsupportedSetupError

T = TypeVar("T")

_SHARDING = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the processes of a run; every method is a plain identity where there is only one.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes ``W``.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def present(cls) -> Ranks:
        """Return the process group that the loop set up, or a single process.

        Raises:
            UnsupportedSetupError: If a launcher started several processes that do not know each other yet.
        """
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        started = os.environ.get("WORLD_SIZE", "1")
        if started not in ("", "1"):
            raise UnsupportedSetupError(
                f"{started} processes were started (WORLD_SIZE), and there is no process group yet",
                "Call torch.distributed.init_process_group, or make the Accelerator or TrainingArguments, before "
                "audit mode.",
            )
        return cls()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def gather(self, thing: Any) -> list[Any]:
        """Return what each process has, in the order of ranks.

        Raises:
            RankError: If another process is gone.
        """
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, thing)
        except RuntimeError as error:
            raise RankError(f"rank {self.rank}: another process of the run is gone ({error})") from error
        return found

    def from_first(self, thing: Any) -> Any:
        """Return what rank 0 has."""
        return self.gather(thing)[0]

    def together(self, act: Callable[[], T]) -> T:
        """Do something on every process; where it fails on one, it fails on all.

        Args:
            act: What to do. No process may wait for another in it.

        Returns:
            What ``act`` returned here.

        Raises:
            RankError: If another process failed.
        """
        if self.size == 1:
            return act()
        try:
            done = act()
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, failure in enumerate(self.gather(None)):
            if failure is not None:
                raise RankError(f"rank {rank} failed, so rank {self.rank} stops too. {failure}")
        return done


def innermost(model: nn.Module) -> nn.Module:
    """Return the model inside ``DistributedDataParallel``.

    Raises:
        UnsupportedSetupError: If the model is sharded or replicated in a way whose gradients cannot be followed.
    """
    if isinstance(model, DistributedDataParallel):
        _refuse_subgroup(model)
        model = model.module
    if isinstance(model, nn.DataParallel):
        raise UnsupportedSetupError(
            "the model is wrapped in DataParallel, which copies it to each device for every pass",
            "Use DistributedDataParallel: torchrun --nproc-per-node=N train.py. On one device: CUDA_VISIBLE_DEVICES=0.",
        )
    refuse_sharded(model)
    return model


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model of which this process holds only parts, or whose gradients somebody else keeps.

    Raises:
        UnsupportedSetupError: Naming the module or parameter.
    """
    sharded = [
        f"module {name or '(the model)'} is a {found[0]}"
        for name, module in model.named_modules()
        if (found := [c.__name__ for c in type(module).__mro__ if c.__name__ in _SHARDING])
    ] or [
        f"parameter {name} is a {type(p).__name__}" for name, p in model.named_parameters() if hasattr(p, "placements")
    ]
    if sharded:
        raise UnsupportedSetupError(
            f"the model's parameters are spread over processes (FSDP, DeepSpeed or tensor parallel): {sharded[0]}",
            "Not supported yet. Train an adapter under DistributedDataParallel, or on one device.",
        )


def refuse_uneven_inputs() -> None:
    """Refuse, inside a forward pass, ``DistributedDataParallel.join``: processes that ran out of data answer nobody.

    Raises:
        UnsupportedSetupError: If the pass runs inside of it.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None:
        return
    _refuse_subgroup(wrapper)
    if wrapper._join_config.enable:
        raise UnsupportedSetupError(
            "the loop runs inside DistributedDataParallel.join(), where a process may stop taking steps",
            "Give every process equally many batches: DistributedSampler, or accelerate with even_batches.",
        )


def _refuse_subgroup(wrapper: DistributedDataParallel) -> None:
    size = dist.get_world_size(wrapper.process_group)
    if size != dist.get_world_size():
        raise UnsupportedSetupError(
            f"gradients are averaged over {size} of {dist.get_world_size()} processes",
            "Audit mode sums over all processes. Use one process group for all of them.",
        )


def device_of(parameters: list[nn.Parameter]) -> device:
    """Return the one device that all parameters are on.

    Raises:
        UnsupportedSetupError: If they are spread over several.
    """
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        raise UnsupportedSetupError(
            f"the tracked parameters are spread over {sorted(map(str, devices))}",
            "A model split over devices is not supported yet; train the adapter on one device.",
        )
    return devices.pop()
