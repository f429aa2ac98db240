"""Which version of the data the files belong to: what git or DVC says of them, or what the operator declares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from auditlog.datamanifest import git
from auditlog.errors import DataError
from auditlog.format.digests import sha256
from auditlog.format.manifest import DataVersion

_DECLARED = {
    "lakefs": (re.compile(r"lakefs://([^@\s]+@[^@\s]+)"), "lakefs://repository@commit"),
    "hub": (re.compile(r"hub:([^@\s]+@[^@\s]+)"), "hub:organisation/name@commit"),
}


def data_versions(
    version: str, paths: Sequence[Path], digests: Sequence[str]
) -> tuple[tuple[DataVersion, ...], list[int]]:
    """Return the data versions, and for each file the id of its own.

    Args:
        version: ``files``, ``git``, ``dvc``, ``lakefs://repository@commit``, ``hub:organisation/name@commit``, or a
            label.
        paths: The files.
        digests: SHA-256 of each, in hex.

    Raises:
        DataError: If git or DVC cannot tell the version, or a declared one is not of its form.
    """
    if version == "git":
        return _git_versions(paths, digests)
    root = root_of(digests)
    if version == "files":
        found = files_version(root)
    elif version == "dvc":
        from auditlog.datamanifest import dvc  # reads YAML, which nothing else here does

        revision, dirty, pointers = dvc.state(paths)
        found = DataVersion(data_version_id=0, kind="dvc", revision=revision, dirty=dirty, root=root, files=pointers)
    else:
        found = _declared(version, root)
    return (found,), [0] * len(paths)


def root_of(digests: Sequence[str]) -> str:
    """Return the SHA-256 over source digests in order."""
    return sha256(*(bytes.fromhex(digest) for digest in digests)).hex()


def files_version(root: str) -> DataVersion:
    """Return the version that the digests alone make."""
    return DataVersion(data_version_id=0, kind="files", revision=f"sha256:{root[:16]}", root=root)


def _git_versions(paths: Sequence[Path], digests: Sequence[str]) -> tuple[tuple[DataVersion, ...], list[int]]:
    """Return one version per repository: a submodule's files belong to the submodule's commit."""
    versions, owner = [], [0] * len(paths)
    for version_id, (repository, members) in enumerate(git.repositories(paths).items()):
        commit, dirty = git.state(repository, [paths[number] for number in members])
        root = root_of([digests[number] for number in members])
        versions.append(DataVersion(data_version_id=version_id, kind="git", revision=commit, dirty=dirty, root=root))
        for number in members:
            owner[number] = version_id
    return tuple(versions), owner


def _declared(version: str, root: str) -> DataVersion:
    for kind, (form, example) in _DECLARED.items():
        if re.match(rf"{kind}:", version):
            match = form.fullmatch(version)
            if match is None:
                raise DataError(f"version={version!r}: not of the form {example}", "Name one commit, after an @.")
            return DataVersion.model_validate({"data_version_id": 0, "kind": kind, "revision": match[1], "root": root})
    return DataVersion(data_version_id=0, kind="label", revision=version, root=root)
