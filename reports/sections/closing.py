"""Sections 14 and 15: limitations, and the lines that people sign."""

from __future__ import annotations

from reports.document import Bullets, Paragraph, Section, SignOff

_LIMITS = (
    "Entries were recorded by the instrumented process; unrecorded events cannot be excluded.",
    "Recorded facts are true as far as the program that wrote them was. A commitment shows that a row is the same row, "
    "not that its content is right.",
    "Digests and salted commitments are personal data while the sample or its salt exists.",
    "Erasure from evidence storage does not remove influence from trained weights.",
    "Influence is an estimate with an error of its own, made from sketches of gradients at the time of training. It is "
    "no finding about a person, a bias or a fault.",
    "Nothing here says whether data were suitable, whether a decision was right, or whether a duty is fulfilled.",
)


def limitations() -> Section:
    """Section 14."""
    return Section("14", "Limitations", (Bullets(_LIMITS),))


def sign_off() -> Section:
    """Section 15."""
    return Section(
        "15",
        "Sign-off",
        (
            Paragraph(
                "This draft was made by software. The key that logs it is an organisation's key, not the signature of "
                "a responsible person. Until the lines below are filled in, nobody has reviewed it."
            ),
            SignOff(("Prepared by", "Reviewed by", "Approved for the deployer by")),
        ),
    )
