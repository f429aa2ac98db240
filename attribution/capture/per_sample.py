"""Per-sample gradients of single modules from what their forward and backward passes show. Pure functions.

For ``y = x Wᵀ + b`` sample ``i`` has ``∂L/∂W = Σ_t g_it x_itᵀ`` and ``∂L/∂b = Σ_t g_it`` (Goodfellow 2015,
arXiv:1510.01799). ``t`` runs over the tokens of the sample. Every function takes tensors that ``Segments.by_sample``
has brought into ``(S, T, d)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# A weight's per-sample gradients are formed in stretches of at most this many entries over all samples.
STRETCH_ENTRIES = 8 << 20


class Piece(NamedTuple):
    """A stretch of per-sample gradients of one parameter, flattened as the sketch takes it.

    Attributes:
        parameter: Its name in the model.
        values: ``(k, n)`` float32: entries ``start`` to ``start + n`` of samples ``first`` to ``first + k``.
        start: Number of the first entry.
        first: The first sample.
        total: ``(n,)``, the same entries' sum over all samples, where somebody has it already.
    """

    parameter: str
    values: Tensor
    start: int = 0
    first: int = 0
    total: Tensor | None = None


class Entries(NamedTuple):
    """Single entries of per-sample gradients of one parameter; the others are zero.

    Attributes:
        parameter: Its name in the model.
        numbers: ``(S, n)`` int64, which entries; one may occur more than once.
        values: ``(S, n)`` float32.
    """

    parameter: str
    numbers: Tensor
    values: Tensor


class Product(NamedTuple):
    """Per-sample gradients of one large weight, ``Σ_t a_t b_tᵀ`` each, not formed.

    Attributes:
        parameter: Its name in the model.
        of_rows: ``a_t``, ``(S, T, rows)`` float32; rows of the weight as it is stored.
        of_columns: ``b_t``, ``(S, T, columns)`` float32.
    """

    parameter: str
    of_rows: Tensor
    of_columns: Tensor


class Lookup(NamedTuple):
    """Per-sample gradients of one large table, ``Σ_t e_{i_t} b_tᵀ`` each, not formed.

    Attributes:
        parameter: Its name in the model.
        numbers: The rows ``i_t`` that were looked up, ``(S, T)`` int64.
        of_columns: ``b_t``, ``(S, T, columns)`` float32.
    """

    parameter: str
    numbers: Tensor
    of_columns: Tensor


Part = Piece | Entries | Product | Lookup

Room = Callable[[int, int, int], Tensor | None]  # a shape -> something to overwrite


def own_room(samples: int, short: int, long: int) -> None:
    """Let every result have its own memory."""


def linear_weight(
    activations: Tensor, output_grads: Tensor, transposed: bool = False, room: Room = own_room
) -> Iterator[tuple[int, Tensor]]:
    """Yield each sample's weight gradient in stretches, flattened as the sketch takes it: the shorter side first.

    That order is also the faster one to compute: for LoRA's tall B matrix it takes half the time on a CPU.

    Args:
        activations: Module input, ``(S, T, d_in)`` float32.
        output_grads: Gradient of the loss w.r.t. the module output, ``(S, T, d_out)`` float32.
        transposed: The weight is stored ``(d_in, d_out)``.
        room: Gives memory to overwrite.

    Yields:
        Number of the first entry and ``(S, n)``: row by row of the stored weight, or column by column if it has more
        rows than columns.

    Example:
        >>> x, g = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]])
        >>> list(linear_weight(x, g))
        [(0, tensor([[3., 6.]]))]
    """
    first, second = (activations, output_grads) if transposed else (output_grads, activations)
    if first.shape[2] > second.shape[2]:
        first, second = second, first
    samples, short, long = first.shape[0], first.shape[2], second.shape[2]
    lines = max(1, min(short, STRETCH_ENTRIES // (samples * long)))
    for line in range(0, short, lines):
        few = min(lines, short - line)
        part = first if few == short else first[:, :, line : line + few]
        product = torch.bmm(part.transpose(1, 2), second, out=room(samples, few, long))
        yield line * long, product.view(samples, few * long)


def linear_bias(output_grads: Tensor) -> Tensor:
    """Return each sample's bias gradient, ``(S, d_out)``, from ``(S, T, d_out)``."""
    return output_grads.sum(1)


def without_padding(ids: Tensor, output_grads: Tensor, padding_idx: int | None) -> Tensor:
    """Return an embedding's output gradients, ``(S, T, d)``, zero where the row that gets none was looked up."""
    if padding_idx is None:
        return output_grads
    return output_grads.masked_fill((ids == padding_idx)[:, :, None], 0.0)


def embedding_weight(ids: Tensor, output_grads: Tensor, rows: int, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """Return each sample's gradient of an embedding table as single entries.

    Args:
        ids: ``(S, T)`` int64.
        output_grads: ``(S, T, d)`` float32.
        rows: Rows of the table ``V``.
        padding_idx: The row that gets no gradient.

    Returns:
        Numbers and values, both ``(S, T * d)``: row by row of the table, or column by column if ``V > d``.
    """
    output_grads = without_padding(ids, output_grads, padding_idx)
    width = output_grads.shape[2]
    column = torch.arange(width, device=ids.device)
    numbers = column * rows + ids[:, :, None] if rows > width else ids[:, :, None] * width + column
    return numbers.flatten(1), output_grads.flatten(1)
