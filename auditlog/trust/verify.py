"""The verdict over a log: every check in order, none skipped because an earlier one failed.

Takes rows, salts and sketches as somebody else opened them. Trusts what the verifier brings (``Trust``) and
nothing that lies in the run: not its keys, not its stored hashes, not its heads. No database, no clock, no network.

The numbered steps are those of FORMAT.md, section "Verification".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from auditlog.errors import FormatError
from auditlog.format.notes import Note
from auditlog.format.records import EventKind
from auditlog.trust.anchors import Trust
from auditlog.trust.attempts import check_attempts
from auditlog.trust.checkpoints import (
    StoredCheckpoint,
    check_checkpoints,
    check_head_files,
    check_kept_heads,
    matching_heads,
    read_checkpoints,
)
from auditlog.trust.facts import Facts
from auditlog.trust.lineage import SourceTable
from auditlog.trust.logview import LogView, StoredBatch, StoredEvent, StoredRecords
from auditlog.trust.losses import AcceptedHeads, accepted_heads, check_losses
from auditlog.trust.payloads import Payloads, check_gradients
from auditlog.trust.ranks import CUSTODY_SUFFIX
from auditlog.trust.seal import Ending, check_custody_ending, check_ending
from auditlog.trust.sessions import Authority, check_sessions
from auditlog.trust.steps import check_clock, check_steps
from auditlog.trust.verdict import Check, Finding, Verdict, counted
from auditlog.trust.walk import Walk, walk_entries

__all__ = [
    "Check",
    "Finding",
    "LogView",
    "StoredBatch",
    "StoredEvent",
    "StoredRecords",
    "Verdict",
    "verify_custody",
    "verify_log",
]

_ALWAYS_OPEN = (
    "whether the trainer wrote the truth: a log shows that a record was not changed later, not that it was right",
    "whether each step's samples add up to its gradient: gradtrail show RUN --recompute repeats those sums",
    "whether the sketches are those of the gradients: only recomputing steps from data and snapshot shows that",
)


@dataclass(slots=True)
class _Report:
    """Checks and findings in the order in which they are printed."""

    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def add(self, name: str, findings: Sequence[Finding], passed: str, *, failed: str = "") -> None:
        """Take the outcome of one check.

        Args:
            name: What was checked.
            findings: What was found.
            passed: What was looked at, if nothing is wrong.
            failed: Why the check failed although it has no finding of its own.
        """
        errors = [finding for finding in findings if finding.level == "error"]
        if errors:
            failed = f"{counted(len(errors), 'finding')}, first: {errors[0].message}"
        self.checks.append(Check(name, "failed" if failed else "passed", failed or passed))
        self.findings += findings

    def skip(self, name: str, why: str, open_question: str = "") -> None:
        """Say that a check was not made."""
        self.checks.append(Check(name, "not run", why))
        if open_question:
            self.not_checked.append(open_question)


def verify_log(
    log: LogView,
    trust: Trust,
    *,
    identities: Callable[[int], bytes] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Verify a run's log.

    Args:
        log: The opened log.
        trust: What the verifier brings from outside.
        identities: Returns the 72 identity bytes of a sample (see ``commitments.sample_identity``), read from the
            source data. Without it the binding of records to the *content* of their rows is not checked.
        progress: Called now and then with the number of entries read.

    Returns:
        The verdict, with every finding. Never raises for what a log holds.
    """
    try:
        manifest = log.manifest()
    except FormatError as error:
        return _unreadable(log, trust, str(error))
    if manifest is None:
        return _unreadable(log, trust, "no run manifest: is this a custody log?")
    sources = SourceTable(manifest)
    stored, order = read_checkpoints(log.checkpoints())
    facts = Facts(sources)
    payloads = Payloads(log, sources, identities)
    # (1) one pass over all entries
    walk = walk_entries(
        log,
        sizes=_wanted_sizes(stored, trust, manifest.origin),
        covered=max((checkpoint.size for checkpoint in stored), default=0),
        observers=(facts, payloads),
        sources=sources,
        session_kind=EventKind.SESSION,
        progress=progress,
    )
    report = _Report()
    report.add("store", log.findings(), "tables, columns and values are what the format says")
    # (2) who may sign, and for what
    authority, binding = check_sessions(facts.sessions, walk, manifest, log.genesis_document(), trust)
    report.add("session certificates", binding, _sessions_detail(authority))
    _add_entries(report, walk, facts, EventKind.SESSION)
    # (3) what was signed
    content, signatures, long_lived = check_checkpoints(stored, walk, authority, manifest.origin)
    _add_checkpoints(report, stored, walk, [*order, *content], signatures)
    # (4) what was kept elsewhere
    accepted = accepted_heads(facts.losses)
    _add_kept_heads(report, trust, walk, manifest.origin, accepted)
    # (5) how it ends
    attempts, resumed = check_attempts(facts, altered=walk.altered)
    ending = check_ending(facts, stored, long_lived, walk, attempts)
    report.add("seal", ending.findings, "abandoned and closed later" if ending.abandoned else "finished and sealed")
    report.add("batches", walk.batches.listed(), f"{len(log.batches()):,} batches cover the log")
    heads = check_head_files(log.heads(), stored, walk, accepted, sealed=ending.sealed)
    heads += check_losses(facts.losses)
    report.add("head files", heads, f"{len(stored):,} notes in heads/ are those of the table")
    # (6) what it says
    finished = ending.sealed and not ending.abandoned
    steps = [*resumed, *check_steps(facts, attempts, altered=walk.altered, finished=finished)]
    report.add("steps", [*steps, *check_clock(facts)], f"{len(facts.steps):,} steps without a gap, records counted")
    _add_payloads(report, log, facts, payloads, walk.altered, has_data=identities is not None)
    _add_snapshots(report, log, facts)
    _add_anchor(report, trust, manifest.origin)
    return _verdict(report, trust, walk, stored, manifest.origin, manifest.run_id, facts, ending)


