"""What may be reported: values read from a run that verified, each with the place where it stands.

``gather`` verifies first and reads afterwards; a run that does not verify against trust from outside yields no
evidence. The types are plain and frozen, and their JSON travels inside the PDF, so that a report can be made again.
Texts of people's records stay out: a row is named by file and number.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from auditlog.errors import FormatError
from auditlog.format.notices import SelfCheck
from auditlog.format.tracking import Tracking
from auditlog.ledger.attempt_steps import AttemptSteps
from auditlog.ledger.sample_use import Fate

RESULT_SCHEMA = "gradtrail/influence-result"
_WORDS = ("case_label", "target", "contrast", "answered")  # answers carry the space that follows a prompt
_CHANCES = ("log_odds", "p_target", "p_contrast")

Log = Literal["verification", "manifest", "run log", "custody log"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EvidenceRef(_Frozen):
    """Where a value stands: which log, and which entry or entries of it."""

    log: Log
    seq: int | None = None
    last_seq: int | None = None
    rank: int = 0  # whose log, where every process kept its own

    def __str__(self) -> str:
        log = f"{self.log} of rank {self.rank}" if self.rank else self.log
        if self.seq is None:
            return log
        if self.last_seq is not None and self.last_seq != self.seq:
            return f"{log}, entries {self.seq:,}–{self.last_seq:,}"
        return f"{log}, entry {self.seq:,}"


class _Sourced(_Frozen):
    ref: EvidenceRef


class CheckFacts(_Frozen):
    """One check of the verifier: what it looked at, and whether it held."""

    name: str
    status: Literal["passed", "failed", "not run"]
    detail: str


class Verification(_Sourced):
    """The verifier's result for the run log, and for the custody log where there is one."""

    origin: str
    run_id: str
    entries: int
    records: int
    steps: int
    attempts: int
    sealed: bool
    abandoned: bool
    root: str
    trust: str
    pinned_keys: tuple[str, ...]
    kept_heads: tuple[int, ...]  # tree sizes
    checks: tuple[CheckFacts, ...]
    notes: tuple[str, ...]
    not_checked: tuple[str, ...]


class SourceFacts(_Sourced):
    """One source file: as the manifest names it, and what training used of it."""

    source_id: int
    path: str
    format: str
    sha256: str
    rows: int
    version_kind: str
    version: str
    dirty: bool | None  # git and dvc: whether files differ from the version; None where that is not known
    uses: int
    tokens: int  # tokens that carried loss, over all uses


class RecordFacts(_Sourced):
    """All records that led to the final weights together, and how many others were logged."""

    records: int
    superseded: int = 0  # of steps that training later went back behind
    samples: int
    tokens: int
    epochs: int
    first_us: int
    last_us: int
    flags: dict[str, int]  # flag name to number of records, only those that occur


class SampleFacts(_Sourced):
    """The samples of one fate."""

    fate: Fate
    count: int
    by_source: tuple[int, ...] | None  # in the order of the sources; None where the log does not name them all
    first: tuple[tuple[int, int], ...]  # source and row of the first ones


class AttemptFacts(_Sourced):
    """One attempt of training: from where it went on, and what it logged."""

    steps: AttemptSteps


class SelfCheckFacts(_Sourced):
    """What a self-check before the first step found."""

    found: SelfCheck


class TrackingFacts(_Sourced):
    """How gradients were taken, and of which parameters none were."""

    found: Tracking


class StepFacts(_Sourced):
    """All step events together: extremes of what each step logged."""

    steps: int
    skipped: int
    loss_first: float | None
    loss_last: float | None
    residual_median: float | None
    residual_max: float | None
    residual_max_step: int | None
    factor_min: float | None  # f: consumed gradient over recorded sum; 1, or the clip factor
    factor_max: float | None
    clipped: int  # steps whose factor is below 1
    tracked_share_min: float | None


class Settings(_Sourced):
    """A block of the manifest as name and value, flattened; lists of files stay out."""

    values: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        """Return one value, or ``None``."""
        return dict(self.values).get(name)


class FileFacts(_Frozen):
    """One file by its digest."""

    name: str
    sha256: str
    size_bytes: int | None = None


class CheckpointFacts(_Sourced):
    """Saved weights."""

    path: str
    step: int
    files: tuple[FileFacts, ...]


class SessionFacts(_Sourced):
    """One attempt: the session key that the long-lived key certified."""

    attempt: int
    ts_us: int


class NoticeFacts(_Sourced):
    """What the recorder wanted to have said, or a loss that was accepted."""

    text: str


class CustodyFacts(_Sourced):
    """One act after the seal."""

    kind: str
    ts_us: int


class InfluenceRow(BaseModel):
    """One training record with its estimated influence. No text of it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rank: int
    source_id: int
    path: str
    row: int
    data_version: str
    uses: int
    cosine: float
    cosine_se: float
    score: float
    score_se: float
    loss_first: float | None
    loss_last: float | None
    above_floor: bool


class InfluenceSource(BaseModel):
    """Estimated influence of one source file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source_id: int
    path: str
    samples: int
    total: float
    se: float
    positive: float
    negative: float


