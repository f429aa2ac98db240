"""What audit mode would do with a model: route and cost of each module, and what it could not track."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from torch import nn

from attribution.capture.formulas import Embedding, Formula, route_of
from attribution.capture.fused import can_fuse
from attribution.capture.modules import Tracking, survey
from attribution.errors import RecipeError
from attribution.sketch import routes
from attribution.training.recipe import load_recipe


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One module.

    Attributes:
        name: Its name in the model.
        kind: Which formula.
        route: ``"exact"``, ``"factored"``, ``"fused"`` or ``"recomputed"``.
        parameters: Trainable parameters.
        entries: Their entries.
        flops: Operations per row beyond the plain backward pass, forming and folding, for one form.
        bytes: Memory read and written for it per row; ``None`` where it depends on the module's inside.
    """

    name: str
    kind: str
    route: str
    parameters: int
    entries: int
    flops: int
    bytes: int | None


def plan(tracking: Tracking, *, mode: str, tokens: int) -> list[ModulePlan]:
    """Return the plan of every tracked module.

    Args:
        tracking: From ``survey`` or ``find_tracked``.
        mode: ``"observe"`` or ``"fused"``.
        tokens: Tokens per row.
    """
    factored = {name: sides for name, p in tracking.parameters.items() if (sides := routes.buckets_of(p.shape))}
    return [_plan(formula, mode, tokens, factored) for formula in tracking.formulas]


def _plan(formula: Formula, mode: str, tokens: int, factored: Mapping[str, tuple[int, int]]) -> ModulePlan:
    entries = sum(formula.module.get_parameter(own).numel() for own in formula.parameters)
    route = route_of(formula, factored)
    if route == "factored":
        flops, moved = _factored_cost(formula, tokens, factored[formula.parameters["weight"]])
        return ModulePlan(formula.name, formula.kind, route, len(formula.parameters), entries, flops, moved)
    is_fused = mode == "fused" and can_fuse(formula, factored)
    forming = 0 if is_fused else formula.flops(tokens)  # the plain backward pass forms it too, as one product
    moved = formula.bytes_moved(tokens)
    return ModulePlan(
        name=formula.name,
        kind=formula.kind,
        route="fused" if is_fused else route,
        parameters=len(formula.parameters),
        entries=entries,
        flops=forming + 2 * entries,
        bytes=4 * entries if is_fused else moved,
    )


def _factored_cost(formula: Formula, tokens: int, buckets: tuple[int, int]) -> tuple[int, int]:
    """Return operations and bytes: every token's vectors are read and folded once, then contracted, then folded."""
    rows, columns = formula.module.get_parameter("weight").shape
    small = buckets[0] * buckets[1]
    is_lookup = isinstance(formula, Embedding)
    folded = tokens * (columns if is_lookup else rows + columns)
    contracted = 2 * tokens * buckets[1] if is_lookup else 2 * tokens * small
    bias = tokens * formula.module.get_parameter("bias").numel() if "bias" in formula.parameters else 0
    return 2 * folded + contracted + 2 * small + bias, 4 * (folded + 2 * small)


def load_model(name: str, lora_rank: int | None) -> nn.Module:
    """Build a model to be looked at; weights are neither read nor made where only its shape is needed.

    Args:
        name: A recipe ``file.py:function``, or the name or folder of a transformers model.
        lora_rank: Put LoRA adapters of this rank on every linear layer.

    Raises:
        RecipeError: If nothing of that name can be built.
    """
    if re.search(r":\w+$", name) and not Path(name).exists():
        model: nn.Module = load_recipe(name)(None).model
        return model
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"no model can be built from {name!r}: {str(error).splitlines()[0]}",
            "Name a folder with config.json, a recipe (train.py:build), or a model in the local cache "
            f"(hf download {name} config.json).",
        ) from error
    if lora_rank is None:
        return model
    from peft import LoraConfig, get_peft_model

    adapted: nn.Module = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear"))
    return adapted


def to_document(tracking: Tracking, modules: list[ModulePlan], mode: str, tokens: int) -> dict[str, Any]:
    """Return everything as plain JSON."""
    return {
        "mode": mode,
        "tokens": tokens,
        "coverage": tracking.coverage if tracking.trainable else None,
        "trainable_entries": tracking.trainable_entries,
        "tracked_entries": tracking.tracked_entries,
        "untracked": tracking.reasons,
        "modules": [dataclasses.asdict(module) for module in modules],
    }


def render(
    tracking: Tracking, modules: list[ModulePlan], mode: str, tokens: int, every: bool
) -> Iterator[RenderableType]:
    """Yield what to print: one line per module, or per kind of layer with numbers replaced by ``*``."""
    table = Table(box=None, pad_edge=False)
    for title, justify in (("module", "left"), ("n", "right"), ("kind", "left"), ("route", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for title in ("entries each", "MFLOP/row", "MB/row"):
        table.add_column(title, justify="right")
    for members in _grouped(modules, every):
        first, n = members[0], len(members)
        name = first.name if n == 1 else _pattern(first.name)
        moved = "–" if first.bytes is None else f"{sum(m.bytes or 0 for m in members) / 1e6:,.1f}"
        flops = f"{sum(m.flops for m in members) / 1e6:,.1f}"
        table.add_row(name, str(n), first.kind, first.route, f"{first.entries:,}", flops, moved)
    yield table
    if not tracking.trainable:
        yield "\n[bold]nothing is trainable[/bold]"
        return
    yield (
        f"\n[bold]tracked: {tracking.coverage:.2%}[/bold] of {tracking.trainable_entries:,} trainable entries, "
        f"in {len(modules)} modules; mode {mode}. MFLOP and MB: what capture adds for one row of {tokens} tokens, "
        "all n modules together"
    )
    if tracking.reasons:
        yield "\n[bold]not tracked[/bold] (AuditMode refuses unless allow_untracked names them)"
        for name, reason in tracking.reasons.items():
            yield f"  {name}: {reason}"


def look(name: str, *, mode: str, tokens: int, lora_rank: int | None) -> tuple[Tracking, list[ModulePlan]]:
    """Build a model and return what audit mode would do with it."""
    tracking = survey(load_model(name, lora_rank))
    return tracking, plan(tracking, mode=mode, tokens=tokens)


def _grouped(modules: list[ModulePlan], every: bool) -> list[list[ModulePlan]]:
    if every:
        return [[module] for module in modules]
    key = [(_pattern(m.name), m.kind, m.route, m.entries) for m in modules]
    order = {k: i for i, k in reversed(list(enumerate(key)))}  # first appearance
    pairs = sorted(zip(key, modules, strict=True), key=lambda pair: order[pair[0]])
    return [[module for _, module in members] for _, members in groupby(pairs, key=lambda pair: pair[0])]


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
