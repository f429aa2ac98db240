"""The Hugging Face Trainer: keep the ids in its batches, find its optimizer, read its epoch. Nothing stays behind."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attribution.capture.batch import SAMPLE_INDEX, Announced
from attribution.errors import SampleIdentityError, UnsupportedSetupError
from attribution.training.collators import SAMPLE_SPANS, IdCollator
from attribution.training.resume import Place
from attribution.training.trl import packs_rows, trains_pairs
from auditlog.datamanifest import DataManifest
from auditlog.format.records import EventKind

if TYPE_CHECKING:
    from attribution.training.audit_mode import AuditMode

logger = logging.getLogger("gradtrail")

PLACE = "gradtrail.AuditMode"  # under this name a trainer's state remembers its place in the run
MAX_ABSENT = 1000  # ids of absent samples that are named

_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "optim",
    "bf16",
    "fp16",
    "seed",
    "data_seed",
)


def describe_trainer(trainer: Trainer) -> dict[str, Any]:
    """Return what the run manifest says about a trainer's arguments, with the digest of all of them."""
    everything = trainer.args.to_dict()
    text = json.dumps(everything, sort_keys=True, default=str)
    return {
        "loop": f"transformers.{type(trainer).__name__}",
        "arguments": {name: _plain(everything.get(name)) for name in _ARGUMENTS if name in everything},
        "arguments_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def describe_dataset(trainer: Trainer, manifest: DataManifest) -> dict[str, Any] | None:
    """Return which samples a trainer's training dataset holds, after whatever it did to it in its constructor.

    Trainers drop rows of their own accord (TRL: rows without any token to learn from).

    Args:
        trainer: The trainer.
        manifest: The data that the dataset was built from.

    Returns:
        ``rows`` and ``distinct`` samples in the dataset, and how many of the manifest's are ``absent``, with the
        first of them; ``None`` for a dataset that cannot be looked through beforehand.
    """
    rows = trainer.train_dataset
    if not isinstance(rows, Dataset) or SAMPLE_INDEX not in rows.column_names:
        return None
    column = rows.with_format("arrow", columns=[SAMPLE_INDEX])[:][SAMPLE_INDEX]
    while pa.types.is_nested(column.type):  # several documents per row
        column = pc.list_flatten(column)
    if not pa.types.is_integer(column.type):  # the first batch will be refused, with advice
        return None
    present = np.unique(column.drop_null().to_numpy())
    absent = np.setdiff1d(np.arange(manifest.rows), present, assume_unique=True)
    return {
        "rows": len(rows),
        "distinct": len(present),
        "absent": len(absent),
        "absent_first": absent[:MAX_ABSENT].tolist(),
    }


class TrainerBinding:
    """Everything that audit mode changes on a trainer while its context is open.

    Evaluation and prediction stay as they are.

    Args:
        trainer: The trainer.
        audit: The audit mode to feed.

    Raises:
        SampleIdentityError: If the training dataset has no ``sample_index`` column.
    """

    def __init__(self, trainer: Trainer, audit: AuditMode) -> None:
        _check_setup(trainer)
        _check_columns(trainer)
        self._trainer, self._audit = trainer, audit
        self._callback = _Callback(audit, lambda: describe_dataset(trainer, audit.data))

    def bind(self) -> None:
        """Keep the ids in the training batches, take them out before each step, and follow the trainer's steps."""
        trainer, audit = self._trainer, self._audit
        self._columns = trainer._signature_columns
        trainer._set_signature_columns_if_needed()
        audit.hooks.rows_per_sample = 2 if trains_pairs(trainer._signature_columns) else 1
        audit.recorder.clip_max_norm = trainer.args.max_grad_norm or None
        trainer.add_callback(self._callback)
        trainer.get_train_dataloader = self._with_ids(trainer.get_train_dataloader)
        trainer.training_step = self._announcing(trainer.training_step)

    def unbind(self) -> None:
        """Leave the trainer as it was."""
        del self._trainer.training_step
        del self._trainer.get_train_dataloader
        self._trainer.remove_callback(self._callback)
        self._trainer._signature_columns = self._columns

    def _with_ids(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """Return a ``get_train_dataloader`` whose batches carry their ids, whatever the collator does with them."""
        trainer = self._trainer

        def get_train_dataloader() -> Any:
            columns, collate = trainer._signature_columns, trainer.data_collator
            trainer._signature_columns = [*columns, SAMPLE_INDEX, SAMPLE_SPANS]
            trainer.data_collator = IdCollator(collate)
            try:
                return original()
            finally:
                trainer._signature_columns, trainer.data_collator = columns, collate

        return get_train_dataloader

    def planned_optimizer(self) -> tuple[type[Any] | None, dict[str, Any]]:
        """Return the class and settings of the optimizer that the trainer has or is going to make."""
        trainer = self._trainer
        if trainer.optimizer is not None:
            inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            return type(inner), inner.defaults
        if trainer.optimizer_cls_and_kwargs is not None:
            kind, settings = trainer.optimizer_cls_and_kwargs
        else:
            kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        return kind, dict(settings)

    def _announcing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``training_step`` that says whose batch it is; the model and its loss never see the ids."""
        hooks, recorder = self._audit.hooks, self._audit.recorder

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(inputs, MutableMapping):
                raise UnsupportedSetupError(
                    f"{type(self._trainer).__name__} trains on what it generates itself, not on rows of the data",
                    "Audit mode follows trainers that train on rows: Trainer, SFTTrainer, DPOTrainer.",
                )
            index, spans = inputs.pop(SAMPLE_INDEX, None), inputs.pop(SAMPLE_SPANS, None)
            hooks.announced = Announced(index, inputs.get("labels"), spans)
            items = kwargs.get("num_items_in_batch", args[0] if args else None)
            recorder.num_items = None if items is None else int(items)
            return original(model, inputs, *args, **kwargs)

        return training_step


class _Callback(TrainerCallback):
    """Tells audit mode what only the trainer knows."""

    def __init__(self, audit: AuditMode, dataset: Callable[[], dict[str, Any] | None]) -> None:
        self._audit, self._dataset = audit, dataset

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        audit = self._audit
        audit.training["train_batch_size"] = state.train_batch_size  # auto_find_batch_size changes it
        place = Place.of_checkpoint(state.stateful_callbacks.get(PLACE), state.global_step, audit.run_id)
        if place is not None:
            audit.begin(place.step, place.attempt)
        else:
            # A second train(), and auto_find_batch_size after running out of memory, count from zero again but go on
            # with the weights as they are.
            steps = audit.recorder.steps
            audit.begin(0 if not steps or audit.is_fresh else steps)
        audit.follow(kwargs["optimizer"])
        dataset = self._dataset()
        if dataset is not None:
            audit.writer.event(EventKind.NOTICE, {"notice": "dataset", **dataset})
            if dataset["absent"]:
                logger.warning(
                    "audit mode: %d of the manifest's samples are not in the training dataset; the log lists them",
                    dataset["absent"],
                )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._audit.epoch = int(state.epoch or 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave in the trainer's state, which every checkpoint holds, where in the run it is."""
        audit = self._audit
        place = Place(audit.run_id, audit.attempt, audit.recorder.steps, state.global_step)
        state.stateful_callbacks[PLACE] = place.to_json()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sign a head at every model save and leave a copy with the weights, so that it travels with them."""
        self._audit.writer.flush()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        newest = max((self._audit.run / "heads").glob("*.note"))
        if folder.is_dir() and state.is_world_process_zero:
            shutil.copyfile(newest, folder / "audit_head.note")


def _check_setup(trainer: Trainer) -> None:
    """Refuse ways of training in which the Trainer wraps the model so that gradients cannot be followed."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UnsupportedSetupError(
            "the Trainer will spread the model's parameters over processes (FSDP or DeepSpeed)",
            "Not supported yet. Train an adapter under DistributedDataParallel, or on one device.",
        )
    if trainer.args.n_gpu > 1:
        raise UnsupportedSetupError(
            f"the Trainer will copy the model to {trainer.args.n_gpu} devices for every pass (DataParallel)",
            "Use DistributedDataParallel: torchrun --nproc-per-node=N train.py. On one device: CUDA_VISIBLE_DEVICES=0.",
        )


def _check_columns(trainer: Trainer) -> None:
    """Refuse a dataset that lost its ids, before anything else happens."""
    columns = getattr(trainer.train_dataset, "column_names", None)
    if not isinstance(columns, list):
        return
    if SAMPLE_INDEX in columns:
        _check_kind((trainer.train_dataset.features or {}).get(SAMPLE_INDEX))
        return
    raise SampleIdentityError(
        f"the training dataset has no {SAMPLE_INDEX} column (it has {', '.join(columns)})",
        "The trainer packed its rows and kept only their tokens. Write:\n"
        "  from attribution import dataset, keep_ids\n"
        "  with keep_ids():\n"
        f"      trainer = {type(trainer).__name__}(model, args=…, train_dataset=dataset(manifest))"
        if packs_rows(trainer)
        else "A map dropped it, or the dataset was not built from the manifest. Write:\n"
        "  from attribution import dataset\n"
        "  data = dataset(manifest).map(tokenize, remove_columns=['text'])   # not every column",
    )


def _check_kind(feature: Any) -> None:
    """Refuse ids that are known to be texts: no loader can send them from one process to another."""
    if getattr(feature, "dtype", None) in ("string", "large_string"):
        raise SampleIdentityError(
            f"the column {SAMPLE_INDEX} holds texts; an id is an integer, the row's position in the data manifest",
            "Write: from attribution import dataset; data = dataset(manifest).map(tokenize)",
        )