def verify_custody(log: LogView, trust: Trust, run_final_note: bytes) -> Verdict:
    """Verify a run's custody log: what was done with the run after its seal.

    Args:
        log: The opened custody log.
        trust: What the verifier brings; every pinned key may sign here, an auditor's own included.
        run_final_note: Bytes of the note that closed the run.
    """
    try:
        origin = Note.parse(run_final_note).checkpoint().origin + CUSTODY_SUFFIX
    except FormatError as error:
        return _unreadable(log, trust, f"the run's final note: {error}")
    stored, order = read_checkpoints(log.checkpoints())
    facts = Facts(None, opening=run_final_note)
    walk = walk_entries(
        log,
        sizes=_wanted_sizes(stored, trust, origin),
        covered=max((checkpoint.size for checkpoint in stored), default=0),
        observers=(facts,),
        sources=None,
        session_kind=None,
    )
    report = _Report()
    report.add("store", log.findings(), "tables, columns and values are what the format says")
    _add_entries(report, walk, facts, EventKind.CUSTODY_OPENED)
    authority = Authority(trust.vkeys, is_pinned=True)
    content, signatures, _ = check_checkpoints(stored, walk, authority, origin)
    if not trust.vkeys:  # nothing in the log says which keys may sign it
        signatures = []
        report.not_checked.append("who signed the custody log: no pinned key was given")
    _add_checkpoints(report, stored, walk, [*order, *content], signatures)
    _add_kept_heads(report, trust, walk, origin)
    report.add("end", check_custody_ending(stored, walk), "every entry lies under a signed checkpoint")
    report.add("batches", walk.batches.listed(), f"{len(log.batches()):,} batches cover the log")
    heads = check_head_files(log.heads(), stored, walk, sealed=True)
    report.add("head files", heads, f"{len(stored):,} notes in heads/ are those of the table")
    report.findings += check_clock(facts)
    _add_anchor(report, trust, origin)
    report.not_checked.append("whether later acts were cut off the end: only a kept head of the custody log shows that")
    return _verdict(report, trust, walk, stored, origin)


def missing_log(origin: str, finding: Finding) -> Verdict:
    """Return the verdict over a log that should be there and is not."""
    report = _Report()
    report.add("log", [finding], "")
    return _verdict(report, Trust(), Walk(), (), origin)


def _wanted_sizes(stored: Sequence[StoredCheckpoint], trust: Trust, origin: str) -> set[int]:
    kept = [head.checkpoint() for head in trust.heads]
    return {checkpoint.size for checkpoint in stored} | {k.size for k in kept if k.origin == origin}


def _sessions_detail(authority: Authority) -> str:
    count = len(authority.sessions)
    whose = "the pinned key" if authority.is_pinned else "the key that the manifest names"
    return f"{counted(count, 'attempt')}, each under a certificate by {whose}"


def _add_entries(report: _Report, walk: Walk, facts: Facts, opening: EventKind) -> None:
    report.add("sequence", walk.order.listed(), f"{walk.size:,} entries, none missing or double")
    form = [finding for finding in facts.findings.listed() if finding.seq not in walk.altered]
    starts_in_a_hole = any(finding.seq == 0 for finding in walk.order.listed())
    if walk.size and facts.first_kind != opening and not starts_in_a_hole:
        form.append(Finding("E_EVENT", f"entry 0 is not the {opening.name} event that opens a log", "table events", 0))
    report.add("hashes", [*walk.hashes.listed(), *form], f"{walk.size:,} rows give the hashes stored beside them")
    report.add("chain", walk.chain.listed(), "every batch leads to its stored chain value", failed=_as_logged(walk))


def _as_logged(walk: Walk) -> str:
    return "it holds for the entries as they were logged, not for the rows as they stand" if walk.rows_differ else ""


