"""Runs a set-up with audit mode and without, and compares what is captured with autograd, one sample at a time."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from setups import ranks
from setups import training as loops
from setups.training import Batch, Context, Loop, LossOf, Optimizer, Training
from torch import Tensor, nn

from attribution import AuditMode
from attribution.capture.hooks import Mode
from attribution.capture.micro_batch import Captured
from attribution.capture.oracle import sketch_each
from attribution.sketch.layout import SketchLayout
from auditlog import DataManifest, RunReader, Signer
from auditlog.format.records import EventKind, Flag

EXACT = 1e-4  # relative, float32
HALF = 2e-2  # relative, against an oracle in the same half precision
DIM = 1024  # sketch size in tests


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


@dataclass(frozen=True)
class SetUp:
    """One way of training.

    Attributes:
        group: Heading in the table.
        name: What the table calls it.
        model: Makes the model; each call gives the same weights.
        batches: Makes what is trained on, with ids.
        loss: What the loop differentiates.
        loss_of: What one sample alone is differentiated by, in the oracle.
        loop: How it is trained.
        optimizer: Made from the trainable parameters.
        context: Around every forward pass, the oracle's too.
        modes: Ways of capturing for which the table has figures.
        limit: Largest error allowed.
        oracle: Makes the oracle's model where it is not ``model``.
        flags: Flags that every record carries.
        clips: Whether ``f`` may differ from 1.
        identical: Whether ``observe`` leaves training bit-identical; a compiler splits its graphs around hooks.
        slow: Takes more than a few seconds.
        processes: How many train together.
    """

    group: str
    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]] = loops.texts
    loss: Callable[[nn.Module, Batch], Tensor] = loops.own_loss
    loss_of: LossOf = loops.text_loss_of
    loop: Loop = loops.plain
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = sgd
    context: Context = nullcontext
    modes: tuple[Mode, ...] = ("observe", "fused")
    limit: float = EXACT
    oracle: Callable[[], nn.Module] | None = None
    flags: int = 0
    clips: bool = False
    identical: bool = True
    slow: bool = False
    processes: int = 1

    def training(self, with_ids: bool) -> Training:
        """Return fresh weights, a fresh optimizer and the data; ids only where somebody takes them out again."""
        model = self.model().train()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        hidden = () if with_ids else ("sample_index",)
        batches = [{k: v for k, v in batch.items() if k not in hidden} for batch in self.batches()]
        return Training(model, optimizer, batches, self.loss, self.context)


@dataclass(frozen=True)
class Compared:
    """What one process captured, beside what autograd says.

    Attributes:
        samples: Captured sample uses, all of them compared.
        error: Largest relative error of a sample's sketch.
        loss_error: Largest relative error of a sample's loss, where it is known.
        drift: Largest difference of a weight from the run without audit mode.
        flags: Flags of each record.
    """

    samples: int
    error: float
    loss_error: float
    drift: float
    flags: list[int]


@dataclass(frozen=True)
class Measured(Compared):
    """What one set-up gave in one mode, all processes together.

    Attributes:
        residual: Worst conservation residual of a step.
        factor_error: Largest distance of a step's ``f`` from 1.
        routes: How modules were captured.
        coverage: Share of trainable entries.
    """

    residual: float
    factor_error: float
    routes: dict[str, int]
    coverage: float


class Unaudited:
    """Stands where audit mode would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def around(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        return nullcontext()

    def attach(self, trainer: Any) -> AbstractContextManager[Any]:
        return nullcontext()


class Audited:
    """Opens audit mode, and calls ``on_step`` with what each step records, before int8 and before a weight moves."""

    def __init__(self, folder: Path, data: DataManifest, signer: Signer, **options: Any) -> None:
        self.folder, self.data = folder, data
        self.options = {"run": folder / "run", "signer": signer, "on_head": folder / "auditor", "sketch_dim": DIM}
        self.options |= options
        self.on_step: Callable[[AuditMode, list[Captured]], None] = lambda audit, captured: None

    def around(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[AuditMode]:
        return self._open(AuditMode(model, optimizer, self.data, **self.options))

    def attach(self, trainer: Any) -> AbstractContextManager[AuditMode]:
        return self._open(AuditMode.attach(trainer, self.data, **self.options))

    @contextmanager
    def _open(self, audit: AuditMode) -> Iterator[AuditMode]:
        with audit:
            plain = audit.recorder._rows

            def rows(captured: list[Captured], *rest: Any) -> Any:
                self.on_step(audit, captured)
                return plain(captured, *rest)

            audit.recorder._rows = rows  # type: ignore[method-assign]
            yield audit


@dataclass
class Comparison:
    """Compares captured samples with autograd on a second model, which no hook was ever on."""

    setup: SetUp
    training: Training
    samples: int = 0
    error: float = 0.0
    loss_error: float = 0.0
    flags: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.twin = (self.setup.oracle or self.setup.model)().train()
        self.own = {name: p for name, p in self.twin.named_parameters() if p.requires_grad}
        self.layout = SketchLayout({name: tuple(p.shape) for name, p in self.own.items()}, DIM)
        self.places = {
            index: (batch, row)
            for batch in self.setup.batches()
            for row, index in enumerate(batch["sample_index"].tolist())
        }

    def __call__(self, audit: AuditMode, captured: list[Captured]) -> None:
        """Compare a step's samples at the weights that they were captured at."""
        self.twin.load_state_dict(self.training.model.state_dict())
        for micro in captured:
            for slot, index in enumerate(micro.sample_index.tolist()):
                self._compare(micro, slot, *self.places[index])

    def _compare(self, micro: Captured, slot: int, batch: Batch, row: int) -> None:
        with torch.random.fork_rng(), torch.enable_grad(), self.setup.context():
            losses = list[Tensor]()

            def loss_of(_: int) -> Tensor:
                losses.append(self.setup.loss_of(self.twin, batch, row))
                return losses[0]

            (expected,) = sketch_each(1, loss_of, self.own, self.layout)
        self.samples += 1
        self.error = max(self.error, relative(micro.sketch[slot], expected))
        self.flags.append(int(micro.flags[slot]))
        if not self.flags[-1] & Flag.UNIT_UNKNOWN:
            self.loss_error = max(self.loss_error, relative(micro.loss[slot], losses[0].detach()))


def measure(setup: SetUp, mode: Mode, folder: Path, data: DataManifest, signer: Signer) -> Measured:
    """Run a set-up twice, with audit mode and without.

    Args:
        setup: What to run.
        mode: How to capture.
        folder: A folder without a run in it.
        data: At least as many rows as the set-up has ids.
        signer: Any key.
    """
    if setup.processes == 1:
        found = compare(setup, mode, folder, data, signer)
    else:
        found = together([Compared(**of_rank) for of_rank in ranks.launch(setup, mode, folder, data, signer)])
    with RunReader.open(folder / "run") as run:
        steps = [event.json() for rank in run.ranks for event in rank.events(EventKind.STEP)]
        tracking = run.manifest.tracking
    assert sum(step["records"] for step in steps) == found.samples
    return Measured(
        **asdict(found),
        residual=max(step["residual"] for step in steps),
        factor_error=max(abs(step["f"] - 1) for step in steps),
        routes=tracking["routes"],
        coverage=tracking["coverage"],
    )


def compare(setup: SetUp, mode: Mode, folder: Path, data: DataManifest, signer: Signer) -> Compared:
    """Do one process's part of ``measure``: train, and compare what was captured here."""
    training = setup.training(with_ids=True)
    audited = Audited(folder, data, signer, mode=mode)
    audited.on_step = seen = Comparison(setup, training)
    setup.loop(training, audited)
    moved = drift(without_audit(setup), training.model)
    return Compared(seen.samples, seen.error, seen.loss_error, moved, seen.flags)


def together(found: list[Compared]) -> Compared:
    """Return the worst of all processes."""
    return Compared(
        samples=sum(f.samples for f in found),
        error=max(f.error for f in found),
        loss_error=max(f.loss_error for f in found),
        drift=max(f.drift for f in found),
        flags=[flag for f in found for flag in f.flags],
    )


@functools.lru_cache(maxsize=1)  # the modes of a set-up follow one another
def without_audit(setup: SetUp) -> nn.Module:
    """Return the model that a set-up trains without audit mode."""
    training = setup.training(with_ids=False)
    with tempfile.TemporaryDirectory() as folder:
        setup.loop(training, Unaudited(Path(folder)))
    return training.model


def relative(value: Tensor, reference: Tensor) -> float:
    """Return the distance over the norm of the reference; the distance itself where that is zero."""
    norm = float(reference.double().norm())
    return float((value.double() - reference.double()).norm()) / (norm or 1.0)


def drift(left: nn.Module, right: nn.Module) -> float:
    """Return the largest difference of two models' parameters; 0 only if they are bit-identical."""
    pairs = list(zip(left.named_parameters(), right.named_parameters(), strict=True))
    assert [a for (a, _), _ in pairs] == [b for _, (b, _) in pairs]
    return max(float((p.detach().double() - q.detach().double()).abs().max()) for (_, p), (_, q) in pairs)
