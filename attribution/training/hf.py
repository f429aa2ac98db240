"""The Hugging Face Trainer: keep the ids in its batches, find its optimizer, read its epoch. Nothing stays behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attribution.capture.hooks import SAMPLE_INDEX
from attribution.errors import SampleIdentityError

if TYPE_CHECKING:
    from attribution.training.audit_mode import AuditMode

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


class TrainerBinding:
    """Everything that audit mode changes on a trainer while its context is open.

    Args:
        trainer: The trainer.
        audit: The audit mode to feed.

    Raises:
        SampleIdentityError: If the training dataset has no ``sample_index`` column.
    """

    def __init__(self, trainer: Trainer, audit: AuditMode) -> None:
        _check_columns(trainer.train_dataset)
        self._trainer, self._audit = trainer, audit
        self._callback = _Callback(audit)

    def bind(self) -> None:
        """Keep the id column, follow the trainer's steps, and see its labels before a label smoother takes them."""
        trainer, audit = self._trainer, self._audit
        self._columns = trainer._signature_columns
        trainer._set_signature_columns_if_needed()
        trainer._signature_columns = [*trainer._signature_columns, SAMPLE_INDEX]
        trainer.add_callback(self._callback)
        original = trainer.training_step

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            audit.hooks.labels = inputs.get("labels")
            audit.recorder.num_items = None if num_items_in_batch is None else int(num_items_in_batch)
            return original(model, inputs, num_items_in_batch)

        trainer.training_step = training_step
        audit.recorder.clip_max_norm = trainer.args.max_grad_norm or None

    def unbind(self) -> None:
        """Leave the trainer as it was."""
        del self._trainer.training_step
        self._trainer.remove_callback(self._callback)
        self._trainer._signature_columns = self._columns


class _Callback(TrainerCallback):
    """Tells audit mode what only the trainer knows."""

    def __init__(self, audit: AuditMode) -> None:
        self._audit = audit

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._audit.follow(kwargs["optimizer"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._audit.epoch = int(state.epoch or 0)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sign a head at every model save and leave a copy with the weights, so that it travels with them."""
        self._audit.writer.flush()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        newest = max((self._audit.run / "heads").glob("*.note"))
        if folder.is_dir():
            shutil.copyfile(newest, folder / "audit_head.note")


def _check_columns(dataset: Any) -> None:
    """Refuse a dataset that lost its ids, before anything else happens."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and SAMPLE_INDEX not in columns:
        raise SampleIdentityError(
            f"the training dataset has no {SAMPLE_INDEX} column (it has {', '.join(columns)})",
            "A map dropped it, or the dataset was not built from the manifest. Write:\n"
            "  from attribution import dataset\n"
            "  data = dataset(manifest).map(tokenize, remove_columns=['text'])   # not every column",
        )
