"""What each of two processes does under ``torchrun``: several small audited trainings, one after the other.

Called as ``rank_worker.py FOLDER CASE…``; writes ``FOLDER/CASE/result-RANK.json``. The tests read the run folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from loops import PLAIN_TRAINER, Oracle, assert_exact, keep_captured
from tiny import VOCABULARY, tiny_llama, tiny_lora
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from attribution import AuditMode, dataset
from attribution.errors import SelfCheckError
from attribution.training import audit_mode
from auditlog import DataManifest, Signer

PASSPHRASE = "correct horse"
Batch = dict[str, torch.Tensor]
# Step by step: the samples of rank 0 and of rank 1. The last step is uneven.
SPLIT = [([0, 1, 2], [3, 4, 5]), ([6, 7, 8], [9, 10, 11]), ([12, 13, 14], [15, 16, 17]), ([18, 0], [19])]


class Place:
    """One case's folder, data and key, the same on both ranks."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder = folder / case
        self.folder.mkdir(exist_ok=True)
        self.signer = Signer.load(folder / "key.p12", passphrase=PASSPHRASE)
        self.data = DataManifest.build(folder / ("nine" if "nine" in case else "data") / "*.jsonl")
        self.rows = [row | tokens(row["text"]) for row in dataset(self.data)]
        self.rank = dist.get_rank()

    def audit(self, model: Any, optimizer: Any, **options: Any) -> AuditMode:
        return AuditMode(model, optimizer, self.data, signer=self.signer, **self.own(options))

    def attach(self, trainer: Trainer, **options: Any) -> AuditMode:
        return AuditMode.attach(trainer, self.data, signer=self.signer, **self.own(options))

    def own(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"run": self.folder / "run", "on_head": self.folder / "auditor"} | options

    def batch(self, index: list[int]) -> Batch:
        return collate([self.rows[i] for i in index])

    def texts(self) -> dict[int, tuple[list[int], list[int]]]:
        return {row["sample_index"]: (row["input_ids"], row["labels"]) for row in self.rows}


def tokens(text: str) -> dict[str, list[int]]:
    ids = [1 + ord(c) % (VOCABULARY - 1) for c in text]
    return {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}


def collate(rows: list[dict[str, Any]]) -> Batch:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    batch = {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }
    if "sample_index" in rows[0]:
        batch["sample_index"] = torch.tensor([row["sample_index"] for row in rows])
    return batch


def fresh_model() -> torch.nn.Module:
    return tiny_lora().train()


