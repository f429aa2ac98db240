"""Heads: signed log checkpoints as files, and the way they leave this machine.

``heads/00001024.note`` is written after the batch it covers is in the database, by temporary file, fsync and
rename. ``on_head`` then hands the same bytes to somebody else; only that binds the operator. Heads over entries
whose loss was accepted stand aside in ``heads/lost/``, so that the log may reach their size again.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from auditlog.errors import FormatError, StoreError, UsageError
from auditlog.format.notes import LogCheckpoint, Note, VKey
from auditlog.ledger.files import disk_error, sync_folder, write_once
from auditlog.trust.checkpoints import LOST

FOLDER = "heads"
RANKS = "ranks"  # below a run's folder: the logs of its other ranks
COMMAND = "command:"
COMMAND_TIMEOUT_S = 60

OnHead = str | Path | Callable[[str, bytes], None]
"""A folder, ``command:CMD`` (the note arrives on its standard input), or a callable of file name and note."""


def note_name(size: int) -> str:
    """Return the file name of the head of that size, such as ``00001024.note``."""
    return f"{size:08d}.note"


def second_note_name(statement: LogCheckpoint) -> str:
    """Return the file name of a head where another head of the same size has, or may take, the plain name."""
    return f"{statement.size:08d}.{statement.root.hex()[:8]}.note"


def read_heads(run: Path) -> dict[str, bytes]:
    """Return the notes in a log's ``heads/``, those in ``lost/`` by names that begin with it."""
    folder = run / FOLDER
    lost = read_notes(folder / LOST)
    return read_notes(folder) | {f"{LOST}{name}": note for name, note in lost.items()}


def read_notes(folder: Path) -> dict[str, bytes]:
    """Return every note of a folder by file name, in order of size; empty where there is no folder."""
    try:
        return {path.name: path.read_bytes() for path in sorted(folder.glob("*.note"))}
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from error


def parse_note(where: str, data: bytes) -> tuple[Note, LogCheckpoint]:
    """Parse a note file; raises ``FormatError`` that names it."""
    try:
        note = Note.parse(data)
        return note, note.checkpoint()
    except FormatError as error:
        raise FormatError(f"{where}: {error}", "Look at where the file comes from; heads are written by us.") from error


def set_aside(run: Path, notes: Iterable[Note]) -> None:
    """Move heads over lost entries to ``heads/lost/``; those that were kept only elsewhere are copied there.

    Raises:
        StoreError: If the disk refuses; nothing is lost then, and it can be done again.
    """
    for note in notes:
        statement, data = note.checkpoint(), note.to_bytes()
        write_once(run / FOLDER / LOST / second_note_name(statement), data)
        plain = run / FOLDER / note_name(statement.size)
        try:
            if plain.exists() and plain.read_bytes() == data:
                plain.unlink()
                sync_folder(plain.parent)
        except OSError as error:
            raise disk_error(plain, error) from error


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

    A folder receives ``<folder>/<name of the run folder>/<size>.note``, for another rank's log below ``ranks/<rank>/``.

    Raises:
        StoreError: If it was not accepted. The head is in ``heads/`` all the same.
    """
    if on_head is None:
        return
    if isinstance(on_head, str) and on_head.startswith(COMMAND):
        _pipe(on_head.removeprefix(COMMAND), note)
    elif isinstance(on_head, str | Path):
        write_once(_place(Path(on_head), run) / name, note)
    else:
        try:
            on_head(name, note)
        except Exception as error:
            raise StoreError(f"on_head did not accept {name}: {error}") from error


def certificate_name(attempt: int, vkey: VKey) -> str:
    """Return the file name of a session certificate beside the heads, such as ``session-1.3f09a1c2.json``."""
    return f"session-{attempt}.{vkey.key_hash.hex()}.json"


def place_beside(on_head: OnHead | None, run: Path, name: str, content: bytes) -> None:
    """Put a file beside the heads that a folder receives; commands and callables take heads and nothing else.

    Raises:
        StoreError: If the folder does not accept it.
    """
    if _is_folder(on_head):
        write_once(_place(Path(str(on_head)), run) / name, content)


def handed_over(on_head: OnHead | None, run: Path) -> dict[str, bytes]:
    """Return the heads that a folder has received from this run by file name; nobody else can be asked."""
    return read_notes(_place(Path(str(on_head)), run)) if _is_folder(on_head) else {}


def _is_folder(on_head: OnHead | None) -> bool:
    return isinstance(on_head, Path) or (isinstance(on_head, str) and not on_head.startswith(COMMAND))


def _place(folder: Path, run: Path) -> Path:
    """Return where in a folder the heads of a run, or of one of its ranks, are kept."""
    run = run.resolve()
    return folder.joinpath(*run.parts[-3:]) if run.parent.name == RANKS else folder / run.name


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
