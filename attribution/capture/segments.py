"""Which token belongs to which sample: rows, stacked rows, or documents packed into rows.

Everything downstream works on ``(S, T, d)``: ``S`` samples, each with its own tokens. This is the only place that
knows how a batch was laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attribution.errors import CaptureError, SampleIdentityError

_ADVICE = "The module mixes or reorders samples. Freeze it, or leave it out with allow_untracked."


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``end`` of one row of the batch; ``place`` is the position that its first token carries."""

    row: int
    start: int
    end: int
    place: int = 0


@dataclass(frozen=True, slots=True)
class Segments:
    """Layout of one micro-batch.

    Attributes:
        samples: Number of samples ``S``.
        rows: Rows of the batch ``R``.
        spans: The spans of each sample, ``S`` tuples; ``None`` where each sample has the same number of whole rows
            (row ``r`` belongs to sample ``r mod S``).
        length: Tokens per row; 0 where that is not known.
    """

    samples: int
    rows: int
    spans: tuple[tuple[Span, ...], ...] | None = None
    length: int = 0
    _gather: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def whole_rows(cls, samples: int, rows: int, length: int = 0) -> Segments:
        """Return the layout of a batch whose rows are not shared: one per sample, or several stacked blocks.

        Raises:
            SampleIdentityError: If the rows do not divide evenly.
        """
        if samples < 1 or rows % samples:
            raise SampleIdentityError(
                f"the batch has {samples} ids and {rows} rows: one id per row is needed",
                "If rows are packed from several documents, use attribution.PackingCollator, or pass position_ids "
                "that start at 0 for each document.",
            )
        return cls(samples, rows, length=length)

    @classmethod
    def packed(cls, position_ids: Tensor, samples: int) -> Segments:
        """Return the layout of documents that are packed into rows: a new one starts wherever positions do not go on.

        Args:
            position_ids: ``(R, T)``; rises by one within a document.
            samples: Number of ids in the batch. With ``k`` times as many documents, document ``j`` belongs to sample
                ``j mod S``.

        Raises:
            SampleIdentityError: If the number of documents is not a multiple of the number of ids.
        """
        rows, length = position_ids.shape
        ids = position_ids.detach().to("cpu")
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids.diff(dim=1) != 1
        begin = [(int(r), int(t)) for r, t in starts.nonzero()]
        if samples < 1 or len(begin) % samples:
            raise SampleIdentityError(
                f"position_ids mark {len(begin)} documents, the batch has {samples} ids",
                "Packed rows need one id per document, in order: use attribution.PackingCollator.",
            )
        spans: list[list[Span]] = [[] for _ in range(samples)]
        for number, (row, start) in enumerate(begin):
            following = begin[number + 1] if number + 1 < len(begin) else (rows, 0)
            end = following[1] if following[0] == row else length
            spans[number % samples].append(Span(row, start, end, int(ids[row, start])))
        return cls(samples, rows, tuple(tuple(s) for s in spans), length)

    @classmethod
    def from_spans(cls, spans: Tensor, rows: int, length: int) -> Segments:
        """Return the layout that a loop states itself, one span per id.

        Args:
            spans: ``(S, 4)`` int64: row, first token, end, and which of its document's tokens is the first.
            rows: Rows of the batch ``R``.
            length: Tokens per row ``T``.

        Raises:
            SampleIdentityError: If a span does not lie in the batch.
        """
        found = [Span(*map(int, span)) for span in spans]
        for span in found:
            if not (0 <= span.row < rows and 0 <= span.start < span.end <= length):
                raise SampleIdentityError(
                    f"tokens {span.start} to {span.end} of row {span.row} are outside of {rows} x {length} tokens",
                    "Let attribution.PackingCollator or attribution.keep_ids() state what lies where.",
                )
        return cls(len(found), rows, tuple((span,) for span in found), length)

    @property
    def is_packed(self) -> bool:
        """Whether samples share rows."""
        return self.spans is not None

    def by_sample(self, tensor: Tensor, module: str) -> Tensor:
        """Bring activations, gradients or ids into ``(S, T, d)``, zeros behind a shorter sample's last token.

        Floating-point numbers come back as float32.

        Args:
            tensor: ``(R, T, d)``, ``(R, d)``, ``(R, …, d)`` or ``(R * T, d)`` with a row's tokens next to each other.
            module: Name for the error message.

        Raises:
            CaptureError: If the tensor does not have the batch's rows in front.
        """
        if self.spans is not None:
            return self._cut_out(tensor, module)
        if tensor.ndim == 3 and tensor.shape[0] == self.rows == self.samples and tensor.dtype is torch.float32:
            return tensor  # by far the most frequent case, some hundred times per step
        rows = _as_float32(self._rows_first(tensor, module))
        if self.rows == self.samples:
            return rows
        stacked = rows.view(-1, self.samples, *rows.shape[1:])  # (k, S, T, d)
        return stacked.transpose(0, 1).flatten(1, 2)

    def cut(self, tensor: Tensor, sample: int) -> Tensor | None:
        """Return one sample's part of a tensor, in the tensor's own shape but for the leading dimensions.

        Returns:
            ``None`` if the tensor does not have the batch's rows or tokens in front, so that all samples share it.
        """
        leading = tensor.shape[0] if tensor.ndim else 0
        if self.spans is None:
            if not leading or not self._is_by_row(tensor):
                return None
            rows = tensor.view(self.rows, leading // self.rows, *tensor.shape[1:])
            return rows[sample :: self.samples].flatten(0, 1)
        if tensor.ndim > 1 and tensor.shape[:2] == (self.rows, self.length):
            parts = [tensor[s.row, s.start : s.end] for s in self.spans[sample]]
            return torch.cat(parts)[None]
        if leading == self.rows * self.length:
            first = [s.row * self.length for s in self.spans[sample]]
            parts = [tensor[f + s.start : f + s.end] for f, s in zip(first, self.spans[sample], strict=True)]
            return torch.cat(parts)
        return None

    def is_ambiguous(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Tell whether among one call's tensors, of these shapes, one may be a row each or a token each.

        That is ``(T, d)`` beside ``(R, T, …)`` in a batch with as many rows as tokens.
        """
        if self.spans is not None or self.rows != self.length or self.rows == 1:
            return False
        has_tokens = any(len(shape) > 2 and tuple(shape[:2]) == (self.rows, self.length) for shape in shapes)
        return has_tokens and any(len(shape) == 2 and shape[0] == self.rows for shape in shapes)

    def owner(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the sample of each token, ``(N,)`` int64, from its row and its position in the row."""
        if self.spans is None:
            return rows % self.samples
        table = torch.zeros(self.rows, self.length, dtype=torch.long)
        for sample, spans in enumerate(self.spans):
            for span in spans:
                table[span.row, span.start : span.end] = sample
        return table.to(rows.device)[rows, positions]

    def slots(self) -> tuple[list[int], list[int]]:
        """Return, per sample, its first row and how many samples begin before it in that row: ``slot`` and ``part``."""
        if self.spans is None:
            return list(range(self.samples)), [0] * self.samples
        slot = [spans[0].row for spans in self.spans]
        part = [slot[:i].count(row) for i, row in enumerate(slot)]
        return slot, part

    def _is_by_row(self, tensor: Tensor) -> bool:
        """Tell whether a tensor has the batch's rows, or their tokens, in front.

        What belongs to no row may still have a length that the rows divide: positions ``(T,)``, for example.
        """
        leading, is_flat = len(tensor), tensor.ndim > 1 and len(tensor) % self.rows == 0
        if self.length:
            is_flat = leading == self.rows * self.length
        is_positions = tensor.ndim == 1 and leading == self.length > 1
        return (leading == self.rows or is_flat) and not (is_positions and self.rows > 1)

    def _rows_first(self, tensor: Tensor, module: str) -> Tensor:
        """View a tensor as ``(R, T, d)``."""
        leading = tensor.shape[0]
        if leading == self.rows:
            return tensor if tensor.ndim == 3 else tensor.reshape(self.rows, -1, tensor.shape[-1])
        # Tokens may have been dropped on the way; then no equal share of what is left is a row's.
        is_flat = leading == self.rows * self.length if self.length else leading % self.rows == 0
        if tensor.ndim == 2 and is_flat:
            return tensor.reshape(self.rows, leading // self.rows, tensor.shape[-1])
        raise CaptureError(
            f"module {module}: its batch has {leading} rows {tuple(tensor.shape)}, the micro-batch has {self.rows}",
            _ADVICE,
        )

    def _cut_out(self, tensor: Tensor, module: str) -> Tensor:
        """Gather each document's tokens into its own padded row."""
        tokens = self.rows * self.length
        if tensor.shape[:2] == (self.rows, self.length):
            flat = tensor.reshape(tokens, -1)
        elif tensor.ndim == 2 and tensor.shape[0] == tokens:
            flat = tensor
        else:
            raise CaptureError(
                f"module {module}: its input or output {tuple(tensor.shape)} does not have the {self.rows} x "
                f"{self.length} tokens of the packed batch in front",
                "A module that works on whole rows cannot be told apart by document. Freeze it, or do not pack.",
            )
        index, inside = self._places(tensor.device)
        return _as_float32(flat[index]).masked_fill(~inside[:, :, None], 0)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return, per sample and place, the token's number in the batch and whether there is one, both ``(S, T)``."""
        if device not in self._gather:
            assert self.spans is not None
            numbers = [[s.row * self.length + t for s in spans for t in range(s.start, s.end)] for spans in self.spans]
            longest = max(map(len, numbers))
            index = torch.tensor([n + [0] * (longest - len(n)) for n in numbers], device=device)
            inside = torch.tensor([[True] * len(n) + [False] * (longest - len(n)) for n in numbers], device=device)
            self._gather[device] = index, inside
        return self._gather[device]


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
