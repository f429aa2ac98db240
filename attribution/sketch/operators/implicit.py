"""Sketching by a change of variables: ``S ∇L(θ₀)`` is the gradient of ``ω ↦ L(θ₀ + Sᵀω)`` at 0.

The implicit form needs no per-parameter gradient, only ``Sᵀ`` in the forward pass, but lifts a whole ``Sᵀω`` there; the
explicit one is cheaper, since the gradient is at hand. Both give the same numbers, and so do the two forms of the
sketched Hessian ``S H Sᵀ``. Source: Schioppa, NeurIPS 2024, arXiv:2402.03994, eq. (4) and (5).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attribution.sketch.operators.operator import Operator

Loss = Callable[[Tensor], Tensor]


def flat_loss(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[Loss, Tensor]:
    """Return a model's loss as a function of one vector of its trainable parameters, and that vector.

    Args:
        model: Its parameters are read, never written.
        loss: From a model with given parameters to a scalar.

    Returns:
        The function of ``(N,)``, and ``θ₀``, ``(N,)``, in the order of ``named_parameters``.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    wrapped = _Lossy(model, loss)

    def of_vector(theta: Tensor) -> Tensor:
        pieces = torch.split(theta, [p.numel() for p in trained.values()])
        shaped = {
            f"model.{name}": piece.view(p.shape) for (name, p), piece in zip(trained.items(), pieces, strict=True)
        }
        value: Tensor = functional_call(wrapped, shaped)
        return value

    return of_vector, torch.cat([p.reshape(-1) for p in trained.values()])


class _Lossy(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self) -> Tensor:
        return self._loss(self.model)


def explicit_gradient(loss: Loss, theta: Tensor, S: Operator) -> Tensor:
    """Return ``S ∇L(θ)``, ``(D,)``, from the gradient."""
    return S @ _gradient(loss, theta)


def implicit_gradient(loss: Loss, theta: Tensor, S: Operator) -> Tensor:
    """Return ``S ∇L(θ)``, ``(D,)``, as the gradient of ``L(θ + Sᵀω)`` at 0.

    Example:
        >>> from attribution.sketch.operators import SRHT
        >>> S, theta = SRHT(N=10, D=4), torch.arange(10.0)
        >>> torch.allclose(implicit_gradient(torch.sum, theta, S), S @ torch.ones(10))
        True
    """
    return _gradient(lambda omega: loss(theta + S.adjoint(omega)), theta.new_zeros(S.D))


def explicit_hvp(loss: Loss, theta: Tensor, S: Operator, v: Tensor) -> Tensor:
    """Return ``S H Sᵀ v``, ``(D,)``, from a Hessian-vector product in ``R^N``."""
    return S @ _hvp(loss, theta, S.adjoint(v))


def implicit_hvp(loss: Loss, theta: Tensor, S: Operator, v: Tensor) -> Tensor:
    """Return ``S H Sᵀ v``, ``(D,)``, as a Hessian-vector product of ``L(θ + Sᵀω)`` at 0."""
    return _hvp(lambda omega: loss(theta + S.adjoint(omega)), theta.new_zeros(S.D), v)


def _gradient(loss: Loss, at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    return torch.autograd.grad(loss(at), at)[0]


def _hvp(loss: Loss, at: Tensor, v: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
    return torch.autograd.grad(gradient, at, v)[0]
