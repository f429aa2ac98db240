"""The identities that the source files of a finished run have now, for opening its commitments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from auditlog.datamanifest.formats import open_reader
from auditlog.datamanifest.paths import inside, missing, require_same_way
from auditlog.datamanifest.rows import FileHash, SourceReader
from auditlog.datamanifest.scan import scan
from auditlog.errors import DataError
from auditlog.format.commitments import sample_identity
from auditlog.format.digests import sha256
from auditlog.format.manifest import RunManifest, Source


def data_identities(manifest: RunManifest, folder: Path) -> Callable[[int], bytes]:
    """Return a function from sample index to the identity that the source files in ``folder`` give it now.

    Raises:
        DataError: If a source file is missing, renamed, exchanged for a link, or has fewer rows than the manifest says;
            or if it was only packed or written anew: its rows are the same, and yet no commitment to it would open.
    """
    sources = manifest.data.sources
    digests, rows = zip(*(_digests(source, folder) for source in sources), strict=True)
    first = np.array([source.first_index for source in sources], dtype=np.int64)

    def identity(index: int) -> bytes:
        source = int(np.searchsorted(first, index, side="right")) - 1
        row = index - int(first[source])
        return sample_identity(digests[source], row, rows[source][32 * row : 32 * (row + 1)])

    return identity


def _digests(source: Source, folder: Path) -> tuple[bytes, bytes]:
    """Return the digest of a source file, and those of its rows joined."""
    path = inside(folder, source.path)
    reader = open_reader(path, source.path, source.format)
    if not path.is_file():
        raise missing(folder, source, "no such file")
    require_same_way(folder, source)
    file, rows = FileHash(), bytearray()
    for row in reader.rows(file):
        rows += sha256(row.raw)
    count = len(rows) // 32
    if count < source.rows:
        raise DataError(f"{path}: {count} rows, the manifest says {source.rows}")
    if file.hexdigest() != source.sha256 and _content(reader) == source.content_sha256:
        raise DataError(
            f"{source.path}: container changed, all rows equal: the file's SHA-256 is not the recorded one, the "
            "values of its rows are",
            "Give the file as it was recorded; the commitments bind the rows to that file.",
        )
    return bytes.fromhex(file.hexdigest()), bytes(rows)


def _content(reader: SourceReader) -> str:
    """Return the digest of a source's values; empty if it holds something that is no row any more."""
    try:
        return scan(reader, ()).content_sha256
    except DataError:
        return ""
