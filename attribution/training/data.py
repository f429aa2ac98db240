"""A ``datasets.Dataset`` whose rows carry their sample index, so that it travels in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attribution.capture.hooks import SAMPLE_INDEX
from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


def dataset(manifest: DataManifest) -> Dataset:
    """Return every row of the manifest as a dataset, with its ``sample_index`` beside its own fields.

    The index is a column like any other, so it survives ``map``, ``filter``, ``shuffle``, ``select`` and the loader's
    workers. A field that some rows lack is ``None`` there.

    Raises:
        DataError: If a row changed since the manifest was built, uses the name ``sample_index``, or has a field whose
            type differs from the other rows'.
    """
    import pyarrow as pa
    from datasets import Dataset

    rows = [manifest.read_row(index) for index in range(manifest.rows)]
    fields = dict.fromkeys(name for row in rows for name in row)
    if SAMPLE_INDEX in fields:
        raise DataError(
            f"the data has a field named {SAMPLE_INDEX}, which the log needs for the place in the manifest",
            "Rename that field in the source files.",
        )
    columns = {name: [row.get(name) for row in rows] for name in fields}
    try:
        return Dataset.from_dict({**columns, SAMPLE_INDEX: list(range(manifest.rows))})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"the rows' fields do not form one table: {error}",
            "Give each field one type in all source files (for example numbers or text, not both).",
        ) from error
