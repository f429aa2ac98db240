"""Factor and loss measured on the logits against torch's own cross-entropy."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from attribution.capture import units
from attribution.capture.segments import Segments

B, T, V = 4, 7, 53


def setup(seed: int = 0, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(B, T, V, generator=generator) * spread).requires_grad_()
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, :3] = -100
    labels[2, 5:] = -100
    return logits, labels


def sums(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed token loss per sample, by the library."""
    each = cross_entropy(logits.reshape(-1, V), targets.reshape(-1), ignore_index=-100, reduction="none")
    return each.view(B, -1).sum(1)


def measured(logits: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor) -> units.Units:
    needed = units.gather_logits(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    return units.measure(needed, gradient, Segments.whole_rows(len(logits), len(logits)))


def reductions(total: torch.Tensor, tokens: int) -> dict[str, tuple[torch.Tensor, float]]:
    return {
        "plain mean": (total / tokens, 1 / tokens),
        "num_items_in_batch": (total / 1234, 1 / 1234),
        "times 0.37": (0.37 * total / tokens, 0.37 / tokens),
        "loss scaler": (65536.0 * total / tokens, 65536.0 / tokens),
    }


@pytest.mark.parametrize("name", ["plain mean", "num_items_in_batch", "times 0.37", "loss scaler"])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_factor_and_loss_agree_with_the_reference(name: str, spread: float) -> None:
    logits, labels = setup(spread=spread)
    targets = units.align_targets(logits, labels, next_token=True)
    assert targets is not None
    reference = sums(logits, targets)
    tokens = int((targets != -100).sum())
    loss, factor = reductions(reference.sum(), tokens)[name]
    got = measured(logits, targets, loss)
    assert got.known.all()
    torch.testing.assert_close(got.factor, torch.full((B,), factor), rtol=1e-5, atol=0)
    torch.testing.assert_close(got.loss, reference.detach(), rtol=1e-5, atol=1e-5)
    assert got.n_tokens.tolist() == (targets != -100).sum(1).tolist()


def test_a_factor_of_its_own_per_sample_is_measured_per_sample() -> None:
    logits, labels = setup()
    targets = units.align_targets(logits, labels, next_token=True)
    own = torch.tensor([0.1, 2.0, 0.5, 3.0])
    got = measured(logits, targets, (own * sums(logits, targets)).sum())
    torch.testing.assert_close(got.factor, own, rtol=1e-5, atol=0)


def test_labels_can_be_read_off_the_gradient() -> None:
    logits, labels = setup()
    targets = units.align_targets(logits, labels, next_token=True)
    (gradient,) = torch.autograd.grad(sums(logits, targets).sum(), logits)
    assert torch.equal(units.targets_from_gradient(gradient), targets)


def test_classification_takes_labels_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 3, generator=generator).requires_grad_()
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    targets = units.align_targets(logits, labels, next_token=True)
    reference = cross_entropy(logits, labels, reduction="none")
    got = measured(logits, targets, reference.mean())
    torch.testing.assert_close(got.factor, torch.full((6,), 1 / 6), rtol=1e-5, atol=0)
    torch.testing.assert_close(got.loss, reference.detach(), rtol=1e-5, atol=1e-6)


def test_two_classes_leave_one_other_class() -> None:
    logits = torch.randn(5, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = torch.tensor([0, 1, 1, 0, 1])
    got = measured(logits, labels, cross_entropy(logits, labels))
    assert got.known.all()
    torch.testing.assert_close(got.factor, torch.full((5,), 0.2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["label smoothing", "focal", "unequal tokens", "squared error"])
def test_what_is_not_plain_cross_entropy_is_said_to_be_unknown(kind: str) -> None:
    logits, labels = setup()
    targets = units.align_targets(logits, labels, next_token=True)
    flat, wanted = logits.reshape(-1, V), targets.reshape(-1)
    each = cross_entropy(flat, wanted, ignore_index=-100, reduction="none")
    loss = {
        "label smoothing": cross_entropy(flat, wanted, ignore_index=-100, label_smoothing=0.1),
        "focal": ((1 - (-each).exp()) ** 2 * each).sum(),
        "unequal tokens": (each * torch.linspace(0.5, 1.5, len(each))).sum(),
        "squared error": (flat**2).mean(),
    }[kind]
    got = measured(logits, targets, loss)
    assert not got.known.any()
    assert got.factor.eq(1).all()
    assert got.loss.isnan().all()


def test_a_sample_without_loss_tokens_is_known_and_empty() -> None:
    logits, labels = setup()
    labels[1] = -100
    targets = units.align_targets(logits, labels, next_token=True)
    got = measured(logits, targets, sums(logits, targets).sum())
    assert got.known.all()
    assert got.n_tokens[1] == 0
    assert got.loss[1] == 0


def test_labels_that_do_not_fit_are_not_guessed_at() -> None:
    logits, labels = setup()
    assert units.align_targets(logits, labels[:, :-1], next_token=True) is None
    assert units.align_targets(logits[:, 0], torch.rand(B), next_token=False) is None


def test_a_gradient_that_is_not_finite_leaves_the_units_unknown() -> None:
    logits, labels = setup()
    targets = units.align_targets(logits, labels, next_token=True)
    nan = torch.full((B, T, V), float("nan"))
    got = units.measure(units.gather_logits(logits, targets), nan, Segments.whole_rows(B, B))
    assert not got.known.any()
