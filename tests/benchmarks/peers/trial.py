"""One peer in a process of its own: the same model, batches and seed, and steps of all kinds in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from benchmarks.peers.rows import Row, Span
from benchmarks.workloads import Batch, Workload, gpt2_lora, without_ids

THREADS, SAMPLES, TOKENS = 2, 8, 128
_WARM_UPS, DISPATCH_ROUNDS = 2, 12


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Took:
    """What one step took, in seconds.

    Attributes:
        wall: By the clock on the wall.
        cpu: CPU time of the whole process, all threads.
        inside: In the recorder's own code.
    """

    wall: float
    cpu: float
    inside: float = 0.0


@dataclass(frozen=True, slots=True)
class Recorder:
    """A peer, ready to record training steps.

    Attributes:
        step: Takes one step and records it; this is timed.
        attach: Called before it, outside of the clock.
        detach: Called after it, outside of the clock: the model is as it was.
        seconds: How long its own code has run so far; ``None`` if that cannot be told.
    """

    step: Callable[[Batch], None]
    attach: Callable[[], None] = _nothing
    detach: Callable[[], None] = _nothing
    seconds: Callable[[], float] | None = None


class Trial:
    """The set-up that every peer gets.

    Args:
        workload: Model, batches with their ``sample_index``, and the data they come from.
        folder: For what the peer writes.
        rounds: How many steps of each kind to count.

    Attributes:
        optimizer: AdamW over the trained parameters, at rate 0: its state moves, the weights stay.
    """

    def __init__(self, workload: Workload, folder: Path, rounds: int) -> None:
        self.workload, self.folder, self.rounds = workload, folder, rounds
        self.optimizer = workload.optimizer()
        self._parameters = workload.parameters
        self.device = self._parameters[0].device

    @classmethod
    def gpt2(cls, folder: Path, rounds: int, device: str = "cpu") -> Trial:
        """GPT-2 (124M parameters, random weights), LoRA r=8 on all linear layers, 8 rows of 128 tokens."""
        torch.set_num_threads(THREADS)
        workload = gpt2_lora(folder, SAMPLES, TOKENS)
        workload.model.to(device)
        batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in workload.batches]
        return cls(Workload(workload.what, workload.model, batches, workload.manifest), folder, rounds)

    @property
    def samples(self) -> int:
        """Samples in a step."""
        return len(self.workload.batches[0]["input_ids"])

    @property
    def steps(self) -> int:
        """Steps of each kind that ``turns`` takes, those included that are not counted."""
        return _WARM_UPS + self.rounds

    def step(self, batch: Batch) -> None:
        """Take a training step without ids."""
        self.workload.model(**without_ids(batch)).loss.backward()
        self.consume()

    def consume(self) -> None:
        """Clip, take the optimizer's step, and drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def compare(self, recorder: Recorder) -> dict[str, Any]:
        """Return a row's figures: steps that the recorder records against plain ones."""
        kinds = {"plain": lambda batch: self._take(batch), "recorded": lambda batch: self._take(batch, recorder)}
        taken = self.turns(kinds)
        found = figures(taken["plain"], taken["recorded"], self.samples)
        if recorder.seconds is None:
            return found
        outside = Span.of(self._dispatch(recorder))
        return found | own_time([s.inside for s in taken["recorded"]], outside) | self._net_on_gpu(found)

    def turns(self, kinds: Mapping[str, Callable[[Batch], Took]]) -> dict[str, list[Took]]:
        """Take a step of each kind per round, on the same batch; the order turns round each time.

        The first rounds are not counted: files grow and caches fill.
        """
        taken: dict[str, list[Took]] = {kind: [] for kind in kinds}
        batches = self.workload.batches
        for number in range(self.steps):
            for kind in list(kinds) if number % 2 else reversed(list(kinds)):
                took = kinds[kind](batches[number % len(batches)])
                if number >= _WARM_UPS:
                    taken[kind].append(took)
        return taken

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds that a call takes, the device's work included."""
        began = perf_counter()
        call()
        self._synchronize()
        return perf_counter() - began

    def _take(self, batch: Batch, recorder: Recorder | None = None) -> Took:
        recorder = recorder or Recorder(self.step)
        recorder.attach()
        self._synchronize()
        before, cpu = _own(recorder), process_time()
        wall = self.timed(lambda: recorder.step(batch))
        took = Took(wall, process_time() - cpu, _own(recorder) - before)
        recorder.detach()
        return took

    def _dispatch(self, recorder: Recorder) -> list[float]:
        """Return what hooks cost outside of their own clocks, by steps on two tokens of one row, as ``overhead`` does.

        They make the same calls, and next to no arithmetic hides what the calls themselves take.
        """
        found = []
        for number in range(DISPATCH_ROUNDS):
            batch = two_tokens(self.workload.batches[number % len(self.workload.batches)])
            if number % 2:
                plain, recorded = self._take(batch), self._take(batch, recorder)
            else:
                recorded, plain = self._take(batch, recorder), self._take(batch)
            found.append(recorded.wall - recorded.inside - plain.wall)
        return found[_WARM_UPS:]

    def _net_on_gpu(self, found: dict[str, Any]) -> dict[str, Any]:
        return {"net": found["added"]} if self.device.type == "cuda" else {}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def figures(plain: list[Took], recorded: list[Took], samples: int) -> dict[str, Any]:
    """Return a row's figures from steps side by side."""
    return {
        "plain": Span.of([s.wall for s in plain]),
        "added": Span.of([r.wall - p.wall for r, p in zip(recorded, plain, strict=True)]),
        "cpu_added": Span.of([r.cpu - p.cpu for r, p in zip(recorded, plain, strict=True)]),
        "rounds": len(plain),
        "samples": samples,
    }


def own_time(gross: list[float], dispatch: Span, replaced: list[float] | None = None) -> dict[str, Any]:
    """Return a row's figures of time in the recorder's code: ``net = gross + dispatch - replaced``, round by round."""
    less = replaced or [0.0] * len(gross)
    net = [g + dispatch.ms / 1e3 - r for g, r in zip(gross, less, strict=True)]
    found = {"gross": Span.of(gross), "dispatch": dispatch, "net": Span.of(net)}
    return found if replaced is None else found | {"replaced": Span.of(replaced)}


def two_tokens(batch: Batch) -> Batch:
    """Return one row's last two tokens as a batch."""
    return {name: (t[:1, -2:] if t.ndim == 2 else t[:1]).contiguous() for name, t in batch.items()}


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _own(recorder: Recorder) -> float:
    return recorder.seconds() if recorder.seconds is not None else 0.0


Measure = Callable[[Trial], list[Row]]
