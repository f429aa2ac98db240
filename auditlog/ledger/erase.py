"""Erasing samples from a sealed run: their salts, their sketches, and what else on disk holds them.

The log itself is not touched. Its records keep source number, row number, loss and token count of an erased sample;
they commit to its content and its sketch under a salt that is gone. An ERASURE event in the custody log is signed
first, then files are written anew without the bytes and take the old ones' place. A crash in between is finished by
running the same command again. Copies elsewhere (backups, file-system snapshots, other machines) and the trained
weights are out of reach from here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from auditlog.errors import DataError, UsageError
from auditlog.format.commitments import SALT_BYTES
from auditlog.format.manifest import Source
from auditlog.format.records import EventKind
from auditlog.ledger.custody import FOLDER as CUSTODY
from auditlog.ledger.custody import RESULTS, CustodyLog, read_custody
from auditlog.ledger.files import disk_error, sync_folder
from auditlog.ledger.reader import RunReader
from auditlog.ledger.salts import FILE as SALTS
from auditlog.ledger.salts import STEP_SALTS
from auditlog.ledger.shards import FOLDER as SKETCHES
from auditlog.ledger.shards import SHARD_ROWS, header_bytes
from auditlog.trust.erasures import read_erasures
from auditlog.trust.keys import Signer

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Erased:
    """What one erasure destroyed.

    Attributes:
        samples: Number of samples.
        records: Uses of them in training; each had a sketch.
        gradients: Steps whose stored gradient was destroyed with them.
        results: Result files of the custody log that named them.
        event: The custody entry that says so.
    """

    samples: int
    records: int
    gradients: int
    results: tuple[str, ...]
    event: int


def erase(run: Path, rows: Sequence[tuple[str, int]], basis: str, signer: Signer) -> Erased:
    """Erase samples from a sealed run, all its ranks included.

    Args:
        run: The run folder.
        rows: Each sample's source file, as the manifest spells it, and its row, from 0.
        basis: Why, such as ``GDPR Art. 17(1)(a)``; public in the custody log, so no name belongs here.
        signer: Key of whoever acts.

    Raises:
        DataError: If the manifest has no such file or row.
        UsageError: If the run is not sealed, or no basis is given.
        StoreError: If the disk refuses. What was not destroyed yet still verifies as not erased.
    """
    if not basis.strip():
        raise UsageError("an erasure needs a basis", 'Say why: --basis "GDPR Art. 17(1)(a)"')
    with RunReader.open(run) as reader:
        places = [_place(reader.manifest.data.sources, *each) for each in dict.fromkeys(rows)]
        uses = [_Uses.of(each, places) for each in reader.ranks]
        indices = sorted(_index(reader.manifest.data.sources, place) for place in places)
        width = reader.manifest.sketch.dim * len(reader.manifest.sketch.forms)
    custody = CustodyLog.open(run, signer)
    steps = set().union(*(each.steps for each in uses))
    results = tuple(_results_that_name(run, set(places)))
    records = sum(len(each.sketches) for each in uses)
    event = _announce(run, custody, places, sorted(steps), results, basis, records)
    for each in uses:
        _wipe(each.folder / SALTS, [(SALT_BYTES * index, SALT_BYTES) for index in indices])
        gradients = [place for step, place in each.gradients.items() if step in steps]
        _wipe_rows(each.folder, [*each.sketches, *gradients], width)
        numbers = [shard * SHARD_ROWS + row for shard, row in gradients]
        _wipe(each.folder / STEP_SALTS, [(SALT_BYTES * number, SALT_BYTES) for number in numbers])
    for name in results:
        _remove(run / CUSTODY / name)
    return Erased(len(places), records, len(steps), results, event)


@dataclass(frozen=True, slots=True)
class _Uses:
    """Where one log keeps what its run learned from the samples; shards and rows, steps as ``(attempt, step)``."""

    folder: Path
    sketches: list[Place]
    steps: set[tuple[int, int]]
    gradients: dict[tuple[int, int], Place]  # of every step

    @classmethod
    def of(cls, reader: RunReader, places: Iterable[Place]) -> _Uses:
        records = reader.records()
        is_theirs = np.zeros(len(records), bool)
        for source, row in places:
            is_theirs |= (records["source_id"] == source) & (records["row"] == row)
        theirs = records[is_theirs]
        bodies = [event.json() for event in reader.events(EventKind.STEP)]
        gradients = {
            (body["attempt"], body["step"]): (body["gradient"]["shard"], body["gradient"]["row"])
            for body in bodies
            if body["gradient"] is not None
        }
        sketches = list(zip(theirs["shard"].tolist(), theirs["shard_row"].tolist(), strict=True))
        steps = set(zip(theirs["attempt"].tolist(), theirs["step"].tolist(), strict=True))
        return cls(reader.path, sketches, steps, gradients)


def _place(sources: Sequence[Source], path: str, row: int) -> Place:
    source = next((each for each in sources if each.path == path), None)
    if source is None:
        known = ", ".join(each.path for each in sources[:5])
        raise DataError(f"the run's manifest has no source file {path}", f"It has: {known}")
    if not 0 <= row < source.rows:
        raise DataError(f"{path} has no row {row}: it has {source.rows:,} rows, counted from 0")
    return source.source_id, row


def _index(sources: Sequence[Source], place: Place) -> int:
    return next(each.first_index for each in sources if each.source_id == place[0]) + place[1]


def _announce(
    run: Path,
    custody: CustodyLog,
    places: Sequence[Place],
    steps: Sequence[tuple[int, int]],
    results: Sequence[str],
    basis: str,
    records: int,
) -> int:
    """Log the erasure, unless an earlier one that was broken off did; returns the entry's number."""
    earlier = read_erasures(read_custody(run))
    if all(place in earlier.samples for place in places) and set(results) <= set(earlier.results):
        return max(earlier.samples[place] for place in places)
    body: dict[str, Any] = {
        "basis": basis,
        "samples": [{"source_id": source, "row": row} for source, row in places],
        "gradients": [{"attempt": attempt, "step": step} for attempt, step in steps],
        "records": records,
        "results": list(results),
    }
    return custody.append(EventKind.ERASURE, body).seq


