"""What a report is about: verified evidence, what people declared, and the register, with the words they share."""

from __future__ import annotations

from dataclasses import dataclass

from reports.coverage import Coverage, rate_all
from reports.declarations import Declarations
from reports.document import Fact, declared_by
from reports.evidence import Evidence
from reports.obligations import Register
from reports.text import shorten

ROLE_NOT_DECLARED = "Role not declared: obligation mapping not applied"
NOT_DECLARED = "not declared"
OPEN = "open human input"


@dataclass(frozen=True)
class Subject:
    """The three inputs of every section, and the report's own identity."""

    evidence: Evidence
    declarations: Declarations
    register: Register
    report_id: str
    evidence_sha256: str
    created_us: int

    @property
    def mapped_roles(self) -> tuple[str, ...]:
        """Roles whose duties are mapped; empty until role, basis, person and date are declared."""
        return self.declarations.roles if self.declarations.role_declared else ()

    @property
    def declared_tag(self) -> str:
        """The tag of everything from the declarations file."""
        return declared_by(shorten(self.declarations.declared_by or "an unnamed person", 60))

    def coverage(self, role: str) -> tuple[Coverage, ...]:
        """Rate the duties of one role; empty if that role is not declared."""
        if role not in self.mapped_roles:
            return ()
        return rate_all(self.register.of_role(role), self.evidence.available())

    def declared(self, label: str, value: object | None) -> Fact:
        """Return a declared value, or the same line as an open human input."""
        if value is None or value == "":
            return Fact(label, NOT_DECLARED, OPEN)
        return Fact(label, shorten(str(value), 400), self.declared_tag)

    def statement(self, name: str) -> Fact:
        """Return one of the register's human inputs, declared or open."""
        label = self.register.human_input[name]
        return self.declared(label[0].upper() + label[1:], self.declarations.statements.get(name))

    def statements(self, *names: str) -> tuple[Fact, ...]:
        """Return human inputs: a line for each that was declared, and one for all that are open."""
        lacking = [name for name in names if name not in self.declarations.statements]
        said = [self.statement(name) for name in names if name not in lacking]
        if lacking:
            said.append(Fact("Not declared", " · ".join(self.register.human_input[name] for name in lacking), OPEN))
        return tuple(said)

    def open_inputs(self, role: str) -> tuple[str, ...]:
        """Return what people still have to say for the duties of one role, each input once."""
        if role not in self.mapped_roles:
            return ()
        names = [name for obligation in self.register.of_role(role) for name in obligation.human_input]
        lacking = dict.fromkeys(name for name in names if name not in self.declarations.statements)
        return tuple(self.register.human_input[name] for name in lacking)
