"""What people declare: role, classification and everything that no log can hold.

A declaration is printed beside the recorded facts and never mixed with them: it is tagged with who said it, and
it never raises a rating.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reports.errors import DeclarationError
from reports.obligations import Register

Role = Literal["provider", "deployer"]


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class System(_Declared):
    """The AI system that the trained model is part of."""

    name: str | None = None
    version: str | None = None
    intended_purpose: str | None = None


class Classification(_Declared):
    """Why the system is taken to be high-risk, or not."""

    basis: str | None = None
    decided_by: str | None = None
    decided_on: datetime.date | None = None


class Declarations(_Declared):
    """The whole of ``declarations.yaml``. Whatever is left out is printed as an open human input."""

    declared_by: str | None = None
    declared_on: datetime.date | None = None
    system: System = System()
    provider: str | None = None
    deployer: str | None = None
    roles: tuple[Role, ...] = ()
    classification: Classification = Classification()
    statements: dict[str, str] = Field(default={}, description="by the names of the register's human inputs")

    @property
    def role_declared(self) -> bool:
        """Whether obligations may be mapped at all: a role, its basis, and who declared them when."""
        return bool(self.roles and self.classification.basis and self.declared_by and self.declared_on)


def load_declarations(path: Path, register: Register) -> Declarations:
    """Read a declarations file.

    Raises:
        DeclarationError: If it cannot be read, is not YAML, or has a field or statement that nobody asked for.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError(f"{path}: {error.strerror}", "Give the path of a declarations.yaml.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise DeclarationError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    try:
        declarations = Declarations.model_validate(content or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise DeclarationError(f"{path}: {where}: {first['msg']}") from error
    unknown = sorted(set(declarations.statements) - set(register.human_input))
    if unknown:
        known = ", ".join(sorted(register.human_input))
        raise DeclarationError(f"{path}: statements.{unknown[0]}: no such statement", f"Known names: {known}.")
    return declarations
