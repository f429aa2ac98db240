"""What traceprop's wheel offers for training: a store that projects and keeps gradients which the caller brings.

The inline logger of language models that its authors have published figures of is not in the wheel (0.7.0). Its
``TrainingContext.step`` runs a backward pass of its own and logs the gradient of the whole batch as one sample's, so
there is nothing per sample in it. ``GradientStore.log_batch`` takes per-sample gradients; here it gets those of the
last block from our own hooks, and 512 dimensions, as its authors measured: the store's projection is a dense matrix,
which for all layers at its default of 4,096 dimensions would take 19 GB, and twice that while it is made.
"""

from __future__ import annotations

from importlib.metadata import version

import traceprop
from benchmarks.peers.last_block import LastBlock
from benchmarks.peers.rows import Row
from benchmarks.peers.trial import Recorder, Trial
from benchmarks.workloads import Batch

DIMENSIONS = 512


def measure(trial: Trial) -> list[Row]:
    """Time it against the plain step; the time in its own store beside."""
    hooks = LastBlock(trial.workload.model)
    in_store = [0.0]
    with traceprop.training_context(source_id="rows", proj_dim=DIMENSIONS) as context:

        def step(batch: Batch) -> None:
            trial.step(batch)
            rows, first = hooks.rows().cpu().numpy(), int(batch["sample_index"][0])
            log = context.gradient_store.log_batch
            in_store[0] += trial.timed(lambda: log(rows, source_id="rows", sample_index_offset=first))

        found = trial.compare(Recorder(step, hooks.attach, hooks.detach, lambda: in_store[0]))
    return [
        Row(
            "traceprop",
            f"dense projection of the last block's gradient to {DIMENSIONS} float32, in memory",
            version=version("traceprop"),
            bytes_per_sample=4 * DIMENSIONS,
            note="no inline logger in the wheel: the gradients come from our last-block hooks; gross: its store alone",
            **found,
        )
    ]
