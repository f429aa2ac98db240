"""Two processes under torchrun: one ledger per rank, one run, and every number that autograd gives.

All cases run in two launches (``rank_worker.py``), because starting processes takes most of the time. The first ends
by a kill.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Features, Value
from tiny import tiny_lora, write_rows
from transformers import Trainer, TrainingArguments

from attribution import AuditMode, dataset
from attribution.errors import SampleIdentityError, UnsupportedSetupError
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run
from auditlog.format.records import EventKind, Flag
from auditlog.ledger.conservation import recompute
from auditlog.summary import run as summary_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test waits for both launches

WORKER = Path(__file__).with_name("rank_worker.py")
EXACT = 1e-4
SAMPLE = ["source_id", "row"]
TEXT_IDS = Features({"text": Value("string"), "sample_index": Value("string")})


class Launch:
    """What the two processes left behind."""

    killed: subprocess.CompletedProcess[str]
    done: subprocess.CompletedProcess[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_rows(folder / "data")
        write_rows(folder / "nine", files=1, rows=9)
        self.signer = Signer.generate("bank.example/audit")
        self.signer.save(folder / "key.p12", "correct horse")

    def start(self, *cases: str) -> subprocess.CompletedProcess[str]:
        torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        return subprocess.run(
            [sys.executable, "-m", *torchrun, str(WORKER), str(self.folder), *cases],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=280,
        )

    def results(self, case: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / case / f"result-{rank}.json").read_text()) for rank in (0, 1)]

    def trust(self) -> Trust:
        return Trust.load([str(self.signer.vkey)], [], None)

    def read(self, case: str) -> tuple[list[np.ndarray], list[list[dict[str, Any]]]]:
        """Return each rank's records and live steps, after the run was verified and its sums were repeated."""
        run = self.folder / case / "run"
        verdict = verify_run(run, self.trust())
        assert (verdict.status, verdict.exit_code) == ("VERIFIED", 0), verdict.findings
        with RunReader.open(run) as reader:
            live = {(event.json()["attempt"], event.json()["step"]) for event in reader.live_steps()}
            # A step that a killed rank never logged and that was taken again cannot add up.
            assert all(check.ok for check in recompute(reader) if (check.attempt, check.step) in live)
            assert {rank.manifest.run_id for rank in reader.ranks} == {reader.manifest.run_id}
            assert [(r.manifest.rank, r.manifest.world_size) for r in reader.ranks] == [(0, 2), (1, 2)]
            records = [rank.records() for rank in reader.ranks]
            steps = [[event.json() for event in rank.live_steps()] for rank in reader.ranks]
        assert [step["step"] for step in steps[0]] == [step["step"] for step in steps[1]]
        for step in (s for of_rank in steps for s in of_rank):
            assert step["residual"] < EXACT
        return records, steps

    def summary(self, case: str) -> dict[str, Any]:
        with RunReader.open(self.folder / case / "run") as reader:
            return summary_of(reader)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    launch = Launch(tmp_path_factory.mktemp("ranks"))
    launch.killed = launch.start("killed!")
    shutil.copytree(launch.folder / "killed" / "run", launch.folder / "as-killed")
    launch.done = launch.start()
    assert launch.done.returncode == 0, launch.done.stderr[-6000:]
    return launch


def weights_by_mean_loss(records: list[np.ndarray], accumulation: int = 1) -> None:
    """Each process averages over its own tokens, DistributedDataParallel over the processes."""
    for of_rank in records:
        for step, micro in {(int(r["step"]), int(r["micro"])) for r in of_rank}:
            rows = of_rank[(of_rank["step"] == step) & (of_rank["micro"] == micro)]
            expected = 1 / (2 * accumulation * rows["n_tokens"].sum())
            assert rows["weight"] == pytest.approx(expected, rel=EXACT)


def padded(records: np.ndarray) -> np.ndarray:
    return records["flags"] & Flag.PADDED_DUPLICATE != 0


# --- plain loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["wrapper", "inner", "fused"])
def test_N17_each_rank_keeps_a_ledger_and_together_they_add_up(launch: Launch, case: str) -> None:
    records, steps = launch.read(case)
    assert [len(of_rank) for of_rank in records] == [11, 10]  # the last step has two rows here and one there
    weights_by_mean_loss(records)
    assert launch.summary(case)["samples"] == 20
    factors = launch.results(case)[0]["factors"] or [1.0] * 4
    for of_rank in steps:
        assert [step["f"] for step in of_rank] == pytest.approx(factors, rel=EXACT)
    assert max(factors) < 0.9 or case != "wrapper"  # it did clip


@pytest.mark.parametrize("case", ["wrapper", "inner"])
def test_training_is_bit_identical_on_both_ranks(launch: Launch, case: str) -> None:
    assert [result["same"] for result in launch.results(case)] == [True, True]


