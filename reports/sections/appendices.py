"""Appendices A to D: digests, the commands to repeat the verification, the duties in full, the words used."""

from __future__ import annotations

from reports.document import MEASURED, Block, Code, Column, Heading, Paragraph, Section, Table
from reports.formats import size
from reports.obligations import Obligation
from reports.sections.identity import law_as_at
from reports.sections.subject import Subject
from reports.text import shorten

_GLOSSARY = (
    ("Entry", "One item of the log: a record (one use of one training row) or an event (everything else)."),
    ("Root", "One digest over all entries of a log, as in Certificate Transparency (RFC 6962)."),
    ("Head", "A signed statement of how long the log is and what its root is. Kept elsewhere, it binds the operator."),
    ("Seal", "The last entry of a run, after which the run log does not grow."),
    ("Custody log", "A second log of what was done with the run after its seal: queries, reports, checks."),
    ("Commitment", "A salted digest. It fixes a content without containing it."),
    ("Gradient", "The direction in which one training row would have changed the weights."),
    ("Sketch", "A short, random but repeatable summary of a gradient that keeps angles and lengths approximately."),
    ("Conservation", "The recorded gradients of a step must add up to the gradient that the optimizer used."),
    ("Residual", "How far that sum is off, relative to the gradient's length."),
    ("Influence", "What a training row did to an output. The score is an estimate of it."),
    ("Cosine", "Likeness of two gradients, from −1 to 1, whatever their length."),
    ("Noise floor", "The cosine that unrelated gradients reach by chance, over all rows together."),
    ("Specific", "The named records differ from those named for other cases."),
)


def hashes(subject: Subject) -> Section:
    """Appendix A."""
    evidence = subject.evidence
    rows = [
        ("evidence.json, attached", subject.evidence_sha256, ""),
        ("manifest.json", evidence.manifest_sha256, ""),
        ("run log, root", evidence.verification.root, f"{evidence.verification.entries:,} entries"),
    ]
    rows += [(shorten(s.path, 60), s.sha256, f"{s.rows:,} rows") for s in evidence.sources]
    for checkpoint in evidence.checkpoints:
        rows += [(f"{checkpoint.path}/{shorten(f.name, 40)}", f.sha256, size(f.size_bytes)) for f in checkpoint.files]
    if (frozen := evidence.model.get("frozen_sha256")) is not None:
        rows.append(("base model, frozen weights", frozen, ""))
    if evidence.recipe_sha256 is not None:
        rows.append(("recipe", evidence.recipe_sha256, ""))
    blocks: list[Block] = [
        Table(
            (Column("What", 30, "strong"), Column("SHA-256", 56, "mono"), Column("Size", 14, "number")),
            tuple(rows),
            tag=MEASURED,
        ),
        Heading("Final head of the run log"),
        _note(evidence.final_note),
    ]
    if evidence.custody_head is not None:
        blocks += [
            Heading("Head of the custody log before this report"),
            _note(evidence.custody_head),
        ]
    return Section("A", "Digests and heads", tuple(blocks))


def _note(text: str) -> Code:
    return Code(tuple(shorten(line, 200) for line in text.rstrip("\n").split("\n")))


def commands(subject: Subject) -> Section:
    """Appendix B."""
    return Section(
        "B",
        "How to repeat the verification",
        (
            Paragraph(
                "On any machine with the run folder and something from outside it: the public key as its owner "
                "published it, or a head that was handed over. Neither may be taken from the run folder or this file."
            ),
            Code(
                (
                    "pip install gradtrail",
                    "gradtrail verify RUN --trust PUBLIC_KEY.vkey --head KEPT_HEAD.note",
                    "gradtrail show RUN --recompute",
                    "pdfdetach -saveall REPORT.pdf && sha256sum evidence.json",
                )
            ),
            Paragraph(
                "Exit 0: verified. 3: cannot be read. 4: an entry was changed. 5: something is missing. 6: a signature "
                "or key does not fit. 7: nothing from outside to compare with. The digest of evidence.json is in "
                "section 1 and in the custody log, whose event for this report also holds the digest of this file."
            ),
        ),
    )


def register_extract(subject: Subject) -> Section:
    """Appendix C."""
    obligations = (*subject.register.of_role("deployer"), *subject.register.of_role("provider"))
    return Section(
        "C",
        "The duties cited",
        (
            Paragraph(
                f"{law_as_at(subject)} Wording of the quotes: consolidated text {subject.register.basis.consolidated}, "
                "which has no legal effect of its own; the Official Journal is authentic. The duties apply from "
                f"{subject.register.basis.applies}, unless a row says otherwise. Ceiling: the highest rating that "
                "training records can reach."
            ),
            Table(
                (
                    Column("Id", 12, "mono"),
                    Column("Duty, in short", 40),
                    Column("Quote", 40),
                    Column("Ceiling", 8),
                ),
                tuple((o.id, _duty(o), f"“{o.quote}”", o.ceiling) for o in obligations),
            ),
        ),
    )


def _duty(obligation: Obligation) -> str:
    return obligation.duty if obligation.applies is None else f"{obligation.duty} Applies: {obligation.applies}."


def glossary() -> Section:
    """Appendix D."""
    return Section("D", "Glossary", (Table((Column("Word", 20, "strong"), Column("Meaning here", 80)), _GLOSSARY),))
