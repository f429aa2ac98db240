"""Section 13: what verification checked, against what, and what it leaves open."""

from __future__ import annotations

from reports.document import MEASURED, RECORDED, Block, Bullets, Column, Fact, Facts, Heading, Paragraph, Section, Table
from reports.evidence import Verification
from reports.formats import moment
from reports.sections.subject import Subject
from reports.text import shorten

_STATUS = {"passed": "holds", "failed": "does not hold", "not run": "not checked"}

_THREATS = (
    "Somebody with write access to the files, without the key: a change to signed entries is detected.",
    "The holder of the long-lived key, the operator included: a change is detected only against a head that was kept "
    "elsewhere, for the entries up to that head.",
    "Nobody is detected who wrote something false in the first place, ran a second run beside this one, or left "
    "events unrecorded. Completeness is not a property that cryptography can show.",
)


def integrity(subject: Subject) -> Section:
    """Section 13."""
    verification = subject.evidence.verification
    blocks: list[Block] = [
        Facts(
            (
                *_result(verification),
                Fact("Key named by the run itself", subject.evidence.vkey, RECORDED, "manifest; no trust", mono=True),
            )
        ),
        Table(
            (Column("Check", 24, "strong"), Column("Result", 14), Column("What was looked at", 62)),
            tuple((check.name, _STATUS[check.status], shorten(check.detail, 220)) for check in verification.checks),
            tag=MEASURED,
        ),
        Heading("Not checked"),
        Bullets(tuple(shorten(point, 300) for point in verification.not_checked)),
        Heading("Anchors and their legal class"),
        Paragraph(
            "No time stamp and no witness signature of another party is recorded. A signed log kept by its operator is "
            "at most a non-qualified electronic ledger (Article 3(52) of Regulation (EU) No 910/2014): it is not "
            "denied effect for that reason alone, and no presumption attaches to it. Times are the operator's clock."
        ),
        Heading("Who could change what"),
        Bullets(_THREATS),
        Heading("Chain of custody"),
        _timeline(subject),
    ]
    return Section("13", "Integrity", tuple(blocks))


def _result(verification: Verification) -> tuple[Fact, ...]:
    place = "verification"
    heads = ", ".join(f"{size:,}" for size in verification.kept_heads[-8:]) or "none: no head left this machine"
    closed = "abandoned" if verification.abandoned else "sealed" if verification.sealed else "open"
    return (
        Fact("Result", "verified: no difference was found by the checks below", MEASURED, place),
        Fact(
            "Range",
            f"entries 0 to {verification.entries - 1:,} of {shorten(verification.origin, 80)}, {closed}",
            MEASURED,
            place,
        ),
        Fact("Root over these entries", verification.root, MEASURED, place, mono=True),
        Fact("Trust brought from outside", verification.trust, MEASURED, place),
        *(
            Fact("Pinned public key", key, RECORDED, "given to the report", mono=True)
            for key in verification.pinned_keys
        ),
        Fact("Kept heads, by number of entries", heads, RECORDED, "given to the report"),
        Fact("Attempts of training", str(verification.attempts), MEASURED, place),
    )


def _timeline(subject: Subject) -> Table:
    evidence = subject.evidence
    rows = [(evidence.created_us, "manifest written", "manifest")]
    rows += [
        (s.ts_us, f"attempt {s.attempt} began with a session key of its own", str(s.ref)) for s in evidence.sessions
    ]
    rows += [(evidence.records.last_us, "last training record", "run log")]
    rows += [(act.ts_us, act.kind.lower().replace("_", " "), str(act.ref)) for act in evidence.custody[-12:]]
    return Table(
        (Column("Time", 26, "mono"), Column("Act", 44), Column("Source", 30)),
        tuple((moment(time_us), act, place) for time_us, act, place in rows),
        caption="The custody log is open-ended: a cut tail shows only against a kept head. Its head at the time of "
        "this report is attached.",
        tag=RECORDED,
    )