def test_fused_training_differs_by_rounding_only(launch: Launch) -> None:
    assert all(result["difference"] < 1e-4 for result in launch.results("fused"))


@pytest.mark.parametrize("case", ["oracle", "oracle-fused"])
def test_sketches_of_both_ranks_are_those_of_the_samples_alone(launch: Launch, case: str) -> None:
    assert [result["checked"] for result in launch.results(case)] == [11, 10]


def test_N17_accumulation_without_synchronisation_counts_every_micro_batch(launch: Launch) -> None:
    records, steps = launch.read("accumulate")
    weights_by_mean_loss(records, accumulation=2)
    assert [len(step["micro_batches"]) for step in steps[0]] == [2, 2]


def test_heads_of_both_ranks_are_handed_over(launch: Launch) -> None:
    auditor = launch.folder / "wrapper" / "auditor" / "run"
    assert list(auditor.glob("*.note"))
    assert list((auditor / "ranks" / "1").glob("*.note"))
    with RunReader.open(launch.folder / "wrapper" / "run") as reader:
        (seal,) = reader.events(EventKind.SEAL)
    assert [member["rank"] for member in seal.json()["ranks"]] == [1]


# --- padding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "contributions", "fills"),
    [
        ("sampler-nine", 20, {1: 1}),
        ("accelerate-nine", 24, {0: 1, 1: 2}),
        ("accelerate-accumulate-nine", 24, {0: 1, 1: 2}),
        ("accelerate-stream-nine", 20, {1: 1}),
        ("accelerate-shards-nine", 24, {0: 1, 1: 2}),
        ("trainer-nine", 24, {0: 1, 1: 2}),
        ("trainer-accumulate-nine", 24, {0: 1, 1: 2}),
    ],
)
def test_A13_repeats_that_fill_batches_are_flagged_and_counted(
    launch: Launch, case: str, contributions: int, fills: dict[int, int]
) -> None:
    """Nine rows, batches of two, two processes, two epochs."""
    records, _ = launch.read(case)
    found = launch.summary(case)
    assert (found["samples"], found["records"]) == (9, contributions)
    assert found["flags"]["padded duplicate"] == contributions - 18
    for rank, of_rank in enumerate(records):
        assert padded(of_rank).sum() == 2 * fills.get(rank, 0)
    everything = np.concatenate(records)
    real = everything[~padded(everything)]
    assert set(Counter(real["row"].tolist()).values()) == {2}  # each sample once per epoch
    assert (everything["weight"] > 0).all()  # a repeat did shape the weights


def test_A13_a_sample_that_comes_twice_is_no_padding(launch: Launch) -> None:
    """Eleven rows, two of them a second time: only the one repeat that fills the last batch is flagged."""
    records, _ = launch.read("accelerate-twice-nine")
    assert launch.summary("accelerate-twice-nine")["records"] == 24
    assert [padded(of_rank).sum() for of_rank in records] == [0, 2]
    everything = np.concatenate(records)
    assert Counter(everything[padded(everything)]["row"].tolist()) == {0: 2}


def test_A13_without_an_epoch_a_second_use_may_be_the_next_epoch(launch: Launch) -> None:
    records, _ = launch.read("sampler-silent-nine")
    assert not padded(np.concatenate(records)).any()
    assert launch.done.stderr.count("does not tell its epoch") >= 1


def test_uneven_rows_are_filled_up_once(launch: Launch) -> None:
    records, _ = launch.read("accelerate-uneven-nine")
    assert [padded(of_rank).sum() for of_rank in records] == [0, 2]  # seven rows: one fills, in each epoch


def test_without_an_epoch_earlier_uses_on_any_rank_count(launch: Launch) -> None:
    """A sample may move from rank to rank; what is recorded is how often the run used it."""
    for case in ("sampler-silent-nine", "accelerate-nine"):
        everything = np.concatenate(launch.read(case)[0])
        real = everything[~padded(everything)]
        for row in range(9):
            assert sorted(real[real["row"] == row]["epoch"].tolist())[:2] == [0, 1]


# --- accelerate and the Trainer -------------------------------------------------------------------------------


def test_A14_int64_ids_reach_every_rank_of_a_dispatched_stream(launch: Launch) -> None:
    records, _ = launch.read("accelerate-stream-nine")
    assert all(len(of_rank) == 10 for of_rank in records)


def test_A14_string_ids_of_a_stream_are_refused_before_step_1(tmp_path: Path, launch: Launch) -> None:
    data = DataManifest.build(launch.folder / "nine" / "*.jsonl")
    rows = dataset(data).map(lambda row: {"sample_index": f"row-{row['sample_index']}"}, features=TEXT_IDS)
    trainer = Trainer(
        model=tiny_lora().train(),
        args=TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[]),
        train_dataset=rows.to_iterable_dataset(),
    )
    with pytest.raises(SampleIdentityError, match="an id is an integer"):
        AuditMode.attach(trainer, data, run=tmp_path / "run", signer=launch.signer)


