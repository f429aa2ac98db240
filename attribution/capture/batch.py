"""Who is in a batch: its sample ids, and which of its tokens are whose. Read off before anything is captured."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attribution.capture.segments import Segments
from attribution.errors import SampleIdentityError

SAMPLE_INDEX = "sample_index"

_TAKE_IDS = "Take sample_index from attribution.dataset(manifest) and let the collator stack it unchanged."


@dataclass(frozen=True, slots=True)
class Announced:
    """What a loop says about the next forward pass, where the model's own arguments will not show it.

    Attributes:
        index: The batch's sample ids.
        labels: Its labels, where the loop computes the loss itself.
        spans: ``(S, 4)`` int64, where each id's tokens lie, if it packs: row, first token, end, and which of the
            document's tokens is the first.
    """

    index: Any = None
    labels: Tensor | None = None
    spans: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch on its way into the model.

    Attributes:
        index: ``(S,)`` int64 on the CPU, or ``None`` if it carries no ids.
        fields: The named arguments without the ids.
        labels: The labels, if anybody knows them.
        spans: Where each id's tokens lie, if the loop says so.
        others: Positional arguments.
        mapping: The whole batch, where the model takes it as one argument; else ``None``.
    """

    index: Any
    fields: Mapping[str, Any]
    labels: Tensor | None
    spans: Tensor | None
    others: tuple[Any, ...]
    mapping: Any = None

    @property
    def token_ids(self) -> Tensor | None:
        """The token ids, if the batch has any."""
        ids = self.fields.get("input_ids")
        return ids if isinstance(ids, Tensor) else None

    @property
    def rows(self) -> int:
        """Length of the leading dimension."""
        tensors = [self.token_ids, *self.fields.values(), *self.others]
        return next((len(t) for t in tensors if isinstance(t, Tensor) and t.ndim), 0)

    def layout(self, rows_per_sample: int) -> tuple[Tensor, Segments]:
        """Return ids ``(S,)`` and the layout of the batch.

        Args:
            rows_per_sample: How many rows, or documents, each sample has; row ``r`` belongs to sample ``r mod S``.

        Raises:
            SampleIdentityError: If ids are missing, are no integers, or do not fit the rows.
        """
        if self.index is None:
            fields = ", ".join(map(str, self.fields)) or "no named fields"
            raise SampleIdentityError(
                f"the batch carries no {SAMPLE_INDEX} (it has {fields}), so its rows cannot be tied to the data",
                "Build the dataset with attribution.dataset(manifest) and keep the column through map and collator:\n"
                "  train_dataset=dataset(manifest).map(tokenize)   # tokenize must not drop sample_index\n"
                "  model(**batch)                                  # plain loop: pass the batch with its sample_index",
            )
        index = _as_integers(self.index)
        if index.ndim != 1:
            shape = tuple(index.shape)
            raise SampleIdentityError(f"{SAMPLE_INDEX} has shape {shape}: one id per row is needed, (S,)", _TAKE_IDS)
        if self.spans is not None and self.token_ids is not None:
            if len(self.spans) != len(index):
                raise SampleIdentityError(f"the batch has {len(index)} ids and {len(self.spans)} spans of tokens")
            return index, Segments.from_spans(self.spans, *self.token_ids.shape)
        places = self._document_places()
        if places is None and len(index) * rows_per_sample != self.rows:
            places = self._document_places(masked=True)
        if places is not None:
            return index, Segments.packed(places, len(index))
        if len(index) * rows_per_sample != self.rows:
            raise SampleIdentityError(
                f"{SAMPLE_INDEX} has shape {tuple(index.shape)}, the batch has {self.rows} rows: "
                f"{'one id per row is' if rows_per_sample == 1 else f'{rows_per_sample} rows per id are'} needed",
                "If rows are packed from several documents, use attribution.PackingCollator, or pass position_ids "
                "that start at 0 for each document and no attention_mask.",
            )
        tokens = self.token_ids
        length = tokens.shape[1] if tokens is not None and tokens.ndim == 2 else 0
        return index, Segments.whole_rows(len(index), self.rows, length)

    @property
    def crosses_documents(self) -> bool:
        """Whether documents that share a row can see each other, as far as positions and masks tell."""
        if self.spans is None:
            return self._document_places(masked=True) is not None and self._document_places() is None
        shares_rows = len(self.spans) > len(self.spans[:, 0].unique())
        return shares_rows and not self._begins_anew_at_spans()

    def _begins_anew_at_spans(self) -> bool:
        """Whether positions begin anew at each span, and no mask keeps the model from noticing."""
        places, mask = self.fields.get("position_ids"), self.fields.get("attention_mask")
        if not isinstance(places, Tensor) or (isinstance(mask, Tensor) and mask.ndim == 2):
            return False
        assert self.spans is not None
        inner = self.spans[self.spans[:, 1] > 0]  # those that do not begin a row
        rows, starts = inner[:, 0].to(places.device), inner[:, 1].to(places.device)
        return bool((places[rows, starts] - places[rows, starts - 1] != 1).all())

    def _document_places(self, masked: bool = False) -> Tensor | None:
        """Return ``position_ids`` ``(R, T)`` if they begin anew within a row; padding with a mask does so too."""
        places = self.fields.get("position_ids")
        mask = self.fields.get("attention_mask")
        if not isinstance(places, Tensor) or places.ndim != 2 or len(places) != self.rows:
            return None
        if isinstance(mask, Tensor) and mask.ndim == 2 and not (masked and bool(mask.all())):
            return None
        return places if bool((places.diff(dim=1) != 1).any()) else None


def read_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], announced: Announced) -> Batch:
    """Return the batch that a model is about to be called with; ids may be named, or announced by the loop."""
    is_mapping = not kwargs and len(args) == 1 and isinstance(args[0], Mapping)
    named = args[0] if is_mapping else kwargs
    return Batch(
        index=announced.index if announced.index is not None else named.get(SAMPLE_INDEX),
        fields={key: value for key, value in named.items() if key != SAMPLE_INDEX},
        spans=announced.spans,
        labels=announced.labels if announced.labels is not None else named.get("labels"),
        others=() if is_mapping else args,
        mapping=args[0] if is_mapping else None,
    )


def with_fields(mapping: Any, fields: Mapping[str, Any]) -> Any:
    """Return a mapping of the same type that holds these fields and nothing else."""
    changed = copy.copy(mapping)
    for key in [key for key in changed if key not in fields]:
        del changed[key]
    for key, value in fields.items():
        changed[key] = value
    return changed


def _as_integers(index: Any) -> Tensor:
    """Return ids as int64 on the CPU; never by rounding."""
    try:
        tensor = torch.as_tensor(index).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleIdentityError(f"{SAMPLE_INDEX} is not a tensor of integers: {error}", _TAKE_IDS) from error
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        raise SampleIdentityError(f"{SAMPLE_INDEX} has type {tensor.dtype}, integers are needed", _TAKE_IDS)
    return tensor.to("cpu", torch.int64)
