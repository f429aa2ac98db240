"""What DVC's own files say of the data, read without DVC: ``*.dvc``, ``dvc.lock`` and listings in ``.dvc/cache``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from auditlog.datamanifest.rows import unreadable
from auditlog.errors import DataError
from auditlog.format.canonical import canonical_bytes
from auditlog.format.digests import sha256
from auditlog.format.manifest import VersionedFile

_ADVICE = "Run `dvc add` or `dvc commit` on the data first, or use version='git', 'files' or a label of your own."


@dataclass(frozen=True, slots=True)
class _Output:
    """One entry of ``outs``: a file or folder, as one of DVC's files pins it."""

    path: Path
    digest: str  # "md5:<hex>"; of a folder, that of its listing: "md5:<hex>.dir"
    size_bytes: int | None
    members: Mapping[str, str] | None  # MD5 by name of a folder's files; None if it is a file, or its listing is gone
    old_text_rule: bool  # before version 3 the MD5 of a text was that of its form with \n line ends


def state(paths: Sequence[Path]) -> tuple[str, bool | None, tuple[VersionedFile, ...]]:
    r"""Return the revision, whether files differ from it, and the pinned outputs that hold the files.

    The revision is the digest of the one output that holds them all; several are named by the SHA-256 of their lines
    ``<digest>  <path>\n``. Whether files differ is ``None`` if a folder's listing is not in the cache.

    Raises:
        DataError: If no ``.dvc`` file or ``dvc.lock`` speaks of a file, or one does not parse.
    """
    outputs: dict[Path, list[_Output]] = {}  # by the folder of the DVC file
    used: dict[Path, _Output] = {}
    differ: list[bool | None] = []
    for path in (path.resolve() for path in paths):
        output = _output_of(path, outputs)
        used[output.path] = output
        differ.append(_differs(path, output))
    folder = os.path.commonpath([path.parent for path in used])
    pinned = [used[path] for path in sorted(used)]
    names = [output.path.relative_to(folder).as_posix() for output in pinned]
    files = tuple(
        VersionedFile(path=name, digest=output.digest, size_bytes=output.size_bytes)
        for name, output in zip(names, pinned, strict=True)
    )
    lines = "".join(f"{output.digest}  {name}\n" for name, output in zip(names, pinned, strict=True))
    revision = pinned[0].digest if len(pinned) == 1 else f"sha256:{sha256(lines.encode()).hex()}"
    return revision, True if True in differ else None if None in differ else False, files


def _output_of(path: Path, outputs: dict[Path, list[_Output]]) -> _Output:
    """Return the output that is, or holds, a file; the nearest one counts."""
    for folder in path.parents:
        if folder not in outputs:
            outputs[folder] = list(_pinned_in(folder))
        for output in outputs[folder]:
            if path.is_relative_to(output.path):
                return output
        if (folder / ".dvc").is_dir():
            break
    raise DataError(f"version='dvc', but no .dvc file or dvc.lock speaks of {path}", _ADVICE)


def _pinned_in(folder: Path) -> Iterator[_Output]:
    """Yield what the DVC files of one folder pin."""
    for file in sorted(folder.glob("*.dvc")):
        if file.is_file():
            document = _load(file)
            start = folder / str(document.get("wdir", "."))
            yield from (_output(file, start, out) for out in document.get("outs") or [])
    lock = folder / "dvc.lock"
    if lock.is_file():
        for stage in (_load(lock).get("stages") or {}).values():
            yield from (_output(lock, folder, out) for out in stage.get("outs") or [])


def _load(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise unreadable(str(file), error) from error
    except (yaml.YAMLError, ValueError) as error:
        raise DataError(f"{file}: not YAML: {error}", _ADVICE) from error
    if not isinstance(document, dict):
        raise DataError(f"{file}: not a DVC file", _ADVICE)
    return document


def _output(file: Path, start: Path, out: Any) -> _Output:
    try:
        path, listing = (start / out["path"]).resolve(), out.get("files")
        # A cloud-versioned folder is listed in the .dvc file itself and has no digest of its own.
        digest = f"md5:{out['md5']}" if listing is None else f"sha256:{sha256(canonical_bytes(listing)).hex()}"
        if digest.endswith(".dir"):
            listing = _cached_listing(path, out["md5"])
        members = None if listing is None else {entry["relpath"]: entry["md5"] for entry in listing}
        return _Output(path, digest, out.get("size"), members, old_text_rule="hash" not in out)
    except (KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{file}: an entry of outs has no path and md5", _ADVICE) from error


def _cached_listing(path: Path, name: str) -> list[dict[str, Any]] | None:
    """Return the listing of a folder, from the cache of version 3 or of those before."""
    for folder in path.parents:
        for cache in (folder / ".dvc/cache/files/md5", folder / ".dvc/cache"):
            file = cache / name[:2] / name[2:]
            if file.is_file():
                content = file.read_bytes()
                if hashlib.md5(content, usedforsecurity=False).hexdigest() + ".dir" != name:
                    raise DataError(f"{file}: damaged: its MD5 is not its name", "Restore DVC's cache: dvc fetch.")
                listing: list[dict[str, Any]] = json.loads(content)
                return listing
    return None


def _differs(path: Path, output: _Output) -> bool | None:
    """Return whether a file differs from what DVC pinned; ``None`` if a folder's listing is gone."""
    if path == output.path:
        pinned = output.digest.removeprefix("md5:")
    elif output.members is None:
        return None
    else:
        pinned = output.members.get(path.relative_to(output.path).as_posix(), "not in the listing")
    return pinned not in _md5s(path, output.old_text_rule)


def _md5s(path: Path, old_text_rule: bool) -> set[str]:
    r"""Return a file's MD5, and by the old rule also that of its text with ``\n`` line ends."""
    as_is, unix = (hashlib.md5(usedforsecurity=False) for _ in range(2))
    with path.open("rb") as file:
        for line in file:
            as_is.update(line)
            unix.update(line[:-2] + b"\n" if line.endswith(b"\r\n") else line)
    return {as_is.hexdigest(), unix.hexdigest()} if old_text_rule else {as_is.hexdigest()}
