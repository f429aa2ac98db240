"""The source files of a finished run, opened again for previews, after checking that they are the recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError
from auditlog.format.manifest import RunManifest, Source


def open_sources(manifest: RunManifest, folder: Path) -> DataManifest:
    """Return the data manifest of the files in ``folder``.

    Raises:
        DataError: If a file is missing or is not the one that the run recorded, or the run's data was a dataset in
            memory.
    """
    recorded = manifest.data
    for source in recorded.sources:
        _require_file(source, folder)
    found = DataManifest.build(
        [folder / s.path for s in recorded.sources], text_fields=recorded.text_fields, base=folder
    )
    now = {source.path: source for source in found.block.sources}
    for source in recorded.sources:
        if source.path not in now or source.sha256 != now[source.path].sha256:
            raise DataError(
                f"{folder / source.path}: not the file that the run recorded ({_what(source, now.get(source.path))})",
                "Restore the file as it was when training began.",
            )
    return found


def text_previews(data: DataManifest) -> Callable[[int], str]:
    """Return a function from sample index to the sample's text: its first text field, or all its fields."""
    fields = data.block.text_fields
    return lambda index: str(data.read_row(index)[fields[0]] if fields else data.read_row(index))


def _require_file(source: Source, folder: Path) -> None:
    if source.format == "dataset":
        raise DataError(
            f"{source.path}: the run's data was a dataset in memory, so no file can be opened for previews",
            "Ask without previews, or look the rows up in the dataset by their numbers.",
        )
    if not (folder / source.path).is_file():
        raise DataError(f"{folder / source.path}: missing", "Name the folder that the manifest's paths start from.")


def _what(source: Source, now: Source | None) -> str:
    if now is None:
        return "it is a link to another source file"
    if source.content_sha256 == now.content_sha256:
        return "container changed, all rows equal"
    return f"SHA-256 {now.sha256[:16]}…, recorded {source.sha256[:16]}…"