def optimizer_of(model: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def digest(model: torch.nn.Module) -> str:
    trained = [p.detach().numpy().tobytes() for p in model.parameters() if p.requires_grad]
    return hashlib.sha256(b"".join(trained)).hexdigest()


# --- plain loops ----------------------------------------------------------------------------------------------


def steps_over_split(place: Place, model: Any, optimizer: Any, clip: float | None = None) -> list[float]:
    """Train over ``SPLIT``; return the clip factors."""
    factors = []
    for of_step in SPLIT:
        batch = place.batch(of_step[place.rank])
        model(**batch).loss.backward()
        if clip is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
            factors.append(min(1.0, clip / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return factors


def plain(place: Place, *, give: str = "wrapper", mode: str = "observe", clip: float | None = None) -> dict[str, Any]:
    """The same training without and with audit mode."""
    without = fresh_model()
    wrapped = DistributedDataParallel(without)
    hide = torch.nn.Module.register_forward_pre_hook(without, _drop_ids, with_kwargs=True)
    steps_over_split(place, wrapped, optimizer_of(without), clip)
    hide.remove()
    model = fresh_model()
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    with place.audit(wrapped if give == "wrapper" else model, optimizer, mode=mode) as audit:
        factors = steps_over_split(place, wrapped, optimizer, clip)
    pairs = zip(without.parameters(), model.parameters(), strict=True)
    return {
        "same": digest(without) == digest(model),
        "difference": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "factors": factors,
        "worst_residual": audit.recorder.worst_residual,
    }


def _drop_ids(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {key: value for key, value in kwargs.items() if key != "sample_index"}


def oracle(place: Place, mode: str = "observe") -> dict[str, Any]:
    """Weights that never move: every captured sketch equals autograd on that sample alone."""
    model = fresh_model()
    alone = Oracle(model)
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model, lr=0.0)
    with place.audit(wrapped, optimizer, mode=mode) as audit:
        captured = keep_captured(audit)
        steps_over_split(place, wrapped, optimizer)
    return {"checked": assert_exact(audit, captured, alone, place.texts())}


def accumulate(place: Place) -> dict[str, Any]:
    """Two micro-batches per step, the first without synchronisation."""
    model = fresh_model()
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model)
    with place.audit(wrapped, optimizer):
        for number, of_step in enumerate(SPLIT):
            is_last = number % 2 == 1
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                (wrapped(**place.batch(of_step[place.rank])).loss / 2).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return {}


def sampler(place: Place, *, says_epoch: bool) -> dict[str, Any]:
    """``DistributedSampler`` fills up nine rows to ten."""
    model = fresh_model()
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model)
    sampler: Any = DistributedSampler(place.rows, shuffle=True, drop_last=False)
    loader: Any = DataLoader(place.rows, batch_size=2, sampler=sampler, collate_fn=collate)
    with place.audit(wrapped, optimizer) as audit:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            if says_epoch:
                audit.epoch = epoch
            for batch in loader:
                wrapped(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return {}


# --- accelerate -----------------------------------------------------------------------------------------------


def accelerated(place: Place, rows: Any, accumulate: int = 1, **loading: Any) -> dict[str, Any]:
    """Two epochs with accelerate."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(**loading),
    )
    inner = fresh_model()
    raw: Any = DataLoader(rows, batch_size=2, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(inner, optimizer_of(inner), raw)
    with place.audit(model, optimizer):
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
    accelerator.free_memory()
    return {}


class Stream(IterableDataset[dict[str, Any]]):
    """Rows of one length: accelerate lays the batches of all processes in one tensor."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = [{k: v[:12] if isinstance(v, list) else v for k, v in row.items()} for row in rows]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


# --- the Trainer ----------------------------------------------------------------------------------------------


def make_trainer(place: Place, rows: Any, **changes: Any) -> Trainer:
    chosen = {
        "output_dir": str(place.folder / "out"),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        **PLAIN_TRAINER,
    }
    set_seed(5)
    return Trainer(
        model=tiny_lora(dropout=0.1).train(),
        args=TrainingArguments(**(chosen | changes)),
        train_dataset=rows,
        data_collator=collate,
    )


def trained(place: Place, **changes: Any) -> dict[str, Any]:
    """The Trainer without and with audit mode."""
    rows = dataset(place.data).map(lambda row: tokens(row["text"]))
    without = make_trainer(place, rows, **changes)
    without.train()
    trainer = make_trainer(place, rows, **changes)
    with place.attach(trainer) as audit:
        trainer.train()
    return {"same": digest(without.model) == digest(trainer.model), "worst_residual": audit.recorder.worst_residual}


class Stopping(TrainerCallback):
    """Raises, on every rank, when a step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError("the power went out")


def resumed(place: Place) -> dict[str, Any]:
    """The Trainer broken off after step 3, and again from its checkpoint of step 2."""
    rows = dataset(place.data).map(lambda row: tokens(row["text"]))
    without = make_trainer(place, rows)
    without.train()
    trainer = make_trainer(place, rows, save_strategy="steps", save_steps=2)
    trainer.add_callback(Stopping(3))
    try:
        with place.attach(trainer):
            trainer.train()
    except InterruptedError:
        pass
    trainer = make_trainer(place, rows, save_strategy="steps", save_steps=2)
    with place.attach(trainer, resume=True):
        trainer.train(resume_from_checkpoint=True)
    return {"same": digest(without.model) == digest(trainer.model)}


# --- what breaks off, and what is refused ---------------------------------------------------------------------


def killed(place: Place) -> dict[str, Any]:
    """Rank 1 dies in step 4; what was flushed after step 2 is safe."""
    model = fresh_model()
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model)
    with place.audit(wrapped, optimizer) as audit:
        for number, of_step in enumerate(SPLIT, start=1):
            if number == 4 and place.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            wrapped(**place.batch(of_step[place.rank])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if place.rank == 0:
                torch.save([model.state_dict(), optimizer.state_dict()], place.folder / f"state-{number}.pt")
            if number == 2:
                audit.writer.flush()
    return {}


def revived(place: Place) -> dict[str, Any]:
    """The killed run goes on from the last step that both ranks have logged."""
    model = fresh_model()
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model)
    with place.audit(wrapped, optimizer, resume=True) as audit:
        last = audit.recorder.steps
        weights, state = torch.load(place.folder / f"state-{last}.pt")
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for of_step in SPLIT[last:]:
            wrapped(**place.batch(of_step[place.rank])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    without = fresh_model()
    hide = without.register_forward_pre_hook(_drop_ids, with_kwargs=True)
    steps_over_split(place, DistributedDataParallel(without), optimizer_of(without))
    hide.remove()
    return {"from_step": last, "same": digest(without) == digest(model)}


def refused(place: Place) -> dict[str, Any]:
    """Everything that must fail on both ranks, before the first step; returns what each error said."""
    said = {}
    for name, attempt in REFUSALS.items():
        try:
            attempt(place, name)
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def _start(place: Place, name: str, model: torch.nn.Module, **options: Any) -> AuditMode:
    return place.audit(model, optimizer_of(model), run=place.folder / name, **options)


def _fully_shard(place: Place, name: str) -> None:
    model = fresh_model()
    fully_shard(model)
    _start(place, name, model)


def _fully_sharded_block(place: Place, name: str) -> None:
    model = fresh_model()
    fully_shard(next(m for n, m in model.named_modules() if n.endswith("layers.0")))
    _start(place, name, model)


def _fsdp(place: Place, name: str) -> None:
    _start(place, name, FullyShardedDataParallel(fresh_model(), device_id=torch.device("cpu"), use_orig_params=True))


def _tensor_parallel(place: Place, name: str) -> None:
    model = tiny_llama()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"model.layers.*.mlp.up_proj": ColwiseParallel()})
    _start(place, name, model)


def _subgroup(place: Place, name: str) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    _start(place, name, DistributedDataParallel(fresh_model(), process_group=groups[place.rank]))


def _join(place: Place, name: str) -> None:
    model = fresh_model()
    wrapped = DistributedDataParallel(model)
    with _start(place, name, model), wrapped.join():
        wrapped(**place.batch([0, 1]))


def _sharded_later(place: Place, name: str) -> None:
    model = fresh_model()
    with _start(place, name, model):
        fully_shard(model)
        model(**place.batch([0, 1]))


def _occupied(place: Place, name: str) -> None:
    """Somebody left a file where rank 1 wants to write; the run's own folder is made before."""
    with _start(place, name, fresh_model(), on_head=_refuse_head if place.rank else place.folder / "auditor"):
        pass


def _refuse_head(name: str, note: bytes) -> None:
    raise OSError("no auditor here")


def _changed_data(place: Place, name: str) -> None:
    changed = Place(place.folder.parent, place.folder.name)
    if place.rank:
        path = place.folder / "elsewhere" / "part-0.jsonl"
        path.parent.mkdir()
        path.write_text('{"text": "first"}\n')
        changed.data = DataManifest.build(path)
        path.write_text('{"text": "other"}\n')
    _start(changed, name, fresh_model()).__enter__()


def _seal_fails(place: Place, name: str) -> None:
    model = fresh_model()
    wrapped = DistributedDataParallel(model)
    with _start(place, name, model) as audit:
        wrapped(**place.batch([place.rank])).loss.backward()
        audit._optimizer.step()  # type: ignore[union-attr]
        if place.rank:
            audit.writer.close()


def _self_check_fails(place: Place, name: str) -> None:
    model = fresh_model()
    wrapped = DistributedDataParallel(model)
    check = audit_mode.check
    if place.rank:
        audit_mode.check = _find_a_difference  # type: ignore[assignment]
    try:
        with _start(place, name, model):
            wrapped(**place.batch([place.rank, 3]))
    finally:
        audit_mode.check = check


def _find_a_difference(*args: Any, **options: Any) -> None:
    raise SelfCheckError("rank 1 sees a difference")


REFUSALS: dict[str, Callable[[Place, str], None]] = {
    "fully_shard": _fully_shard,
    "one-block": _fully_sharded_block,
    "fsdp": _fsdp,
    "tensor-parallel": _tensor_parallel,
    "sharded-later": _sharded_later,
    "subgroup": _subgroup,
    "join": _join,
    "occupied": _occupied,
    "changed-data": _changed_data,
    "seal-fails": _seal_fails,
    "self-check-fails": _self_check_fails,
}


CASES: dict[str, Callable[[Place], dict[str, Any]]] = {
    "wrapper": lambda place: plain(place, clip=0.05),
    "inner": lambda place: plain(place, give="inner"),
    "fused": lambda place: plain(place, mode="fused"),
    "oracle": oracle,
    "oracle-fused": lambda place: oracle(place, "fused"),
    "accumulate": accumulate,
    "sampler-nine": lambda place: sampler(place, says_epoch=True),
    "sampler-silent-nine": lambda place: sampler(place, says_epoch=False),
    "accelerate-nine": lambda place: accelerated(place, place.rows),
    "accelerate-accumulate-nine": lambda place: accelerated(place, place.rows, accumulate=2),
    "accelerate-twice-nine": lambda place: accelerated(place, [*place.rows, place.rows[3], place.rows[8]]),
    "accelerate-uneven-nine": lambda place: accelerated(place, place.rows[:7], even_batches=True),
    "accelerate-stream-nine": lambda place: accelerated(place, Stream(place.rows)),
    "accelerate-shards-nine": lambda place: accelerated(place, Stream(place.rows), dispatch_batches=False),
    "trainer-nine": trained,
    "trainer-accumulate-nine": lambda place: trained(place, gradient_accumulation_steps=2),
    "trainer-resumed-nine": resumed,
    "killed": revived,
    "refused": refused,
}


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        place = Place(folder, case.removesuffix("!"))
        result = killed(place) if case == "killed!" else CASES[case](place)
        (place.folder / f"result-{place.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
