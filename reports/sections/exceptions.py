"""What must be said first: everything in the records that departs from the plain case, each with its place."""

from __future__ import annotations

from reports.evidence import Evidence
from reports.formats import quantity, short
from reports.text import quoted, shorten

RESIDUAL_EXPECTED = 1e-4  # fp32 sums in another order stay below this; more says that something was left out

_FLAGS = {
    "NOT_FINITE": "a loss or gradient that is not finite; their sketches are stored as zeros",
    "NO_LOSS_TOKEN": "no token that carries loss",
    "PADDED_DUPLICATE": "a repeated sample that only fills the batch",
    "NOT_SEPARABLE": "a gradient that could not be separated from others",
    "UNIT_UNKNOWN": "a loss that is not plain cross-entropy, so their unit is unknown",
}


def exceptions(evidence: Evidence) -> tuple[str, ...]:
    """Return the exceptions as sentences, gravest first."""
    return (*_log(evidence), *_training(evidence), *_influence(evidence), *_anchoring(evidence))


def _log(evidence: Evidence) -> list[str]:
    found = []
    verification = evidence.verification
    if verification.abandoned:
        found.append("The run was closed as abandoned: training did not end in an orderly way.")
    if verification.attempts > 1:
        found.append(f"Training was resumed: {verification.attempts} attempts are recorded.")
    found += [f"Note of the verifier: {shorten(note, 300)}" for note in verification.notes]
    found += [f"Notice of the recorder ({notice.ref}): {shorten(notice.text, 300)}" for notice in evidence.notices]
    for flag, number in evidence.records.flags.items():
        found.append(f"{quantity(number, 'record')} with {_FLAGS.get(flag, flag)}.")
    return found


def _training(evidence: Evidence) -> list[str]:
    found, steps = [], evidence.steps
    if steps.skipped:
        found.append(f"{quantity(steps.skipped, 'optimizer step')} skipped by the loss scaler.")
    if steps.residual_max is None:
        found.append("No step logged a conservation residual, so completeness of the steps was not measured.")
    elif steps.residual_max > RESIDUAL_EXPECTED:
        found.append(
            f"The conservation residual reaches {short(steps.residual_max)} at step {steps.residual_max_step}, "
            f"above {RESIDUAL_EXPECTED:g}: part of that step's gradient may not be recorded."
        )
    dirty = [source.path for source in evidence.sources if source.dirty]
    if dirty:
        found.append(f"{quantity(len(dirty), 'source file')} differed from the named commit when read.")
    trainable, tracked = (evidence.tracking.get(name) for name in ("trainable_entries", "tracked_entries"))
    if trainable != tracked:
        found.append(f"Only {tracked} of {trainable} trainable values are tracked; the rest left no sketch.")
    if evidence.model.get("frozen_sha256") is None:
        found.append("The base model is not identified by a digest of its weights.")
    if not evidence.checkpoints:
        found.append("No saved weights are recorded, so no deployed model can be compared with this run.")
    return found


def _influence(evidence: Evidence) -> list[str]:
    influence = evidence.influence
    if influence is None:
        return ["No influence query is logged, so section 12 has no result."]
    found = []
    if influence.specificity.specific is None:
        found.append("Whether the influence answer is specific to the case was not tested (section 12).")
    elif not influence.specificity.specific:
        found.append("The influence answer is not specific to the case that was asked about (section 12).")
    if not influence.answered.startswith(influence.target):
        found.append(
            f"The model's own answer was {quoted(influence.answered)}, not the {quoted(influence.target)} asked about."
        )
    rows = (*influence.top_for, *influence.top_against)
    below = sum(not row.above_floor for row in rows)
    if below:
        found.append(f"{below} of the {len(rows)} listed influence scores do not clear the noise floor.")
    return found


def _anchoring(evidence: Evidence) -> list[str]:
    found = []
    if not evidence.verification.kept_heads:
        found.append("No head left this machine: nothing here binds the operator.")
    found.append("No time stamp or witness signature of another party is recorded; times are the operator's clock.")
    return found
