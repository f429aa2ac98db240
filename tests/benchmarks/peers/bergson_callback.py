"""bergson's gradient collector callback, its events called as the Hugging Face Trainer calls them, its own defaults.

The defaults: two random projections to 16 × 16 per layer, float16, divided by Adam's second moment of the step before.
"""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

from benchmarks.peers.rows import Row
from benchmarks.peers.trial import Recorder, Trial
from benchmarks.workloads import Batch, without_ids
from bergson.huggingface import GradientCollectorCallback


def measure(trial: Trial) -> list[Row]:
    """Time it against the plain step."""
    for group in trial.optimizer.param_groups:
        group["lr"] = 1e-4  # it divides by the rate
    callback = GradientCollectorCallback(trial.folder / "gradients")
    model, state = trial.workload.model, SimpleNamespace(epoch=0, global_step=0)
    args = SimpleNamespace(__gradient_collection_enabled__=True)
    samples = range(sum(len(batch["input_ids"]) for batch in trial.workload.batches))
    callback.on_train_begin(args, state, None, model=model)
    callback.on_epoch_begin(args, state, None, train_dataloader=SimpleNamespace(dataset=samples))
    callback.collector.__exit__(None, None, None)

    def step(batch: Batch) -> None:
        model(**without_ids(batch), _idx=batch["sample_index"]).loss.backward()
        trial.consume()
        callback.on_step_end(args, state, None, model=model, optimizer=trial.optimizer)

    def attach() -> None:
        callback.collector.__enter__()

    def detach() -> None:
        callback.collector.__exit__(None, None, None)

    found = trial.compare(Recorder(step, attach, detach))
    layers = len(callback.grad_sizes)
    callback.on_train_end(args, state, None)
    return [
        Row(
            "bergson",
            f"two-sided projection of each of {layers} trained layers to 16 × 16, float16, scaled by Adam's moments",
            version=version("bergson"),
            bytes_per_sample=callback.dtype.itemsize * sum(callback.grad_sizes.values()),
            note="a memory map of one row per sample; its flush at the end of an epoch is not in the step",
            **found,
        )
    ]
