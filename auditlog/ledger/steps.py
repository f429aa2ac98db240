"""What an optimizer step becomes: sketches on disk, and records and a gradient block that commit to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditlog.datamanifest import DataManifest
from auditlog.errors import StoreError, UsageError
from auditlog.format.canonical import finite
from auditlog.format.commitments import gradient_commitment, sample_commitment, sketch_commitment
from auditlog.format.manifest import SketchBlock
from auditlog.format.records import FORMAT_VERSION, RECORD, canonical_floats
from auditlog.ledger.appender import now_us
from auditlog.ledger.salts import FILE as SALTS
from auditlog.ledger.salts import Salts, StepSaltWriter
from auditlog.ledger.shards import SHARD_ROWS, ShardWriter


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One optimizer step as the recorder hands it over: ``n`` sample uses and the gradient they add up to.

    Attributes:
        records: ``(n,)`` of dtype ``RECORD`` with everything filled in that the recorder knows. The ledger
            fills ``fmt``, ``seq``, ``attempt``, ``ts_us``, ``shard``, ``shard_row`` and both commitments.
        index: ``(n,)`` int64, the sample index behind each record.
        sketches: ``(n, width)`` int8, raw and whitened form side by side.
        gradient: ``(width,)`` int8, sketch of the gradient that the optimizer consumed; ``None`` if skipped.
        gradient_scales: Its two scales; a form that is not stored has scale 0.
        body: The step event's body, without what the ledger adds: ``first_seq``, ``records``, ``attempt``,
            ``gradient``.
    """

    records: NDArray[np.void]
    index: NDArray[np.int64]
    sketches: NDArray[np.int8]
    gradient: NDArray[np.int8] | None
    gradient_scales: tuple[float, float]
    body: dict[str, Any]


class StepWriter:
    """Writes the sketches of steps and fills in what their records commit to.

    Args:
        run: The run folder.
        sketch: What the sketches are.
        data: The data manifest, for the samples' identities.
        written: Sketch rows that the log refers to already.
    """

    def __init__(self, run: Path, sketch: SketchBlock, data: DataManifest, *, written: int) -> None:
        self._run = run
        self._data = data
        self._dim = sketch.dim
        self._width = sketch.dim * len(sketch.forms)
        self._shards = ShardWriter(run, self._width, written=written)
        self._salts, self._step_salts = Salts(run), StepSaltWriter(run)

    def check(self, entry: StepEntry) -> None:
        """Refuse a step whose parts do not fit together.

        Raises:
            UsageError: If an array has the wrong shape, or a sample index is not in the manifest.
        """
        n, step = len(entry.records), entry.body["step"]
        expected = {"index": (n,), "sketches": (n, self._width), "gradient": (self._width,)}
        for name, shape in expected.items():
            array = getattr(entry, name)
            if array is not None and array.shape != shape:
                raise UsageError(f"step {step}: {name} has shape {array.shape}, expected {shape}")
        if entry.records.dtype != RECORD:
            raise UsageError(f"step {step}: records must have the dtype RECORD")
        outside = (entry.index < 0) | (entry.index >= self._data.rows)
        if outside.any():
            raise UsageError(
                f"step {step}: sample_index {int(entry.index[outside][0])} is outside the data manifest, which has "
                f"{self._data.rows} rows"
            )

    def write(self, entry: StepEntry, attempt: int) -> tuple[NDArray[np.void], dict[str, Any] | None]:
        """Write the step's sketches and return its records and its gradient block, complete but for ``seq``.

        Raises:
            StoreError: If the disk refuses, or a salt is missing.
        """
        sketches = entry.sketches if entry.gradient is None else np.vstack([entry.sketches, entry.gradient[None]])
        places = self._shards.append(np.ascontiguousarray(sketches, np.int8))
        n = len(entry.records)
        rows = canonical_floats(entry.records.copy())
        rows["fmt"], rows["attempt"], rows["ts_us"] = FORMAT_VERSION, attempt, now_us()
        rows["shard"], rows["shard_row"] = places.shard[:n], places.row[:n]
        scales = zip(rows["scale_raw"].tolist(), rows["scale_whitened"].tolist(), strict=True)
        samples, committed = [], []
        for index, own, sketch in zip(entry.index.tolist(), scales, sketches, strict=False):
            salt = self._salt(index)
            samples.append(sample_commitment(salt, self._data.identity(index)))
            committed.append(sketch_commitment(salt, *own, *self._forms(sketch)))
        if n:
            rows["sample_commit"] = np.frombuffer(b"".join(samples), "V32")
            rows["sketch_commit"] = np.frombuffer(b"".join(committed), "V32")
        if entry.gradient is None:
            return rows, None
        raw, whitened = float(np.float32(entry.gradient_scales[0])), float(np.float32(entry.gradient_scales[1]))
        salt = self._step_salts.make(int(places.shard[n]) * SHARD_ROWS + int(places.row[n]))
        commitment = gradient_commitment(salt, raw, whitened, *self._forms(entry.gradient))
        return rows, {
            "shard": int(places.shard[n]),
            "row": int(places.row[n]),
            "scale_raw": finite(raw),
            "scale_whitened": finite(whitened),
            "commitment": commitment.hex(),
        }

    def sync(self) -> None:
        """Wait until every sketch is on the disk."""
        self._shards.sync()
        self._step_salts.sync()

    def close(self, *, cut: bool) -> None:
        """Sync and close; with ``cut`` the last shard is shortened to the rows it has."""
        self._shards.close(cut=cut)
        self._step_salts.close()

    def _forms(self, sketch: NDArray[np.int8]) -> tuple[bytes, bytes]:
        """Return a row's raw and whitened bytes; the whitened half has no length in a raw-only run."""
        return sketch[: self._dim].tobytes(), sketch[self._dim :].tobytes()

    def _salt(self, index: int) -> bytes:
        salt = self._salts.salt(index)
        if salt is None:
            raise StoreError(f"{self._run / SALTS}: no salt for sample {index}")
        return salt
