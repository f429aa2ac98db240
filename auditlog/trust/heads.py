"""Heads that were kept elsewhere, against the log: signed by a key that is known, and part of the log as it stands.

A head that nobody known has signed shows nothing, neither for the log nor against it: anybody can write one. It is a
finding about the head (``E_HEAD``), and is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from auditlog.format.notes import LogCheckpoint, Note
from auditlog.trust.anchors import Trust
from auditlog.trust.checkpoints import LOST_WAL
from auditlog.trust.losses import AcceptedHeads
from auditlog.trust.ranks import run_origin
from auditlog.trust.sessions import Authority
from auditlog.trust.verdict import Finding, counted
from auditlog.trust.walk import Walk

WHERE = "kept head"
SINCE = "since"  # the check that says what has become of the log since one head

_DOUBTFUL = (
    "If you received this head from the operator while the run was going on, this log is not the one that you were "
    "shown. If you cannot say where it comes from, leave it out. The session certificate that was handed over with it "
    "settles which."
)


@dataclass(slots=True)
class KeptHeads:
    """What the kept heads of one log say.

    Attributes:
        findings: What is wrong with them, or with the log against them.
        sizes: Sizes of those that a known key signed and that lie on this log, smallest first.
        believed: How many of them a known key signed.
    """

    findings: list[Finding] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    believed: int = 0


def check_kept_heads(
    trust: Trust,
    walk: Walk,
    origin: str,
    authority: Authority,
    accepted: AcceptedHeads = MappingProxyType({}),
    own: Collection[bytes] = (),
) -> KeptHeads:
    """Compare the heads that the verifier kept with the log.

    A run, its custody log and the logs of its ranks are logs of their own; a head of one is not about the others.

    Args:
        trust: What the verifier brought.
        walk: What the pass over the log found.
        origin: The log's origin.
        authority: The keys that may sign heads of this log.
        accepted: Heads over entries whose loss the log itself declares.
        own: Notes in the log's own ``heads/``. A kept head that lies there too shows a cut, whoever signed it: the
            entry that certified its key may be among those that are gone.
    """
    kept = KeptHeads()
    for head in trust.all_heads:
        statement = head.checkpoint()
        if run_origin(statement.origin) != run_origin(origin):
            message = f"the kept head is of {statement.origin}, this log is {origin}"
            kept.findings.append(Finding("E_BIND", message, WHERE))
        if statement.origin != origin:
            continue
        is_cut = statement.size > walk.size and head.to_bytes() in own
        doubt = "" if is_cut else authority.doubt(head, trust.certificates)
        accepted_at = accepted.get((statement.size, statement.root))
        root = walk.roots.get(statement.size)
        if accepted_at is not None and statement.root != root:  # the log vouches for this head by itself
            kept.findings.append(_accepted(statement, accepted_at))
        elif doubt:
            kept.findings.append(doubtful_head(statement, doubt))
        else:
            kept.believed += 1
            kept.findings += _compare(statement, walk)
            kept.sizes += [statement.size] if statement.root == root else []
    kept.sizes.sort()
    return kept


def absent_log(heads: Sequence[Note], authority: Authority, what: str) -> list[Finding]:
    """Return what kept heads say about a log that is not there at all.

    Args:
        heads: The kept heads of that log.
        authority: The keys that may sign them.
        what: Why there is no such log, in words.
    """
    findings = []
    for head in heads:
        statement, doubt = head.checkpoint(), authority.doubt(head)
        if doubt:
            findings.append(doubtful_head(statement, doubt))
        else:
            entries = counted(statement.size, "entry", "entries")
            message = f"the kept head of {statement.origin} has {entries}; {what}"
            findings.append(Finding("E_ROLLBACK", message, WHERE, 0))
    return findings


def doubtful_head(statement: LogCheckpoint, doubt: str) -> Finding:
    """Return the finding that a kept head cannot be believed."""
    message = (
        f"the kept head of {statement.size:,} entries cannot be trusted and was not compared with the log: {doubt}"
    )
    return Finding("E_HEAD", message, WHERE, hint=_DOUBTFUL)


def describe_since(trust: Trust, walk: Walk, origin: str, kept: KeptHeads) -> tuple[str, str] | None:
    """Say what has become of the log since the head that the verifier named for that.

    Returns:
        What was found if the log has only grown, and otherwise an empty text; and why it could not be said. ``None``
        if no such head of this log was given.
    """
    if trust.since is None or trust.since.checkpoint().origin != origin:
        return None
    size = trust.since.checkpoint().size
    if size not in kept.sizes:
        return "", f"the log does not go on from the kept head of {size:,} entries, or that head cannot be trusted"
    came = counted(walk.size - size, "entry", "entries")
    return f"entries before {size:,} are those of the kept head, none skipped or changed; {came} came after", ""


def _accepted(statement: LogCheckpoint, accepted_at: int) -> Finding:
    message = f"the kept head has {statement.size:,} entries, of which the last were lost"
    message += f"; the loss was accepted at entry {accepted_at}"
    return Finding("E_LOSS_ACCEPTED", message, WHERE, accepted_at)


def _compare(kept: LogCheckpoint, walk: Walk) -> list[Finding]:
    if kept.size > walk.size:
        message = (
            f"the kept head has {counted(kept.size, 'entry', 'entries')}, the log has {walk.size:,}: "
            f"{counted(kept.size - walk.size, 'entry', 'entries')} missing"
        )
        return [Finding("E_ROLLBACK", message, WHERE, walk.size, hint=LOST_WAL)]
    root = walk.roots.get(kept.size)
    if root is None or kept.root in (root, walk.logged_roots.get(kept.size)):
        return []  # no root behind a gap, which is reported already
    if walk.first_bad is not None and walk.first_bad < kept.size:
        message = f"the kept head of {kept.size:,} entries has another root than the entries as they stand now"
        return [Finding("E_ROOT", message, WHERE)]
    message = (
        f"the log agrees with itself, but not with the kept head of {kept.size:,} entries: "
        "two different logs were signed under one name"
    )
    hint = "Both the kept head and this log carry signatures: keep both, they are the evidence."
    return [Finding("E_FORK", message, WHERE, hint=hint)]
