"""The recipe: the user's own function that rebuilds model and data, so that others can ask and replay later."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attribution.errors import RecipeError
from auditlog.datamanifest import DataManifest


@dataclass(frozen=True, slots=True)
class Recipe:
    """What training needs, built again.

    Attributes:
        model: The model as it was trained, adapters in place, initial weights.
        tokenizer: Its tokenizer.
        dataset: The training dataset; rows carry ``sample_index``.
        collator: Makes batches of it.
        optimizer: Builds the optimizer from the model's parameters.
    """

    model: Any
    tokenizer: Any
    dataset: Any = None
    collator: Any = None
    optimizer: Any = None


def load_recipe(name: str) -> Callable[[DataManifest | None], Recipe]:
    """Load the function behind ``"file.py:function"`` or ``"package.module:function"``.

    Raises:
        RecipeError: If the file, module or function does not exist or does not load.
    """
    place, _, function = name.partition(":")
    if not function:
        raise RecipeError(
            f"recipe {name!r} names no function", "Write recipe='train.py:build' or 'package.module:build'."
        )
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"{place} cannot be loaded")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found: Callable[[DataManifest | None], Recipe] = getattr(module, function)
    except (ImportError, OSError, AttributeError, SyntaxError) as error:
        raise RecipeError(f"recipe {name!r} cannot be loaded: {error}") from error
    return found


def describe_recipe(name: str) -> dict[str, Any]:
    """Return what the run manifest says of a recipe: its name, and its file's digest."""
    source = inspect.getsourcefile(load_recipe(name))
    if source is None:
        raise RecipeError(f"recipe {name!r}: its source file cannot be found")
    content = Path(source).read_bytes()
    return {
        "name": name,
        "file": Path(source).name,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
