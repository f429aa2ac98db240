"""dattri-llm's offload callback, as its own quick start turns it on.

One change in its favour: ``capture_style="auto"``, its own cost rule, since its default stores every token's factors
of a LoRA layer. Measured with its inline and with its background writer; the ratio takes the cheaper.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version

from benchmarks.peers.rows import DATTRI, Row
from benchmarks.peers.trial import Recorder, Trial, folder_bytes
from dattri_llm import REGISTER_ALL, GradientStorageManager, HookManager, HookManagerConfig, OffloadCallback


def measure(trial: Trial) -> list[Row]:
    """Time both ways of writing against the plain step."""
    return [_measure(trial, False, DATTRI), _measure(trial, True, f"{DATTRI}, writing in the background")]


def _measure(trial: Trial, async_write: bool, peer: str) -> Row:
    folder = trial.folder / "gradients"
    callback = OffloadCallback(
        offload_interval=1,
        file_manager=GradientStorageManager(str(folder)),
        recording_type="per_sample",
        async_write=async_write,
    )
    manager = HookManager(
        trial.workload.model,
        config=HookManagerConfig(linear_io=REGISTER_ALL, capture_style="auto"),
        callbacks=[callback],
    )
    with manager.collect():
        manager.remove()
        found = trial.compare(Recorder(trial.step, manager.register, manager.remove))
    stored = folder_bytes(folder) // (trial.samples * trial.steps)
    shutil.rmtree(folder)
    return Row(
        peer,
        "every trained layer's exact gradient of each sample, float32, with a SHA-256 of its inputs",
        version=version("dattri-llm"),
        bytes_per_sample=stored,
        note="capture_style='auto'; a step writes what the step before captured",
        **found,
    )
