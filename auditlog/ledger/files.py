"""Small files that must be there in full or not at all, and still be there after a crash."""

from __future__ import annotations

import os
from pathlib import Path

from auditlog.errors import StoreError


def write_once(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a new file by temporary file, fsync and rename. The same content again is no error.

    Raises:
        StoreError: If the file exists with other content, or the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if path.read_bytes() == content:
                return
            raise StoreError(f"{path} exists already with other content")
        temporary = path.with_name(f".{path.name}.partial")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(path, error) from error


def sync_folder(folder: Path) -> None:
    """Make a folder's new names durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(path: Path, error: OSError) -> StoreError:
    """Return our error for a disk that refuses to write."""
    return StoreError(
        f"cannot write {path}: {error.strerror or error}",
        "Free some space or choose another folder. Everything recorded before this is intact.",
    )
