"""Collators: one that packs documents, and one that keeps any other collator's ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attribution.capture.batch import SAMPLE_INDEX
from attribution.errors import SampleIdentityError

# Where each sample lies in the batch, (S, 4): row, first token, end, and which token of the sample the first one is.
SAMPLE_SPANS = "sample_spans"
IGNORE_INDEX = -100

_Example = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PackingCollator:
    """Puts all documents of a batch into one row, without padding, each with its own id.

    Positions restart with every document, and neither an attention mask nor a cache is passed, which is how models of
    transformers tell that documents must not see each other. A document's first token is no target, because it would
    be predicted from the document before.

    Example:
        >>> batch = PackingCollator()([
        ...     {"input_ids": [5, 6, 7], "sample_index": 0},
        ...     {"input_ids": [8, 9], "sample_index": 3},
        ... ])
        >>> batch["position_ids"], batch["labels"], batch["sample_index"]
        (tensor([[0, 1, 2, 0, 1]]), tensor([[-100,    6,    7, -100,    9]]), tensor([0, 3]))
    """

    def __call__(self, examples: Sequence[_Example]) -> dict[str, Any]:
        """Pack examples.

        Args:
            examples: Each with ``input_ids``; ``labels`` default to them. Tokens that its ``attention_mask`` hides are
                left out. ``sample_index`` is kept where every example has one.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``, ``(1, N)``; ``use_cache``; ``sample_index``, ``(S,)``.
        """
        examples = [example for example in examples if len(example["input_ids"])]
        documents = [_document(example) for example in examples]
        batch: dict[str, Any] = {
            "input_ids": torch.cat([ids for ids, _ in documents])[None],
            "labels": torch.cat([labels for _, labels in documents])[None],
            "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in documents])[None],
            "use_cache": False,  # with a cache, transformers would not separate the documents
        }
        if all(SAMPLE_INDEX in example for example in examples):
            batch[SAMPLE_INDEX] = torch.tensor([int(example[SAMPLE_INDEX]) for example in examples])
        return batch


def _document(example: _Example) -> tuple[Tensor, Tensor]:
    """Return one example's tokens and targets, ``(T,)`` each."""
    ids = torch.as_tensor(example["input_ids"])
    labels = torch.as_tensor(example.get("labels", ids)).clone()
    if "attention_mask" in example:
        seen = torch.as_tensor(example["attention_mask"]).bool()
        ids, labels = ids[seen], labels[seen]
    labels[:1] = IGNORE_INDEX
    return ids, labels


