"""What the custody log says was erased, and so need not open any more.

An ERASURE event names samples, and the steps whose stored gradient held them too: that gradient without the other
samples' sketches would be theirs. It names them; it does not prove that no copy is left anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from auditlog.format.canonical import whole
from auditlog.format.records import Event, EventKind


@dataclass(frozen=True, slots=True)
class Erasures:
    """What was erased, each with the custody entry that says so.

    Attributes:
        samples: By ``(source_id, row)``.
        gradients: Steps' consumed gradients, by ``(attempt, step)``.
        results: Result files of the custody log, by name.
    """

    samples: Mapping[tuple[int, int], int] = field(default_factory=dict)
    gradients: Mapping[tuple[int, int], int] = field(default_factory=dict)
    results: Mapping[str, int] = field(default_factory=dict)


NONE = Erasures()


def read_erasures(events: Iterable[Event]) -> Erasures:
    """Return what a custody log's events say was erased; the first that names something counts.

    Malformed bodies name nothing: ``erasure_of`` says what is wrong with one.
    """
    found = Erasures({}, {}, {})
    for event in events:
        if event.kind != EventKind.ERASURE:
            continue
        try:
            one = erasure_of(event)
        except (ValueError, KeyError, TypeError):
            continue
        for name in ("samples", "gradients", "results"):
            earlier: dict[Any, int] = getattr(found, name)
            earlier.update({key: seq for key, seq in getattr(one, name).items() if key not in earlier})
    return found


def erasure_of(event: Event) -> Erasures:
    """Read one ERASURE event.

    Raises:
        ValueError: If a member is not of its kind (as does ``KeyError`` if one is missing, ``TypeError`` if it is no
            list of objects).
    """
    body = event.json()
    if not isinstance(body["basis"], str) or not body["basis"]:
        raise ValueError("an erasure states its basis")
    samples = {(whole(each, "source_id"), whole(each, "row")): event.seq for each in body["samples"]}
    gradients = {(whole(each, "attempt"), whole(each, "step")): event.seq for each in body["gradients"]}
    if not all(isinstance(name, str) for name in body["results"]):
        raise ValueError("a result is named by its file")
    return Erasures(samples, gradients, dict.fromkeys(body["results"], event.seq))
