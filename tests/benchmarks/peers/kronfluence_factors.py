"""kronfluence, which works after training: two of its passes over the same samples, on the same model.

The first fits the covariances that K-FAC and EK-FAC need; the second forms every sample's gradient (its diagonal
factors, the cheapest strategy that does). The eigendecomposition between them, whose cost does not depend on the
number of samples, and the scores are left out.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from benchmarks.peers.rows import Row, Span
from benchmarks.peers.trial import Trial
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments
from kronfluence.task import Task
from kronfluence.utils.dataset import DataLoaderKwargs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class _LanguageModelling(Task):
    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self._layers = layers

    def compute_train_loss(self, batch: dict[str, Tensor], model: nn.Module, sample: bool = False) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        if sample:
            labels = torch.multinomial(logits.detach().softmax(-1), 1).flatten()
        return cross_entropy(logits, labels, reduction="sum")

    def compute_measurement(self, batch: dict[str, Tensor], model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self) -> list[str]:
        return self._layers


class _Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, trial: Trial) -> None:
        self._rows = torch.cat([batch["input_ids"] for batch in trial.workload.batches]).cpu()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def measure(trial: Trial) -> list[Row]:
    """Time the two passes; a batch's share of each is what the row holds."""
    model = trial.workload.model
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    samples = _Samples(trial)
    task = _LanguageModelling(layers)
    analyzer = Analyzer(
        "samples",
        prepare_model(model, task),
        task,
        cpu=trial.device.type == "cpu",
        log_level=logging.ERROR,
        disable_tqdm=True,
        output_dir=str(trial.folder),
    )
    analyzer.set_dataloader_kwargs(DataLoaderKwargs(num_workers=0))
    common: dict[str, Any] = {"dataset": samples, "per_device_batch_size": trial.samples, "overwrite_output_dir": True}
    passes = {
        "covariances": partial(
            analyzer.fit_covariance_matrices, "k", factor_args=FactorArguments("ekfac", True), **common
        ),
        "per-sample gradients": partial(
            analyzer.fit_lambda_matrices, "d", factor_args=FactorArguments("diagonal", True), **common
        ),
    }
    batches = len(samples) / trial.samples
    return [
        Row(
            f"kronfluence, {name}",
            "after training; scores, not samples, are stored",
            version=version("kronfluence"),
            second_pass=Span.of([trial.timed(one_pass) / batches for _ in range(2)]),
            rounds=2,
            samples=trial.samples,
            note="empirical Fisher; time of one pass per batch of 8, factors written to disk in it",
        )
        for name, one_pass in passes.items()
    ]