class Agreement(BaseModel):
    """How alike the rankings of different cases are."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    spearman_mean: float | None  # None: too few other cases to compare with
    spearman_min: float | None
    spearman_max: float | None
    top10_overlap_mean: float | None  # share of the leading records on either side, 0 to 1


class Specificity(Agreement):
    """Whether the answer says something about this case, or the same about every case."""

    cases: int
    centred: Agreement
    specific: bool | None
    statement: str


class Influence(_Sourced):
    """The latest influence query of the custody log."""

    commitment: str
    queries: int  # query events in the custody log
    case_label: str
    target: str
    contrast: str
    answered: str
    log_odds: float
    p_target: float
    p_contrast: float
    estimator: str
    sketch_dim: int
    n_records: int
    n_samples: int
    noise_floor: float
    noise_alpha: float
    top_for: tuple[InfluenceRow, ...]
    top_against: tuple[InfluenceRow, ...]
    sources: tuple[InfluenceSource, ...]
    specificity: Specificity
    limits: tuple[str, ...]

    @classmethod
    def from_document(cls, document: dict[str, Any], *, ref: EvidenceRef, commitment: str, queries: int) -> Influence:
        """Read a result document as the query wrote it; the prompt and the rows' texts are left behind.

        Raises:
            FormatError: If it is not a result document of the known schema.
        """
        if document.get("schema") != RESULT_SCHEMA:
            raise FormatError(f"query result: schema is {document.get('schema')!r}, expected {RESULT_SCHEMA!r}")
        try:
            question, estimator, top = document["question"], document["estimator"], document["top"]
            return cls.model_validate(
                {
                    **{name: question[name].strip() for name in _WORDS},
                    **{name: question[name] for name in _CHANCES},
                    "estimator": estimator["name"],
                    **{name: estimator[name] for name in ("sketch_dim", "n_records", "n_samples")},
                    "noise_floor": document["noise_floor"]["cosine"],
                    "noise_alpha": document["noise_floor"]["alpha"],
                    "top_for": top["for"],
                    "top_against": top["against"],
                    **{name: document[name] for name in ("sources", "specificity", "limits")},
                    "ref": ref,
                    "commitment": commitment,
                    "queries": queries,
                }
            )
        except KeyError as error:
            raise FormatError(f"query result: {error} is missing") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise FormatError(f"query result: {where}: {first['msg']}") from error


class Evidence(_Frozen):
    """Everything that a report may draw on."""

    verification: Verification
    created_us: int  # of the manifest
    manifest_sha256: str
    vkey: str
    data_description: str
    purpose: Settings
    sources: tuple[SourceFacts, ...]
    samples: tuple[SampleFacts, ...]
    records: RecordFacts
    steps: StepFacts
    model: Settings
    tracking: TrackingFacts
    training: Settings
    environment: Settings
    sketch: Settings
    recipe_sha256: str | None
    checkpoints: tuple[CheckpointFacts, ...]
    sessions: tuple[SessionFacts, ...]
    attempts: tuple[AttemptFacts, ...]
    processes: int
    self_checks: tuple[SelfCheckFacts, ...]
    losses: tuple[NoticeFacts, ...]
    notices: tuple[NoticeFacts, ...]
    final_note: str
    custody: tuple[CustodyFacts, ...]
    custody_head: str | None
    influence: Influence | None

    def available(self) -> frozenset[str]:
        """Return the register's names of the evidence that is here.

        Kept heads are the verifier's own and count as no anchor; a training log is no log of the deployed system.
        """
        here = {
            "ledger_integrity": True,
            "timestamps": True,
            "operator_identity": bool(self.sessions),
            "data_lineage_table": bool(self.sources),
            "data_version": bool(self.sources),
            "dataset_statistics": bool(self.sources),
            "base_model_identity": self.model.get("frozen_sha256") is not None,
            "model_checkpoint_hash": bool(self.checkpoints),
            "run_configuration": bool(self.training.values),
            "hyperparameters": bool(self.training.values),
            "software_versions": bool(self.environment.values),
            "influence_top_k": self.influence is not None,
            "influence_by_source": self.influence is not None and bool(self.influence.sources),
            "influence_method_card": self.influence is not None and bool(self.influence.limits),
        }
        return frozenset(name for name, present in here.items() if present)


def flatten(block: dict[str, Any], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Return a JSON block as dotted names and printable values; lists of objects are left out."""
    found: list[tuple[str, str]] = []
    for key in sorted(block):
        value, name = block[key], f"{prefix}{key}"
        match value:
            case dict():
                found += flatten(value, f"{name}.")
            case [*items] if any(isinstance(item, dict) for item in items):
                continue
            case [*items]:
                found.append((name, ", ".join(_text(item) for item in items)))
            case None:
                continue
            case _:
                found.append((name, _text(value)))
    return tuple(found)


def _text(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case _:
            return str(value)
