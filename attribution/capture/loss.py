"""What a pass's loss says of its units: wait where the model's output meets the loss, and measure there."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch import Tensor

from attribution.capture import fused_head, outputs, units
from attribution.capture.kept import keep, take
from attribution.capture.micro_batch import MicroBatch
from attribution.capture.modules import Tracking

Spend = Callable[[float], None]  # takes the seconds that a measurement took


def target_log_probs(output: Any, labels: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the targets' log-probabilities and the targets, both ``(R, T)``, if the model returns those."""
    log_probs = outputs.find(output, "log_probs")
    if log_probs is None or labels is None:
        return None
    return log_probs, labels[:, labels.shape[1] - log_probs.shape[1] :].to(log_probs.device)


def watch_head(output: Any, labels: Tensor | None, tracking: Tracking, micro: MicroBatch) -> None:
    """Capture a trained head that is read by a fused loss and never called."""
    found = target_log_probs(output, labels)
    if found is not None:
        fused_head.watch(*found, tracking.parameters, micro)


def watch_units(
    output: Any, labels: Tensor | None, micro: MicroBatch, next_token: bool, anchor: Tensor, spend: Spend
) -> None:
    """Measure the micro-batch's units when the gradient of the model's output arrives.

    Args:
        output: What the model returned.
        labels: The labels, if anybody knows them; else the targets are read off the gradient.
        micro: Takes the units.
        next_token: Position ``t`` predicts label ``t + 1``.
        anchor: For keeping logits.
        spend: Told how long it took.
    """

    def on(tensor: Tensor, measure: Callable[[Tensor], units.Units]) -> None:
        def consume(gradient: Tensor) -> None:
            started = perf_counter()
            micro.units = measure(gradient)
            spend(perf_counter() - started)

        outputs.on_gradient(tensor, consume)

    logits, found = outputs.find_logits(output), target_log_probs(output, labels)
    if logits is None:
        if found is not None:
            values, targets = found[0].detach(), found[1]
            on(found[0], lambda g: units.measure_log_probs(values, g, targets, micro.segments))
        return
    aligned = None if labels is None else units.align_targets(logits, labels.to(logits.device), next_token)
    if aligned is not None:
        needed = units.gather_logits(logits, aligned, outputs.gradient_dtype(logits))
        on(logits, lambda g: units.measure(needed, g, micro.segments))
        return
    cell = [keep([logits.detach()], anchor)]

    def read_off(gradient: Tensor) -> units.Units:
        (kept,) = take(cell)
        needed = units.gather_logits(kept, units.targets_from_gradient(gradient), gradient.dtype)
        return units.measure(needed, gradient, micro.segments)

    on(logits, read_off)
