"""One forward pass and its backward pass: who is in it, and what has been collected so far."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attribution.capture.factored import FactoredSums
from attribution.capture.per_sample import Entries, Part, Piece
from attribution.capture.segments import Segments
from attribution.capture.units import Units
from attribution.capture.whitening import Whitening
from attribution.sketch.layout import SketchLayout
from attribution.sketch.sign_fold import SignFold, unwrapped, wrap
from auditlog.format.records import Flag

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Captured:
    """What one micro-batch leaves behind. ``B`` samples, sketch size ``D``.

    Attributes:
        sample_index: ``(B,)`` int64.
        segments: Where each sample lies in the batch.
        sketch: ``(B, D)`` float32, of each sample's own summed loss; zeros where not finite.
        whitened: The same of the whitened gradient; ``None`` in a run that records the raw form only.
        weight: ``(B,)`` float32, the factor with which that gradient entered ``p.grad``, before clipping.
        loss: ``(B,)`` float32, nats.
        n_tokens: ``(B,)`` int64.
        flags: ``(B,)`` int64, of ``auditlog.format.records.Flag``.
        token_ids_sha256: Digest of the micro-batch's token ids as int64, or ``None`` if it had none.
        expected: ``(D,)`` float32, ``Σ weight · sketch``, before int8: what the optimizer should get.
        arrived: Names of the modules that gradients reached.
    """

    sample_index: Tensor
    segments: Segments
    sketch: Tensor
    whitened: Tensor | None
    weight: Tensor
    loss: Tensor
    n_tokens: Tensor
    flags: Tensor
    token_ids_sha256: str | None
    expected: Tensor
    arrived: frozenset[str]

    def shared(self, share: float) -> Captured:
        """Return the same where only this share of the back-propagated gradient enters ``p.grad``.

        Where the unit is known the share is the weight's. Elsewhere the sketch is the contribution itself, weight 1.
        """
        if share == 1.0:
            return self
        is_known = (self.flags & Flag.UNIT_UNKNOWN) == 0
        of_sketch = torch.where(is_known, torch.ones_like(self.weight), share)
        return dataclasses.replace(
            self,
            sketch=self.sketch * of_sketch[:, None],
            whitened=None if self.whitened is None else self.whitened * of_sketch[:, None],
            weight=torch.where(is_known, self.weight * share, self.weight),
            expected=self.expected * share,
        )


class MicroBatch:
    """Accumulates one micro-batch while its backward pass runs.

    Args:
        sample_index: ``(B,)`` int64.
        segments: Where each sample lies in the batch.
        token_ids: The batch's token ids, for their digest; may be ``None``.
        layout: Where gradients land.
        whitening: What the second form is made with; ``None`` for the raw form only.

    Attributes:
        arrived: Names of the tracked modules that gradients reached.
        is_half: Some of them were in half precision.
        units: What the logits said; ``None`` until their gradient arrives.
        not_separable: Something in the loss or the attention couples the samples.
    """

    def __init__(
        self,
        sample_index: Tensor,
        segments: Segments,
        token_ids: Tensor | None,
        layout: SketchLayout,
        whitening: Whitening | None = None,
    ) -> None:
        self.sample_index, self.segments = sample_index, segments
        self.token_ids_sha256 = None if token_ids is None else _digest(token_ids)
        forms = 1 if whitening is None else 2
        rows = unwrapped(segments.samples * forms, layout.dim, layout.device)
        self._forms = rows.view(segments.samples, forms, -1)  # one sample's forms side by side, to be added to at once
        self.sums = self._forms[:, 0]
        self.whitened_sums = None if whitening is None else self._forms[:, 1]
        self.whitening = whitening
        self.units: Units | None = None
        self.arrived: set[str] = set()
        self.is_half = False
        self.closed = False
        self.is_training = True
        self.not_separable = False
        self._maps = layout.maps
        self._factored = FactoredSums(self.sums, self.whitened_sums, whitening)

    @property
    def samples(self) -> int:
        """Number of samples ``B``."""
        return self.segments.samples

    def arrive(self, module: str, gradients: Sequence[Tensor | None]) -> None:
        """Note that gradients reached a module."""
        self.arrived.add(module)
        for gradient in gradients:
            if gradient is not None and gradient.dtype in _HALF:
                self.is_half = True

    def add(self, part: Part) -> None:
        """Sketch a part of the samples' gradients."""
        fold = self._maps[part.parameter]
        if not isinstance(fold, SignFold):
            self._factored.add(part, fold)
        elif isinstance(part, Piece):
            self.add_pieces([part])
        else:
            assert isinstance(part, Entries)
            self._add_entries(part, fold)

    def add_pieces(self, pieces: Sequence[Piece]) -> None:
        """Sketch pieces side by side: what whitening needs is computed for all of them at once."""
        exact: list[Piece] = []
        folds: list[SignFold] = []
        for piece in pieces:
            fold = self._maps[piece.parameter]
            if isinstance(fold, SignFold):
                exact.append(piece)
                folds.append(fold)
            else:
                self._factored.add(piece, fold)
        if not exact:
            return
        lengths = [piece.values.shape[1] for piece in exact]
        signs = torch.cat([f.stretch(p.start, n) for f, p, n in zip(folds, exact, lengths, strict=True)])
        forms = [signs] if self.whitening is None else [signs, self.whitening.roots(exact).mul_(signs)]
        factors = torch.stack(forms).split(lengths, 1)  # each (F, n)
        for piece, fold, factor in zip(exact, folds, factors, strict=True):
            is_of_all = piece.values.shape[0] == self.samples
            sums = self._forms if is_of_all else self._forms.narrow(0, piece.first, piece.values.shape[0])
            fold.add_products(sums, piece.values, factor, piece.start)

    def rest(self) -> None:
        """Let go of what only modules that follow each other share."""
        self._factored.forget()

    def _add_entries(self, part: Entries, fold: SignFold) -> None:
        fold.scatter_to(self.sums, part.numbers, part.values)
        if self.whitening is not None and self.whitened_sums is not None:
            numbers = part.numbers.reshape(-1)
            total = part.values.new_zeros(len(fold.signs)).scatter_add_(0, numbers, part.values.reshape(-1))
            roots = self.whitening.roots_at(part.parameter, total[numbers], numbers)
            fold.scatter_to(self.whitened_sums, part.numbers, part.values * roots.view_as(part.values))

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
        # Others' losses reach a sample that they can see, whether or not it has a target of its own.
        is_unused = empty & (not self.not_separable)
        sketch = wrap(self.sums) / units.factor[:, None]  # (B, D)
        whitened = None if self.whitened_sums is None else wrap(self.whitened_sums) / units.factor[:, None]
        finite = sketch.isfinite().all(1) & (units.loss.isfinite() | ~units.known)
        if whitened is not None:
            finite &= whitened.isfinite().all(1)
        weight = torch.where(is_unused, torch.zeros_like(units.factor), units.factor)
        flags = (
            Flag.NOT_FINITE * (~finite).long()
            + Flag.NO_LOSS_TOKEN * empty.long()
            + Flag.UNIT_UNKNOWN * (~units.known).long()
            + Flag.NOT_SEPARABLE * int(self.not_separable)
        )
        expected = (weight[:, None] * sketch).sum(0)
        return Captured(
            sample_index=self.sample_index,
            segments=self.segments,
            sketch=_zero_where_not(finite, sketch),
            whitened=None if whitened is None else _zero_where_not(finite, whitened),
            weight=weight,
            loss=units.loss,
            n_tokens=units.n_tokens,
            flags=flags,
            token_ids_sha256=self.token_ids_sha256,
            expected=expected,
            arrived=frozenset(self.arrived),
        )


def _zero_where_not(finite: Tensor, sketch: Tensor) -> Tensor:
    return torch.where(finite[:, None], sketch, torch.zeros_like(sketch))


def _digest(token_ids: Tensor) -> str:
    ids = token_ids.detach().to("cpu", torch.int64).contiguous().numpy().astype("<i8")
    return hashlib.sha256(repr(ids.shape).encode() + ids.tobytes()).hexdigest()
