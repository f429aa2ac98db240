"""TRL's trainers: what they do to a dataset before anybody can attach to them.

``SFTTrainer`` packs documents into rows in its constructor and keeps nothing but their tokens. ``keep_ids`` does the
same packing, with TRL's own code, on rows whose every token names its sample; so whatever a strategy cuts, drops or
moves is known afterwards.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attribution.capture.batch import SAMPLE_INDEX
from attribution.training.collators import SAMPLE_SPANS

_SAMPLE, _PLACE = "sample_of_token", "place_of_token"  # columns that live only while rows are packed
_KEPT = ("input_ids", "labels")  # what TRL keeps of a row that it packs


@contextmanager
def keep_ids() -> Iterator[None]:
    """Let every ``SFTTrainer`` that is made inside keep the ids of the documents that it packs.

    Its rows are the same as without. Needed with ``packing=True`` only, and only around the constructor:

        with attribution.keep_ids():
            trainer = SFTTrainer(model, args=SFTConfig(packing=True, …), train_dataset=dataset(manifest))
    """
    from trl import SFTTrainer

    original = SFTTrainer._prepare_dataset
    signature = inspect.signature(original)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        config, rows = call.arguments["args"], call.arguments["dataset"]
        if not call.arguments["packing"] or config.max_length is None or SAMPLE_INDEX not in _columns(rows):
            return original(*args, **kwargs)
        # Everything but the packing; TRL cuts to max_length only what it does not pack.
        call.arguments |= {"packing": False, "args": _without_length(config)}
        return _pack(original(*call.args, **call.kwargs), config)

    SFTTrainer._prepare_dataset = prepare
    try:
        yield
    finally:
        SFTTrainer._prepare_dataset = original


def packs_rows(trainer: Any) -> bool:
    """Tell whether a trainer has packed its documents in its constructor."""
    return bool(getattr(trainer.args, "packing", False))


def trains_pairs(columns: list[str]) -> bool:
    """Tell by its columns whether a trainer stacks chosen and rejected answers: rows ``j`` and ``j + B``."""
    return {"chosen_ids", "rejected_ids"} <= set(columns)


def _columns(rows: Any) -> list[str]:
    from trl.data_utils import get_dataset_column_names

    return list(get_dataset_column_names(rows))


def _without_length(config: Any) -> Any:
    changed = copy.copy(config)
    changed.max_length = None
    return changed


def _pack(rows: Any, config: Any) -> Any:
    """Pack prepared rows the way ``SFTTrainer`` does, and keep of each packed row whose tokens are where."""
    from datasets import Dataset
    from trl import pack_dataset

    how = {"num_proc": config.dataset_num_proc} if isinstance(rows, Dataset) else {}
    rows = rows.map(_name_tokens, remove_columns=[c for c in _columns(rows) if c not in _KEPT], **how)
    rows = pack_dataset(rows, config.max_length, config.packing_strategy, how)
    rows = rows.map(_find_spans, remove_columns=[_SAMPLE, _PLACE], **how)
    return rows.shuffle(seed=config.seed) if config.shuffle_dataset else rows


def _name_tokens(row: Mapping[str, Any]) -> dict[str, list[int]]:
    length = len(row["input_ids"])
    return {_SAMPLE: [row[SAMPLE_INDEX]] * length, _PLACE: list(range(length))}


def _find_spans(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the ids of a packed row's documents, and their spans: first token, end, its place in the document."""
    samples, places = row[_SAMPLE], row[_PLACE]
    starts = [0, *(t for t in range(1, len(samples)) if _begins(samples, places, t))] if samples else []
    ends = [*starts[1:], len(samples)]
    return {
        SAMPLE_INDEX: [samples[start] for start in starts],
        SAMPLE_SPANS: [[start, end, places[start]] for start, end in zip(starts, ends, strict=False)],
    }


def _begins(samples: list[int], places: list[int], token: int) -> bool:
    return samples[token] != samples[token - 1] or places[token] != places[token - 1] + 1
