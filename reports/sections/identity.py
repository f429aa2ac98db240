"""Cover and sections 1 to 4: which document, which system, which law, and what it comes to."""

from __future__ import annotations

from datetime import UTC, date, datetime

from auditlog.ledger.sample_use import Fate
from reports.document import (
    ESTIMATED,
    MEASURED,
    RECORDED,
    Bullets,
    Column,
    Cover,
    Fact,
    Facts,
    Heading,
    Notice,
    Paragraph,
    Section,
    Table,
)
from reports.evidence import Evidence
from reports.formats import moment, quantity, short
from reports.sections.exceptions import exceptions
from reports.sections.subject import ROLE_NOT_DECLARED, Subject
from reports.text import shorten

TITLE = "Article 26 deployer evidence file: supporting records"
STATUS = "DRAFT"
_MOST_PURPOSE = 8
_APPLIES_FROM = date(2027, 12, 2)

_STANDING = (
    "This document records facts held in the evidence ledger. It is not a conformity assessment, EU declaration of "
    "conformity, legal opinion or statutory audit.",
    "Integrity verification shows that recorded entries were not changed after recording or anchoring. It does not "
    "show that they were true or that everything was recorded.",
    "Influence scores are estimates with the validity reported in section 12.",
)


def system_line(subject: Subject) -> str:
    """Return system and version for headers."""
    system = subject.declarations.system
    name = shorten(system.name or "System not declared", 70)
    return f"{name}, version {shorten(system.version, 20)}" if system.version else name


def _role_line(subject: Subject) -> str:
    if not subject.mapped_roles:
        return ROLE_NOT_DECLARED
    declarations = subject.declarations
    roles = " and ".join(declarations.roles)
    basis = shorten(declarations.classification.basis or "", 160)
    return f"Declared role: {roles}. Classification basis: {basis}. Declared on {declarations.declared_on}."


def law_as_at(subject: Subject) -> str:
    """Return the standing sentence on the wording of the law."""
    legal = subject.register.basis
    return f"Law as at {legal.as_at.day} {legal.as_at:%B %Y}: {legal.law}."


def cover(subject: Subject) -> Cover:
    """Return the first page."""
    verification = subject.evidence.verification
    found, lacking = exceptions(subject.evidence), _open_inputs(subject)
    return Cover(
        title="Article 26 deployer evidence file",
        subtitle="Supporting records",
        system=system_line(subject),
        role=_role_line(subject),
        facts=(
            Fact("Report", subject.report_id, MEASURED, "section 1", mono=True),
            Fact("Run", shorten(verification.run_id, 60), RECORDED, "manifest", mono=True),
            Fact(
                "Log",
                f"{shorten(verification.origin, 80)}, {quantity(verification.entries, 'entry')}",
                MEASURED,
                "verification",
            ),
            Fact("Root", verification.root, MEASURED, "verification", mono=True),
            Fact("Result", "the log verified against the trust named in section 13", MEASURED, "verification"),
        ),
        notices=(
            Notice(
                "exception",
                f"{quantity(len(found), 'exception')}, listed in section 4",
                items=tuple(shorten(f, 160) for f in found[:3]),
            ),
            Notice("open", f"{quantity(sum(map(len, lacking.values())), 'open human input')}, listed in section 4"),
        ),
        standing=(*_STANDING[:2], law_as_at(subject), _STANDING[2]),
    )


def _open_inputs(subject: Subject) -> dict[str, tuple[str, ...]]:
    """Return open inputs by where they belong, each once."""
    declarations = subject.declarations
    head = {
        "person and date of the declarations": declarations.declared_by and declarations.declared_on,
        "role of the operator": declarations.roles,
        "classification basis": declarations.classification.basis,
        "name of the system": declarations.system.name,
        "version of the system": declarations.system.version,
        "intended purpose": declarations.system.intended_purpose,
        "provider": declarations.provider,
        "deployer": declarations.deployer,
    }
    deployer = subject.open_inputs("deployer")
    groups = {
        "Identification": tuple(label for label, value in head.items() if not value),
        "As deployer": deployer,
        "As provider": tuple(label for label in subject.open_inputs("provider") if label not in deployer),
    }
    return {where: labels for where, labels in groups.items() if labels}


def control(subject: Subject) -> Section:
    """Section 1."""
    return Section(
        "1",
        "Document control and status",
        (
            Facts(
                (
                    Fact("Title", TITLE, RECORDED, "this document"),
                    Fact("Report id", subject.report_id, MEASURED, "from the digest below", mono=True),
                    Fact(
                        "Status",
                        f"{STATUS}: not reviewed and not signed by a person (section 15)",
                        RECORDED,
                        "this document",
                    ),
                    Fact("Made on", moment(subject.created_us), RECORDED, "clock of this machine"),
                    Fact("Made from", "evidence.json, attached to this file", RECORDED, "this document"),
                    Fact("SHA-256 of evidence.json", subject.evidence_sha256, MEASURED, "this document", mono=True),
                    subject.declared("Declarations dated", subject.declarations.declared_on),
                )
            ),
            Paragraph(
                "Tags say where a fact comes from: [measured] was computed by this software over the run, [recorded] "
                "was written by the training program or its operator, [declared by] was stated by a person, "
                "[estimated] has an error of its own. Human statements are never mixed with machine facts."
            ),
        ),
    )


