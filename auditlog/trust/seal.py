"""How the log ends: sealed, abandoned, or open. The end of a log is a signed statement, or it is no end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from auditlog.trust.attempts import Attempt, is_live
from auditlog.trust.checkpoints import StoredCheckpoint
from auditlog.trust.facts import Facts, SealFact
from auditlog.trust.verdict import Finding, counted
from auditlog.trust.walk import Walk

_OPEN = "The run is still going on, was interrupted, or was cut short. gradtrail seal RUN --abandon closes it."


@dataclass(frozen=True, slots=True)
class Ending:
    """Whether the log is closed, and what is wrong with how it ends."""

    sealed: bool
    abandoned: bool
    findings: list[Finding] = field(default_factory=list)

    def describe(self) -> str:
        """Say in words how the log ends, if nothing is wrong with it."""
        if not self.sealed:
            return "open, which was allowed"
        return "abandoned and closed later" if self.abandoned else "finished and sealed"


def check_ending(
    facts: Facts,
    stored: Sequence[StoredCheckpoint],
    long_lived_sizes: Collection[int],
    walk: Walk,
    attempts: Sequence[Attempt],
    *,
    allow_open: bool = False,
) -> Ending:
    """Look for the seal: a SEAL event as the last entry, under a log checkpoint that the long-lived key signed.

    Args:
        facts: What the entries say.
        stored: The log's checkpoints.
        long_lived_sizes: Sizes that the long-lived key signed.
        walk: What the pass over the log found.
        attempts: Those that say from where they went on.
        allow_open: Whether the run may still be going on. An empty log, one that nobody signed, or a seal without
            its signature is not excused by that.
    """
    sizes = {checkpoint.size for checkpoint in stored}
    covered = max((size for size in sizes if size <= walk.size), default=0)
    seal = next((seal for seal in facts.seals if seal.seq + 1 in sizes), None)
    if seal is None:
        finding = _unsealed(facts, walk, covered)
        if allow_open and covered and not facts.seals:
            finding = replace(finding, code="N_OPEN", level="note")
        return Ending(False, False, [finding, *_tail_note(walk, covered)])
    findings = []
    if walk.size > seal.seq + 1:
        findings.append(_orphans(seal.seq + 1, walk.size, f"the seal (entry {seal.seq})"))
    is_signed = seal.seq + 1 in long_lived_sizes
    if not is_signed:
        message = f"the seal (log checkpoint of size {seal.seq + 1:,}) does not carry a long-lived key's signature"
        message += " that could be checked"
        findings.append(Finding("E_UNSEALED", message, "table checkpoints"))
    findings += _check_counts(seal, facts, attempts)
    return Ending(is_signed, seal.abandoned, findings)


def check_custody_ending(stored: Sequence[StoredCheckpoint], walk: Walk) -> list[Finding]:
    """A custody log is never closed, but each of its entries must lie under a signed checkpoint."""
    covered = max((checkpoint.size for checkpoint in stored), default=0)
    if walk.size <= covered:
        return []
    return [_orphans(covered, walk.size, "the last signed checkpoint")]


def _orphans(first: int, end: int, what: str) -> Finding:
    entries = f"entry {first} stands" if end - first == 1 else f"entries {first} to {end - 1} stand"
    message = f"{entries} after {what}, without any signature"
    return Finding("E_ORPHAN", message, "tables records and events", first)


def _unsealed(facts: Facts, walk: Walk, covered: int) -> Finding:
    if walk.size == 0:
        message = "the log is empty: 0 entries"
    elif facts.seals:
        seal = facts.seals[-1]
        message = f"the seal event is there (entry {seal.seq}), but no signed log checkpoint of size {seal.seq + 1:,}"
    else:
        message = f"the run has no seal; its signed log checkpoints cover {covered:,} of {walk.size:,} entries"
    return Finding("E_UNSEALED", message, "table checkpoints", hint=_OPEN)


def _tail_note(walk: Walk, covered: int) -> list[Finding]:
    if not 0 < covered < walk.size:
        return []
    unsigned = counted(walk.size - covered, "entry", "entries")
    message = f"{unsigned} from {covered} on came after the last signed log checkpoint: no signature covers them yet"
    return [Finding("N_TAIL", message, "tables records and events", covered, level="note")]


def _check_counts(seal: SealFact, facts: Facts, attempts: Sequence[Attempt]) -> list[Finding]:
    """Compare what the seal says it closes with what is there."""
    records, steps = facts.records(), facts.steps
    present = {
        "records": {len(records)},
        # After a resume a repeated step counts once or twice, depending on who counts.
        "steps": {len(steps), len({fact.step for fact in steps})},
        "attempts": {len(facts.sessions)},
    }
    if len(attempts) == len(facts.sessions):  # otherwise nobody can tell, which is reported
        live_steps = is_live(attempts, [step.attempt for step in steps], [step.step for step in steps])
        present["live_steps"] = {int(live_steps.sum())}
        present["live_records"] = {int(is_live(attempts, records["attempt"], records["step"]).sum())}
    findings = []
    for name, counts in present.items():
        said = seal.body.get(name)
        if said is not None and (type(said) is not int or said not in counts):
            message = f"the seal (entry {seal.seq}) closes {said} {name.replace('_', ' ')}; the log holds {max(counts)}"
            findings.append(Finding("E_GAP_STEP", message, "table events", seal.seq))
    return findings
