"""The document: its sections, its wording, and that strings of others stay strings."""

from __future__ import annotations

import dataclasses
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest

from auditlog.format.tracking import Untracked
from reports import render
from reports.art26 import assemble
from reports.document import Document, Fact, Facts, Notice, Table
from reports.errors import RenderError
from reports.evidence import Evidence, NoticeFacts
from reports.obligations import load_register
from reports.render import render_html, templates_folder
from reports.sections.exceptions import exceptions
from reports.sections.subject import OPEN, ROLE_NOT_DECLARED, Subject
from tests.unit.reports.report_samples import (
    MANIFEST,
    make_declarations,
    make_evidence,
    make_influence,
    make_sources,
    make_subject,
    make_tracking,
)

REPOSITORY = Path(__file__).parents[3]

FORBIDDEN = (
    "compliant",
    "compliance",
    "certify",
    "certifies",
    "certified(?! by the pinned key)",
    r"\bconforms?\b",
    r"\bmeets? Art",
    r"\bpassed\b",
    "audit-proof",
    "court-proof",
    "legally valid",
    "tamper",
    "immutable",
    "non-repudiable",
    "complete log",
    "caused by",
    "because of",
    "responsible sample",
    "reason for the decision",
    "explains the decision",
    "unbiased",
    "free of errors",
    "erased under",
    "forgotten",
    "anonymised",
    "qualified time stamp",
    "Article 12 retention",
    r"12\(4\)",
    "backstop",
    "aligned with",
    "✓",
    "✔",
    "✅",
)

STANDING = (
    "This document records facts held in the evidence ledger. It is not a conformity assessment, EU declaration of "
    "conformity, legal opinion or statutory audit.",
    "Integrity verification shows that recorded entries were not changed after recording or anchoring. It does not "
    "show that they were true or that everything was recorded.",
    "Law as at 1 December 2026: Regulation (EU) 2024/1689 as amended by Regulation (EU) 2026/1744.",
    "Influence scores are estimates with the validity reported in section 12.",
    "Article 26 does not require training-data lineage. Sections 11 and 12 support provider duties under Articles 10, "
    "11 and 18 and are included because the deployer may need them for paragraphs 5, 9 and 12.",
    "Erasure from evidence storage does not remove influence from trained weights.",
)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def parse(html: str) -> _Text:
    parser = _Text()
    parser.feed(re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL))
    return parser


def text_of(subject: Subject) -> str:
    return " ".join(" ".join(parse(render_html(assemble(subject))).parts).split())


def forbidden_in(text: str) -> list[str]:
    return [pattern for pattern in FORBIDDEN if re.search(pattern, text, re.IGNORECASE)]


def facts_of(document: Document) -> list[Fact]:
    blocks = [block for section in document.sections for block in section.blocks]
    return [*document.cover.facts, *(fact for block in blocks if isinstance(block, Facts) for fact in block.facts)]


VARIANTS = {
    "plain": make_subject(),
    "nothing declared": make_subject(declarations=make_declarations(roles=(), statements={})),
    "deployer only": make_subject(declarations=make_declarations(roles=("deployer",))),
    "no query": make_subject(make_evidence(influence=None, custody=(), custody_head=None)),
    "specific answer": make_subject(make_evidence(influence=make_influence(specific=True))),
}

