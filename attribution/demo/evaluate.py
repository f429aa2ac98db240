"""How well the fine-tuned model tells denials from approvals on rows it never saw, beside what no model would reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from attribution.demo.data import Row

BATCH = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures on the held-out rows. A constant answer has AUC 0.5 and balanced accuracy 0.5.

    Attributes:
        auc: Probability that a random denial gets higher odds of refusal than a random approval.
        auc_se: Its standard error (Hanley and McNeil 1982).
        balanced_accuracy: Mean of the shares of denials refused and approvals approved.
        refused: Share of the held-out rows that the model refuses.
        denial_rate: Share that the file says were denied.
    """

    auc: float
    auc_se: float
    balanced_accuracy: float
    refused: float
    denial_rate: float
    rows: int


def log_odds(
    model: Any, tokenizer: Any, rows: Sequence[Row], progress: Callable[[int], None] = lambda done: None
) -> NDArray[np.float64]:
    """Return ``log p(deny) - log p(approve)`` for each row, ``(n,)``; above 0 the model refuses."""
    deny, approve = (tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in ("deny", "approve"))
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found = np.empty(len(prompts))
    model.eval()
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        with torch.inference_mode():
            logits = model(
                **_left_padded([prompts[i] for i in chosen], tokenizer.pad_token_id), logits_to_keep=1
            ).logits
        found[chosen] = (logits[:, -1, deny] - logits[:, -1, approve]).double().numpy()
        progress(len(chosen))
    return found


def _left_padded(prompts: Sequence[list[int]], pad: int) -> dict[str, torch.Tensor]:
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def quality(scores: NDArray[np.float64], denied: NDArray[np.bool_]) -> Quality:
    """Compare log-odds with the file's decisions.

    Args:
        scores: ``(n,)`` log-odds of refusal.
        denied: ``(n,)`` whether the file says the application was denied; both kinds must occur.
    """
    n1, n0 = int(denied.sum()), int((~denied).sum())
    auc = (rankdata(scores)[denied].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = (auc * (1 - auc) + (n1 - 1) * (q1 - auc**2) + (n0 - 1) * (q2 - auc**2)) / (n1 * n0)
    refused = scores > 0
    balanced = (refused[denied].mean() + (~refused[~denied]).mean()) / 2
    return Quality(
        auc=float(auc),
        auc_se=float(max(variance, 0.0) ** 0.5),
        balanced_accuracy=float(balanced),
        refused=float(refused.mean()),
        denial_rate=float(denied.mean()),
        rows=len(scores),
    )
