"""The run manifest: who trains what, on which data, with which sketch. Hashed before anything else.

Its canonical JSON bytes are the genesis of the chain, so nothing in it can change without every later value
changing too. Blocks that the log does not interpret (model, training, environment) are plain JSON.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from auditlog.errors import FormatError
from auditlog.format.canonical import canonical_bytes, parse_canonical
from auditlog.format.records import FORMAT_VERSION

Hex32 = Field(pattern=r"^[0-9a-f]{64}$")


class Frozen(BaseModel):
    """Base of every document that is hashed: immutable, strict, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


SourceFormat = Literal[
    "jsonl", "jsonl.gz", "csv", "csv.gz", "tsv", "tsv.gz", "text", "text.gz", "parquet", "arrow", "dataset"
]


class Source(Frozen):
    """One source file. ``first_index`` is the sample index of its row 0.

    ``sha256`` is over the file as it lies on the disk, so a file that was packed again has another one.
    ``content_sha256`` is over the values of its rows in order, whatever they are packed in. A ``dataset`` is a table
    in memory and no file: there both are the same.
    """

    source_id: int = Field(ge=0)
    path: str
    format: SourceFormat
    sha256: str = Hex32
    size_bytes: int = Field(ge=0)
    content_sha256: str = Hex32
    rows: int = Field(ge=1)
    first_index: int = Field(ge=0)
    data_version_id: int = Field(ge=0)
    link: str | None = None  # where the path really leads, where it is or passes a symbolic link


class VersionedFile(Frozen):
    """A file as the version system itself names it."""

    path: str
    digest: str | None = None  # "md5:<hex>" or "sha256:<hex>"
    size_bytes: int | None = None


class DataVersion(Frozen):
    """Which version of the data the source files belong to.

    ``root`` is the SHA-256 over the source digests in order, so it names the content whatever ``revision`` says.
    ``git`` and ``dvc`` were compared with the files. ``label``, ``lakefs`` and ``hub`` are what the operator
    declared: nobody asked the server, and only the digests speak about the content.
    """

    data_version_id: int = Field(ge=0)
    kind: Literal["files", "git", "dvc", "label", "lakefs", "hub"]
    revision: str
    dirty: bool | None = None  # git and dvc: files differ from the revision; null if that cannot be told
    root: str = Hex32
    files: tuple[VersionedFile, ...] = ()  # dvc: its pointers; hub: downloads that the loader recorded


class DataBlock(Frozen):
    """The data as the run saw it. Symbolic links were followed inside the folder that paths start from, never out."""

    description: str = ""
    text_fields: tuple[str, ...] = ()
    links: Literal["inside"] = "inside"
    sources: tuple[Source, ...]
    versions: tuple[DataVersion, ...]
    rows: int = Field(ge=1)


class SketchParameter(Frozen):
    """One trainable parameter and where its entries land in the sketch.

    ``buckets``: a large weight's rows and columns are folded into so many first; null where every entry has its own
    sign.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    buckets: tuple[int, int] | None = None


class SketchBlock(Frozen):
    """What the sketches are: the linear map, its size, and the digest of its random tables."""

    kind: Literal["rolled-sign-fold"]
    dim: int = Field(ge=1)
    forms: tuple[Literal["raw", "whitened"], ...]
    seed: str
    tables_sha256: str = Hex32
    route: Literal["exact", "factored"]  # factored: at least one parameter has buckets of its own
    parameters: tuple[SketchParameter, ...]


class RunManifest(Frozen):
    """Everything that is known before step 1."""

    format: Literal["gradtrail/run"] = "gradtrail/run"
    fmt: Literal[0] = FORMAT_VERSION
    run_id: str
    origin: str
    created_us: int
    rank: int = 0
    world_size: int = 1
    vkey: str  # the long-lived key that certifies sessions and the seal; trusted only if pinned from outside
    data: DataBlock
    sketch: SketchBlock
    model: dict[str, Any]  # name, architecture, digests of the base weights' files
    tracking: dict[str, Any]  # trainable, tracked and untracked parameters by name and count
    training: dict[str, Any]  # optimizer, arguments, planned steps
    recipe: dict[str, Any] | None = None  # function, file and digest that rebuild model and data
    purpose: dict[str, Any] = {}  # what the operator declares: system, use, role
    environment: dict[str, Any]  # Python, packages, platform, code revision

    def to_bytes(self) -> bytes:
        """Return the canonical JSON bytes: what is hashed, stored and signed."""
        return canonical_bytes(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes) -> RunManifest:
        """Parse canonical bytes.

        Raises:
            FormatError: If they are not canonical JSON of a run manifest of a known format version.
        """
        try:
            parse_canonical(data)
        except FormatError as error:
            raise FormatError(
                f"manifest.json: {error}", "Restore the file; every hash of the log starts from its bytes."
            ) from error
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise FormatError(f"manifest.json: {where}: {first['msg']}") from error
