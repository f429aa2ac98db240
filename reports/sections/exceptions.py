"""What must be said first: everything in the records that departs from the plain case, each with its place."""

from __future__ import annotations

from auditlog.ledger.sample_use import Fate
from reports.evidence import Evidence
from reports.formats import quantity, short
from reports.text import quoted, shorten

RESIDUAL_EXPECTED = 1e-4  # fp32 sums in another order stay below this; more says that something was left out

_FLAGS = {
    "NOT_FINITE": "with a loss or gradient that is not finite; their sketches are stored as zeros",
    "NO_LOSS_TOKEN": "with no token that carries loss",
    "PADDED_DUPLICATE": "of a sample repeated to fill a batch: they did contribute to the weights and count as uses, "
    "not as further distinct rows",
    "NOT_SEPARABLE": "of samples that could not be separated: other samples are part of what their sketches hold",
    "UNIT_UNKNOWN": "with a loss that is not plain cross-entropy, so their unit is unknown",
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
        found.append(f"Training was resumed: {verification.attempts} attempts are recorded (section 11).")
    if evidence.records.superseded:
        found.append(
            f"{quantity(evidence.records.superseded, 'record')} of steps that a later attempt went back behind: they "
            "are no part of the final weights and are not counted."
        )
    found += [f"A loss was accepted ({loss.ref}): {shorten(loss.text, 300)}" for loss in evidence.losses]
    found += [f"Note of the verifier: {shorten(note, 300)}" for note in verification.notes]
    found += [f"Notice of the recorder ({notice.ref}): {shorten(notice.text, 300)}" for notice in evidence.notices]
    for flag, number in evidence.records.flags.items():
        found.append(f"{quantity(number, 'record')} {_FLAGS.get(flag, f'with the flag {flag}')}.")
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
        found.append(f"{quantity(len(dirty), 'source file')} differed from the named version when read.")
    unknown = sum(source.version_kind == "dvc" and source.dirty is None for source in evidence.sources)
    if unknown:
        found.append(f"Whether {quantity(unknown, 'source file')} differed from what DVC pins could not be told.")
    found += [*_samples(evidence), *_capture(evidence)]
    if evidence.model.get("frozen_sha256") is None:
        found.append("The base model is not identified by a digest of its weights.")
    if not evidence.checkpoints:
        found.append("No saved weights are recorded, so no deployed model can be compared with this run.")
    return found


def _samples(evidence: Evidence) -> list[str]:
    dropped = sum(samples.count for samples in evidence.samples if samples.fate is Fate.DROPPED)
    rows = sum(source.rows for source in evidence.sources)
    return [f"The trainer's dataset did not hold {dropped:,} of the {rows:,} rows (section 11)."] if dropped else []


def _capture(evidence: Evidence) -> list[str]:
    found, tracking = [], evidence.tracking.found
    if tracking.trainable_entries != tracking.tracked_entries:
        found.append(
            f"Only {tracking.tracked_entries or 0:,} of {tracking.trainable_entries or 0:,} trainable values are "
            "tracked; the rest left no sketch (section 11)."
        )
    if not evidence.self_checks:
        found.append("No self-check before the first step is recorded.")
    found += [
        f"Self-check before the first step ({check.ref}): {check.found.sentence(short)}."
        for check in evidence.self_checks
        if not check.found.confirmed
    ]
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
