"""Audit mode around a plain loop: what lands in the log is what autograd says, and training does not notice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import make_batch, sample_loss, tiny_lora

from attribution import AuditMode
from attribution.capture.oracle import sketch_each
from attribution.errors import CaptureError, SampleIdentityError
from attribution.sketch.layout import SketchLayout
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run
from auditlog.errors import DataError, UsageError
from auditlog.format.records import EventKind
from auditlog.ledger.conservation import recompute

RTOL_INT8 = 0.05  # int8 alone is 1 to 4 % of a row


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    """Four rows a step, with ids that walk through the twenty rows of the data, twice for long runs."""
    made = []
    for step in range(steps):
        batch = make_batch(seed=step % 5)
        batch["sample_index"] = torch.arange(4) + 4 * (step % 5)
        made.append(batch)
    return made


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None) -> None:
    for batch in batches(steps):
        model(**batch).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def test_a_run_is_recorded_sealed_and_verified(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora().train()
    optimizer = optimizer_of(model)
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"):
        train(model, optimizer, 7)
    trust = Trust.load([str(signer.vkey)], sorted((tmp_path / "auditor").rglob("*.note"))[:1], None)
    verdict = verify_run(tmp_path / "run", trust, data=tmp_path / "data")
    assert (verdict.status, verdict.exit_code) == ("VERIFIED", 0), verdict.findings
    with RunReader.open(tmp_path / "run") as run:
        records = run.records()
        steps = [event.json() for event in run.events(EventKind.STEP)]
    assert len(records) == 28
    assert [s["step"] for s in steps] == list(range(1, 8))
    source, row, _ = data.locate(np.concatenate([b["sample_index"].numpy() for b in batches(7)]))
    assert records["source_id"].tolist() == source.tolist()
    assert records["row"].tolist() == row.tolist()
    assert records["epoch"].tolist() == [0] * 20 + [1] * 8  # earlier uses, as the loop reports no epoch
    for step in steps:
        assert step["residual"] < 1e-4
        assert step["f"] == pytest.approx(1, abs=1e-4)
        assert step["audit"]["hook_s"] > 0
    assert all(check.ok for check in _recomputed(tmp_path / "run"))


def _recomputed(run: Path):
    with RunReader.open(run) as reader:
        return recompute(reader)


def test_stored_sketches_are_those_of_the_samples_alone(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora().train()
    optimizer = optimizer_of(model)
    batch = batches(1)[0]
    wanted_from = tiny_lora().train()
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"):
        train(model, optimizer, 1)
    with RunReader.open(tmp_path / "run") as run:
        layout = SketchLayout.from_block(run.manifest.sketch)
        (block,) = run.sketches().blocks()
    records = block.records
    stored = torch.from_numpy(block.raw.astype(np.float32) * records["scale_raw"][:, None])
    parameters = {n: p for n, p in wanted_from.named_parameters() if p.requires_grad}
    want = sketch_each(4, lambda i: sample_loss(wanted_from, batch, i), parameters, layout)
    assert ((stored - want).norm(dim=1) / want.norm(dim=1)).max() < RTOL_INT8
    np.testing.assert_allclose(records["grad_norm"], want.norm(dim=1), rtol=1e-4)
    losses = [float(sample_loss(wanted_from, batch, i).detach()) for i in range(4)]
    np.testing.assert_allclose(records["loss"], losses, rtol=1e-5)


def test_the_trained_adapter_is_bit_identical_to_a_run_without_audit_mode(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    plain, audited = tiny_lora(dropout=0.1).train(), tiny_lora(dropout=0.1).train()
    for model, audit in ((plain, False), (audited, True)):
        optimizer = optimizer_of(model)
        torch.manual_seed(3)
        if audit:
            with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "a"):
                train(model, optimizer, 8, clip=1.0)
        else:
            ids = "sample_index"
            for batch in batches(8):
                model(**{k: v for k, v in batch.items() if k != ids}).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    for (name, left), (_, right) in zip(plain.named_parameters(), audited.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_f_is_the_clip_factor(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora().train()
    optimizer = optimizer_of(model)
    factors = []
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"):
        for batch in batches(4):
            model(**batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            factors.append(min(1.0, 0.05 / (float(norm) + 1e-6)))
            optimizer.step()
            optimizer.zero_grad()
    with RunReader.open(tmp_path / "run") as run:
        recorded = [event.json() for event in run.events(EventKind.STEP)]
    assert max(factors) < 0.9  # it did clip
    assert [r["f"] for r in recorded] == pytest.approx(factors, rel=1e-4)
    assert max(r["residual"] for r in recorded) < 1e-4


def test_a_gradient_that_nobody_zeroed_shows_in_the_residual_and_is_warned_about(
    tmp_path: Path, data: DataManifest, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_lora().train()
    optimizer = optimizer_of(model)
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"):
        for batch in batches(2):
            model(**batch).loss.backward()
            optimizer.step()  # no zero_grad: step 2 consumes step 1's gradient once more
    with RunReader.open(tmp_path / "run") as run:
        residuals = [event.json()["residual"] for event in run.events(EventKind.STEP)]
        (seal,) = run.events(EventKind.SEAL)
    assert residuals[0] < 1e-4 < 0.1 < residuals[1]
    assert caplog.text.count("samples of step 2 do not add up") == 1
    assert seal.json()["open_steps"] == 1


def test_a_step_of_which_nothing_was_captured_is_refused(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    model = tiny_lora().eval()  # in evaluation mode a batch without ids is taken for inference
    optimizer = optimizer_of(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with (
        pytest.raises(CaptureError, match="captured 0 of 28 modules"),
        AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"),
    ):
        batch = {name: tensor for name, tensor in make_batch().items() if name != "sample_index"}
        model(**batch).loss.backward()
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "refused before it moved anything"


def test_the_final_snapshot_is_the_trained_adapter_and_named_in_the_log(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    model = tiny_lora().train()
    optimizer = optimizer_of(model)
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"):
        train(model, optimizer, 2)
    saved = load_file(tmp_path / "run" / "snapshots" / "final" / "trainable.safetensors")
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name].detach()) for name in saved)
    state = load_file(tmp_path / "run" / "snapshots" / "final" / "optimizer.safetensors")
    for name, parameter in trained.items():
        assert torch.equal(state[f"{name}/exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])
    with RunReader.open(tmp_path / "run") as run:
        (event,) = run.events(EventKind.MODEL_CHECKPOINT)
    assert {f["name"] for f in event.json()["files"]} >= {"trainable.safetensors", "optimizer.safetensors"}


# --- bad input loses nothing that was recorded -------------------------------------------------------------------


def test_an_id_out_of_range_names_step_and_row_and_keeps_what_was_recorded(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    model = tiny_lora().train()
    optimizer = optimizer_of(model)
    with (
        pytest.raises(SampleIdentityError, match=r"step 3, row 2 of the batch: sample_index 77 is outside"),
        AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"),
    ):
        train(model, optimizer, 2)
        model(**(make_batch() | {"sample_index": torch.tensor([0, 1, 77, 3])}))
    verdict = verify_run(tmp_path / "run", Trust.load([str(signer.vkey)], [], None))
    assert (verdict.exit_code, verdict.records) == (5, 8)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_source_file_changed_after_the_manifest_stops_the_run_before_it_starts(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    (tmp_path / "data" / "part-1.jsonl").write_text('{"text": "another"}\n')
    model = tiny_lora().train()
    with (
        pytest.raises(DataError, match=r"part-1\.jsonl: changed after the data manifest was built"),
        AuditMode(model, optimizer_of(model), data, run=tmp_path / "run", signer=signer),
    ):
        raise AssertionError("the context must not be entered")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_is_never_written_twice(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("mine")
    model = tiny_lora().train()
    with pytest.raises(UsageError), AuditMode(model, optimizer_of(model), data, run=tmp_path / "run", signer=signer):
        raise AssertionError("the context must not be entered")
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loss_that_is_not_finite_is_recorded_warned_about_and_training_goes_on(
    tmp_path: Path, data: DataManifest, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_lora().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with AuditMode(model, optimizer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor"):
        (model(**batches(1)[0]).loss * float("nan")).backward()
        optimizer.step()
    verdict = verify_run(tmp_path / "run", Trust.load([str(signer.vkey)], [], None))
    assert verdict.exit_code == 0, verdict.findings
    with RunReader.open(tmp_path / "run") as run:
        assert (run.records()["flags"] & 1).all()
    assert "a loss or gradient is not finite" in caplog.text
    with RunReader.open(tmp_path / "run") as run:
        (step,) = run.events(EventKind.STEP)
    assert step.json()["residual"] is None


def test_without_on_head_the_banner_says_that_nothing_binds_the_operator(
    tmp_path: Path, data: DataManifest, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_lora().train()
    with AuditMode(model, optimizer_of(model), data, run=tmp_path / "run", signer=signer):
        pass
    assert "nothing here binds the operator" in caplog.text
