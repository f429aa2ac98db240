"""Declarations: what is said is tagged with who said it, what is unknown is refused, what is missing is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.declarations import Declarations, load_declarations
from reports.errors import DeclarationError
from reports.obligations import load_register
from reports.sections.subject import OPEN
from tests.unit.reports.report_samples import make_declarations, make_subject

REGISTER = load_register()

GOOD = """
declared_by: Credit Models, Example Bank
declared_on: 2026-12-01
system: {name: Assistant, version: "0.1"}
provider: Example Bank
deployer: Example Bank
roles: [provider, deployer]
classification: {basis: "Annex III point 5(b)"}
statements: {monitoring_plan: "Weekly review, plan 7"}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "declarations.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_good_file_is_read(tmp_path: Path) -> None:
    declared = load_declarations(write(tmp_path, GOOD), REGISTER)
    assert declared.role_declared
    assert declared.roles == ("provider", "deployer")
    assert declared.statements == {"monitoring_plan": "Weekly review, plan 7"}


def test_an_empty_file_leaves_everything_open(tmp_path: Path) -> None:
    assert load_declarations(write(tmp_path, ""), REGISTER) == Declarations()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("roles: [importer]", "roles.0"),
        ("system: {nmae: x}", "system.nmae"),
        ("statements: {monitring_plan: x}", "monitring_plan"),
        ("declared_on: soon", "declared_on"),
        ("a: [1", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("- a list", "document"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(DeclarationError, match=named.replace(".", r"\.")):
        load_declarations(write(tmp_path, text), REGISTER)


def test_a_missing_or_binary_file_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="No such file"):
        load_declarations(tmp_path / "none.yaml", REGISTER)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeclarationError, match="not YAML"):
        load_declarations(tmp_path / "binary.yaml", REGISTER)


@pytest.mark.parametrize("missing", ["declared_by", "declared_on", "roles", "classification"])
def test_without_role_basis_person_or_date_no_duty_is_mapped(missing: str) -> None:
    complete = make_declarations()
    assert make_subject(declarations=complete).mapped_roles == ("provider", "deployer")
    partly = complete.model_copy(update={missing: getattr(Declarations(), missing)})
    subject = make_subject(declarations=partly)
    assert subject.mapped_roles == ()
    assert subject.coverage("deployer") == ()


def test_statements_change_no_rating() -> None:
    everything = dict.fromkeys(REGISTER.human_input, "declared in full")
    silent = make_subject(declarations=make_declarations(statements={}))
    said = make_subject(declarations=make_declarations(statements=everything))
    for role in ("deployer", "provider"):
        assert [c.rating for c in silent.coverage(role)] == [c.rating for c in said.coverage(role)]
        assert said.open_inputs(role) == ()


def test_a_statement_carries_its_author_and_a_missing_one_is_open() -> None:
    subject = make_subject(declarations=make_declarations(statements={"dpia": "DPIA 12 of 3 May 2026"}))
    said, lacking = subject.statements("dpia", "dpo_consultation")
    assert (said.value, said.tag) == ("DPIA 12 of 3 May 2026", "declared by Credit Models, Example Bank")
    assert (lacking.value, lacking.tag) == (REGISTER.human_input["dpo_consultation"], OPEN)
