"""How strings that others wrote are shown: nothing hidden, nothing that reorders, nothing without end.

Markup is escaped elsewhere (Jinja2 and markupsafe). This file cares for what escaping leaves alone: control and
formatting characters such as bidirectional overrides, and stacks of combining marks.
"""

from __future__ import annotations

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_MARKS = {"Mn", "Me"}
_MOST_MARKS = 2  # on one letter; living languages seldom need more, and taller stacks run into other lines
_LONGEST = 3000


def visible(text: str) -> str:
    """Return ``text`` with every hidden character spelled out, e.g. ``⟨U+202E⟩``, and cut if it is very long."""
    shown: list[str] = []
    marks = 0
    for character in text[:_LONGEST]:
        category = unicodedata.category(character)
        marks = marks + 1 if category in _MARKS else 0
        if character in "\n\t":
            shown.append(" ")
        elif category in _HIDDEN or marks > _MOST_MARKS:
            shown.append(f"⟨U+{ord(character):04X}⟩")
        else:
            shown.append(character)
    rest = len(text) - _LONGEST
    return "".join(shown) + (f" … ({rest:,} more characters)" if rest > 0 else "")


def quoted(text: str) -> str:
    """Return an answer in quotation marks, short enough for a line."""
    return f"“{shorten(text, 40)}”"


def shorten(text: str, limit: int) -> str:
    """Return ``text``, or its start and end around an ellipsis where it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - head - 1) :]}"
