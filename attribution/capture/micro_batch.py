"""One forward pass and its backward pass: who is in it, and what has been collected so far."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from attribution.capture.units import Units
from attribution.sketch.operators import unwrapped, wrap
from auditlog.format.records import Flag


@dataclass(frozen=True, slots=True)
class Captured:
    """What one micro-batch leaves behind. ``B`` samples, sketch size ``D``.

    Attributes:
        sample_index: ``(B,)`` int64.
        sketch: ``(B, D)`` float32, of each sample's own summed loss; zeros where not finite.
        weight: ``(B,)`` float32, the factor with which that gradient entered ``p.grad``, before clipping.
        loss: ``(B,)`` float32, nats.
        n_tokens: ``(B,)`` int64.
        flags: ``(B,)`` int64, of ``auditlog.format.records.Flag``.
        token_ids_sha256: Digest of the micro-batch's token ids as int64, or ``None`` if it had none.
        expected: ``(D,)`` float32, ``Σ weight · sketch``, before int8: what the optimizer should get.
    """

    sample_index: Tensor
    sketch: Tensor
    weight: Tensor
    loss: Tensor
    n_tokens: Tensor
    flags: Tensor
    token_ids_sha256: str | None
    expected: Tensor


class MicroBatch:
    """Accumulates one micro-batch while its backward pass runs.

    Args:
        sample_index: ``(B,)`` int64.
        token_ids: The batch's token ids, for their digest; may be ``None``.
        dim: Sketch size.
        device: Where the sketches are summed.
    """

    def __init__(self, sample_index: Tensor, token_ids: Tensor | None, dim: int, device: torch.device) -> None:
        self.sample_index = sample_index
        self.token_ids_sha256 = None if token_ids is None else _digest(token_ids)
        self.sums = unwrapped(len(sample_index), dim, device)
        self.units: Units | None = None
        self.arrived = 0  # gradients that reached a tracked module
        self.closed = False
        self.is_training = True

    @property
    def samples(self) -> int:
        """Number of samples ``B``."""
        return len(self.sample_index)

    def close(self) -> Captured | None:
        """Finish: divide by the measured factor, flag what is special.

        Returns:
            ``None`` if no gradient arrived, because ``backward`` was never called on this forward pass.
        """
        self.closed = True
        if not self.arrived:
            return None
        units = self.units or Units.unknown(self.samples, self.sums.device)
        empty = units.known & (units.n_tokens == 0)
        sketch = wrap(self.sums) / units.factor[:, None]  # (B, D)
        finite = sketch.isfinite().all(1) & (units.loss.isfinite() | ~units.known)
        weight = torch.where(empty, torch.zeros_like(units.factor), units.factor)
        flags = (
            Flag.NOT_FINITE * (~finite).long()
            + Flag.NO_LOSS_TOKEN * empty.long()
            + Flag.UNIT_UNKNOWN * (~units.known).long()
        )
        expected = (weight[:, None] * sketch).sum(0)
        return Captured(
            sample_index=self.sample_index,
            sketch=torch.where(finite[:, None], sketch, torch.zeros_like(sketch)),
            weight=weight,
            loss=units.loss,
            n_tokens=units.n_tokens,
            flags=flags,
            token_ids_sha256=self.token_ids_sha256,
            expected=expected,
        )


def _digest(token_ids: Tensor) -> str:
    ids = token_ids.detach().to("cpu", torch.int64).contiguous().numpy().astype("<i8")
    return hashlib.sha256(repr(ids.shape).encode() + ids.tobytes()).hexdigest()
