"""A report as frozen plain values: sections made of blocks, each fact with its tag and its source.

No layout and no evidence here: ``art26`` fills these values, ``render`` turns them into HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from markupsafe import Markup

MEASURED = "measured"  # computed by this software over the run
RECORDED = "recorded"  # written by the training program; true as far as its writer was
ESTIMATED = "estimated"  # an estimate with an error of its own


def declared_by(who: str) -> str:
    """Return the tag of something that a person says."""
    return f"declared by {who}"


@dataclass(frozen=True)
class Fact:
    """One labelled value. ``source`` says where it stands, e.g. ``run log, entry 12``."""

    label: str
    value: str
    tag: str
    source: str = ""
    mono: bool = False


@dataclass(frozen=True)
class Facts:
    """A list of facts."""

    facts: tuple[Fact, ...]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Paragraph:
    """Running text of our own."""

    text: str
    kind: ClassVar[str] = "paragraph"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: tuple[str, ...]
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class Notice:
    """A box that must not be overlooked."""

    level: Literal["exception", "open", "note"]
    title: str
    text: str = ""
    items: tuple[str, ...] = ()
    kind: ClassVar[str] = "notice"


@dataclass(frozen=True)
class Column:
    """A table column; widths of a table's columns add up to 100."""

    title: str
    width: float
    style: Literal["text", "number", "mono", "strong", "tag-cell"] = "text"


@dataclass(frozen=True)
class Table:
    """A table with fixed column widths."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    tag: str = ""
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A drawing. ``svg`` comes from ``charts``, which escapes what others wrote."""

    svg: Markup
    caption: str
    tag: str
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Code:
    """Commands to repeat, one per line."""

    lines: tuple[str, ...]
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class SignOff:
    """Empty lines for names, dates and signatures of people."""

    roles: tuple[str, ...]
    kind: ClassVar[str] = "signoff"


Block = Facts | Paragraph | Heading | Bullets | Notice | Table | Figure | Code | SignOff


@dataclass(frozen=True)
class Section:
    """A numbered section; appendices have letters."""

    number: str
    title: str
    blocks: tuple[Block, ...]

    @property
    def is_appendix(self) -> bool:
        """Whether the number is a letter."""
        return self.number.isalpha()


@dataclass(frozen=True)
class Cover:
    """The first page."""

    title: str
    subtitle: str
    system: str
    role: str
    facts: tuple[Fact, ...]
    notices: tuple[Notice, ...]
    standing: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    report_id: str
    status: str
    created: str  # ISO 8601, UTC
    running_title: str
    cover: Cover
    sections: tuple[Section, ...]
