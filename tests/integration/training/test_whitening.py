"""The whitened form against autograd one sample at a time, scaled by Adam's own second moment after the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from loops import PLAIN_TRAINER, collate, keep_captured, tokenized
from setups import models
from tiny import make_batch, sample_loss, tiny_llama, tiny_lora
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from attribution import AuditMode
from attribution.capture.hooks import Mode
from attribution.errors import UnsupportedSetupError
from attribution.sketch.quantize import dequantize
from attribution.training.second_moments import is_adam_type, keeps_second_moment
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run
from auditlog.errors import UsageError
from auditlog.format.records import EventKind

EXACT = 1e-4
NEARLY = 1e-3  # where a batch's gradient cancels to rounding, its square at the first step is rounding, too
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.98), eps=1e-7)


def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups with other settings, in another order than the model's."""
    groups = [
        {"params": parameters[1::2][::-1], "betas": (0.8, 0.9), "eps": 1e-3},
        {"params": parameters[::2], "betas": (0.9, 0.98), "eps": 1e-7},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


@dataclass
class Trained:
    """What one audited step left, beside what it should have left."""

    whitened: Tensor  # (B, D), before int8, as captured
    expected: Tensor  # (B, D)


def exact(layout: Any, gradients: list[dict[str, Tensor]], optimizer: torch.optim.Optimizer, names: dict) -> Tensor:
    """Sketch ``g / sqrt(sqrt(v̂) + ε)`` with the ``v`` that the optimizer itself holds after its step."""
    roots = {}
    for name, parameter in names.items():
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        state = optimizer.state[parameter]
        v = state["exp_avg_sq"].double() / (1 - group["betas"][1] ** float(state["step"]))
        roots[name] = (v.sqrt() + group["eps"]).rsqrt().float()
    return torch.stack([layout.sketch({n: g * roots[n] for n, g in each.items()}) for each in gradients])


def train(
    model: nn.Module,
    data: DataManifest,
    signer: Signer,
    run: Path,
    *,
    make_optimizer: MakeOptimizer = adamw,
    mode: Mode = "observe",
    steps: int = 3,
    clip: float | None = None,
    loss_scale: float = 1.0,
    halves: int = 1,
) -> Iterator[Trained]:
    """Train and compare each step; the oracle is a copy of the model that never had a hook."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    oracle = copy.deepcopy(model)
    with AuditMode(model, optimizer, data, run=run, signer=signer, mode=mode, self_check=False) as audit:
        kept = keep_captured(audit)
        for step in range(steps):
            batch = make_batch(seed=step) | {"sample_index": torch.arange(4) + 4 * step}
            oracle.load_state_dict(model.state_dict())
            names = {n: p for n, p in model.named_parameters() if p.requires_grad}
            gradients = []
            for row in range(4):
                oracle.zero_grad()
                sample_loss(oracle, batch, row).backward()
                grads = {n: p.grad for n, p in oracle.named_parameters() if p.requires_grad}
                gradients.append({n: torch.zeros_like(names[n]) if g is None else g for n, g in grads.items()})
            for part in range(halves):
                rows = slice(part * 4 // halves, (part + 1) * 4 // halves)
                (model(**{k: v[rows] for k, v in batch.items()}).loss * loss_scale / halves).backward()
            for p in names.values():
                p.grad /= loss_scale
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            captured = torch.cat([c.whitened for c in kept[-1]])
            yield Trained(captured, exact(audit._layout, gradients, optimizer, names))


def worst(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


MODELS = {
    "LoRA": tiny_lora,
    "all of Llama: embedding, norms, head": tiny_llama,
    "experts, run again": models.mixtral,
}


@pytest.mark.parametrize("mode", ["observe", "fused"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_whitened_sketches_are_those_of_the_exactly_whitened_gradients(
    make: Callable[[], nn.Module], mode: Mode, tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    for trained in train(make().train(), data, signer, tmp_path / "run", mode=mode):
        assert worst(trained.whitened, trained.expected) < NEARLY


def test_each_parameter_has_its_own_groups_settings(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    for trained in train(tiny_lora().train(), data, signer, tmp_path / "run", make_optimizer=grouped):
        assert worst(trained.whitened, trained.expected) < EXACT


def test_lora_that_starts_with_zero_does_not_blow_up(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    """With the moment from before the step A's entries would be divided by ε at step 2: v is zero there."""
    model = tiny_lora().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    for trained in train(model, data, signer, tmp_path / "run"):
        assert worst(trained.whitened, trained.expected) < EXACT


def stored(run: Path) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
    with RunReader.open(run) as reader:
        records = reader.records()
        q = reader.sketch_rows(records["shard"], records["shard_row"])
        return records, q, [event.json() for event in reader.events(EventKind.STEP)]


def recorded(run: Path, steps: int) -> tuple[Tensor, list[float], list[float]]:
    """Return the whitened sketches as stored, ``(steps, 4, D)``, and what was assumed and found at each step."""
    records, q, events = stored(run)
    found = torch.from_numpy(dequantize(q[:, 4096:], records["scale_whitened"])).view(steps, 4, -1)
    assumed, seen = zip(*(event["whitened_share"] for event in events), strict=True)
    return found, list(assumed), list(seen)


@pytest.mark.parametrize("how", [{"clip": 0.05}, {"loss_scale": 512.0}], ids=["clipping", "a loss scale"])
def test_what_is_known_at_the_step_only_is_put_right_at_the_first_and_estimated_then(
    how: dict[str, Any], tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    expected = [t.expected for t in train(tiny_lora().train(), data, signer, tmp_path / "run", **how)]
    found, assumed, seen = recorded(tmp_path / "run", 3)
    assert assumed[0] == 1.0
    assert assumed[1:] == pytest.approx(seen[:-1])
    assert seen[0] != pytest.approx(1.0, rel=0.5)
    for step in range(3):
        assert torch.cosine_similarity(found[step], expected[step]).min() > 0.98, f"step {step + 1}"
        ratio = found[step].norm(dim=1) / expected[step].norm(dim=1)
        assert (ratio - 1).abs().max() < 0.2, f"step {step + 1}"  # uncorrected, the first step's is 0.35 or 23


def test_accumulated_gradients_are_estimated_from_each_part_and_better_with_every_step(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    """Half a batch's own squares are not the batch's; the moment from the steps before soon outweighs them."""
    steps = list(train(tiny_lora().train(), data, signer, tmp_path / "run", steps=5, halves=2))
    close = [float(torch.cosine_similarity(t.whitened, t.expected).min()) for t in steps]
    assert close == sorted(close)
    assert close[-1] > 0.97
    _, assumed, seen = recorded(tmp_path / "run", 5)
    assert seen == pytest.approx([2.0] * 5)
    assert assumed == pytest.approx([1.0, *seen[:-1]])


def test_both_forms_are_stored_committed_to_and_verified(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    captured = list(train(tiny_lora().train(), data, signer, tmp_path / "run"))
    records, q, _ = stored(tmp_path / "run")
    assert q.shape == (12, 2 * 4096)
    back = dequantize(q[:, 4096:], records["scale_whitened"])
    assert worst(torch.from_numpy(back), torch.cat([t.whitened for t in captured])) < 0.1
    trust = Trust.load([str(signer.vkey)], [], None)
    assert verify_run(tmp_path / "run", trust).exit_code == 0
    shard = tmp_path / "run" / "sketches" / "000000.npy"
    data_ = bytearray(shard.read_bytes())
    data_[-1 - 8192 * 2] ^= 1  # in a record's whitened half
    shard.write_bytes(data_)
    assert verify_run(tmp_path / "run", trust).exit_code == 4


def test_a_plain_optimizer_has_the_raw_form_only(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer):
        model(**make_batch()).loss.backward()
        optimizer.step()
    records, q, _ = stored(tmp_path / "run")
    assert q.shape == (4, 4096)
    assert not records["scale_whitened"].any()


def test_the_raw_form_alone_can_be_asked_for(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora().train()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, forms=("raw",)):
        model(**make_batch()).loss.backward()
        optimizer.step()
    assert stored(tmp_path / "run")[1].shape == (4, 4096)
    with pytest.raises(UsageError, match="forms"):
        AuditMode(model, optimizer, data, run=tmp_path / "other", signer=signer, forms=("whitened",))


def test_whitening_without_a_second_moment_is_refused(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    audit = AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, forms=("raw", "whitened"))
    with pytest.raises(UnsupportedSetupError, match="keeps no second moment") as caught, audit:
        pass
    assert "forms=('raw',)" in caught.value.advice()


@pytest.mark.parametrize(
    ("optim", "forms"), [("adamw_torch", 2), ("adamw_torch_fused", 2), ("sgd", 1), ("adafactor", 1)]
)
def test_the_trainers_own_optimizer_decides(
    optim: str, forms: int, tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    model = tiny_lora().train()
    options = PLAIN_TRAINER | {"max_steps": 2, "optim": optim, "per_device_train_batch_size": 4}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path / "out"), **options),
        train_dataset=tokenized(data),
        data_collator=collate,
    )
    with AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer):
        trainer.train()
    records, q, _ = stored(tmp_path / "run")
    assert q.shape == (8, forms * 4096)
    assert (records["scale_whitened"] > 0).all() == (forms == 2)


class Forgetful(torch.optim.AdamW):
    """Looks like Adam from outside and keeps its moments elsewhere, as eight-bit optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["state2"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "settings", "keeps"),
    [
        (torch.optim.Adam, {}, True),
        (torch.optim.NAdam, {}, True),
        (torch.optim.RAdam, {}, True),
        (schedulefree.AdamWScheduleFree, {}, True),
        (torch.optim.AdamW, {"amsgrad": True}, False),
        (torch.optim.Adamax, {}, False),
        (torch.optim.SGD, {"lr": 0.1}, False),
        (torch.optim.RMSprop, {}, False),
        (Forgetful, {}, False),
    ],
)
def test_an_optimizer_is_tried_out_and_not_told_by_its_name(kind: Any, settings: dict, keeps: bool) -> None:
    defaults = kind([nn.Parameter(torch.zeros(1))], **settings).defaults
    assert keeps_second_moment(kind, defaults, torch.device("cpu")) is keeps


def test_settings_of_another_kind_are_not_adams() -> None:
    assert not is_adam_type({"betas": (0.9, 0.99)})  # Lion
    assert not is_adam_type({"betas": None, "eps": (1e-30, 1e-3)})  # Adafactor
