"""The demo's whole story, with a tiny random model and a synthetic table in place of the large inputs."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hmda import SENTINEL, make_csv
from rich.console import Console
from tiny import VOCABULARY, tiny_llama

from attribution.demo import data, evaluate, model, overhead, recipe, story
from attribution.demo.stage import Stage, typed
from attribution.errors import AttributionError
from auditlog.errors import UsageError
from auditlog.ledger.custody import read_custody

pytestmark = pytest.mark.slow


class WordTokenizer:
    """Splits at blanks; a word's id is a sum over its letters. Just enough of a tokenizer's interface."""

    pad_token_id, eos_token_id = 0, 1

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [2 + sum(map(ord, word)) % (VOCABULARY - 2) for word in text.split()]}

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"<{i}>" for i in ids)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the two packages' contents, and shorten what only takes time."""
    base = model.BaseModel(tmp_path / "cache", "tiny.gguf", "0" * 64)
    monkeypatch.setattr(data, "read_csv", lambda: make_csv(200))
    monkeypatch.setattr(data, "HELD_OUT_ROWS", 60)
    monkeypatch.setattr(model, "cached_base", lambda: base)
    monkeypatch.setattr(model, "load_base", lambda base: (tiny_llama(), WordTokenizer()))
    monkeypatch.setattr(overhead, "MAX_PAIRS", 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "demo"


@pytest.fixture
def transcript() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def stage(transcript: io.StringIO) -> Stage:
    return Stage(Console(file=transcript, width=110, highlight=False))


def test_the_story_ends_well_and_nothing_of_the_dropped_column_is_on_disk(
    small: Path, stage: Stage, transcript: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    story.run_demo(small, stage=stage)
    told, commands = transcript.getvalue(), capfd.readouterr().out
    # verify; report; edit, verify; cut, verify
    assert re.findall(r"^→ exit (\d+), as it should be$", told, re.MULTILINE) == ["0", "0", "0", "4", "0", "5"]
    assert [word for word in ("VERIFIED", "INTEGRITY", "INCOMPLETE") if word not in commands] == []
    edited = re.search(r"Entry (\d+) \(step", told)
    assert edited is not None
    assert re.search(rf"\b{edited[1]}\b", commands[commands.index("INTEGRITY") :])  # verify names that row
    for number in range(1, 8):
        assert f"{number}/7" in told
    assert "other cases" in told
    assert (small / "report-art26.pdf").read_bytes().startswith(b"%PDF")
    assert len(read_custody(small / "runs" / "credit")) == 3  # opened, query, report
    written = b"".join(path.read_bytes() for path in small.rglob("*") if path.is_file())
    assert SENTINEL not in written
    assert b"black" not in written


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path: Path, stage: Stage) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a demo's folder"):
        story.run_demo(tmp_path, force=True, stage=stage)
    assert (tmp_path / "thesis.tex").exists()


def test_left_padding_changes_no_log_odds(small: Path) -> None:
    rows = list(data.write_split(data.parse(make_csv(200)), small, held_out_rows=60).held_out)
    for length, row in enumerate(rows):
        row["prompt"] = " ".join(row["prompt"].split()[: 5 + length % 20])
    tokenizer: Any = WordTokenizer()
    net = recipe.assemble(tiny_llama(), tokenizer, None).model
    together = evaluate.log_odds(net, tokenizer, rows)
    alone = [evaluate.log_odds(net, tokenizer, [row])[0] for row in rows]
    assert together == pytest.approx(alone, abs=1e-5)


def test_a_verdict_other_than_the_story_needs_stops_the_demo(
    tmp_path: Path, stage: Stage, transcript: io.StringIO
) -> None:
    with pytest.raises(AttributionError, match="ended with exit 3, the demo expected 0"):
        stage.command("gradtrail", "verify", tmp_path / "no-such-run")
    assert "→ exit 3, but 0 was expected" in transcript.getvalue()


def test_commands_are_printed_as_one_would_type_them() -> None:
    assert typed([sys.executable, "-c", "f('x y')"]) == "python -c \"f('x y')\""
    assert typed(["gradtrail", "verify", "a run"]) == "gradtrail verify 'a run'"
    assert typed(["sh", "-c", "it's $HOME"]) == """sh -c 'it'"'"'s $HOME'"""
