"""The verdict over a log: every check in order, none skipped because an earlier one failed.

Takes rows, salts and sketches as somebody else opened them. Trusts what the verifier brings (``Trust``) and
nothing that lies in the run: not its keys, not its stored hashes, not its heads. No database, no clock, no network.

The numbered steps are those of FORMAT.md, section "Verification".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from auditlog.errors import FormatError
from auditlog.format.notes import Note, VKey
from auditlog.format.records import EventKind
from auditlog.trust.anchors import Trust
from auditlog.trust.attempts import check_attempts
from auditlog.trust.checkpoints import StoredCheckpoint, check_checkpoints, check_head_files, read_checkpoints
from auditlog.trust.erasures import NONE, Erasures
from auditlog.trust.facts import Facts
from auditlog.trust.heads import SINCE, check_kept_heads, describe_since
from auditlog.trust.lineage import SourceTable
from auditlog.trust.logview import LogView, StoredBatch, StoredEvent, StoredRecords
from auditlog.trust.losses import AcceptedHeads, accepted_heads, check_losses
from auditlog.trust.payloads import Payloads, check_gradients
from auditlog.trust.ranks import CUSTODY_SUFFIX
from auditlog.trust.report import Report
from auditlog.trust.seal import Ending, check_custody_ending, check_ending
from auditlog.trust.sessions import Authority, check_sessions, named_keys, revoked_from
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


def verify_log(
    log: LogView,
    trust: Trust,
    *,
    identities: Callable[[int], bytes] | None = None,
    erasures: Erasures = NONE,
    payloads: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Verify a run's log.

    Args:
        log: The opened log.
        trust: What the verifier brings from outside.
        identities: Returns the 72 identity bytes of a sample (see ``commitments.sample_identity``), read from the
            source data. Without it the binding of records to the *content* of their rows is not checked.
        erasures: What need not be there any more, from a custody log that is believed.
        payloads: Open the commitments to sketches and salts; without, the log alone is verified, many times as fast.
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
    opened = Payloads(log, sources, identities, erasures) if payloads else None
    # (1) one pass over all entries
    walk = walk_entries(
        log,
        sizes=_wanted_sizes(stored, trust, manifest.origin),
        covered=max((checkpoint.size for checkpoint in stored), default=0),
        observers=(facts,) if opened is None else (facts, opened),
        sources=sources,
        session_kind=EventKind.SESSION,
        progress=progress,
    )
    report = Report()
    report.add("store", log.findings(), "tables, columns and values are what the format says")
    # (2) who may sign, and for what
    trust = trust.naming(named_keys(manifest, facts.sessions))
    authority, binding = check_sessions(facts.sessions, walk, manifest, log.genesis_document(), trust)
    report.add("session certificates", binding, _sessions_detail(authority))
    _add_entries(report, walk, facts, EventKind.SESSION)
    # (3) what was signed
    content, signatures, long_lived = check_checkpoints(stored, walk, authority, manifest.origin)
    _add_checkpoints(report, stored, walk, [*order, *content], signatures)
    # (4) what was kept elsewhere
    accepted = accepted_heads(facts.losses)
    own_notes = log.heads()
    bound = _add_kept_heads(report, trust, walk, manifest.origin, authority, accepted, own_notes.values())
    # (5) how it ends
    attempts, resumed = check_attempts(facts, altered=walk.altered)
    ending = check_ending(facts, stored, long_lived, walk, attempts, allow_open=trust.allow_open)
    report.add("seal", ending.findings, ending.describe())
    report.add("batches", walk.batches.listed(), f"{len(log.batches()):,} batches cover the log")
    heads = check_head_files(own_notes, stored, walk, accepted, sealed=ending.sealed)
    heads += check_losses(facts.losses)
    report.add("head files", heads, f"{len(stored):,} notes in heads/ are those of the table")
    # (6) what it says
    finished = ending.sealed and not ending.abandoned
    steps = [*resumed, *check_steps(facts, attempts, altered=walk.altered, finished=finished)]
    report.add("steps", [*steps, *check_clock(facts)], f"{len(facts.steps):,} steps without a gap, records counted")
    if opened is None:
        report.skip("sketches", "not asked for", "whether sketches and salts are those that were committed")
    else:
        gradients = [fact for fact in facts.steps if fact.gradient is not None and fact.seq not in walk.altered]
        gone = sum((fact.attempt, fact.step) in erasures.gradients for fact in gradients)
        compared = f"{len(gradients) - gone:,} stored gradients were compared with their commitments"
        compared += f"; {gone:,} were erased" if gone else ""
        report.add("sketches", opened.findings(walk.altered), opened.describe())
        report.add("gradients", check_gradients(gradients, log, erasures), compared)
        _add_data_status(report, has_data=identities is not None)
    _add_snapshots(report, log, facts)
    _add_anchor(report, trust, manifest.origin, bound, walk)
    return _verdict(report, trust, walk, stored, manifest.origin, manifest.run_id, facts, ending)


def verify_custody(log: LogView, trust: Trust, run_final_note: bytes, *, named: Sequence[VKey] = ()) -> Verdict:
    """Verify a run's custody log: what was done with the run after its seal.

    Args:
        log: The opened custody log.
        trust: What the verifier brings; every pinned key may sign here, an auditor's own included.
        run_final_note: Bytes of the note that closed the run.
        named: Keys that the run names. Where none is pinned, they may sign kept heads, which then show no more than
            that run and head agree.
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
    report = Report()
    report.add("store", log.findings(), "tables, columns and values are what the format says")
    _add_entries(report, walk, facts, EventKind.CUSTODY_OPENED)
    long_lived = trust.vkeys if trust.is_pinned else tuple(named)
    authority = Authority(long_lived, trust.is_pinned, revoked_from=revoked_from(trust, origin))
    content, signatures, _ = check_checkpoints(stored, walk, authority, origin)
    if not trust.vkeys:  # nothing in the log says which keys may sign it
        signatures = []
        report.not_checked.append("who signed the custody log: no pinned key whose name is known was given")
    elif trust.fingerprints:
        unnamed = ", ".join(text[:16] for text in trust.fingerprints)
        report.not_checked.append(
            f"signatures of keys that were pinned by fingerprint and that no run names: {unnamed}"
        )
    _add_checkpoints(report, stored, walk, [*order, *content], signatures)
    own_notes = log.heads()
    bound = _add_kept_heads(report, trust, walk, origin, authority, own=own_notes.values())
    report.add("end", check_custody_ending(stored, walk), "every entry lies under a signed checkpoint")
    report.add("batches", walk.batches.listed(), f"{len(log.batches()):,} batches cover the log")
    heads = check_head_files(own_notes, stored, walk, sealed=True)
    report.add("head files", heads, f"{len(stored):,} notes in heads/ are those of the table")
    report.findings += check_clock(facts)
    _add_anchor(report, trust, origin, bound, walk)
    report.not_checked.append("whether later acts were cut off the end: only a kept head of the custody log shows that")
    return _verdict(report, trust, walk, stored, origin)


