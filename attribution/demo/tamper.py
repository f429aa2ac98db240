"""Two attacks on copies of the demo's run, as SQL that anybody with the files could type.

The statements run in a Python process of their own, which is printed, so that they can be repeated by hand. They do
what an insider with write access would do: change the store, leave the rest.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from auditlog.ledger.reader import RunReader
from auditlog.ledger.store import DATABASE

EDITED_STEP = 17


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack, prepared: what it does, to which copy, by which command.

    Attributes:
        what: In words.
        copy: The run folder that is attacked.
        statements: SQL, in order.
        command: The process that runs them.
    """

    what: str
    copy: Path
    statements: tuple[str, ...]
    command: tuple[str, ...]


def edit_one_row(run: Path, copy: Path) -> Attack:
    """Copy the run, and prepare to move one record to another source file."""
    shutil.copytree(run, copy)
    with RunReader.open(run) as reader:
        records, files = reader.records(), reader.manifest.data.sources
    step = min(EDITED_STEP, int(records["step"].max()))
    record = records[records["step"] == step][0]
    old = int(record["source_id"])
    new = (old + 1) % max(len(files), 2)
    target = files[new].path if new < len(files) else f"source {new}"
    return _attack(
        f"Entry {record['seq']} (step {step}) came from {files[old].path}; now it is said to come from {target}.",
        copy,
        (f"UPDATE records SET source_id = {new} WHERE seq = {record['seq']}",),
    )


def drop_the_end(run: Path, copy: Path) -> Attack:
    """Copy the run without the heads of its last batch, and prepare to delete the batch itself.

    The last batch that holds records, and whatever follows it.
    """
    with RunReader.open(run) as reader:
        records = reader.records()
        last = int(records["seq"].max())
        sizes = sorted(reader.heads())
    first = max((size for size in sizes if size <= last), default=0)  # entries below stay
    shutil.copytree(run, copy)
    for note in (copy / "heads").glob("*.note"):
        if int(note.stem) > first:
            note.unlink()
    tables = (("records", "seq"), ("events", "seq"), ("batches", "first_seq"))
    return _attack(
        f"{int((records['seq'] >= first).sum())} records and everything after entry {first - 1} are gone, with the "
        "checkpoints and heads that covered them.",
        copy,
        (
            *(f"DELETE FROM {table} WHERE {column} >= {first}" for table, column in tables),
            f"DELETE FROM checkpoints WHERE size > {first}",
        ),
    )


def _attack(what: str, copy: Path, statements: tuple[str, ...]) -> Attack:
    sql = "; ".join(statements)
    code = f"import duckdb; duckdb.connect({str(copy / DATABASE)!r}).execute({sql!r})"
    return Attack(what, copy, statements, (sys.executable, "-c", code))