@pytest.mark.parametrize("case", ["trainer-nine", "trainer-accumulate-nine"])
def test_the_trainer_averages_over_the_tokens_of_all_ranks(launch: Launch, case: str) -> None:
    records, steps = launch.read(case)
    everything = np.concatenate(records)
    for step in steps[0]:
        rows = everything[everything["step"] == step["step"]]
        assert step["num_items"] == rows["n_tokens"].sum()
        assert rows["weight"] == pytest.approx(1 / step["num_items"], rel=EXACT)
    assert [result["same"] for result in launch.results(case)] == [True, True]


def test_a_resumed_trainer_goes_on_on_both_ranks(launch: Launch) -> None:
    launch.read("trainer-resumed-nine")
    assert [result["same"] for result in launch.results("trainer-resumed-nine")] == [True, True]
    with RunReader.open(launch.folder / "trainer-resumed-nine" / "run") as reader:
        for rank in reader.ranks:
            assert [(a.number, a.from_attempt, a.from_step) for a in rank.attempts] == [(1, 0, 0), (2, 1, 2)]
        live = reader.live_records()
    uninterrupted = np.concatenate(launch.read("trainer-nine")[0])
    names = ["step", "micro", "slot", *SAMPLE, "loss", "weight", "n_tokens", "flags", "epoch"]
    assert np.array_equal(np.sort(live[names]), np.sort(uninterrupted[names]))


# --- processes that die, and what is refused ------------------------------------------------------------------


def test_N02_a_killed_rank_ends_the_others_and_leaves_the_run_open(launch: Launch) -> None:
    assert launch.killed.returncode == 1  # torchrun came back, although rank 0 was waiting for rank 1
    assert "SIGKILL" in launch.killed.stderr
    with RunReader.open(launch.folder / "as-killed") as reader:
        for rank in reader.ranks:
            assert rank.final_note is None
            assert len(rank.events(EventKind.STEP)) >= 2  # what was flushed


def test_N02_a_killed_run_goes_on_from_the_last_step_of_the_shortest_log(launch: Launch) -> None:
    launch.read("killed")
    results = launch.results("killed")
    assert [result["same"] for result in results] == [True, True]
    first = results[0]["from_step"]
    with RunReader.open(launch.folder / "killed" / "run") as reader:
        for rank in reader.ranks:
            assert [(a.number, a.from_attempt, a.from_step) for a in rank.attempts] == [(1, 0, 0), (2, 1, first)]
        live = reader.live_records()
    whole = np.concatenate(launch.read("inner")[0])  # the same training without a kill
    names = ["step", "micro", "slot", *SAMPLE, "loss", "weight", "grad_norm", "epoch"]
    assert np.array_equal(np.sort(live[names]), np.sort(whole[names]))


def test_another_number_of_processes_cannot_go_on(launch: Launch) -> None:
    run = launch.folder / "as-killed"
    data = DataManifest.build(launch.folder / "data" / "*.jsonl")
    model = tiny_lora().train()
    audit = AuditMode(model, torch.optim.SGD(model.parameters()), data, run=run, signer=launch.signer, resume=True)
    with pytest.raises(UnsupportedSetupError, match="begun by 2 processes"):
        audit.__enter__()


SHARDED = "UnsupportedSetupError: the model's parameters are spread over processes"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fully_shard", [SHARDED] * 2),
        ("one-block", [SHARDED] * 2),
        ("fsdp", [SHARDED] * 2),
        ("tensor-parallel", [SHARDED] * 2),
        ("sharded-later", [SHARDED] * 2),
        ("subgroup", ["UnsupportedSetupError: gradients are averaged over 1 of 2 processes"] * 2),
        ("join", ["UnsupportedSetupError: the loop runs inside DistributedDataParallel.join()"] * 2),
        ("occupied", ["RankError: rank 1 failed, so rank 0 stops too. StoreError: on_head", "StoreError: on_head"]),
        ("changed-data", ["RankError: rank 1 failed, so rank 0 stops too. DataError: part-0", "DataError: part-0"]),
        ("seal-fails", ["RankError: rank 1 failed, so rank 0 stops too. StoreError", "StoreError"]),
        ("self-check-fails", ["RankError: rank 1 failed", "SelfCheckError: rank 1 sees a difference"]),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(launch: Launch, name: str, expected: list[str]) -> None:
    for result, start in zip(launch.results("refused"), expected, strict=True):
        assert result[name].startswith(start), result[name]
