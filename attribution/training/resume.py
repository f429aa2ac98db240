"""Going on with an interrupted run: is it the same run, and from which of its steps does it go on?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attribution.errors import SketchMismatchError, UnsupportedSetupError
from attribution.sketch.layout import SketchLayout
from attribution.training.environment import describe_model, hash_tensor
from attribution.training.ranks import Ranks
from auditlog.errors import StoreError, UsageError
from auditlog.format.manifest import RunManifest


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a run, as a trainer's checkpoint remembers it.

    Attributes:
        run_id: The run.
        attempt: The attempt in which the checkpoint was made.
        step: Optimizer steps that its weights went through, as the log counts them.
        global_step: The same as the trainer counts them; it may have started anew.
    """

    run_id: str
    attempt: int
    step: int
    global_step: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)

    @classmethod
    def of_checkpoint(cls, stored: Any, global_step: int, run_id: str) -> Place | None:
        """Return the place that a checkpoint remembers, ``None`` for a start from scratch.

        Args:
            stored: What ``to_json`` gave, or nothing.
            global_step: The step that the trainer goes on from.
            run_id: The run that is to go on.

        Raises:
            UsageError: If the checkpoint was made in another run, or in none.
        """
        if global_step == 0:
            return None
        place = cls(**stored) if isinstance(stored, Mapping) else None
        if place is None or place.global_step != global_step:
            raise UsageError(
                f"the checkpoint of step {global_step} was not made in audit mode, so nothing says that its weights "
                "went through the steps of this run",
                "Go on from a checkpoint that was saved inside AuditMode.attach. To audit what comes after other "
                "training, load its weights and start a new run without resume_from_checkpoint.",
            )
        if place.run_id != run_id:
            raise UsageError(
                f"the checkpoint of step {global_step} belongs to run {place.run_id}, the run folder to {run_id}",
                "Go on from a checkpoint of the same run, or name that checkpoint's run folder.",
            )
        return place


def refuse_other_run(manifest: RunManifest, layout: SketchLayout, model: nn.Module, ranks: Ranks) -> None:
    """Refuse to go on with a run that was made with another model, another sketch or by other processes.

    Raises:
        UnsupportedSetupError: If the number of processes differs.
        SketchMismatchError: Naming what differs.
    """
    if (manifest.rank, manifest.world_size) != (ranks.rank, ranks.size):
        raise UnsupportedSetupError(
            f"the run was begun by {manifest.world_size} processes; this is process {ranks.rank} of {ranks.size}",
            "Resume with as many processes as the run began with, or start a new run.",
        )
    if manifest.sketch != layout.block(manifest.sketch.forms):
        raise SketchMismatchError(
            "the run in that folder sketches other parameters, or with other tables, than this model would",
            "Resume with the same model, adapter configuration, sketch_dim and sketch_seed, or start a new run.",
        )
    present = describe_model(model)
    for name in ("class", "frozen_sha256", "trainable_entries"):
        if manifest.model.get(name) != present[name]:
            raise SketchMismatchError(
                f"the run in that folder was trained from another base model: {name} was {manifest.model.get(name)}, "
                f"is {present[name]}",
                "Resume with the same base model, or start a new run.",
            )


def refuse_unlogged(run: Path, reached: Sequence[tuple[int, int]], step: int, from_attempt: int | None) -> None:
    """Refuse, on all processes alike, to go on from a step that one of their logs does not hold.

    Args:
        run: The run folder.
        reached: The last attempt in each process's log, and the last step that its weights went through.
        step: Where training would go on from.
        from_attempt: In which attempt; ``None`` for the last one.

    Raises:
        StoreError: Naming the process.
    """
    for rank, (attempt, last) in enumerate(reached):
        if from_attempt is not None and from_attempt > attempt:
            logged = f"attempt {attempt}, training would go on from step {step} of attempt {from_attempt}"
        elif (from_attempt is None or from_attempt == attempt) and step > last:
            logged = f"step {last}, training would go on from step {step}"
        else:
            continue
        raise StoreError(
            f"{run}: {'' if len(reached) == 1 else f'rank {rank} is '}logged up to {logged}: the steps between were "
            "trained and not logged",
            "Go on from an older snapshot, or say that they are lost: accept_loss=True.",
        )


def weights_digest(parameters: Mapping[str, nn.Parameter]) -> bytes:
    """Return a digest of the parameters' values, to tell whether a loop that starts again starts from scratch."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        hash_tensor(digest, name, parameter)
    return digest.digest()
