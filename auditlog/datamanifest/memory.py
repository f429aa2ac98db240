"""A ``datasets.Dataset`` as a source. It is used through what it offers and never imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from auditlog.datamanifest.arrow import MemoryTable, TableSource
from auditlog.datamanifest.scan import Scan, scan
from auditlog.datamanifest.versions import files_version, root_of
from auditlog.errors import DataError
from auditlog.format.manifest import DataVersion, VersionedFile

_COMMIT = re.compile(r"@([0-9a-f]{40})/")


def open_dataset(dataset: Any, revision: str | None, name: str | None, text_fields: tuple[str, ...]) -> Scan:
    """Read every row of a dataset once.

    Raises:
        DataError: If it is no map-style dataset of one split, or a row lacks a text field.
    """
    if isinstance(dataset, Mapping):
        raise DataError(f"a dictionary of the splits {sorted(dataset)}, not one dataset", "Pass one of its splits.")
    if not (hasattr(dataset, "with_format") and hasattr(dataset, "__len__")):
        raise DataError(
            f"a {type(dataset).__name__} cannot be read by row number",
            "Load it without streaming and pass revision=, or write it to files and use DataManifest.build.",
        )
    info = getattr(dataset, "info", None)
    called = name or getattr(info, "dataset_name", None) or getattr(info, "builder_name", None) or "unnamed"
    split = getattr(dataset, "split", None)
    label = f"{'hub' if revision else 'dataset'}:{called}{f'/{split}' if split else ''}"
    return scan(TableSource(MemoryTable(dataset), label, "dataset"), text_fields)


def dataset_version(dataset: Any, revision: str | None, sha256: str) -> DataVersion:
    """Return the version that was declared, with what the loader recorded of its downloads.

    Raises:
        DataError: If those downloads are of another commit than the one declared.
    """
    downloads = tuple(_downloads(dataset))
    commits = {match[1] for file in downloads if (match := _COMMIT.search(file.path))}
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision) and commits - {revision}:
        raise DataError(
            f"revision={revision}, but the dataset's own record names {', '.join(sorted(commits))}",
            "Pass the commit that it was loaded from.",
        )
    root = root_of([sha256])
    if not revision:
        return files_version(root).model_copy(update={"files": downloads})
    return DataVersion(data_version_id=0, kind="hub", revision=revision, root=root, files=downloads)


def _downloads(dataset: Any) -> Iterator[VersionedFile]:
    """Yield the loader's list of downloads; of a local file the name alone, its folder is nobody's business."""
    recorded = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    for url, entry in sorted(recorded.items()):
        path = url if "://" in url else re.split(r"[/\\]", url)[-1]
        digest = f"sha256:{entry['checksum']}" if entry.get("checksum") else None
        yield VersionedFile(path=path, digest=digest, size_bytes=entry.get("num_bytes"))
