"""Ask a finished run: which recorded samples pushed the model towards one answer and away from another.

The quantity asked about is ``F = log p(target | prompt) - log p(contrast | prompt)``, summed over each answer's
tokens, in evaluation mode, at the run's final weights. Its gradient is sketched by the run's own map and compared with
what the log holds. Reads the run; writes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attribution.capture.oracle import gradient
from attribution.errors import AttributionError, SketchMismatchError
from attribution.influence import estimators
from attribution.influence.result import InfluenceResult, RunFacts, build_result
from attribution.influence.specificity import MIN_CASES
from attribution.sketch.layout import SketchLayout
from attribution.training.snapshot import load_trainable
from auditlog.errors import ReadError
from auditlog.format.records import EventKind
from auditlog.ledger.custody import erased_samples
from auditlog.ledger.reader import RunReader

FINAL = "snapshots/final"
OBJECTIVE = "log p(target) - log p(contrast)"


@dataclass(frozen=True, slots=True)
class Question:
    """One case to explain.

    Attributes:
        prompt: What the model was asked.
        target: The answer in question, exactly as it follows the prompt (mostly with a leading space).
        contrast: The answer it is compared with, likewise.
        case_label: How the case is called in outputs; may be empty.
    """

    prompt: str
    target: str
    contrast: str
    case_label: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says to a question at the final weights.

    Attributes:
        answered: Its own greedy continuation of the prompt, as many tokens as the longer answer has.
        log_odds: ``F``, nats.
        p_target: Probability of the target among all continuations.
        p_contrast: Probability of the contrast.
    """

    answered: str
    log_odds: float
    p_target: float
    p_contrast: float


def follow_on(prompt: str, answer: str) -> str:
    """Return the answer as it follows the prompt: one space is put between them where neither brings white space."""
    joined = not prompt or prompt[-1].isspace() or answer[:1].isspace()
    return answer if joined else f" {answer}"


def load_final(reader: RunReader, model: nn.Module) -> int:
    """Load the run's final weights into ``model`` after comparing them with the digests in the log.

    Returns:
        The ``seq`` of the log entry that names them.

    Raises:
        ReadError: If the run has no final snapshot, or its file is missing or is not the one that was logged.
        SketchMismatchError: If the model's trainable parameters are not those of the snapshot.
    """
    logged = [e for e in reader.events(EventKind.MODEL_CHECKPOINT) if e.json()["path"] == FINAL]
    if not logged:
        raise ReadError(
            f"{reader.path}: the log names no final weights, so there is no model to ask",
            "Only a run that ended in good order has them.",
        )
    folder = reader.path / FINAL
    for file in logged[-1].json()["files"]:
        if _digest(folder / file["name"]) != file["sha256"]:
            raise ReadError(
                f"{folder / file['name']} is not the file that entry {logged[-1].seq} of the log names",
                "Restore the snapshot; an answer from other weights would say nothing about this run.",
            )
    load_trainable(folder, model)
    return logged[-1].seq