def _results_that_name(run: Path, places: set[Place]) -> list[str]:
    """Return the result files that name one of the samples: their lists say where it stands and quote its text."""
    found = []
    for path in sorted((run / CUSTODY / RESULTS).glob("*.json")):
        if places & set(_named(json.loads(path.read_bytes()))):
            found.append(f"{RESULTS}/{path.name}")
    return found


def _named(document: Any) -> Iterable[Place]:
    """Yield every ``(source_id, row)`` in a document."""
    if isinstance(document, dict):
        source, row = document.get("source_id"), document.get("row")
        if type(source) is int and type(row) is int:
            yield source, row
        document = list(document.values())
    if isinstance(document, list):
        for each in document:
            yield from _named(each)


def _wipe_rows(folder: Path, places: Iterable[Place], width: int) -> None:
    by_shard: dict[int, list[int]] = defaultdict(list)
    for shard, row in places:
        by_shard[shard].append(row)
    header = header_bytes(width)
    for shard, rows in by_shard.items():
        spans = [(header + row * width, width) for row in rows]
        _wipe(folder / SKETCHES / f"{shard:06d}.npy", spans)


def _wipe(path: Path, spans: Sequence[tuple[int, int]]) -> None:
    """Write a file anew with zeros at these ``(offset, length)``, and let it take the old one's place."""
    if not spans or not path.exists():
        return
    temporary = path.with_name(f".{path.name}.partial")
    try:
        shutil.copyfile(path, temporary)
        shutil.copymode(path, temporary)
        with temporary.open("r+b") as file:
            for offset, length in spans:
                if offset + length <= temporary.stat().st_size:
                    os.pwrite(file.fileno(), bytes(length), offset)
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def _remove(path: Path) -> None:
    """Remove a result and its salt."""
    try:
        for each in (path, path.with_suffix(".salt")):
            each.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(path, error) from error
