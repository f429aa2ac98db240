"""Whether documents that share a row see each other: tried out, since it depends on model, attention and cache.

Models of ``transformers`` keep packed documents apart by ``position_ids``, but only without an attention mask and
without a cache, and an attention implementation may ignore them. So one document is exchanged and the outputs at the
others are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attribution.capture import outputs
from attribution.capture.segments import Segments, Span
from attribution.capture.undisturbed import undisturbed

# Relative to the largest output. Rounding is the same in both passes; what another document adds is far more.
_VISIBLE = 1e-3


def documents_see_each_other(model: nn.Module, fields: Mapping[str, Any], segments: Segments) -> bool:
    """Run the model twice on a packed batch, with one document exchanged, and compare the outputs at the others.

    Both passes draw the same random numbers, and the generators are put back. Takes two forward passes; the caller
    sees to it that nothing is captured meanwhile.

    Args:
        model: The model, in the mode in which it trains.
        fields: The batch's named arguments, ``input_ids`` among them.
        segments: Where the documents lie.

    Returns:
        False also where nothing can be told: one document per row, or no logits.
    """
    ids = fields.get("input_ids")
    pair = _neighbours(segments)
    if pair is None or not isinstance(ids, Tensor):
        return False
    changed, others = pair
    exchanged = ids.clone()
    part = exchanged[changed.row, changed.start : changed.end]
    part.copy_(ids.max() + ids.min() - part)  # other tokens that the model knows
    before, after = (_outputs(model, {**fields, "input_ids": tokens}) for tokens in (ids, exchanged))
    if before is None or after is None:
        return False
    # The last token of a document predicts the next document's first.
    difference = max(float((before - after)[s.row, s.start : s.end - 1].abs().max()) for s in others)
    return difference > _VISIBLE * float(before.abs().max())


def _neighbours(segments: Segments) -> tuple[Span, list[Span]] | None:
    """Return a document and the others of its row that have at least two tokens."""
    spans = [span for of_sample in segments.spans or () for span in of_sample]
    for changed in spans:
        others = [s for s in spans if s.row == changed.row and s != changed and s.end - s.start > 1]
        if others:
            return changed, others
    return None


def _outputs(model: nn.Module, fields: Mapping[str, Any]) -> Tensor | None:
    """Return logits ``(R, T, V)`` or log-probabilities of the targets ``(R, T - 1, 1)``."""
    with undisturbed(model):
        output = model(**fields)
    found = outputs.find_logits(output)
    if found is None:
        found = outputs.find(output, "log_probs")
    if found is None or found.ndim < 2:
        return None
    return found.detach().float().reshape(*found.shape[:2], -1)
