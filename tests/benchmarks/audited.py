"""One workload that can take the same step plainly, under audit mode in any of its modes, or with a stopwatch."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.replaced import Clock, Stopwatch, timed
from benchmarks.workloads import Batch, Workload, without_ids
from torch import nn

from attribution.capture.hooks import Mode
from attribution.training.audit_mode import AuditMode
from auditlog.trust.keys import Signer

Around = Callable[[Callable[[], None]], Any]


@dataclass(frozen=True, slots=True)
class Seconds:
    """What one step took.

    Attributes:
        wall: From the forward pass to the end of ``zero_grad``.
        cpu: CPU seconds of the whole process for it, all threads; for an audited step until its writer is done.
        thread: CPU seconds of the training thread.
        inside: In our hooks, at the optimizer step and waiting for the writer; of a step with a stopwatch, in the
            products it times. By the clock that ``take`` was given.
        writer: CPU seconds of the writer thread.
    """

    wall: float
    cpu: float
    thread: float
    inside: float = 0.0
    writer: float = 0.0


class Audited:
    """A workload with audit mode at hand; outside of audited steps the model is as it was.

    All steps share one optimizer at rate 0: its state moves, the weights stay.

    Attributes:
        workload: What is trained.
        audits: An open audit mode for each capture mode, its hooks removed between steps.
        fused: The modules whose weight gradients mode ``fused`` computes; empty without it.
    """

    def __init__(self, workload: Workload, optimizer: torch.optim.Optimizer, audits: dict[Mode, AuditMode]) -> None:
        self.workload, self.audits = workload, audits
        self._optimizer, self._parameters = optimizer, workload.parameters
        self.fused = self._find_fused() if "fused" in audits else []

    @classmethod
    @contextmanager
    def open(cls, workload: Workload, folder: Path, modes: Sequence[Mode], **options: Any) -> Iterator[Audited]:
        """Open a throw-away run in ``folder`` for each mode; options are those of ``AuditMode``."""
        optimizer, signer = workload.optimizer(), Signer.generate("throw-away")
        with ExitStack() as stack:
            audits: dict[Mode, AuditMode] = {}
            for mode in modes:
                audit = AuditMode(
                    workload.model,
                    optimizer,
                    workload.manifest,
                    run=folder / mode,
                    signer=signer,
                    mode=mode,
                    on_head=lambda name, note: None,
                    self_check=False,
                    **options,
                )
                audits[mode] = stack.enter_context(audit)
                audit.hooks.detach()
                audit.unfollow()
            yield cls(workload, optimizer, audits)

    def plain(self, batch: Batch) -> Seconds:
        """Take a step without audit mode."""
        return self._take(lambda: self._step(without_ids(batch)))

    def audited(
        self, mode: Mode, batch: Batch, clock: Clock = time.perf_counter, around: Around = lambda step: step()
    ) -> Seconds:
        """Take a step under audit mode.

        Args:
            mode: Which capture mode.
            batch: With its ``sample_index``.
            clock: By which time in our own code is told.
            around: Called with the step, instead of the step itself.
        """
        audit = self.audits[mode]
        before, written = audit.time.hooks + audit.time.writer, _cpu_of_writers()
        with self._hooked(mode), _own_clock(clock):
            taken = self._take(lambda: around(lambda: self._step(batch)), audit.writer.flush)
        inside = audit.time.hooks + audit.time.writer - before
        return replace(taken, inside=inside, writer=_cpu_of_writers() - written)

    def with_stopwatch(self, batch: Batch, clock: Clock = time.perf_counter) -> Seconds:
        """Take a plain step that times the weight gradients which mode ``fused`` replaces."""
        watch = Stopwatch(clock)
        with timed(self.fused, watch):
            taken = self._take(lambda: self._step(without_ids(batch)))
        return replace(taken, inside=watch.seconds)

    def plain_passes(self, batch: Batch) -> Seconds:
        """Run forward and backward pass without audit mode, and throw the gradients away."""
        return self._take(lambda: self._passes(without_ids(batch)))

    def audited_passes(self, mode: Mode, batch: Batch) -> Seconds:
        """Run them under audit mode; time in our code is CPU time."""
        audit = self.audits[mode]
        before = audit.hooks.seconds
        with self._hooked(mode), _own_clock(time.thread_time):
            taken = self._take(lambda: self._passes(batch))
            inside = audit.hooks.seconds - before
            audit.discard()
        return replace(taken, inside=inside)

    def passes_with_stopwatch(self, batch: Batch) -> Seconds:
        """Run them plainly, timing the weight gradients that mode ``fused`` replaces; in CPU time."""
        watch = Stopwatch(time.thread_time)
        with timed(self.fused, watch):
            taken = self._take(lambda: self._passes(without_ids(batch)))
        return replace(taken, inside=watch.seconds)

    def _take(self, work: Callable[[], None], finish: Callable[[], None] = lambda: None) -> Seconds:
        self._synchronize()
        cpu, thread, began = time.process_time(), time.thread_time(), time.perf_counter()
        work()
        self._synchronize()
        wall, thread = time.perf_counter() - began, time.thread_time() - thread
        finish()
        return Seconds(wall, time.process_time() - cpu, thread)

    def _step(self, batch: Batch) -> None:
        self.workload.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _passes(self, batch: Batch) -> None:
        self.workload.model(**batch).loss.backward()
        self._optimizer.zero_grad()

    def _synchronize(self) -> None:
        if self._parameters[0].is_cuda:
            torch.cuda.synchronize()

    @contextmanager
    def _hooked(self, mode: Mode) -> Iterator[None]:
        audit = self.audits[mode]
        audit.hooks.attach()
        audit.follow(self._optimizer)
        try:
            yield
        finally:
            audit.hooks.detach()
            audit.unfollow()

    def _find_fused(self) -> list[nn.Module]:
        """Find the modules that mode ``fused`` gives another forward pass."""
        before = {module: type(module) for module in self.workload.model.modules()}
        with self._hooked("fused"):
            return [module for module, kind in before.items() if type(module) is not kind]


@contextmanager
def _own_clock(clock: Clock) -> Iterator[None]:
    """Let the product tell its own time by another clock."""
    places = [m for name, m in sys.modules.items() if name.startswith("attribution.") and hasattr(m, "perf_counter")]
    kept = [place.perf_counter for place in places]
    for place in places:
        place.perf_counter = clock  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for place, own in zip(places, kept, strict=True):
            place.perf_counter = own  # type: ignore[attr-defined]


def _cpu_of_writers() -> float:
    """Return the CPU seconds of the writer threads so far."""
    idents = [t.ident for t in threading.enumerate() if t.name == "gradtrail-writer"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)