def identification(subject: Subject) -> Section:
    """Section 2."""
    declarations, evidence = subject.declarations, subject.evidence
    roles = " and ".join(declarations.roles) if declarations.roles else None
    weights = [file for checkpoint in evidence.checkpoints[-1:] for file in checkpoint.files]
    trained = next((f for f in weights if f.name.startswith("trainable")), weights[0] if weights else None)
    facts = [
        subject.declared("System", declarations.system.name),
        subject.declared("Version", declarations.system.version),
        subject.declared("Intended purpose", declarations.system.intended_purpose),
        subject.declared("Deployer", declarations.deployer),
        subject.declared("Provider", declarations.provider),
        subject.declared("Role of the operator", roles),
        subject.declared("Classification basis", declarations.classification.basis),
        subject.declared("Classified by", declarations.classification.decided_by),
        subject.declared("Classified on", declarations.classification.decided_on),
        subject.statement("eu_database_entry"),
    ]
    if trained is not None:
        where = str(evidence.checkpoints[-1].ref)
        facts.append(Fact("SHA-256 of trained weights", trained.sha256, MEASURED, where, mono=True))
    else:
        facts.append(Fact("Trained weights", "not recorded", MEASURED, "run log"))
    facts += [
        Fact(f"Told to the run: {shorten(name, 40)}", shorten(value, 200), RECORDED, "manifest")
        for name, value in evidence.purpose.values[:_MOST_PURPOSE]
    ]
    blocks: list[Facts | Notice | Paragraph] = [Facts(tuple(facts))]
    if not subject.mapped_roles:
        blocks.insert(0, Notice("open", ROLE_NOT_DECLARED, "Role, classification basis, person and date are needed."))
    elif set(declarations.roles) == {"provider", "deployer"}:
        blocks.append(
            Paragraph(
                "Whoever develops a high-risk system and puts it into service under its own name, even only for its "
                "own use, is its provider (Article 3(3) and 3(11)) and, using it, its deployer as well. The duties of "
                "both roles are therefore mapped."
            )
        )
    return Section("2", "Identification", tuple(blocks))


def scope(subject: Subject) -> Section:
    """Section 3."""
    evidence = subject.evidence
    today = datetime.fromtimestamp(subject.created_us // 1_000_000, UTC).date()
    yet = " On the date of this document they do not apply yet." if today < _APPLIES_FROM else ""
    return Section(
        "3",
        "Scope, period and law",
        (
            Facts(
                (
                    Fact("Covers", f"training run {shorten(evidence.verification.run_id, 60)}", RECORDED, "manifest"),
                    Fact("Training began", moment(evidence.records.first_us), RECORDED, "first record"),
                    Fact("Training ended", moment(evidence.records.last_us), RECORDED, "last record"),
                    subject.statement("put_into_service"),
                )
            ),
            Paragraph(
                f"{law_as_at(subject)} Chapter III Sections 1 to 3, and with them Article 26, apply from 2 December "
                "2027 to the systems of Annex III and from 2 August 2028 to those of Annex I Section A. Systems placed "
                "on the market before are covered only after significant changes in their design (Article 111(2))."
                + yet
            ),
            Paragraph(
                "Article 26 does not require training-data lineage. Sections 11 and 12 support provider duties under "
                "Articles 10, 11 and 18 and are included because the deployer may need them for paragraphs 5, 9 and 12."
            ),
            Heading("Not covered"),
            Bullets(
                (
                    "The system in operation: its inputs, its outputs, its logs, and what people did with them.",
                    "Training outside this run, and events that the instrumented process did not record.",
                    "Where the data came from before the source files were read, and whether they are true.",
                    "National law, sector rules and contracts.",
                )
            ),
        ),
    )


def summary(subject: Subject) -> Section:
    """Section 4: exceptions and open inputs before anything else."""
    lacking = _open_inputs(subject)
    return Section(
        "4",
        "Summary",
        (
            Notice("exception", "Exceptions", items=exceptions(subject.evidence)),
            Notice(
                "open",
                "Open human inputs",
                "" if lacking else "None: every input that the mapped duties ask for was declared.",
                tuple(f"{where}: {' · '.join(labels)}" for where, labels in lacking.items()),
            ),
            Heading("What the records show"),
            Table((Column("", 17, "strong"), Column("", 70), Column("", 13, "tag-cell")), _shown(subject)),
        ),
    )


def _shown(subject: Subject) -> tuple[tuple[str, str, str], ...]:
    evidence = subject.evidence
    records, steps, influence = evidence.records, evidence.steps, evidence.influence
    integrity = (
        f"{quantity(evidence.verification.entries, 'entry')} verified: changes to any of them after signing would be "
        "detected by the checks of section 13."
    )
    data = (
        f"{quantity(len(evidence.sources), 'source file')}, {records.samples:,} rows used {records.records:,} times, "
        f"{quantity(records.tokens, 'token')} with loss{_unused(subject.evidence)} (section 11)."
    )
    gradients = (
        "Sum of the recorded gradients against the gradient that the optimizer consumed, over "
        f"{quantity(steps.steps, 'optimizer step')}: largest relative residual {short(steps.residual_max)} (section "
        "11). Unrecorded events cannot be excluded."
    )
    shown = [
        ("Integrity", integrity, f"[{MEASURED}]"),
        ("Data", data, f"[{MEASURED}]"),
        ("Recorded gradients", gradients, f"[{MEASURED}]"),
    ]
    if influence is not None:
        rows = (*influence.top_for, *influence.top_against)
        answer = (
            f"For {shorten(influence.case_label, 60) or 'the case'} the estimator ranked "
            f"{influence.n_samples:,} training rows; "
            f"{sum(row.above_floor for row in rows)} of the {len(rows)} listed clear the noise floor (section 12). "
            f"{shorten(influence.specificity.statement, 400)}"
        )
        shown.append(("Influence", answer, f"[{ESTIMATED}]"))
    return tuple(shown)


def _unused(evidence: Evidence) -> str:
    """Count the rows that the final weights did not use, by list."""
    lists = [f"{found.count:,} {found.fate}" for found in evidence.samples if found.count and found.fate != Fate.USED]
    return "".join(f"; {said}" for said in lists)
