"""The peers' table: what its ratios say, what the baselines store, and what becomes of a peer that fails."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import peers
from benchmarks.peers import environment
from benchmarks.peers.environment import Environment, first_error
from benchmarks.peers.last_block import LastBlock
from benchmarks.peers.logra_style import BYTES_PER_SAMPLE, LograStyle, choose_widths
from benchmarks.peers.rows import DATTRI, LOGRA, MARK, OBSERVE, OURS, POST_HOC, Row, Span, ratios
from benchmarks.peers.trial import DISPATCH_ROUNDS, Recorder, Took, Trial, figures, own_time
from benchmarks.workloads import Workload, gpt2_lora, without_ids
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config

FLOAT32 = 1e-5  # relative; sums over a few dozen tokens
QUIET = GPT2Config(
    vocab_size=61,
    n_positions=16,
    n_embd=24,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
ROWS, TOKENS = 3, 7

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # PEFT, on every Conv1D


@pytest.fixture
def tiny(tmp_path: Path) -> Workload:
    return gpt2_lora(tmp_path / "data", ROWS, TOKENS, QUIET)


@pytest.fixture
def trial(tiny: Workload, tmp_path: Path) -> Trial:
    return Trial(tiny, tmp_path, 3)


def one_by_one(workload: Workload) -> list[dict[str, torch.Tensor]]:
    """Each sample's own gradient in the batch's mean loss, by autograd, one backward pass per sample."""
    batch, found = without_ids(workload.batches[0]), []
    for row in range(ROWS):
        workload.model.zero_grad()
        (workload.model(**{k: v[row : row + 1] for k, v in batch.items()}).loss / ROWS).backward()
        found.append({n: p.grad.clone() for n, p in workload.model.named_parameters() if p.grad is not None})
    workload.model.zero_grad()
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).norm()) <= FLOAT32 * float(expected.norm())


# --- sketch sizes ------------------------------------------------------------------------------------------------

GPT2 = [(8, 768), (2304, 8), (8, 768), (768, 8), (8, 768), (3072, 8), (8, 3072), (768, 8)] * 12


def test_gpt2_blocks_have_exactly_our_bytes() -> None:
    widths = choose_widths(GPT2, BYTES_PER_SAMPLE)
    assert sum(a * b for a, b in widths) == BYTES_PER_SAMPLE
    assert {min(pair) for pair in widths} == {8}  # the rank's side is never projected
    assert {max(pair) for pair in widths} == {10, 11}


SIDES = st.integers(1, 40)


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=12), st.integers(12, 2000))
def test_blocks_use_the_budget_and_never_exceed_it(shapes: list[tuple[int, int]], budget: int) -> None:
    widths = choose_widths(shapes, budget)
    left = budget - sum(a * b for a, b in widths)
    assert left >= 0
    share = budget // len(shapes)
    for shape, (k_out, k_in) in zip(shapes, widths, strict=True):
        short, long = (k_out, k_in) if shape[0] <= shape[1] else (k_in, k_out)
        assert short == min(*shape, math.isqrt(share))
        assert long in (min(max(shape), share // short), min(max(shape), share // short + 1))
        assert long > share // short or long == max(shape) or short > left  # no further row of it would fit


# --- baselines against autograd ----------------------------------------------------------------------------------


def test_logra_style_blocks_are_the_projected_gradients(tiny: Workload, tmp_path: Path) -> None:
    recorder = LograStyle(tiny.model, tmp_path / "rows.bin", budget=16 * 3 * 7)  # projects sides of 4 x 5 at least
    recorder.attach()
    tiny.model(**without_ids(tiny.batches[0])).loss.backward()
    recorder.detach()
    rows = recorder.sketches()
    for row, gradients in enumerate(one_by_one(tiny)):
        blocks = [b.left @ gradients[f"{name}.weight"] @ b.right.T for name, b in recorder.blocks.items()]
        assert_close(rows[row], torch.cat([block.flatten() for block in blocks]))
    assert any(b.left.shape[0] < b.left.shape[1] for b in recorder.blocks.values())
    assert any(b.right.shape[0] < b.right.shape[1] for b in recorder.blocks.values())
    assert len(recorder.blocks) == 2 * 4 * 2


def test_logra_style_projections_keep_inner_products_in_expectation(tiny: Workload, tmp_path: Path) -> None:
    recorder = LograStyle(tiny.model, tmp_path / "rows.bin", budget=16 * 3 * 7)
    for block in recorder.blocks.values():
        for matrix in (block.left, block.right):
            assert torch.allclose((matrix**2).sum(0), torch.ones(matrix.shape[1]))  # the diagonal of E[PᵀP] = I
            if len(matrix) < matrix.shape[1]:
                assert len(matrix.abs().unique()) == 1
                assert 0 < (matrix > 0).float().mean() < 1


def test_logra_style_file_holds_the_rows_and_their_scales(tiny: Workload, tmp_path: Path) -> None:
    recorder = LograStyle(tiny.model, tmp_path / "rows.bin", budget=512)
    recorder.attach()
    for _ in range(2):
        tiny.model(**without_ids(tiny.batches[0])).loss.backward()
        tiny.model.zero_grad()
        recorder.write()
    rows, width = recorder.sketches(), sum(block.size for block in recorder.blocks.values())
    data = (tmp_path / "rows.bin").read_bytes()
    assert len(data) == 2 * ROWS * (width + 4)
    values = np.frombuffer(data, np.int8, ROWS * width).reshape(ROWS, width)
    scales = np.frombuffer(data, np.float32, ROWS, offset=ROWS * width)
    assert np.abs(values).max(1).tolist() == [127] * ROWS
    assert (np.abs(values * scales[:, None] - rows.numpy()).max(1) <= 0.501 * scales).all()  # rounded, not cut off
    assert recorder.seconds > 0


def test_last_block_is_autograds_own(tiny: Workload, tmp_path: Path) -> None:
    recorder = LastBlock(tiny.model, tmp_path / "rows.bin")
    assert all(".h.1." in name for name in recorder.layers)
    assert len(recorder.layers) == 8
    recorder.attach()
    tiny.model(**without_ids(tiny.batches[0])).loss.backward()
    recorder.write()
    recorder.detach()
    rows = recorder.rows()
    for row, gradients in enumerate(one_by_one(tiny)):
        assert_close(rows[row], torch.cat([gradients[f"{name}.weight"].flatten() for name in recorder.layers]))
    stored = np.fromfile(tmp_path / "rows.bin", np.float32).reshape(rows.shape)
    assert np.array_equal(stored, rows.numpy())


@pytest.mark.parametrize("recorder", [LograStyle, LastBlock])
def test_baselines_leave_gradients_and_model_as_they_were(recorder: type, tiny: Workload, tmp_path: Path) -> None:
    def gradients() -> list[torch.Tensor]:
        tiny.model.zero_grad()
        tiny.model(**without_ids(tiny.batches[0])).loss.backward()
        return [p.grad.clone() for p in tiny.parameters]

    plain = gradients()
    hooks = recorder(tiny.model, tmp_path / "rows.bin")
    hooks.attach()
    recorded = gradients()
    hooks.detach()
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert not any(m._forward_hooks for m in tiny.model.modules() if isinstance(m, nn.Linear))


# --- the clock ---------------------------------------------------------------------------------------------------


def test_order_turns_round_and_the_first_rounds_are_not_counted(trial: Trial) -> None:
    seen: list[str] = []

    def kind(name: str):
        return lambda batch: (seen.append(name), Took(float(len(seen)), 0.0))[1]

    taken = trial.turns({"a": kind("a"), "b": kind("b")})
    assert "".join(seen) == "baabbaabba"
    assert [t.wall for t in taken["a"]] == [6.0, 7.0, 10.0]
    assert [t.wall for t in taken["b"]] == [5.0, 8.0, 9.0]


def test_a_recorder_is_attached_for_its_own_steps_only(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(trial, "step", lambda batch: calls.append("plain"))
    recorder = Recorder(
        lambda batch: calls.append(f"step {batch['input_ids'].shape[1]}"),
        lambda: calls.append("attach"),
        lambda: calls.append("detach"),
        seconds=lambda: float(len(calls)),
    )
    row = trial.compare(recorder)
    kept = "|".join(c for c in calls if c != "plain")
    steps = [3, 2]  # wide rounds of 7 tokens: two to warm up and three; then those of two tokens
    assert kept.startswith("|".join([f"attach|step {TOKENS}|detach"] * sum(steps)))
    assert (
        kept.removeprefix("|".join([f"attach|step {TOKENS}|detach"] * 5)).strip("|").count("step 2") == DISPATCH_ROUNDS
    )
    assert row["gross"] == Span(1e3, 1e3, 1e3)  # one more call after the step than before it
    assert row["rounds"] == 3
    assert row["samples"] == ROWS


def test_row_figures_are_differences_round_by_round() -> None:
    plain = [Took(1.0, 2.0), Took(3.0, 2.0), Took(2.0, 2.0)]
    recorded = [Took(1.5, 2.25), Took(3.25, 3.0), Took(2.125, 2.5)]
    found = figures(plain, recorded, 8)
    assert found["added"] == Span(250.0, 125.0, 500.0)  # three values: the whole range
    assert found["cpu_added"] == Span(500.0, 250.0, 1000.0)
    assert found["plain"] == Span(2000.0, 1000.0, 3000.0)


def test_net_is_gross_and_dispatch_less_what_is_replaced() -> None:
    found = own_time([0.5, 0.75, 1.0], Span(125.0, 100.0, 150.0), [0.25, 0.125, 0.5])
    assert found["net"] == Span(625.0, 375.0, 750.0)
    assert found["replaced"] == Span(250.0, 125.0, 500.0)
    assert own_time([0.5], Span(125.0, 0.0, 0.0)) == {
        "gross": Span(500.0, 500.0, 500.0),
        "dispatch": Span(125.0, 0.0, 0.0),
        "net": Span(625.0, 625.0, 625.0),
    }


# --- ratios ------------------------------------------------------------------------------------------------------


def span(ms: float, width: float = 0.0) -> Span:
    return Span(ms, ms - width, ms + width)


ROWS_OF_ALL = [
    Row(OURS, net=span(4, 1), gross=span(16), added=span(8), cpu_added=span(12)),
    Row(OBSERVE, net=span(20)),
    Row(LOGRA, net=span(10, 2), gross=span(9), cpu_added=span(24)),
    Row(POST_HOC, second_pass=span(800, 40)),
    Row(f"{DATTRI}, inline", added=span(80), cpu_added=span(96)),
    Row(f"{DATTRI}, background", added=span(64, 16), cpu_added=span(48)),
]


def test_ratios_divide_as_they_are_named() -> None:
    found = ratios(ROWS_OF_ALL)
    assert found["ratio.dattri_llm"] == 4 / 64  # against the cheaper of its rows
    assert found["ratio.dattri_llm.interval"] == [3 / 80, 5 / 48]
    assert found["ratio.dattri_llm.added"] == 8 / 64
    assert found["ratio.dattri_llm.cpu_added"] == 12 / 48
    assert found["ratio.logra_baseline"] == 4 / 10
    assert found["ratio.logra_baseline.interval"] == [3 / 12, 5 / 8]
    assert found["ratio.logra_baseline.observe"] == 20 / 10
    assert found["ratio.logra_baseline.cpu_added"] == 12 / 24
    assert found["ratio.posthoc"] == 800 / 4
    assert found["ratio.posthoc.interval"] == [760 / 5, 840 / 3]
    assert found["ratio.posthoc.gross"] == 800 / 16
    assert found["ratio.posthoc.observe"] == 800 / 20


def test_a_missing_side_gives_no_ratio() -> None:
    failed = [Row(DATTRI, failed="not installed") if row.peer.startswith(DATTRI) else row for row in ROWS_OF_ALL]
    found = ratios(failed)
    assert found["ratio.dattri_llm"] is None
    assert found["ratio.dattri_llm.interval"] is None
    assert found["ratio.posthoc"] == 200
    assert set(ratios([])) == set(found)
    assert not any(ratios([]).values())


@pytest.mark.parametrize(("added", "ratio", "interval"), [(span(64, 65), 4 / 64, None), (span(-1, 2), None, None)])
def test_a_denominator_that_may_be_zero_has_no_interval(added: Span, ratio: float | None, interval: None) -> None:
    found = ratios([ROWS_OF_ALL[0], Row(DATTRI, added=added)])
    assert found["ratio.dattri_llm"] == ratio
    assert found["ratio.dattri_llm.interval"] is interval


# --- failures ----------------------------------------------------------------------------------------------------


def interpreter(folder: Path, script: str) -> Path:
    """Return something that is called as an interpreter and runs this shell script instead."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_peer_that_cannot_be_installed_or_run_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter(tmp_path, "echo 'Traceback' >&2; echo 'ImportError: no module named it' >&2; exit 1")
    place = Environment(python, {"absent": "No matching distribution found for absent"})
    monkeypatch.setattr(environment, "prepare", lambda folder: place)
    monkeypatch.setattr(peers, "PEERS", {"whatever": "absent", "another": "broken", "ours": ""})
    found = peers.measure("cpu", 1, tmp_path)
    rows = [Row.from_json(body) for body in found["tables.peers"]]
    assert rows == [
        Row("absent", failed="not installed: No matching distribution found for absent"),
        Row("broken", failed="ImportError: no module named it"),
        Row("ours", failed="ImportError: no module named it"),
    ]
    assert found["ratio.posthoc"] is None
    assert peers.as_table(found).row_count == 3


