"""A ``datasets.Dataset`` whose rows carry their sample index, so that it travels in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attribution.capture.hooks import SAMPLE_INDEX
from auditlog.datamanifest import DataManifest
from auditlog.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


def dataset(manifest: DataManifest) -> Dataset:
    """Return every row of the manifest as a dataset, with its ``sample_index`` beside its own fields.

    The index is a column like any other, so it survives ``map``, ``filter``, ``shuffle``, ``select``, interleaving and
    the loader's workers. Tables keep the types of their columns, other rows those of their values. A field that some
    rows lack is ``None`` there. Every row is compared with the manifest on the way.

    Raises:
        DataError: If a row changed since the manifest was built, uses the name ``sample_index``, or has a field whose
            type differs from the other rows'.
    """
    import pyarrow as pa

    try:
        rows = _checked_original(manifest) if manifest.dataset is not None else _joined(manifest)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(
            f"the rows' fields do not form one table: {error}",
            "Give each field one type in all source files (for example numbers or text, not both).",
        ) from error
    if SAMPLE_INDEX in rows.column_names:
        raise DataError(
            f"the data has a field named {SAMPLE_INDEX}, which the log needs for the place in the manifest",
            "Rename that field in the source files.",
        )
    return rows.add_column(SAMPLE_INDEX, pa.array(range(manifest.rows), pa.int64()))


def _checked_original(manifest: DataManifest) -> Dataset:
    """Return the dataset that the manifest was made from, with its own features, if its rows are still the same."""
    manifest.check_unchanged()
    return manifest.dataset


def _joined(manifest: DataManifest) -> Dataset:
    """Return the rows of all source files in order."""
    import pyarrow as pa
    from datasets import Dataset

    tables = {source.source_id: manifest.source_table(source.source_id) for source in manifest.block.sources}
    textual = [number for number, table in tables.items() if table is None]
    text = _typed([row for number in textual for row in manifest.source_rows(number)])
    if len(textual) == len(tables):
        return text
    first = 0
    for number in textual:
        count = manifest.block.sources[number].rows
        tables[number] = text.data.table.slice(first, count)
        first += count
    return Dataset(pa.concat_tables(tables.values(), promote_options="default"))


def _typed(rows: Sequence[dict[str, Any]]) -> Dataset:
    """Return rows of plain values as a dataset, each column with the type that all its values share."""
    from datasets import Dataset

    fields = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_dict({name: [row.get(name) for row in rows] for name in fields})
