"""What a set-up trains on, and the loops that people write. Each runs with audit mode and without, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from loops import PLAIN_TRAINER
from setups.models import CLASSES
from tiny import make_batch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Optimizer = torch.optim.Optimizer
Context = Callable[[], AbstractContextManager[Any]]


class Auditor(Protocol):
    """Opens audit mode around a loop, or does nothing."""

    folder: Path

    def around(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]: ...

    def attach(self, trainer: Any) -> AbstractContextManager[Any]: ...


@dataclass
class Training:
    """Everything a loop needs. ``loss`` is what it differentiates; the forward pass runs inside ``context``.

    A loop whose trainer puts an adapter around the model leaves the result in ``model``.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: list[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    context: Context = nullcontext

    def forward(self, batch: Batch) -> Tensor:
        with self.context():
            return self.loss(self.model, batch)


Loop = Callable[[Training, Auditor], None]


# --- data -------------------------------------------------------------------------------------------------------


def texts(steps: int = 2, rows: int = 4, **options: Any) -> list[Batch]:
    """Return batches of token rows of different lengths; ids walk through the data."""
    made = [make_batch(rows=rows, seed=step, **options) for step in range(steps)]
    for step, batch in enumerate(made):
        batch["sample_index"] = torch.arange(rows) + rows * step
    return made


def short_last_batch() -> list[Batch]:
    """Return a batch of four, one of one, and one of two."""
    made = [make_batch(rows=rows, seed=rows) for rows in (4, 1, 2)]
    for first, batch in zip((0, 4, 5), made, strict=True):
        batch["sample_index"] = torch.arange(len(batch["input_ids"])) + first
    return made


def left_padded() -> list[Batch]:
    """Return left-padded rows with the positions that their tokens have."""
    made = texts(left=True)
    for batch in made:
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return made


def some_without_loss() -> list[Batch]:
    """Return a batch of which one sample has no token with a loss."""
    made = texts()
    made[0]["labels"][2] = -100
    return made


def labelled_texts() -> list[Batch]:
    """Return batches with one class per row."""
    made = texts()
    for batch in made:
        batch["labels"] = batch["input_ids"].sum(1) % CLASSES
    return made


def tensors(*shape: int) -> Callable[[], list[Batch]]:
    """Return how to make batches of random tensors with one class per row."""

    def make() -> list[Batch]:
        generator = torch.Generator().manual_seed(3)
        return [
            {
                "x": torch.randn(4, *shape, generator=generator),
                "labels": torch.randint(0, CLASSES, (4,), generator=generator),
                "sample_index": torch.arange(4) + 4 * step,
            }
            for step in range(2)
        ]

    return make


# --- losses -----------------------------------------------------------------------------------------------------


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model computes itself."""
    return model(**batch).loss


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that the loop computes; the model never sees the labels."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return torch.nn.functional.cross_entropy(model(**inputs), batch["labels"])


def smoothed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that is no plain cross-entropy."""
    labels = batch["labels"][:, 1:]
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def squared_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that has nothing to do with classes."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return model(**inputs).square().sum(1).mean()


# (model, batch, row) -> one sample's own summed loss, or its share of the trained loss where units are unknown
LossOf = Callable[[nn.Module, Batch, int], Tensor]


def text_loss_of(model: nn.Module, batch: Batch, row: int) -> Tensor:
    """One row's summed loss, alone and without the padding on its right."""
    end = int(batch["attention_mask"][row].nonzero().max()) + 1
    one = {key: value[row : row + 1, :end] for key, value in batch.items() if value.ndim == 2}
    logits = model(**{key: value for key, value in one.items() if key != "labels"}).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, one["labels"][0, 1:], ignore_index=-100, reduction="sum")


def class_loss_of(model: nn.Module, batch: Batch, row: int) -> Tensor:
    output = model(**{key: batch[key][row : row + 1] for key in batch if key not in ("labels", "sample_index")})
    logits = output if isinstance(output, Tensor) else output.logits
    return torch.nn.functional.cross_entropy(logits.float(), batch["labels"][row : row + 1], reduction="sum")


def smoothed_share_of(model: nn.Module, batch: Batch, row: int) -> Tensor:
    logits = model(**{key: batch[key][row : row + 1] for key in ("input_ids", "attention_mask")}).logits[0, :-1]
    labels = batch["labels"][:, 1:]
    summed = torch.nn.functional.cross_entropy(logits, labels[row], label_smoothing=0.1, reduction="sum")
    return summed / (labels != -100).sum()


def squared_share_of(model: nn.Module, batch: Batch, row: int) -> Tensor:
    return model(x=batch["x"][row : row + 1]).square().sum() / len(batch["x"])