@dataclass(frozen=True, slots=True)
class IdCollator:
    """Any collator, with the ids taken out of the examples before it and put beside the batch behind it.

    So a collator may drop what it does not know, or choke on it; one that asks for ``sample_index`` gets it. It must
    keep the order of the examples, which is checked where they bring ``input_ids``.

    Attributes:
        collate: The collator.
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: list[Any]) -> Any:
        """Collate; the batch gains ``sample_index``, and ``sample_spans`` where samples share rows.

        Raises:
            SampleIdentityError: If an id is no integer, or the collator changed the order of the examples.
        """
        if not all(isinstance(example, Mapping) and SAMPLE_INDEX in example for example in examples):
            return self.collate(examples)
        batch = self.collate([_Hidden.of(example) for example in examples])
        if isinstance(batch, MutableMapping):
            batch.update(_whose(examples, batch.get("input_ids")))
        return batch


class _Hidden(dict[str, Any]):
    """An example whose id is there for who asks for it, and not among its keys."""

    _own: Mapping[str, Any] = MappingProxyType({})  # a batch that a collator makes of this type has no id of its own

    @classmethod
    def of(cls, example: _Example) -> _Hidden:
        own = (SAMPLE_INDEX, SAMPLE_SPANS)
        hidden = cls((key, value) for key, value in example.items() if key not in own)
        hidden._own = {key: example[key] for key in own if key in example}
        return hidden

    def __missing__(self, key: str) -> Any:
        return self._own[key]

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, self._own.get(key, default))


def _whose(examples: Sequence[_Example], tokens: Any) -> dict[str, Tensor]:
    """Return the ids of a batch, and its spans where samples share rows.

    Args:
        examples: As they went into the collator.
        tokens: The batch's ``input_ids``, ``(R, T)``, if it has any.
    """
    ids = [_ids(example[SAMPLE_INDEX]) for example in examples]
    flat = torch.tensor([number for of_row in ids for number in of_row], dtype=torch.int64)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or "input_ids" not in examples[0]:
        return {SAMPLE_INDEX: flat}
    originals = [torch.as_tensor(example["input_ids"]).to(tokens) for example in examples]
    is_flattened = len(tokens) == 1 < len(examples)
    is_packed = is_flattened or any(SAMPLE_SPANS in example for example in examples)
    if not is_packed:
        _refuse_reordering(tokens, originals)
        return {SAMPLE_INDEX: flat}
    spans = list[list[int]]()
    offset = 0
    for row, (example, original) in enumerate(zip(examples, originals, strict=True)):
        place, first = (0, offset) if is_flattened else (row, 0)
        _refuse_misplaced(tokens, place, first, original)
        for start, end, inside in example.get(SAMPLE_SPANS, [[0, len(original), 0]]):
            spans.append([place, first + start, first + end, inside])
        offset += len(original)
    kept = [number for number, (_, start, end, _) in enumerate(spans) if end > start]  # without empty documents
    return {SAMPLE_INDEX: flat[kept], SAMPLE_SPANS: torch.tensor([spans[k] for k in kept], dtype=torch.int64)}


def _ids(value: Any) -> list[int]:
    """Return the ids of one example: its own, or those of the documents packed into it.

    Raises:
        SampleIdentityError: If they are not integers.
    """
    found = torch.as_tensor(value) if not isinstance(value, str | bytes) and value is not None else None
    if found is None or found.dtype.is_floating_point or found.dtype is torch.bool or found.ndim > 1:
        raise SampleIdentityError(
            f"{SAMPLE_INDEX} is {value!r}: the place of a row in the data manifest is needed, an integer",
            "Take the column from attribution.dataset(manifest). Ids of your own can travel beside it, in a column "
            "of another name.",
        )
    numbers = found.reshape(-1).tolist()
    return [int(number) for number in numbers]


def _refuse_reordering(tokens: Tensor, originals: Sequence[Tensor]) -> None:
    """Compare each row with its example; rows that a collator masks or cuts can only be told from *other* examples.

    Raises:
        SampleIdentityError: If a row holds another example than the one at its place.
    """
    if len(tokens) != len(originals):
        return
    for row, original in enumerate(originals):
        if _holds(tokens[row], original):
            continue
        other = next((k for k, candidate in enumerate(originals) if _holds(tokens[row], candidate)), None)
        if other is not None:
            raise SampleIdentityError(
                f"the collator put example {other} of the batch into row {row}, so ids would name the wrong rows",
                "Let the collator keep the order of its examples; sort in the sampler instead "
                "(TrainingArguments(train_sampling_strategy='group_by_length')).",
            )


def _refuse_misplaced(tokens: Tensor, row: int, first: int, original: Tensor) -> None:
    """Check that a row of documents lies where its spans say.

    Raises:
        SampleIdentityError: If other tokens are there.
    """
    if not torch.equal(tokens[row, first : first + len(original)], original):
        raise SampleIdentityError(
            f"the collator changed packed rows: tokens {first} to {first + len(original)} of row {row} are not those "
            "of their example, so its documents cannot be told apart",
            "Pack with attribution.PackingCollator, or with TRL inside attribution.keep_ids().",
        )


def _holds(row: Tensor, original: Tensor) -> bool:
    """Tell whether a row is an example, padded or cut on either side."""
    n = min(len(row), len(original))
    return n > 0 and (torch.equal(row[:n], original[:n]) or torch.equal(row[-n:], original[-n:]))
