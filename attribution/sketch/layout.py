"""Which parameter lands where: one D-vector per sample, summed over every tracked parameter.

The layout is fixed by ``(seed, dim, parameter names and shapes)``, and by which parameters are folded on both sides,
which their shapes decide. The digest of its random tables goes into the run manifest, so a verifier or a later query
can tell that it rebuilt the same map.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attribution.errors import SketchMismatchError
from attribution.sketch import rng, routes
from attribution.sketch.sign_fold import SignFold, unwrapped, wrap
from attribution.sketch.two_sided import SideFold, TwoSidedFold
from auditlog.format.manifest import SketchBlock, SketchParameter

DEFAULT_DIM = 4096


def is_tall(shape: Sequence[int]) -> bool:
    """Tell whether a matrix is flattened column by column, so that LoRA's A and B both run along their long side."""
    return len(shape) == 2 and shape[0] > shape[1]


def flatten(gradient: Tensor) -> Tensor:
    """Return a parameter's gradient as the sketch takes it, ``(1, n)`` float32."""
    rows = (gradient.t() if is_tall(gradient.shape) else gradient).reshape(1, -1)
    return rows if rows.dtype is torch.float32 else rows.float()


def unflatten(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return matrices, ``(B, rows, columns)``, from flattened ones, ``(B, n)``."""
    rows, columns = shape
    return values.view(-1, columns, rows).transpose(1, 2) if is_tall(shape) else values.view(-1, rows, columns)


class SketchLayout:
    """The map from a model's gradient to its sketch.

    Args:
        shapes: Tracked parameters' shapes by name, in the model's own order.
        dim: Sketch size ``D``.
        seed: Any text; part of every random table's key.
        buckets: Buckets of both sides by name, ``None`` for the exact route; by default what ``routes`` chooses.

    Attributes:
        dim: Sketch size ``D``.
        maps: Each parameter's own map, by name; into a ``SignFold`` a tall matrix enters column by column.
        buckets: Buckets of both sides, by name, of the parameters on the factored route.
        device: Where the tables are.
        tables_sha256: Digest over all signs, offsets and numbers of buckets.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dim: int = DEFAULT_DIM,
        seed: str = "0",
        buckets: Mapping[str, tuple[int, int] | None] | None = None,
    ) -> None:
        self.dim, self.seed, self.device = dim, seed, torch.device("cpu")
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        chosen = {name: routes.buckets_of(s) for name, s in shapes.items()} if buckets is None else buckets
        self.buckets = {name: sides for name, sides in chosen.items() if sides is not None}
        self.maps: dict[str, SignFold | TwoSidedFold] = {}
        self._sides: dict[str, SideFold] = {}
        digest = hashlib.sha256()
        for name, shape in self.shapes.items():
            sides = self.buckets.get(name)
            purpose = f"gradtrail/{seed}/{name}"
            table = rng.signs(f"{purpose}/signs", shape.numel() if sides is None else math.prod(sides))
            offset = rng.offset(f"{purpose}/offset", dim)
            fold = SignFold(torch.from_numpy(table).float(), offset, dim)
            digest.update(f"{name}\0{offset}\0".encode() + table.tobytes())
            if sides is None:
                self.maps[name] = fold
                continue
            rows, columns = (self._side(name, axis, shape[axis], sides[axis]) for axis in (0, 1))
            self.maps[name] = TwoSidedFold(rows, columns, fold)
            for side in (rows, columns):
                digest.update(f"\0{side.buckets}\0".encode() + side.weights.to(torch.int8).numpy().tobytes())
        self.tables_sha256 = digest.hexdigest()

    def _side(self, name: str, axis: int, n: int, buckets: int) -> SideFold:
        """Return one axis' fold: that of all modules below the same parent, which may have the same input."""
        parent = ".".join(name.split(".")[:-2])
        key = f"gradtrail/{self.seed}/{parent}/axis {axis}/{n} to {buckets}"
        if key not in self._sides:
            self._sides[key] = SideFold(torch.from_numpy(rng.signs(key, n)).float(), buckets)
        return self._sides[key]

    @classmethod
    def from_block(cls, block: SketchBlock) -> SketchLayout:
        """Rebuild the map that a run manifest describes.

        Raises:
            SketchMismatchError: If the rebuilt tables do not have the recorded digest.
        """
        shapes = {p.name: p.shape for p in block.parameters}
        layout = cls(shapes, block.dim, block.seed, {p.name: p.buckets for p in block.parameters})
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
            route="factored" if self.buckets else "exact",
            parameters=tuple(
                SketchParameter(
                    name=name, shape=tuple(shape), offset=self.maps[name].offset, buckets=self.buckets.get(name)
                )
                for name, shape in self.shapes.items()
            ),
        )

    def to(self, device: torch.device) -> SketchLayout:
        """Move the sign tables to ``device``; returns ``self``. Sides that were shared still are."""
        moved = {id(side): side.to(device) for side in self._sides.values()}
        for name, fold in self.maps.items():
            self.maps[name] = (
                fold.to(device)
                if isinstance(fold, SignFold)
                else TwoSidedFold(moved[id(fold.rows)], moved[id(fold.columns)], fold.core.to(device))
            )
        self._sides = {key: moved[id(side)] for key, side in self._sides.items()}
        self.device = device
        return self

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
            fold = self.maps[name]
            if isinstance(fold, SignFold):
                flat = flatten(gradient)
                fold.add_to(sums, flat if flat.device == self.device else flat.to(self.device))
            else:
                fold.add_matrices(sums, gradient[None].to(self.device, torch.float32))
        return wrap(sums)[0]


def _plain(shape: torch.Size | None) -> tuple[int, ...] | str:
    return "no such parameter" if shape is None else tuple(shape)
