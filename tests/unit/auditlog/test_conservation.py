"""Conservation from stored int8 rows, against sums made by hand in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from auditlog.ledger.conservation import recompute
from auditlog.ledger.reader import RunReader
from tests.support import LedgerSimulator, Plan


@pytest.fixture
def sim(tmp_path: Path) -> LedgerSimulator:
    return LedgerSimulator(tmp_path / "one", Plan(steps=9, dim=256, forms=("raw",))).write()


def test_clean_steps_add_up_and_give_the_clip_factor(sim: LedgerSimulator) -> None:
    with RunReader.open(sim.run) as reader:
        checks = recompute(reader)
    assert [check.step for check in checks] == list(range(1, 10))
    assert all(check.ok for check in checks)
    expected = [0.5 if step % 3 == 0 else 1.0 for step in range(1, 10)]
    np.testing.assert_allclose([check.f for check in checks], expected, rtol=0.02)
    # The tolerance is tight enough to mean something: an eighth of the gradient is far outside.
    assert all(check.tolerance < 0.1 for check in checks)


def test_residual_and_factor_are_those_of_a_direct_sum(sim: LedgerSimulator) -> None:
    with RunReader.open(sim.run) as reader:
        check = recompute(reader)[2]
        body = reader.events()[3].json()
        records = reader.records()
    shard = np.load(sim.run / "sketches/000000.npy").astype(np.float64)
    a = np.zeros(256)
    for record in records[records["step"] == 3]:
        a += float(record["weight"]) * float(record["scale_raw"]) * shard[record["shard_row"]]
    b = body["gradient"]["scale_raw"] * shard[body["gradient"]["row"]]
    f = np.dot(a, b) / np.dot(a, a)
    assert check.f == pytest.approx(f, rel=1e-12)
    assert check.residual == pytest.approx(np.linalg.norm(b - f * a) / np.linalg.norm(b), rel=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET weight = 0 WHERE seq = 13",  # a sample left out of step 2
        "UPDATE records SET weight = weight * 2 WHERE seq = 13",  # counted twice
        "UPDATE records SET scale_raw = scale_raw * 3 WHERE seq = 13",  # a scale error of one sample
        "UPDATE records SET shard_row = shard_row + 9 WHERE seq = 13",  # another step's sketch in its place
    ],
)
def test_an_omission_or_scale_error_of_one_sample_is_found_in_its_step(change: str, sim: LedgerSimulator) -> None:
    sim.sql(change)
    with RunReader.open(sim.run) as reader:
        assert [check.step for check in recompute(reader) if not check.ok] == [2]


def test_what_it_cannot_see_is_a_factor_common_to_all(sim: LedgerSimulator) -> None:
    """Stated in the text, so it must stay true: ``f`` absorbs it."""
    sim.sql("UPDATE records SET weight = weight * 10 WHERE step = 2")
    with RunReader.open(sim.run) as reader:
        check = recompute(reader)[1]
    assert check.ok
    assert check.f == pytest.approx(0.1, rel=0.02)


def test_steps_that_cannot_be_checked_are_left_out(sim: LedgerSimulator) -> None:
    sim.sql("UPDATE records SET flags = 1 WHERE seq = 13")
    with RunReader.open(sim.run) as reader:
        assert [check.step for check in recompute(reader)] == [1, *range(3, 10)]