def _add_checkpoints(
    report: _Report,
    stored: Sequence[StoredCheckpoint],
    walk: Walk,
    content: list[Finding],
    signatures: list[Finding],
) -> None:
    if stored or content:
        failed = _as_logged(walk) or ("it ends where entries are missing" if walk.root is None else "")
        report.add("tree", content, f"{len(stored):,} signed roots are those of the entries", failed=failed)
        report.add("signatures", signatures, f"{len(stored):,} log checkpoints, each by a key that may sign it")
    else:
        report.skip("tree", "there is no signed log checkpoint")
        report.skip("signatures", "there is no signed log checkpoint")


def _add_kept_heads(
    report: _Report, trust: Trust, walk: Walk, origin: str, accepted: AcceptedHeads = MappingProxyType({})
) -> None:
    if not trust.heads:
        report.skip("kept heads", "none was given")
        return
    sizes = matching_heads(trust.heads, walk, origin)
    if sizes:
        detail = f"{len(sizes):,} of {len(trust.heads):,} lie on this log, the largest with {sizes[-1]:,} entries"
    else:
        detail = "none is of this log"
    findings = check_kept_heads(trust.heads, walk, origin, accepted)
    report.add("kept heads", findings, detail, failed="" if sizes else _as_logged(walk))


def _add_payloads(
    report: _Report, log: LogView, facts: Facts, payloads: Payloads, altered: Collection[int], *, has_data: bool
) -> None:
    opened = f"{payloads.opened:,} stored sketches were compared with their commitments"
    report.add("sketches", payloads.findings(altered), opened)
    gradients = [fact for fact in facts.steps if fact.gradient is not None and fact.seq not in altered]
    compared = f"{len(gradients):,} stored gradients were compared with their commitments"
    report.add("gradients", check_gradients(gradients, log), compared)
    if has_data:
        report.checks.append(Check("source data", *_data_status(report)))
    else:
        why = "the source data was not given"
        report.skip(
            "source data", why, "whether the rows of the source files are those that were committed: give --data"
        )


def _data_status(report: _Report) -> tuple[Literal["passed", "failed"], str]:
    if any(finding.code == "E_OPENING" for finding in report.findings):
        return "failed", "some rows are not those that were committed"
    return "passed", "every record's row is the committed one"


def _add_snapshots(report: _Report, log: LogView, facts: Facts) -> None:
    """Compare the files that the log names with those on disk. A missing one was pruned, which changes nothing."""
    present = log.file_digests()
    findings = []
    missing = []
    for seq, path, expected in facts.snapshots:
        found = present.get(path)
        if found is None:
            missing.append(path)
        elif found != expected:
            message = f"{path} is not the file that was logged: SHA-256 {found[:16]}…, logged {expected[:16]}…"
            findings.append(Finding("E_BIND", message, path, seq))
    compared = len(facts.snapshots) - len(missing)
    if compared or not missing:
        report.add("snapshots", findings, f"{compared} of {len(facts.snapshots)} logged files compared by SHA-256")
    else:
        report.skip("snapshots", f"none of the {len(missing)} logged files is here")
    if missing:
        report.not_checked.append(f"{len(missing)} snapshot files that are not here, the first is {missing[0]}")


def _add_anchor(report: _Report, trust: Trust, origin: str) -> None:
    """Say what the verifier's own knowledge leaves open; without any, this is no verification."""
    relevant = [head for head in trust.heads if head.checkpoint().origin == origin]
    known = Trust(trust.vkeys, tuple(relevant), trust.origin)
    if known.is_empty:
        message = "the log agrees with itself at best: nothing from outside it was given to compare it with"
        hint = "Give the operator's public key (--trust) and a head that was handed over (--head)."
        report.findings.append(Finding("W_UNANCHORED", message, hint=hint))
    if known.leaves_open():
        report.not_checked.append(known.leaves_open())


def _verdict(
    report: _Report,
    trust: Trust,
    walk: Walk,
    stored: Sequence[StoredCheckpoint],
    origin: str,
    run_id: str = "",
    facts: Facts | None = None,
    ending: Ending | None = None,
) -> Verdict:
    """Put the verdict together; a custody log has neither records nor an end."""
    return Verdict(
        origin=origin,
        run_id=run_id,
        entries=walk.size,
        records=len(facts.records()) if facts else 0,
        steps=len({fact.step for fact in facts.steps}) if facts else 0,
        samples=facts.sample_count() if facts else 0,
        attempts=len(facts.sessions) if facts else 0,
        sealed=ending is not None and ending.sealed,
        abandoned=ending is not None and ending.abandoned,
        root=walk.root.hex() if walk.root else "",
        checks=tuple(report.checks),
        findings=tuple(report.findings),
        not_checked=(*report.not_checked, *_ALWAYS_OPEN),
        trust=trust.describe(),
        heads=tuple(sorted(checkpoint.size for checkpoint in stored)),
    )


def _unreadable(log: LogView, trust: Trust, why: str) -> Verdict:
    report = _Report()
    report.add("format", [*log.findings(), Finding("E_FORMAT", f"{log.name}: {why}")], "")
    return _verdict(report, trust, Walk(), (), "")
