"""Which files a pattern stands for, in an order that no file system decides, and where symbolic links may lead.

Links are followed as long as they stay inside the base folder: a file is recorded under the path that was given, and
where the link leads is recorded beside it. A link that leaves the base folder, leads in a circle or to nothing is
refused. A file that is matched more than once, for example under its own path and through a link, is taken once,
under its own path if that is among them.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from auditlog.errors import DataError
from auditlog.format.manifest import Source


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One source file: where it is, and what it is called relative to the base folder."""

    path: Path
    name: str
    link: str | None


def find_files(patterns: str | Path | Sequence[str | Path], base: Path | None) -> tuple[Path, list[FoundFile]]:
    """Return the base folder and all matches, each file once, in path order.

    Raises:
        DataError: If nothing matches a pattern, a match lies outside ``base``, or a link is refused.
    """
    given = [patterns] if isinstance(patterns, str | Path) else list(patterns)
    by_target: dict[Path, Path] = {}
    for path in sorted({path for pattern in given for path in _matches(pattern)}):
        target = path.resolve()
        if target not in by_target or path == target:
            by_target[target] = path
    paths = sorted(by_target.values())
    if not paths:
        raise DataError("no pattern was given", "Name at least one file or pattern.")
    folder = _absolute(Path(base)) if base else Path(os.path.commonpath([path.parent for path in paths]))
    for path in paths:
        if not path.is_relative_to(folder):
            raise DataError(f"{path}: outside the base folder {folder}", "Give a base folder that holds all files.")
    names = [path.relative_to(folder).as_posix() for path in paths]
    return folder, [FoundFile(p, name, link_of(folder, name)) for p, name in zip(paths, names, strict=True)]


def link_of(base: Path, name: str) -> str | None:
    """Return where ``name`` really leads, relative to the base folder; ``None`` if no link is on its way.

    Raises:
        DataError: If it leads out of the base folder.
    """
    target, root = (base / name).resolve(), base.resolve()
    if not target.is_relative_to(root):
        raise DataError(
            f"{name}: a link that leaves the base folder: it leads to {target}",
            f"Copy the file to {base}, or build the manifest with base= a folder that holds both.",
        )
    inside = target.relative_to(root).as_posix()
    return None if inside == name else inside


def require_same_way(folder: Path, source: Source) -> None:
    """Check that a source is reached as it was recorded: directly, or through the same links.

    Raises:
        DataError: If a link was put in, taken out or turned elsewhere, whatever its content is.
    """
    link = link_of(folder, source.path)
    if link != source.link:
        before, now = (f"a link to {way}" if way else "no link" for way in (source.link, link))
        raise DataError(
            f"{source.path}: changed after the data manifest was built (it was {before} and is {now})",
            "Restore the file itself, or build the manifest anew and start a new run.",
        )


def inside(folder: Path, name: str) -> Path:
    """Return the path of a manifest's source in ``folder``.

    Raises:
        DataError: If the name, which may be somebody else's, is absolute or climbs out of the folder.
    """
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise DataError(f"{name}: a manifest's paths are relative and stay in their folder")
    return folder / name


def missing(folder: Path, source: Source, reason: str) -> DataError:
    """Return the error for a source that cannot be read, naming the file that it may have been renamed to."""
    for path in _same_size(folder, source.size_bytes):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == source.sha256:
                return DataError(
                    f"{source.path}: file renamed, content identical: it is {path.relative_to(folder).as_posix()} now",
                    "Give it its recorded name again, or build the manifest anew and start a new run.",
                )
    return DataError(
        f"{source.path}: listed in the data manifest but cannot be read: {reason}",
        f"Restore the file under {folder}, or name the folder that the manifest's paths start from.",
    )


def _same_size(folder: Path, size_bytes: int) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and os.access(path, os.R_OK) and path.stat().st_size == size_bytes:
                yield path


def _matches(pattern: str | Path) -> Iterator[Path]:
    """Yield the files that one pattern stands for, as absolute paths whose links are not resolved."""
    literal = Path(pattern).is_file()  # a name may hold brackets
    straight: set[Path] = set()  # folders that are known not to lead in a circle
    found = False
    for match in [str(pattern)] if literal else glob.iglob(str(pattern), recursive=True):
        path = _absolute(Path(match))
        if path.parent not in straight:
            _refuse_circle(path.parent)
            straight.add(path.parent)
        if path.is_symlink() and not path.exists():
            raise DataError(f"{path}: a link that leads to nothing or to itself", "Remove the link.")
        if path.is_file():
            found = True
            yield path
    if not found:
        raise DataError(
            f"no file matches {str(pattern)!r}",
            f"Patterns are relative to the current folder, which is {Path.cwd()}.",
        )


def _absolute(path: Path) -> Path:
    """Return an absolute path without ``..``; only what stands before a ``..`` is resolved."""
    parts = path.absolute().parts
    climbs = [number for number, part in enumerate(parts) if part == ".."]
    if not climbs:
        return Path(*parts)
    last = climbs[-1] + 1
    return Path(*parts[:last]).resolve().joinpath(*parts[last:])


def _refuse_circle(path: Path) -> None:
    """Raise ``DataError`` if a folder on the way to ``path``, or itself, is one of those above it."""
    seen: set[Path] = set()
    for folder in [*reversed(path.parents), path]:
        target = folder.resolve()
        if target in seen:
            raise DataError(f"{folder}: a link that leads in a circle, to {target}", "Remove the link.")
        seen.add(target)
