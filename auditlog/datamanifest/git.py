"""What git says of files: their repository, its commit, and whether they differ from it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from auditlog.errors import DataError

_AT_ONCE = 500  # paths per command line


def repositories(paths: Sequence[Path]) -> dict[Path, list[int]]:
    """Return the top folder of each repository, with the positions of the files that it holds.

    A link belongs to the repository of the file that it leads to, a submodule's file to the submodule.

    Raises:
        DataError: If a file is in no repository, or git is not installed.
    """
    tops: dict[Path, Path] = {}
    found: dict[Path, list[int]] = {}
    for number, path in enumerate(paths):
        folder = path.resolve().parent
        if folder not in tops:
            tops[folder] = Path(_git(folder, "rev-parse", "--show-toplevel"))
        found.setdefault(tops[folder], []).append(number)
    return found


def state(repository: Path, paths: Sequence[Path]) -> tuple[str, bool]:
    """Return the commit that is checked out, and whether one of the files differs from it.

    What is not in the commit differs from it: changed, staged, untracked and ignored files, and new links.

    Raises:
        DataError: If there is no commit yet.
    """
    commit = _git(repository, "rev-parse", "HEAD")
    links = {path.parent.resolve() / path.name for path in paths if path.is_symlink()}
    asked = sorted({path.resolve() for path in paths} | {link for link in links if link.is_relative_to(repository)})
    status = ("status", "--porcelain", "--ignored", "--untracked-files=all", "--")
    groups = (asked[first : first + _AT_ONCE] for first in range(0, len(asked), _AT_ONCE))
    return commit, any(_git(repository, *status, *map(str, group)) for group in groups)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--literal-pathspecs", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise DataError(
            f"version='git', but git cannot tell the commit of {folder}: {detail.strip().splitlines()[-1]}",
            "Commit the data first, or use version='files' or a label of your own.",
        ) from error
    return done.stdout.strip()
