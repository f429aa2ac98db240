"""``gradtrail query`` on a run that an example wrote: with and without a key, and what it refuses."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attribution.cli import app
from auditlog.errors import DataError, Error, UsageError
from auditlog.format.records import EventKind
from auditlog.ledger.custody import read_custody
from auditlog.trust.keys import Signer

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = ("--prompt", "income 42, answer:", "--target", "yes", "--against", "no")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "argv", ["01_plain_loop.py", str(tmp_path)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "01_plain_loop.py"))
    return tmp_path


def others(folder: Path, lines: list[str] | None = None) -> str:
    path = folder / "others.jsonl"
    path.write_text("\n".join(lines or [json.dumps({"prompt": f"income {n}, answer:"}) for n in range(20, 100, 10)]))
    return str(path)


def ask(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["query", str(folder / "run"), *options])


@pytest.mark.slow
def test_without_a_key_the_answer_is_printed_and_not_logged(folder: Path) -> None:
    result = ask(folder, *ASKED, "--reference", others(folder), "--data", str(folder / "data"))
    assert result.exit_code == 0, result.exception
    assert "not logged: no --key was given" in result.output
    assert "branch-a.jsonl" in result.output
    assert "8 other cases" in result.output
    assert not (folder / "run" / "custody").exists()


@pytest.mark.slow
def test_with_a_key_it_is_logged_once_per_question(folder: Path) -> None:
    secret = folder / "passphrase.txt"
    secret.touch(mode=0o600)
    secret.write_text("a passphrase\n")
    Signer.generate("bank.example/asker").save(folder / "asker.p12", "a passphrase")
    for number in (1, 2):
        done = ask(folder, *ASKED, "--json", "--key", str(folder / "asker.p12"), "--passphrase-file", str(secret))
        document = json.loads(done.output)
        assert document["logged"] == f"results/query-{number}.json"
        assert document["specificity"]["specific"] is None  # no other cases were given
        assert document["top"]["for"][0]["preview"] == ""
    kinds = [event.kind for event in read_custody(folder / "run")]
    assert kinds == [EventKind.CUSTODY_OPENED, EventKind.QUERY, EventKind.QUERY]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (("--target", "yes", "--against", "no"), UsageError, "give the prompt once"),
        ((*ASKED, "--prompt-file", "x"), UsageError, "give the prompt once"),
        (("--prompt-file", "nowhere.txt", "--target", "a", "--against", "b"), UsageError, "nowhere.txt"),
    ],
)
def test_a_question_without_one_prompt_is_refused(
    tmp_path: Path, options: tuple[str, ...], kind: type[Error], message: str
) -> None:
    error = ask(tmp_path, *options).exception
    assert isinstance(error, kind)
    assert message in str(error)


@pytest.mark.parametrize(
    ("line", "message"), [("{not json", "line 1: not JSON"), ('{"text": "x"}', "line 1: no text in field 'prompt'")]
)
def test_a_bad_line_among_the_other_cases_is_named(tmp_path: Path, line: str, message: str) -> None:
    error = ask(tmp_path, *ASKED, "--reference", others(tmp_path, [line])).exception
    assert isinstance(error, DataError)
    assert message in str(error)