def ask(
    reader: RunReader,
    model: nn.Module,
    tokenizer: Any,
    question: Question,
    others: Sequence[Question] = (),
    *,
    preview: Callable[[int], str] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> InfluenceResult:
    """Score every recorded sample for one question, and say how specific the answer is.

    Only records that led to the final weights count; those of all ranks do.

    Args:
        reader: The run.
        model: The model at the run's final weights (``load_final``).
        tokenizer: Its tokenizer.
        question: The case in question.
        others: At least eight other cases, for specificity; fewer leave it untested.
        preview: Gives a few words of a sample, by its index; only its first 200 characters are kept.
        progress: Called after each question's gradient.

    Raises:
        SketchMismatchError: If the model lacks a parameter of the run's sketch.
        AttributionError: If a question has no answer tokens, or both its answers are the same.
    """
    manifest = reader.manifest
    layout = SketchLayout.from_block(manifest.sketch)
    questions = [question, *(others if len(others) >= MIN_CASES else ())]
    sketches, answers = [], []
    for each in questions:
        sketch, answer = query_sketch(model, tokenizer, each, layout)
        sketches.append(sketch)
        answers.append(answer)
        progress()

    stored = reader.live_sketches()
    records = stored.records
    if not len(records):
        raise ReadError(f"{reader.path}: the run holds no record of a sample, so nothing can be scored")
    steps = [event.json() for event in reader.live_steps()]
    scores = estimators.score(
        lambda samples: ((block.records, block.raw) for block in stored.where(samples=samples).blocks()),
        np.stack(sketches),
        estimators.step_factors(steps),
        np.array([source.first_index for source in manifest.data.sources], dtype=np.int64),
        manifest.data.rows,
    )
    superseded = sum(len(rank.records()) for rank in reader.ranks) - len(records)
    gone = erased_samples(reader.path)
    erased = sum(place in gone for place in zip(records["source_id"].tolist(), records["row"].tolist(), strict=True))
    facts = RunFacts(manifest, records, len(others), estimators.unmeasured(steps), superseded, erased)
    return build_result(facts, question, answers[0], scores, preview)


def query_sketch(
    model: nn.Module, tokenizer: Any, question: Question, layout: SketchLayout
) -> tuple[NDArray[np.float32], Answer]:
    """Return the sketch of ``∇F``, ``(D,)`` float32, and what the model answers; the model is left as it was."""
    parameters = dict(model.named_parameters())
    missing = [name for name in layout.shapes if name not in parameters or not parameters[name].requires_grad]
    if missing:
        raise SketchMismatchError(
            f"the model has no trainable parameter {missing[0]} ({len(missing)} of {len(layout.shapes)} are missing)",
            "Ask with the model that was trained: same base model, same adapter configuration.",
        )
    prompt, target, contrast = _encode(tokenizer, question)
    with _evaluation(model):
        log_target, log_contrast = log_prob(model, prompt, target), log_prob(model, prompt, contrast)
        objective = log_target - log_contrast
        sketch = layout.sketch(gradient(objective, {name: parameters[name] for name in layout.shapes}))
        answered = _greedy(model, tokenizer, prompt, max(len(target), len(contrast)))
    answer = Answer(
        answered=answered,
        log_odds=float(objective.detach()),
        p_target=float(log_target.detach().exp()),
        p_contrast=float(log_contrast.detach().exp()),
    )
    return sketch.cpu().numpy(), answer


def log_prob(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return ``log p(answer | prompt)``, a scalar: the sum over the answer's tokens, nats."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *answer]], device=device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum()


def _encode(tokenizer: Any, question: Question) -> tuple[list[int], list[int], list[int]]:
    """Return the token ids of prompt, target and contrast, each encoded on its own as in training."""
    if question.target == question.contrast:
        raise AttributionError(f"target and contrast are the same answer: {question.target!r}")
    prompt = list(tokenizer(question.prompt)["input_ids"])
    target, contrast = (
        list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (question.target, question.contrast)
    )
    for name, ids in (("prompt", prompt), ("target", target), ("contrast", contrast)):
        if not ids:
            raise AttributionError(f"the question's {name} has no tokens", f"Give a {name} that is not empty.")
    return prompt, target, contrast


def _greedy(model: nn.Module, tokenizer: Any, prompt: Sequence[int], tokens: int) -> str:
    """Return the model's own most likely continuation, at most ``tokens`` tokens."""
    ids = list(prompt)
    device = next(model.parameters()).device
    with torch.no_grad():
        for _ in range(tokens):
            batch = torch.tensor([ids], device=device)
            ids.append(int(model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    return str(tokenizer.decode(ids[len(prompt) :]))


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode and back, module by module."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ReadError(f"{path}: {error.strerror or error}", "Restore the run's snapshot.") from error