# --- loops ------------------------------------------------------------------------------------------------------


def plain(training: Training, auditor: Auditor) -> None:
    with auditor.around(training.model, training.optimizer):
        for batch in training.batches:
            training.forward(batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()


def clipped(training: Training, auditor: Auditor) -> None:
    with auditor.around(training.model, training.optimizer):
        for batch in training.batches:
            training.forward(batch).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
            training.optimizer.step()
            training.optimizer.zero_grad()


def accumulating(training: Training, auditor: Auditor) -> None:
    """Two batches per step, each loss divided by two."""
    with auditor.around(training.model, training.optimizer):
        for number, batch in enumerate(training.batches):
            (training.forward(batch) / 2).backward()
            if number % 2:
                training.optimizer.step()
                training.optimizer.zero_grad()


def with_closure(training: Training, auditor: Auditor) -> None:
    with auditor.around(training.model, training.optimizer):
        for batch in training.batches:

            def closure(batch: Batch = batch) -> Tensor:
                training.optimizer.zero_grad()
                loss = training.forward(batch)
                loss.backward()
                return loss

            training.optimizer.step(closure)


def seeded(training: Training, auditor: Auditor) -> None:
    """A loop that seeds each forward pass, so that its dropout can be repeated."""
    with auditor.around(training.model, training.optimizer):
        for batch in training.batches:
            torch.manual_seed(100)
            training.forward(batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()


def seeded_loss_of(model: nn.Module, batch: Batch, row: int) -> Tensor:
    """One row's loss out of the whole batch's forward pass, with the masks that the loop drew."""
    torch.manual_seed(100)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[row, :-1]
    return torch.nn.functional.cross_entropy(logits, batch["labels"][row, 1:], reduction="sum")


def scaled(scale: float = 1024.0, clip: float | None = None) -> Loop:
    """Return a loop with a gradient scaler, which unscales before clipping, or leaves that to ``step``."""

    def loop(training: Training, auditor: Auditor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with auditor.around(training.model, training.optimizer):
            for batch in training.batches:
                scaler.scale(training.forward(batch)).backward()
                if clip is not None:
                    scaler.unscale_(training.optimizer)
                    torch.nn.utils.clip_grad_norm_(training.model.parameters(), clip)
                scaler.step(training.optimizer)
                scaler.update()
                training.optimizer.zero_grad()

    return loop


def compiled_after(training: Training, auditor: Auditor) -> None:
    """Attach first, compile afterwards; what another model left compiled in this process would be used again."""
    torch._dynamo.reset()
    with auditor.around(training.model, training.optimizer):
        compiled = torch.compile(training.model, backend="aot_eager")
        for batch in training.batches:
            training.loss(compiled, batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    torch._dynamo.reset()


def accelerated(training: Training, auditor: Auditor) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(training.model, training.optimizer)
    with auditor.around(model, optimizer):
        for batch in training.batches:
            with accelerator.accumulate(model):
                accelerator.backward(training.loss(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def arguments(folder: Path) -> dict[str, Any]:
    """Return what every trainer is told: one epoch, and nothing but training."""
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 3,
        "num_train_epochs": 1,
        **PLAIN_TRAINER,
        "learning_rate": 1e-3,
    }


def run(made: Any, auditor: Auditor) -> None:
    """Train with a trainer; its optimizer and its loss are its own."""
    from transformers import PrinterCallback

    made.remove_callback(PrinterCallback)
    with auditor.attach(made):
        made.train()


def trainer(**options: Any) -> Loop:
    """Return Hugging Face's Trainer."""

    def loop(training: Training, auditor: Auditor) -> None:
        from datasets import Dataset
        from transformers import Trainer, TrainingArguments

        made = Trainer(
            model=training.model,
            args=TrainingArguments(**(arguments(auditor.folder) | options)),
            train_dataset=Dataset.from_list(list(_rows(training.batches))),
            data_collator=_stack,
        )
        run(made, auditor)

    return loop


def _rows(batches: Iterable[Batch]) -> Iterable[dict[str, Any]]:
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            yield {key: value[row].tolist() for key, value in batch.items()}


def _stack(rows: list[dict[str, Any]]) -> Batch:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def data_parallel(training: Training, auditor: Auditor) -> None:
    """One of several processes: every n-th row of each batch, gradients averaged over the processes."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = nn.parallel.DistributedDataParallel(training.model)
    with auditor.around(model, training.optimizer):
        for batch in training.batches:
            training.loss(model, {key: value[rank::world] for key, value in batch.items()}).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
