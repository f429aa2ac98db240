"""Measure, on the logits, in which unit the loss reaches the backward pass.

Trainers scale the loss in many ways (mean, ``num_items_in_batch``, accumulation, loss scalers), and the way changes
between versions. So nothing is assumed. For one token with logits ``z``, target ``y`` and softmax ``p``, a
cross-entropy that entered the trained loss with factor ``c`` sends the gradient ``g = c (p - e_y)`` back. With any
other class ``v``:

    c    = g_v exp(z_y - z_v) - g_y          (g_v = c p_v and exp(z_y - z_v) = p_y / p_v)
    loss = z_v - z_y - ln(g_v / c)           (= -ln p_y)

Two classes ``v`` must give the same ``c``, and the gradient over all classes must sum to zero (looked at for a few
tokens); where not, the loss is not plain cross-entropy. Costs a gather,
where a second softmax would cost a pass over the vocabulary. A gradient in half precision is rounded, so there the
demands are wider and ``c`` is the median over tokens.

A model may return log-probabilities of the targets instead of logits; then ``c`` is minus their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attribution.capture.segments import Segments

IGNORE_INDEX = -100
# Relative; two classes, and all tokens of one sample, must agree this well on c.
AGREEMENT = {torch.bfloat16: 3e-2, torch.float16: 2e-2}
AGREEMENT_FLOAT32 = 1e-3
# Classes among which the two v are chosen: runs of neighbours, since each run costs one or two reads from memory per
# token, and some targets of the batch, which are likely classes for other tokens too.
_RUNS, _RUN, _TARGETS = 4, 8, 24
_SUMMED = 4  # tokens whose whole gradient is summed
# The second v may be this much less likely than the first, in nats: its gradient must not underflow.
_REACH = {torch.float16: 4.0}
_REACH_FLOAT32 = 25.0


@dataclass(frozen=True, slots=True)
class Units:
    """What one micro-batch's logits say, all ``(B,)``.

    Attributes:
        factor: ``c``, the factor with which each sample's own summed loss entered the trained loss; 1 where unknown.
        loss: Each sample's own summed token loss, nats, float32; NaN where the units are not known.
        n_tokens: Tokens that carry loss, int64.
        known: The loss is plain cross-entropy with one factor per sample.
    """

    factor: Tensor
    loss: Tensor
    n_tokens: Tensor
    known: Tensor

    @classmethod
    def unknown(cls, samples: int, device: torch.device) -> Units:
        """Return units that claim nothing: factor 1, loss NaN."""
        return cls(
            factor=torch.ones(samples, device=device),
            loss=torch.full((samples,), float("nan"), device=device),
            n_tokens=torch.zeros(samples, dtype=torch.long, device=device),
            known=torch.zeros(samples, dtype=torch.bool, device=device),
        )


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """The few logits that the measurement needs, gathered on the forward pass. ``N`` tokens carry loss.

    Attributes:
        rows: ``(N,)`` sample of each token.
        positions: ``(N,)`` position of each token in its row; all zero for classification.
        target: ``(N,)`` class ``y``.
        others: ``(N, 2)`` a likely and an unlikely other class ``v``; equal in a vocabulary of two.
        z_target: ``(N,)`` float32.
        z_others: ``(N, 2)`` float32.
    """

    rows: Tensor
    positions: Tensor
    target: Tensor
    others: Tensor
    z_target: Tensor
    z_others: Tensor


def align_targets(logits: Tensor, labels: Tensor, next_token: bool) -> Tensor | None:
    """Return the class that each logit row is asked for, ``(B, T)`` or ``(B,)``; ``IGNORE_INDEX`` where none.

    Args:
        logits: ``(B, T, V)`` or ``(B, V)``.
        labels: ``(B, T)`` token labels or ``(B,)`` class labels.
        next_token: Position ``t`` predicts label ``t + 1``, as causal language models do.

    Returns:
        ``None`` if the two do not fit together, so that no cross-entropy over classes can be meant.
    """
    if labels.dtype.is_floating_point or labels.shape != logits.shape[:-1]:
        return None
    if not (next_token and labels.ndim == 2):
        return labels
    ignored = labels.new_full((labels.shape[0], 1), IGNORE_INDEX)
    return torch.cat([labels[:, 1:], ignored], dim=1)


def gather_logits(logits: Tensor, targets: Tensor, dtype: torch.dtype | None = None) -> TokenLogits:
    """Pick, for every token that carries loss, its target's logit and those of a likely and an unlikely other class.

    Args:
        logits: ``(B, T, V)`` or ``(B, V)``.
        targets: ``(B, T)`` or ``(B,)``, ``IGNORE_INDEX`` where no loss is.
        dtype: Precision that their gradient will have; by default the logits' own.
    """
    reach = _REACH.get(dtype or logits.dtype, _REACH_FLOAT32)
    logits = logits.detach()
    if logits.ndim == 2:
        logits, targets = logits[:, None], targets[:, None]
    rows, positions = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    target = targets[rows, positions]
    classes = _candidates(logits.shape[-1], target)
    z = logits[rows[:, None], positions[:, None], classes].float()  # (N, K)
    z = z.masked_fill(classes == target[:, None], float("-inf"))
    likely = z.argmax(1, keepdim=True)  # (N, 1)
    # The least likely class within reach: there a loss that is not cross-entropy shows most.
    within = z >= z.gather(1, likely) - reach
    unlikely = z.masked_fill(~within, float("inf")).argmin(1, keepdim=True)
    picked = torch.cat([likely, unlikely], dim=1)  # (N, 2)
    return TokenLogits(
        rows=rows,
        positions=positions,
        target=target,
        others=classes[picked],
        z_target=logits[rows, positions, target].float(),
        z_others=z.gather(1, picked),
    )


def _candidates(vocabulary: int, target: Tensor) -> Tensor:
    """Return the classes to look at, ``(K,)``, in rising order."""
    run = min(_RUN, vocabulary)
    starts = torch.linspace(0, vocabulary - run, _RUNS, device=target.device).long()
    runs = (starts[:, None] + torch.arange(run, device=target.device)).flatten()
    return torch.cat([runs, target[:: max(1, len(target) // _TARGETS)][:_TARGETS]]).unique()


def measure(token_logits: TokenLogits, gradient: Tensor, segments: Segments) -> Units:
    """Measure each sample's factor and loss from the gradient that arrived at the logits.

    Args:
        token_logits: From ``gather_logits`` on the same logits.
        gradient: Gradient of the trained loss w.r.t. the logits, ``(R, T, V)`` or ``(R, V)``.
        segments: Which token belongs to which sample.
    """
    t = token_logits
    if gradient.ndim == 2:
        gradient = gradient[:, None]
    g_target = gradient[t.rows, t.positions, t.target].double()
    g_others = gradient[t.rows[:, None], t.positions[:, None], t.others].double()  # (N, 2)
    z_target, z_others = t.z_target.double(), t.z_others.double()
    c = g_others * (z_target[:, None] - z_others).exp() - g_target[:, None]  # (N, 2)
    tolerance = AGREEMENT.get(gradient.dtype, AGREEMENT_FLOAT32)
    agrees = (c[:, 1] - c[:, 0]).abs() <= tolerance * c[:, 0].abs()
    agrees &= _rows_sum_to_zero(t, gradient, c[:, 0], tolerance)
    factor = c[:, 0] if gradient.dtype not in AGREEMENT else _medians(c[:, 0], tolerance)
    token_loss = z_others[:, 0] - z_target - (g_others[:, 0] / factor).log()
    return _per_sample(factor, token_loss, agrees, tolerance, segments.owner(t.rows, t.positions), segments.samples)


def measure_log_probs(log_probs: Tensor, gradient: Tensor, targets: Tensor, segments: Segments) -> Units:
    """Measure from the log-probabilities of the targets and their gradient, where a model returns those.

    Args:
        log_probs: ``(R, T)``, of the target at each position.
        gradient: Gradient of the trained loss w.r.t. them, ``(R, T)``.
        targets: ``(R, T)``, ``IGNORE_INDEX`` where no loss is.
        segments: Which token belongs to which sample.
    """
    rows, positions = (targets != IGNORE_INDEX).nonzero(as_tuple=True)
    factor = -gradient[rows, positions].double()
    loss = -log_probs.detach()[rows, positions].double()
    agrees = torch.ones_like(rows, dtype=torch.bool)
    tolerance = AGREEMENT.get(gradient.dtype, AGREEMENT_FLOAT32)
    return _per_sample(factor, loss, agrees, tolerance, segments.owner(rows, positions), segments.samples)


def _rows_sum_to_zero(t: TokenLogits, gradient: Tensor, c: Tensor, tolerance: float) -> bool:
    """Tell whether the gradient over all classes sums to zero at a few tokens, as a cross-entropy's does.

    A loss on the normaliser (z-loss) sends ``k p`` as well: every two classes agree on it, only the sum shows it. The
    kind of loss is the same for all tokens, so a few will do.
    """
    some = torch.linspace(0, len(c) - 1, min(len(c), _SUMMED), device=c.device).long()
    sums = gradient[t.rows[some], t.positions[some]].sum(-1, dtype=torch.double)
    return bool((sums.abs() <= tolerance * c[some].abs()).all())


def _medians(c: Tensor, tolerance: float) -> Tensor:
    """Return one factor for all tokens if all agree, so that their rounding averages out; else each token's own."""
    if not len(c):
        return c
    middle = c.median()
    return middle.expand_as(c) if bool(((c - middle).abs() <= tolerance * middle.abs()).all()) else c


