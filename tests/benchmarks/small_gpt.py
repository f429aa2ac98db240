"""A small trained transformer and its per-sample gradients, with or without outlier features that all layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

VOCABULARY, CONTEXT = 32, 24


@dataclass(frozen=True)
class Gradients:
    """Per-sample gradients of a trained model.

    Attributes:
        rows: ``(R, N)`` float32, all parameters flattened one after another.
        shapes: Their shapes by name, in the same order.
    """

    rows: Tensor
    shapes: Mapping[str, torch.Size]

    def part(self, *names: str) -> Tensor:
        """Return the columns of some parameters, in the model's order."""
        pieces = torch.split(self.rows, [shape.numel() for shape in self.shapes.values()], 1)
        return torch.cat([p for name, p in zip(self.shapes, pieces, strict=True) if name in names], 1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            h.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for h in self.qkv(self.norm1(x)).chunk(3, -1)
        )  # (B, heads, T, width / heads)
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(-2, -3).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A decoder with tied nothing: embeddings, pre-norm blocks, a linear head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor) -> Tensor:
        """Return the mean next-token loss of ``(B, T)`` ids."""
        return functional.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def texts(rows: int, seed: int) -> Tensor:
    """Return rows of six small languages: each is a random walk with its own favourite next tokens, ``(R, T)``."""
    generator = torch.Generator().manual_seed(1234)
    follow = torch.softmax(4 * torch.randn(6, VOCABULARY, VOCABULARY, generator=generator), -1)
    generator.manual_seed(seed)
    language = torch.arange(rows) % 6
    ids = [torch.randint(0, VOCABULARY, (rows,), generator=generator)]
    for _ in range(CONTEXT - 1):
        ids.append(torch.multinomial(follow[language, ids[-1]], 1, generator=generator)[:, 0])
    return torch.stack(ids, 1)


def trained(width: int, layers: int, steps: int, outliers: int = 0) -> SmallGPT:
    """Return a model after some steps of AdamW.

    Args:
        width: Features.
        layers: Blocks.
        steps: Optimizer steps of 32 rows each.
        outliers: Features that every normalisation multiplies by 12 before training, the same in all layers: what large
            language models grow by themselves.
    """
    torch.manual_seed(0)
    model = SmallGPT(width, layers)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) and module is not model.norm:
                module.weight[3 : 3 + outliers] *= 12
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(texts(32, seed=step)).backward()
        optimizer.step()
    return model


def gradients(model: SmallGPT, rows: int) -> Gradients:
    """Return each row's own gradient, for rows that training has not seen."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(values: dict[str, Tensor], ids: Tensor) -> Tensor:
        logits = functional_call(model, values, (ids[None],))
        return functional.cross_entropy(logits[0, :-1], ids[1:])

    each = vmap(grad(one), in_dims=(None, 0), chunk_size=32)(parameters, texts(rows, seed=10**6))
    return Gradients(
        torch.cat([each[name].flatten(1) for name in parameters], 1), {name: p.shape for name, p in parameters.items()}
    )


def linear_weights(found: Gradients) -> list[str]:
    """Return the names of the blocks' matrices: what a two-sided map can be used on."""
    return [name for name, shape in found.shapes.items() if name.startswith("blocks.") and len(shape) == 2]