variants = pytest.mark.parametrize("subject", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_sections_stand_in_the_prescribed_order(subject: Subject) -> None:
    numbers = [section.number for section in assemble(subject).sections]
    assert numbers == [*map(str, range(1, 16)), "A", "B", "C", "D"]


@variants
def test_no_forbidden_word_is_printed(subject: Subject) -> None:
    assert forbidden_in(text_of(subject)) == []


@variants
def test_standing_sentences_are_printed(subject: Subject) -> None:
    text = text_of(subject)
    assert [sentence for sentence in STANDING if sentence not in text] == []


@variants
def test_every_fact_is_tagged(subject: Subject) -> None:
    tags = {fact.tag for fact in facts_of(assemble(subject))}
    known = {"measured", "recorded", "estimated", OPEN}
    assert all(tag in known or tag.startswith("declared by ") for tag in tags)


def test_each_declared_statement_is_printed_once() -> None:
    said = {name: f"statement about {name}" for name in load_register().human_input}
    subject = make_subject(declarations=make_declarations(statements=said))
    values = [fact.value for fact in facts_of(assemble(subject))]
    assert [text for text in said.values() if values.count(text) != 1] == []


@variants
def test_column_widths_add_up(subject: Subject) -> None:
    tables = [b for s in assemble(subject).sections for b in s.blocks if isinstance(b, Table)]
    assert {round(sum(column.width for column in table.columns)) for table in tables} == {100}
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


def test_the_cover_names_role_and_classification() -> None:
    cover = assemble(make_subject()).cover
    assert "provider and deployer" in cover.role
    assert "Annex III point 5(b)" in cover.role


def test_without_a_role_nothing_is_mapped() -> None:
    document = assemble(VARIANTS["nothing declared"])
    assert document.cover.role == ROLE_NOT_DECLARED
    article_26 = document.sections[4]
    assert [type(block) for block in article_26.blocks] == [Notice]
    assert "Provider duties" not in text_of(VARIANTS["nothing declared"])


def test_a_training_log_supports_no_log_retention() -> None:
    table = next(block for block in assemble(make_subject()).sections[4].blocks if isinstance(block, Table))
    row = next(row for row in table.rows if row[0].startswith("26(6)"))
    assert row[-1] == "none"
    assert row[1].startswith("Context only: ")


def test_exceptions_come_before_everything_else_in_the_summary() -> None:
    summary = assemble(make_subject()).sections[3]
    assert [block.level for block in summary.blocks[:2]] == ["exception", "open"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verification": {"abandoned": True}}, "abandoned"),
        ({"verification": {"attempts": 3}}, "3 attempts"),
        ({"records": {"superseded": 8}}, "8 records of steps that a later attempt went back behind"),
        ({"verification": {"kept_heads": ()}}, "nothing here binds the operator"),
        ({"records": {"flags": {"NOT_FINITE": 2}}}, "2 records with a loss or gradient that is not finite"),
        ({"steps": {"residual_max": 3e-3, "residual_max_step": 41}}, "0.003 at step 41"),
        ({"steps": {"residual_max": None}}, "completeness of the steps was not measured"),
        ({"steps": {"skipped": 1}}, "1 optimizer step skipped"),
        ({"model": {"values": ()}}, "base model is not identified"),
        ({"influence": {"answered": "approve"}}, "not the “deny” asked about"),
    ],
)
def test_what_departs_from_the_plain_case_is_an_exception(change: dict, words: str) -> None:
    plain = make_evidence()
    ((name, values),) = change.items()
    changed = plain.model_copy(update={name: getattr(plain, name).model_copy(update=values)})
    assert not any(words in sentence for sentence in exceptions(plain))
    assert any(words in sentence for sentence in exceptions(changed))


def test_a_missing_query_and_dirty_files_are_exceptions() -> None:
    assert any("No influence query" in sentence for sentence in exceptions(make_evidence(influence=None)))
    first, *others = make_sources()
    dirty = make_evidence(sources=(first.model_copy(update={"dirty": True}), *others))
    assert any("1 source file differed" in sentence for sentence in exceptions(dirty))


def test_an_answer_that_is_not_specific_says_so_in_plain_words() -> None:
    assert "The influence answer is not specific to the case" in text_of(VARIANTS["plain"])
    assert "The influence answer is not specific to the case" not in text_of(VARIANTS["specific answer"])


def test_texts_of_people_are_not_printed() -> None:
    evidence = make_evidence()
    for text in (text_of(make_subject(evidence)), evidence.model_dump_json()):
        assert "secret" not in text
        assert "Applicant" not in text


HOSTILE = '<script>alert(1)</script><img src="file:///etc/passwd">{{ 7*7 }}</style>&amp;"\'\u202e' + "W" * 4_000


