"""A resumed run is scored by what led to its final weights: a sum by hand over the live records is the reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from attribution.influence import query
from attribution.influence.query import Answer, Question
from auditlog.ledger.reader import RunReader
from tests.support import LedgerSimulator, Plan, simulated_steps

PLAN = Plan(steps=6, per_step=4)
AGAIN = Plan(steps=6, per_step=3, seed=9)
QUESTION = Question("who", " this", " that")


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LedgerSimulator:
    """Six steps, then steps 4 to 6 again with other batches and other clip factors."""
    sketch = np.random.default_rng(2).normal(size=PLAN.dim).astype(np.float32)
    monkeypatch.setattr(query.SketchLayout, "from_block", lambda block: SimpleNamespace(dim=block.dim))
    monkeypatch.setattr(query, "query_sketch", lambda *arguments: (sketch, Answer("this", 0.0, 0.5, 0.5)))
    sim = LedgerSimulator(tmp_path / "one", PLAN)
    ledger, data = sim.start()
    for entry in simulated_steps(data, PLAN):
        ledger.append_step(entry)
    ledger.begin_attempt(3)
    for entry in list(simulated_steps(data, AGAIN))[3:]:
        ledger.append_step(entry)
    ledger.seal({})
    return sim


def test_superseded_records_do_not_score_and_are_counted(sim: LedgerSimulator) -> None:
    with RunReader.open(sim.run) as reader:
        result = query.ask(reader, None, None, QUESTION)  # type: ignore[arg-type]
        records = reader.records()
        (sketches,) = (block.raw.astype(np.float64) for block in reader.sketches().blocks())
    z = np.random.default_rng(2).normal(size=PLAN.dim).astype(np.float32).astype(np.float64)
    totals, live = np.zeros(2), 0
    for record, q in zip(records, sketches, strict=True):
        attempt, step = int(record["attempt"]), int(record["step"])
        if attempt == 1 and step > 3:
            continue
        live += 1
        f = 0.5 if step % 3 == 0 else 1.0
        totals[record["source_id"]] -= 1e-3 * f * float(record["weight"]) * float(record["scale_raw"]) * (q @ z)
    assert (result.n_records, live) == (21, 21)
    np.testing.assert_allclose([source.total for source in result.sources], totals, rtol=1e-4)
    assert any(text.startswith("12 records are left out") for text in result.limits)


def test_a_run_without_a_resume_says_nothing_about_superseded_records(sim: LedgerSimulator, tmp_path: Path) -> None:
    plain = LedgerSimulator(tmp_path / "plain", PLAN).write()
    with RunReader.open(plain.run) as reader:
        result = query.ask(reader, None, None, QUESTION)  # type: ignore[arg-type]
    assert result.n_records == 24
    assert not any("left out" in text and "records are" in text for text in result.limits)