def _per_sample(factor: Tensor, loss: Tensor, agrees: Tensor, tolerance: float, owner: Tensor, samples: int) -> Units:
    """Gather tokens, all ``(N,)``, into samples; a sample is known if its tokens agree."""
    zeros = torch.zeros(samples, dtype=torch.double, device=factor.device)
    counts = torch.zeros(samples, dtype=torch.long, device=factor.device)
    n_tokens = counts.index_add(0, owner, torch.ones_like(owner))
    summed = zeros.index_add(0, owner, loss)
    mean = zeros.index_add(0, owner, factor) / n_tokens.clamp(min=1)
    agrees = agrees & ((factor - mean[owner]).abs() <= tolerance * mean[owner].abs())
    wrong = counts.index_add(0, owner, (~agrees).long())
    known = (wrong == 0) & ((mean != 0) | (n_tokens == 0))
    mean = torch.where(known & (n_tokens > 0), mean, torch.ones_like(mean))
    summed = torch.where(known, summed, torch.full_like(summed, float("nan")))
    return Units(factor=mean.float(), loss=summed.float(), n_tokens=n_tokens, known=known)


def targets_from_gradient(gradient: Tensor) -> Tensor:
    """Read the targets off the gradient where no labels are at hand: the one negative entry of ``p - e_y``.

    Args:
        gradient: ``(B, T, V)`` or ``(B, V)``.

    Returns:
        ``(B, T)`` or ``(B,)``, ``IGNORE_INDEX`` where the whole row of the gradient is zero.
    """
    lowest = gradient.argmin(-1)
    reached = gradient.abs().amax(-1) != 0  # not finite counts as reached
    return torch.where(reached, lowest, torch.full_like(lowest, IGNORE_INDEX))