def hostile_evidence() -> Evidence:
    sources = tuple(s.model_copy(update={"path": HOSTILE, "version": HOSTILE}) for s in make_sources())
    influence = make_influence(path=HOSTILE)
    statement = influence.specificity.model_copy(update={"statement": HOSTILE})
    plain = make_evidence()
    values = ((HOSTILE[:200], HOSTILE),)
    return make_evidence(
        sources=sources,
        data_description=HOSTILE,
        influence=influence.model_copy(
            update={
                "case_label": HOSTILE,
                "target": HOSTILE,
                "answered": HOSTILE,
                "specificity": statement,
                "limits": (HOSTILE,),
            }
        ),
        verification=plain.verification.model_copy(
            update={"origin": HOSTILE, "run_id": HOSTILE, "notes": (HOSTILE,), "not_checked": (HOSTILE,)}
        ),
        training=plain.training.model_copy(update={"values": values}),
        purpose=plain.purpose.model_copy(update={"values": values}),
        notices=(NoticeFacts(ref=MANIFEST, text=HOSTILE),),
        losses=(NoticeFacts(ref=MANIFEST, text=HOSTILE),),
        tracking=make_tracking(
            mode=HOSTILE, routes=((HOSTILE, 1),), untracked=(Untracked(HOSTILE, 1, HOSTILE),), tracked_entries=1
        ),
        final_note=HOSTILE,
    )


def hostile_subject() -> Subject:
    system = make_declarations().system.model_copy(
        update={"name": HOSTILE, "version": HOSTILE, "intended_purpose": HOSTILE}
    )
    declared = make_declarations(declared_by=HOSTILE, system=system, statements={"dpia": HOSTILE}, provider=HOSTILE)
    return make_subject(hostile_evidence(), declared)


def test_strings_of_others_never_become_markup() -> None:
    parsed = parse(render_html(assemble(hostile_subject())))
    text = "".join(parsed.parts)
    assert not parsed.tags & {"script", "img", "image", "link", "object", "iframe"}
    assert "<script>alert(1)</script>" in text
    assert "{{ 7*7 }}" in text
    assert "\u202e" not in text
    assert "⟨U+202E⟩" in text


def test_the_page_refers_to_nothing_outside_itself() -> None:
    html = render_html(assemble(make_subject()))
    addresses = re.findall(r"(?:src|href)\s*=\s*[\"']([^\"']*)|url\(([^)]*)\)|@import", html)
    assert all(found[0].startswith("#") for found in addresses)


def test_an_undefined_name_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in templates_folder().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "report.html.j2").write_text("{{ document.no_such_field }}")
    monkeypatch.setattr("reports.render.templates_folder", lambda: tmp_path)
    with pytest.raises(RenderError, match="no_such_field"):
        render_html(assemble(make_subject()))
    (tmp_path / "report.html.j2").write_text("{% if %}")
    with pytest.raises(RenderError, match=r"report\.html\.j2, line 1"):
        render_html(assemble(make_subject()))


def test_templates_are_found_in_a_wheel_and_in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert templates_folder() == REPOSITORY / "templates"
    monkeypatch.setattr(render, "__file__", str(tmp_path / "site-packages" / "reports" / "render.py"))
    with pytest.raises(RenderError, match="templates are missing"):
        templates_folder()
    inside = tmp_path / "site-packages" / "reports" / "templates"
    shutil.copytree(REPOSITORY / "templates", inside)
    assert templates_folder() == inside.resolve()


def test_the_document_is_a_function_of_its_subject() -> None:
    assert assemble(make_subject()) == assemble(make_subject())
    assert dataclasses.is_dataclass(assemble(make_subject()))


def test_templates_escape_whatever_their_ending() -> None:
    environment = jinja2.Environment(autoescape=True)
    assert environment.from_string("{{ x }}").render(x="<b>") == "&lt;b&gt;"
    assert "|safe" not in "".join(path.read_text() for path in templates_folder().iterdir()).replace(" ", "")
