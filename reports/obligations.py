"""The register of duties: what the law asks, which evidence touches it, and how high a rating may go.

The facts are in ``obligations.yaml``; this file reads and checks them. It rates nothing (see ``coverage``).
"""

from __future__ import annotations

import datetime
from functools import cache
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

Rating = Literal["none", "partial", "full"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LegalBasis(_Frozen):
    """Which wording of the law the register follows."""

    law: str
    consolidated: str
    as_at: datetime.date
    applies: str  # of every duty that does not say otherwise


class Obligation(_Frozen):
    """One duty. ``ceiling`` is the highest rating that a report may show for it."""

    id: str
    reference: str
    role: Literal["provider", "deployer"]
    title: str
    duty: str
    quote: str
    applies: str | None = None
    evidence: tuple[str, ...]
    requires: tuple[str, ...] = ()
    ceiling: Rating
    limit: str
    human_input: tuple[str, ...]


class Register(_Frozen):
    """All duties, and the words for evidence and human inputs that they use."""

    basis: LegalBasis
    evidence: dict[str, str]
    human_input: dict[str, str]
    obligations: tuple[Obligation, ...]

    @model_validator(mode="after")
    def _names_are_known(self) -> Register:
        ids = [obligation.id for obligation in self.obligations]
        if len(set(ids)) != len(ids):
            raise ValueError("an obligation id occurs twice")
        for obligation in self.obligations:
            unknown = {*obligation.evidence, *obligation.requires} - set(self.evidence)
            unknown |= set(obligation.human_input) - set(self.human_input)
            if unknown or not set(obligation.requires) <= set(obligation.evidence):
                raise ValueError(f"{obligation.id}: unknown or unlisted names {sorted(unknown)}")
        return self

    def __getitem__(self, obligation_id: str) -> Obligation:
        for obligation in self.obligations:
            if obligation.id == obligation_id:
                return obligation
        raise KeyError(obligation_id)

    def of_role(self, role: str) -> tuple[Obligation, ...]:
        """Return the duties of one role, in the register's order."""
        return tuple(obligation for obligation in self.obligations if obligation.role == role)


@cache
def load_register() -> Register:
    """Return the register that comes with this package."""
    content = resources.files("reports").joinpath("obligations.yaml").read_text(encoding="utf-8")
    return Register.model_validate(yaml.safe_load(content))