def missing_log(origin: str, finding: Finding) -> Verdict:
    """Return the verdict over a log that should be there and is not."""
    report = Report()
    report.add("log", [finding], "")
    return _verdict(report, Trust(), Walk(), (), origin)


def _wanted_sizes(stored: Sequence[StoredCheckpoint], trust: Trust, origin: str) -> set[int]:
    kept = {head.checkpoint().size for head in trust.heads_of(origin)}
    return {checkpoint.size for checkpoint in stored} | kept


def _sessions_detail(authority: Authority) -> str:
    count = len(authority.sessions)
    whose = "the pinned key" if authority.is_pinned else "the key that the manifest names"
    return f"{counted(count, 'attempt')}, each under a certificate by {whose}"


def _add_entries(report: Report, walk: Walk, facts: Facts, opening: EventKind) -> None:
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
    report: Report,
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
    report: Report,
    trust: Trust,
    walk: Walk,
    origin: str,
    authority: Authority,
    accepted: AcceptedHeads = MappingProxyType({}),
    own: Collection[bytes] = (),
) -> int:
    """Add what the kept heads say; returns the size of the largest that lies on this log, 0 if none does."""
    given = len(trust.heads_of(origin))
    others = len(trust.all_heads) - given
    if not trust.all_heads:
        report.skip("kept heads", "none was given")
        return 0
    kept = check_kept_heads(trust, walk, origin, authority, accepted, own)
    detail = f"{len(kept.sizes):,} of {given:,} of this log lie on it" if given else "none is of this log"
    detail += f", the largest with {kept.sizes[-1]:,} entries" if kept.sizes else ""
    detail += f"; {others:,} of other logs, compared there" if others and given else ""
    report.add("kept heads", kept.findings, detail, failed="" if kept.sizes or not given else _as_logged(walk))
    since = describe_since(trust, walk, origin, kept)
    if since is not None:
        report.add(SINCE, (), since[0], failed=since[1])
    return max(kept.sizes, default=0)


def _add_data_status(report: Report, *, has_data: bool) -> None:
    if has_data:
        report.checks.append(Check("source data", *_data_status(report)))
    else:
        why = "the source data was not given"
        report.skip(
            "source data", why, "whether the rows of the source files are those that were committed: give --data"
        )


def _data_status(report: Report) -> tuple[Literal["passed", "failed"], str]:
    if any(finding.code == "E_OPENING" for finding in report.findings):
        return "failed", "some rows are not those that were committed"
    return "passed", "every record's row is the committed one"


def _add_snapshots(report: Report, log: LogView, facts: Facts) -> None:
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


def _add_anchor(report: Report, trust: Trust, origin: str, bound: int, walk: Walk) -> None:
    """Say what the verifier's own knowledge leaves open; without any, this is no verification.

    Args:
        report: Takes it.
        trust: What the verifier brought.
        origin: The log's origin.
        bound: Size of the largest kept head that lies on this log.
        walk: What the pass over the log found.
    """
    known = replace(trust, heads=trust.heads_of(origin), since=None)
    if known.is_empty:
        message = "the log agrees with itself at best: nothing from outside it was given to compare it with"
        hint = "Give the operator's public key (--trust) and a head that was handed over (--head)."
        level: Literal["error", "note"] = "note" if trust.allow_unanchored else "error"
        report.findings.append(Finding("W_UNANCHORED", message, level=level, hint=hint))
    if known.leaves_open():
        report.not_checked.append(known.leaves_open())
    elif 0 < bound < walk.size:
        report.not_checked.append(
            f"whether entries from {bound:,} on are as they were first written: they came after the largest kept head, "
            "so whoever holds the key could have rewritten or shortened them"
        )
    if trust.tsa_roots:
        report.not_checked.append(
            f"time stamps: {len(trust.tsa_roots)} TSA roots were given and are unused, no time stamp is checked yet"
        )


def _verdict(
    report: Report,
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
        trust=trust.describe(origin),
        heads=tuple(sorted(checkpoint.size for checkpoint in stored)),
    )


def _unreadable(log: LogView, trust: Trust, why: str) -> Verdict:
    report = Report()
    report.add("format", [*log.findings(), Finding("E_FORMAT", f"{log.name}: {why}")], "")
    return _verdict(report, trust, Walk(), (), "")
