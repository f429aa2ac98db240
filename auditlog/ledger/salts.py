"""``salts.bin``: 32 random bytes per manifest row, written once before step 1.

A commitment says nothing without its salt, so overwriting a salt with zeros erases a sample from the log
without changing the log. The file is as confidential as the data; nobody but its owner may read it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from auditlog.errors import StoreError
from auditlog.format.commitments import SALT_BYTES
from auditlog.ledger.files import disk_error

FILE = "salts.bin"
STEP_SALTS = "step_salts.bin"
_CHUNK_ROWS = 1 << 16


def create_salts(run: Path, rows: int) -> None:
    """Write fresh salts for ``rows`` samples.

    Raises:
        StoreError: If the file exists (salts are never replaced) or the disk refuses.
    """
    path = run / FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for first in range(0, rows, _CHUNK_ROWS):
                file.write(os.urandom(SALT_BYTES * min(_CHUNK_ROWS, rows - first)))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise StoreError(f"{path} exists already; salts are never replaced") from error
    except OSError as error:
        raise disk_error(path, error) from error


class Salts:
    """The salts of a run, by sample index.

    Args:
        run: The run folder.
    """

    file: ClassVar[str] = FILE

    def __init__(self, run: Path) -> None:
        self._salts = memoryview(b"")
        path = run / self.file
        if path.is_file() and path.stat().st_size >= SALT_BYTES:
            rows = path.stat().st_size // SALT_BYTES
            self._salts = np.memmap(path, np.uint8, mode="r", shape=(rows * SALT_BYTES,)).data

    def __len__(self) -> int:
        return len(self._salts) // SALT_BYTES

    def salt(self, index: int) -> bytes | None:
        """Return a sample's salt, or ``None`` where it is missing or was erased (all zeros)."""
        if not 0 <= index < len(self):
            return None
        salt = bytes(self._salts[index * SALT_BYTES : (index + 1) * SALT_BYTES])
        return salt if any(salt) else None


class StepSalts(Salts):
    """The salts of steps' stored gradients, by number of the sketch row that a gradient has.

    Args:
        run: The run folder.
    """

    file = STEP_SALTS


class StepSaltWriter:
    """Gives each stored gradient a salt of its own. The file has holes where sketch rows belong to samples.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / STEP_SALTS
        self._descriptor: int | None = None

    def make(self, number: int) -> bytes:
        """Write and return a fresh salt for the gradient in sketch row ``number``.

        Raises:
            StoreError: If the disk refuses.
        """
        salt = os.urandom(SALT_BYTES)
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._descriptor, salt, SALT_BYTES * number)
        except OSError as error:
            raise disk_error(self._path, error) from error
        return salt

    def sync(self) -> None:
        """Wait until every salt is on the disk."""
        if self._descriptor is None:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_error(self._path, error) from error

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
