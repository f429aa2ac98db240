"""Which parameter lands where: one D-vector per sample, summed over every tracked parameter.

The layout is fixed by ``(seed, dim, parameter names and shapes)``. The digest of its random tables goes into the
run manifest, so a verifier or a later query can tell that it rebuilt the same map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attribution.errors import SketchMismatchError
from attribution.sketch import rng
from attribution.sketch.sign_fold import SignFold, unwrapped, wrap
from auditlog.format.manifest import SketchBlock, SketchParameter

DEFAULT_DIM = 4096


def is_tall(shape: Sequence[int]) -> bool:
    """Tell whether a matrix is flattened column by column, so that LoRA's A and B both run along their long side."""
    return len(shape) == 2 and shape[0] > shape[1]


def flatten(gradient: Tensor) -> Tensor:
    """Return a parameter's gradient as the sketch takes it, ``(1, n)`` float32."""
    return (gradient.t() if is_tall(gradient.shape) else gradient).reshape(1, -1).float()


class SketchLayout:
    """The map from a model's gradient to its sketch.

    Args:
        shapes: Tracked parameters' shapes by name, in the model's own order.
        dim: Sketch size ``D``.
        seed: Any text; part of every random table's key.

    Attributes:
        dim: Sketch size ``D``.
        maps: Each parameter's own map, by name; a tall matrix enters it column by column.
        tables_sha256: Digest over all signs and offsets.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], dim: int = DEFAULT_DIM, seed: str = "0") -> None:
        self.dim, self.seed = dim, seed
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.maps: dict[str, SignFold] = {}
        digest = hashlib.sha256()
        for name, shape in self.shapes.items():
            purpose = f"gradtrail/{seed}/{name}"
            table = rng.signs(f"{purpose}/signs", shape.numel())
            offset = rng.offset(f"{purpose}/offset", dim)
            self.maps[name] = SignFold(torch.from_numpy(table).float(), offset, dim)
            digest.update(f"{name}\0{offset}\0".encode() + table.tobytes())
        self.tables_sha256 = digest.hexdigest()

    @classmethod
    def from_block(cls, block: SketchBlock) -> SketchLayout:
        """Rebuild the map that a run manifest describes.

        Raises:
            SketchMismatchError: If the rebuilt tables do not have the recorded digest.
        """
        layout = cls({p.name: p.shape for p in block.parameters}, block.dim, block.seed)
        if layout.tables_sha256 != block.tables_sha256:
            raise SketchMismatchError(
                f"the sketch's random tables rebuild to {layout.tables_sha256[:16]}…, "
                f"the run manifest says {block.tables_sha256[:16]}…",
                "The manifest or this installation differs from the one that recorded; scores would mean nothing.",
            )
        return layout

    def block(self, forms: Sequence[str] = ("raw",)) -> SketchBlock:
        """Return the description that goes into the run manifest."""
        return SketchBlock(
            kind="rolled-sign-fold",
            dim=self.dim,
            forms=tuple(forms),
            seed=self.seed,
            tables_sha256=self.tables_sha256,
            route="exact",
            parameters=tuple(
                SketchParameter(name=name, shape=tuple(shape), offset=self.maps[name].offset)
                for name, shape in self.shapes.items()
            ),
        )

    def to(self, device: torch.device) -> SketchLayout:
        """Move the sign tables to ``device``; returns ``self``."""
        self.maps = {name: fold.to(device) for name, fold in self.maps.items()}
        return self

    @property
    def device(self) -> torch.device:
        """Where the sign tables are."""
        return next(iter(self.maps.values())).signs.device

    @torch.no_grad()
    def sketch(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Sketch one gradient given per parameter.

        Args:
            gradients: ``(*shape)`` tensors by parameter name; a missing parameter counts as zero.

        Returns:
            ``(D,)`` float32.

        Raises:
            SketchMismatchError: If a name is not in the layout or has another shape.
        """
        sums = unwrapped(1, self.dim, self.device)
        for name, gradient in gradients.items():
            if gradient.shape != self.shapes.get(name):
                raise SketchMismatchError(
                    f"parameter {name}: shape {tuple(gradient.shape)}, the sketch has {_plain(self.shapes.get(name))}",
                    "Query with the model that was trained: same base model, same adapter configuration.",
                )
            self.maps[name].add_to(sums, flatten(gradient).to(self.device))
        return wrap(sums)[0]


def _plain(shape: torch.Size | None) -> tuple[int, ...] | str:
    return "no such parameter" if shape is None else tuple(shape)
