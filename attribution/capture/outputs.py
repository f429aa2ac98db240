"""Where a model's output meets its loss: the logits, or the targets' log-probabilities, and the node they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CASTS = ("ToCopyBackward0",)


def find(output: Any, name: str) -> Tensor | None:
    """Return a named tensor of a model's output that takes part in training."""
    if isinstance(output, Tensor):
        value: Any = output if name == "logits" else None
    else:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) and value.requires_grad else None


def find_logits(output: Any) -> Tensor | None:
    """Return the logits over two or more classes in what a model returned, ``(R, T, V)`` or ``(R, V)``."""
    logits = find(output, "logits")
    return logits if logits is not None and logits.ndim in (2, 3) and logits.shape[-1] > 1 else None


def on_gradient(tensor: Tensor, consume: Callable[[Tensor], None]) -> None:
    """Call ``consume`` with the gradient of a tensor, also where the loss used it before it was cast.

    Mixed-precision wrappers cast what a model returns, while the loss inside the model was computed from the tensor
    before the cast. So the hook sits on the node that made that one.
    """
    node, number = _source(tensor)

    def before(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is not None:
            consume(gradient)

    node.register_prehook(before)


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """Return the precision that the gradient of a tensor has where ``on_gradient`` sees it."""
    node, number = _source(tensor)
    dtype: torch.dtype = node._input_metadata[number].dtype
    return dtype


def _source(tensor: Tensor) -> tuple[Any, int]:
    """Return the node that made a tensor, before any casts, and which of the node's outputs it is."""
    node, number = tensor.grad_fn, tensor.output_nr
    while type(node).__name__ in _CASTS:
        node, number = node.next_functions[0]  # type: ignore[union-attr]
    return node, number


def predicts_next_token(model: nn.Module) -> bool:
    """Tell whether position ``t`` predicts label ``t + 1``: by the model's own loss, else for every sequence."""
    kind = getattr(model, "loss_type", None)
    return kind is None or "CausalLM" in str(kind)


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the module that makes a language model's logits, if the model names one."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = None if get is None else get()
    except Exception:  # a model without a head says so in many ways
        return None
    return head if isinstance(head, nn.Module) else None
