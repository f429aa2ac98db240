"""From a run folder to an answer: rebuild the model by the recorded recipe, ask, and log if somebody signs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attribution.errors import RecipeError
from attribution.influence.query import Question, ask, follow_on, load_final
from attribution.influence.record import log_answer
from attribution.influence.result import InfluenceResult
from attribution.influence.sources import open_sources, text_previews
from attribution.training.recipe import Recipe, load_recipe
from auditlog.errors import UsageError
from auditlog.ledger.reader import RunReader
from auditlog.trust.keys import Signer


def answer(
    run: Path,
    prompt: str,
    target: str,
    against: str,
    *,
    others: Sequence[Mapping[str, str]] = (),
    recipe: str | None = None,
    data: Path | None = None,
    signer: Signer | None = None,
) -> tuple[InfluenceResult, str | None]:
    """Answer one question about a run.

    Args:
        run: The run folder, sealed.
        prompt: What the model was asked.
        target: The answer to explain; joined to the prompt by a space where neither brings one.
        against: The answer it is compared with.
        others: Other cases, each with ``prompt`` and, where they differ, ``target`` and ``against``.
        recipe: Instead of the recorded one.
        data: Folder of the source files, for previews.
        signer: Logs the answer in the run's custody log.

    Returns:
        The answer, and its file below ``custody/``, or ``None`` if it was not logged.

    Raises:
        RecipeError: If no recipe was recorded and none is given, or it does not return a ``Recipe``.
        ReadError: If the run or its final weights cannot be read.
    """
    with RunReader.open(run) as reader:
        preview = None if data is None else text_previews(open_sources(reader.manifest, data))
        built = _build(reader, recipe)
        load_final(reader, built.model)
        question = _question(prompt, target, against)
        cases = [_question(o["prompt"], o.get("target", target), o.get("against", against)) for o in others]
        result = ask(reader, built.model, built.tokenizer, question, cases, preview=preview)
    return result, None if signer is None else log_answer(run, result, signer)[0]


def _question(prompt: str, target: str, against: str) -> Question:
    for name, text in (("prompt", prompt), ("target", target), ("against", against)):
        if not text.strip():
            raise UsageError(f"the {name} is empty", "Give the text as the model sees or says it.")
    return Question(prompt, follow_on(prompt, target), follow_on(prompt, against))


def _build(reader: RunReader, recipe: str | None) -> Recipe:
    """Call the recipe and check what it returns."""
    recorded = reader.manifest.recipe
    name = recipe or (recorded["name"] if recorded else None)
    if name is None:
        raise RecipeError(
            f"{reader.path}: no recipe recorded, so the model cannot be built again",
            "Name the function that builds it: --recipe train.py:build",
        )
    built = load_recipe(name)(None)
    if not isinstance(built, Recipe):
        raise RecipeError(f"recipe {name!r} returned {type(built).__name__}, not a Recipe")
    return built
