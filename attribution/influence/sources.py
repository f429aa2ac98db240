"""The source files of a finished run, opened again for previews, after checking that they are the recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError
from auditlog.format.manifest import RunManifest


def open_sources(manifest: RunManifest, folder: Path) -> DataManifest:
    """Return the data manifest of the files in ``folder``.

    Raises:
        DataError: If a file is missing or is not the one that the run recorded.
    """
    recorded = manifest.data
    for source in recorded.sources:
        if not (folder / source.path).is_file():
            raise DataError(f"{folder / source.path}: missing", "Name the folder that the manifest's paths start from.")
    found = DataManifest.build([folder / s.path for s in recorded.sources], text_fields=recorded.text_fields)
    for source, now in zip(recorded.sources, found.block.sources, strict=True):
        if source.sha256 != now.sha256:
            raise DataError(
                f"{folder / source.path}: not the file that the run recorded (SHA-256 {now.sha256[:16]}…, "
                f"recorded {source.sha256[:16]}…)",
                "Restore the file as it was when training began.",
            )
    return found


def text_previews(data: DataManifest) -> Callable[[int], str]:
    """Return a function from sample index to the sample's text: its first text field."""
    field = data.block.text_fields[0]
    return lambda index: str(data.read_row(index)[field])
