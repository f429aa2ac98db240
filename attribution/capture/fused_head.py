"""A language-model head that is trained, but never called: its weight goes straight into a fused loss.

TRL computes the targets' log-probabilities from hidden states and ``lm_head.weight`` in one autograd function, without
logits, so no hook of a module sees that use of the weight. The function's own backward is linear in the gradient that
arrives and treats tokens apart. So it is run again for the tokens of one sample at a time, which gives exactly the
terms that it adds up in the weight's gradient, in its own precision and with its own memory for logits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attribution.capture.micro_batch import MicroBatch
from attribution.capture.per_sample import Piece
from attribution.errors import CaptureError
from attribution.sketch.layout import flatten

_DEPTH = 4  # nodes between the function and what the model returns: a view, a mask


def watch(log_probs: Tensor, targets: Tensor, parameters: Mapping[str, nn.Parameter], micro: MicroBatch) -> None:
    """Capture the head's per-sample gradients on the backward pass, if a tracked parameter is used in this way.

    Args:
        log_probs: What the model returned, ``(R, T)``.
        targets: ``(R, T)``, ``IGNORE_INDEX`` where no loss is.
        parameters: The tracked parameters by name.
        micro: Where the gradients go.
    """
    names = {id(p): name for name, p in parameters.items()}
    found = _node_that_uses(log_probs.grad_fn, names)
    if found is None:
        return
    node, places = found  # places: number of the argument -> name of the parameter

    def before(gradients: tuple[Tensor | None, ...]) -> None:
        if micro.closed:
            raise CaptureError(
                "the fused head's gradient arrived after its micro-batch was closed",
                "Call backward after each forward pass, before the next forward pass or optimizer.step().",
            )
        with torch.no_grad():
            owner = _owners(node, gradients, targets, micro)
            of = functools.partial(_gradients, node, gradients, places=places)
            every = torch.ones_like(owner, dtype=torch.bool)
            totals = {} if micro.whitening is None else {name: flatten(grad)[0] for name, grad in of(every).items()}
            for sample in range(micro.samples):
                for name, grad in of(owner == sample).items():
                    micro.add(Piece(name, flatten(grad), first=sample, total=totals.get(name)))
        micro.arrived.update(places.values())

    node.register_prehook(before)


def _node_that_uses(node: Any, names: Mapping[int, str]) -> tuple[Any, dict[int, str]] | None:
    """Return the custom function behind a tensor that takes parameters directly, and which arguments they are."""
    for _ in range(_DEPTH):
        if node is None:
            return None
        inputs = [following for following, _ in node.next_functions]
        if hasattr(node, "_forward_cls"):
            places = {
                number: names[id(following.variable)]
                for number, following in enumerate(inputs)
                if id(getattr(following, "variable", None)) in names
            }
            return (node, places) if places else None
        node = next((following for following in inputs if following is not None), None)
    return None


def _owners(node: Any, gradients: Sequence[Tensor | None], targets: Tensor, micro: MicroBatch) -> Tensor:
    """Return the sample of each of the function's tokens, ``(N,)``: of all positions, or of those that carry loss."""
    n = next(len(g) for g in gradients if g is not None)
    every = torch.ones_like(targets, dtype=torch.bool)
    chosen = next((mask for mask in (every, targets != -100) if int(mask.sum()) == n), None)
    if chosen is None:
        raise CaptureError(
            f"the fused head works on {n} tokens, the batch has {targets.numel()}",
            "Freeze the head (lm_head), or turn the fused head off.",
        )
    rows, positions = chosen.nonzero(as_tuple=True)
    return micro.segments.owner(rows, positions)


def _gradients(
    node: Any, gradients: Sequence[Tensor | None], tokens: Tensor, places: Mapping[int, str]
) -> dict[str, Tensor]:
    """Run the function's backward on some of its tokens, and return the gradients of the wanted arguments."""
    part = _Part(node, tokens, places)
    found = node._forward_cls.backward(part, *(None if g is None else g[tokens] for g in gradients))
    return {name: found[number] for number, name in places.items()}


class _Part:
    """A function's context, as if it had been called with some of its tokens only."""

    def __init__(self, node: Any, tokens: Tensor, places: Mapping[int, str]) -> None:
        own = {node.next_functions[number][0].variable.data_ptr() for number in places}
        self.saved_tensors = tuple(
            saved[tokens] if _is_per_token(saved, len(tokens), own) else saved for saved in node.saved_tensors
        )
        self.needs_input_grad = tuple(number in places for number in range(len(node.needs_input_grad)))
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _is_per_token(saved: Tensor | None, tokens: int, parameters: set[int]) -> bool:
    if saved is None or isinstance(saved, nn.Parameter) or saved.data_ptr() in parameters:
        return False
    return saved.ndim > 0 and len(saved) == tokens