def test_a_peers_process_is_told_module_device_and_rounds_and_its_rows_are_read(tmp_path: Path) -> None:
    row = Row("a", records="b")
    python = interpreter(tmp_path, f"echo \"$*\" > {tmp_path}/told; echo '{MARK}{json.dumps([row.to_json()])}'")
    assert peers.measured_apart("ours", "", Environment(python), "cuda", 5) == [row]
    *told, scratch = (tmp_path / "told").read_text().split()
    assert told == ["-m", "benchmarks.peers.child", "ours", "cuda", "5"]
    assert not Path(scratch).exists()


def test_a_peer_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_LIMIT_S", 0.1)
    python = interpreter(tmp_path, "exec sleep 20")
    assert peers.measured_apart("ours", "", Environment(python), "cpu", 1) == [
        Row("ours", failed="stopped after 0.1 s")
    ]


def test_rows_are_read_from_among_what_a_peer_prints() -> None:
    rows = [ROWS_OF_ALL[0], Row("a", records="b", bytes_per_sample=0, failed="c")]
    printed = f"hello\n{MARK}{json.dumps([row.to_json() for row in rows])}\nbye\n"
    assert peers.read_rows(printed) == rows


def test_the_reason_is_the_line_that_says_it() -> None:
    pip = "WARNING: a cache\nERROR: Could not find a version\nERROR: No matching distribution"
    assert first_error(pip) == "Could not find a version"
    assert first_error("Traceback (most recent call last):\n  File x\nImportError: no y\n\n") == "ImportError: no y"
    assert first_error("\n") == "it ended without a word"


def test_the_environment_sees_our_packages_and_reports_what_pip_refuses(tmp_path: Path) -> None:
    not_a_package = tmp_path / "not-a-package"
    place = environment.prepare(tmp_path / "peers", {f"{not_a_package}": ()})
    assert list(place.failed) == [str(not_a_package)]
    assert place.failed[str(not_a_package)]
    ask = "import sys; from importlib.util import find_spec; print(sys.prefix, find_spec('torch').origin)"
    out = subprocess.run([str(place.python), "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    assert out == [str(tmp_path / "peers"), torch.__file__]
