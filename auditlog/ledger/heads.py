"""Heads: signed log checkpoints as files, and the way they leave this machine.

``heads/00001024.note`` is written after the batch it covers is in the database, by temporary file, fsync and
rename. ``on_head`` then hands the same bytes to somebody else; only that binds the operator.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from auditlog.errors import StoreError, UsageError
from auditlog.ledger.files import write_once

FOLDER = "heads"
COMMAND = "command:"
COMMAND_TIMEOUT_S = 60

OnHead = str | Path | Callable[[str, bytes], None]
"""A folder, ``command:CMD`` (the note arrives on its standard input), or a callable of file name and note."""


def note_name(size: int) -> str:
    """Return the file name of the head of that size, such as ``00001024.note``."""
    return f"{size:08d}.note"


def read_notes(folder: Path) -> dict[str, bytes]:
    """Return every note of a folder by file name, in order of size; empty where there is no folder."""
    try:
        return {path.name: path.read_bytes() for path in sorted(folder.glob("*.note"))}
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from error


def check_on_head(on_head: OnHead | None, run: Path) -> None:
    """Refuse a destination that cannot work, before anything is recorded.

    Raises:
        UsageError: If it lies inside the run folder, is a file, or is an empty command.
    """
    if isinstance(on_head, str) and on_head.startswith(COMMAND):
        if not shlex.split(on_head.removeprefix(COMMAND)):
            raise UsageError("on_head is an empty command", "Write it as 'command:PROGRAM ARGUMENTS'.")
    elif isinstance(on_head, str | Path):
        folder = Path(on_head).resolve()
        if folder == run.resolve() or run.resolve() in folder.parents:
            raise UsageError(
                f"on_head points into the run folder: {on_head}",
                "Heads bind the operator only where the operator cannot rewrite them: name a place elsewhere.",
            )
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"on_head is not a folder: {on_head}", "Name a folder, a command or a callable.")


def deliver(on_head: OnHead | None, run: Path, name: str, note: bytes) -> None:
    """Hand one head over.

    A folder receives ``<folder>/<name of the run folder>/<size>.note``.

    Raises:
        StoreError: If it was not accepted. The head is in ``heads/`` all the same.
    """
    if on_head is None:
        return
    if isinstance(on_head, str) and on_head.startswith(COMMAND):
        _pipe(on_head.removeprefix(COMMAND), note)
    elif isinstance(on_head, str | Path):
        write_once(Path(on_head) / run.resolve().name / name, note)
    else:
        try:
            on_head(name, note)
        except Exception as error:
            raise StoreError(f"on_head did not accept {name}: {error}") from error


def _pipe(command: str, note: bytes) -> None:
    try:
        done = subprocess.run(
            shlex.split(command), input=note, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StoreError(f"on_head command did not run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1][:200]
        raise StoreError(f"on_head command ended with status {done.returncode}: {said}")
