"""Every training set-up against autograd, one sample at a time; what cannot be recorded is refused."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from setups import models
from setups import training as loops
from setups.measure import DIM, EXACT, HALF, Audited, Comparison, SetUp, Unaudited, drift, measure, relative
from setups.refusals import REFUSALS, Refusal
from setups.registry import SETUPS
from setups.training import Batch
from tiny import tiny_llama, tiny_lora

from attribution import AuditMode
from attribution.capture import per_sample, units
from attribution.capture.hooks import Mode
from attribution.capture.micro_batch import Captured
from attribution.capture.oracle import gradient
from attribution.errors import CaptureError
from attribution.sketch.layout import SketchLayout
from auditlog import DataManifest, RunReader, Signer, Trust, verify_run
from auditlog.format.records import EventKind, Flag

# With autograd's own sums rounded otherwise; a weight of a tiny model is about 0.02 to 1.
FUSED_DRIFT = 1e-6


@pytest.fixture
def auditor(tmp_path: Path, data: DataManifest, signer: Signer) -> Audited:
    return Audited(tmp_path, data, signer)


# torch's compiler looks at .grad of what it traces.
_SLOW = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]


def _cases() -> list[Any]:
    return [
        pytest.param(setup, mode, id=f"{setup.name}-{mode}", marks=_SLOW if setup.slow else [])
        for setup in SETUPS
        for mode in setup.modes
    ]


@pytest.mark.parametrize(("setup", "mode"), _cases())
def test_what_is_recorded_is_what_autograd_says(
    setup: SetUp, mode: Mode, tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    found = measure(setup, mode, tmp_path, data, signer)
    assert found.samples > 0
    assert found.error <= setup.limit
    assert found.loss_error <= setup.limit
    assert found.residual <= setup.limit
    assert set(found.flags) == {setup.flags}
    assert found.coverage == 1
    if not setup.clips:
        assert found.factor_error <= setup.limit
    if mode == "observe" and setup.identical:
        assert found.drift == 0, "training is bit-identical"
    else:
        assert found.drift <= FUSED_DRIFT


def _twice_the_factor(right: Any) -> Any:
    def wrong(*arguments: Any) -> units.Units:
        found = right(*arguments)
        return units.Units(2 * found.factor, found.loss, found.n_tokens, found.known)

    return wrong


@pytest.mark.parametrize(
    ("module", "name", "breaking"),
    [
        (per_sample, "linear_bias", lambda right: lambda g: 0.99 * right(g)),
        (per_sample, "embedding_weight", lambda right: lambda ids, *rest: right(ids.roll(1, 1), *rest)),
        (units, "measure", _twice_the_factor),
    ],
    ids=["a bias off by 1 %", "tokens exchanged within a row", "a factor of two in the unit"],
)
def test_the_comparison_finds_an_engine_that_is_broken(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    data: DataManifest,
    signer: Signer,
    module: Any,
    name: str,
    breaking: Any,
) -> None:
    setup = next(setup for setup in SETUPS if setup.name.startswith("GPT-2, all"))
    monkeypatch.setattr(AuditMode, "_before_first", lambda *arguments: None)  # the self-check finds the first two
    monkeypatch.setattr(module, name, breaking(getattr(module, name)))
    found = measure(setup, "observe", tmp_path, data, signer)
    assert found.error > 10 * setup.limit


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_what_cannot_be_recorded_is_refused_with_advice(refusal: Refusal, auditor: Audited) -> None:
    with pytest.raises(refusal.error, match=refusal.match) as caught:
        refusal.act(auditor)
    assert caught.value.advice()


def test_the_table_in_METHODS_lists_every_set_up() -> None:
    methods = Path(__file__).parents[3] / "attribution" / "METHODS.md"
    table = re.search(r"<!-- set-ups -->(.*)<!-- end of set-ups -->", methods.read_text(encoding="utf-8"), re.DOTALL)
    assert table is not None
    listed = {line.split("|")[1].strip() for line in table[1].splitlines() if line.startswith("| ")}
    names = {setup.name for setup in SETUPS} | {refusal.name for refusal in REFUSALS}
    assert names == listed - {"Set-up", "Refused"}, "run: make setups"


# --- cases of comparable software ---------------------------------------------------------------------------------


def test_A01_lora_on_gpt2_trains_bit_identically_and_nothing_of_it_is_written(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    """Five AdamW steps with and without audit mode: outputs, gradients, adapters and random numbers are the same."""

    def run(audited: bool, folder: Path) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        setup = SetUp("", "", models.gpt2_lora, functools.partial(loops.texts, 5), optimizer=torch.optim.AdamW)
        training = setup.training(with_ids=audited)
        seen: list[torch.Tensor] = []
        auditor: loops.Auditor = Audited(folder, data, signer) if audited else Unaudited(folder)
        torch.manual_seed(4)
        with auditor.around(training.model, training.optimizer):
            for batch in training.batches:
                output = training.model(**batch)
                output.loss.backward()
                seen += [output.logits.detach(), torch.rand(1)]
                seen += [p.grad.clone() for p in training.model.parameters() if p.grad is not None]
                training.optimizer.step()
                training.optimizer.zero_grad()
        return training.model, [*seen, torch.get_rng_state()]

    plain, without = run(False, tmp_path)
    model, seen = run(True, tmp_path)
    assert drift(plain, model) == 0
    assert all(torch.equal(a, b) for a, b in zip(without, seen, strict=True))


def test_A01_gradients_recorded_of_lora_on_gpt2_are_autograds(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    setup = SetUp("", "A01", models.gpt2_lora, functools.partial(loops.texts, 5), optimizer=torch.optim.AdamW)
    found = measure(setup, "observe", tmp_path, data, signer)
    assert (found.samples, found.drift) == (20, 0)
    assert max(found.error, found.residual) < EXACT


def test_A02_a_tied_weight_appears_once_and_its_row_is_embedding_part_plus_head_part(auditor: Audited) -> None:
    batch = loops.texts(1, rows=3)[0]
    tied = models.gpt2().train()
    kept = keep(auditor)
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.0)
    with auditor.around(tied, optimizer) as audit:
        tied(**batch).loss.backward()
        consumed = {name: p.grad.clone() for name, p in tied.named_parameters()}
        optimizer.step()
    assert [n for n in audit._tracking.parameters if "wte" in n or "lm_head" in n] == ["transformer.wte.weight"]
    assert auditor_coverage(auditor) == 1
    apart = models.gpt2(tie_word_embeddings=False).train()
    apart.load_state_dict(tied.state_dict())
    parts = dict(apart.named_parameters())
    layout = SketchLayout({name: tuple(p.shape) for name, p in tied.named_parameters()}, DIM)
    ((captured,),) = kept
    for row in range(3):
        found = gradient(loops.text_loss_of(apart, batch, row), parts)
        head = found.pop("lm_head.weight")
        assert head.any()
        assert found["transformer.wte.weight"].any()
        found["transformer.wte.weight"] = found["transformer.wte.weight"] + head
        assert relative(captured.sketch[row], layout.sketch(found)) < EXACT
    assert relative(captured.expected, layout.sketch(consumed)) < EXACT


def keep(auditor: Audited) -> list[list[Captured]]:
    """Return a list that gains, at every step, what the step captured."""
    kept: list[list[Captured]] = []
    auditor.on_step = lambda audit, captured: kept.append(captured)
    return kept


def auditor_coverage(auditor: Audited) -> float:
    with RunReader.open(auditor.folder / "run") as run:
        return float(run.manifest.tracking["coverage"])


def steps_of(auditor: Audited) -> list[dict[str, Any]]:
    with RunReader.open(auditor.folder / "run") as run:
        return [event.json() for event in run.events(EventKind.STEP)]


def records_of(auditor: Audited) -> Any:
    with RunReader.open(auditor.folder / "run") as run:
        return run.records()


def verified(auditor: Audited) -> bool:
    trust = Trust.load([str(auditor.options["signer"].vkey)], [], None)
    return verify_run(auditor.folder / "run", trust).exit_code == 0


@pytest.mark.parametrize("mode", ["observe", "fused"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_A04_records_under_checkpointing_are_those_without_it(
    tmp_path: Path, data: DataManifest, signer: Signer, reentrant: bool, mode: Mode
) -> None:
    """Three linear blocks, and a weight that is used inside and outside of the checkpointed region."""
    sketches = {}
    for kind in (None, reentrant):
        auditor = Audited(tmp_path / str(kind), data, signer, mode=mode)
        kept = keep(auditor)
        setup = SetUp("", "", functools.partial(models.blocks, kind), loops.tensors(5, 8), loops.class_loss)
        loops.plain(setup.training(with_ids=True), auditor)
        sketches[kind] = torch.cat([micro.sketch for step in kept for micro in step])
    assert len(sketches[None]) == 8
    assert relative(sketches[reentrant], sketches[None]) < 1e-5


def test_A05_an_activation_in_place_after_a_tracked_module_trains_and_is_recorded(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    (setup,) = [setup for setup in SETUPS if "inplace" in setup.name]
    for mode in setup.modes:
        found = measure(setup, mode, tmp_path / mode, data, signer)
        assert max(found.error, found.residual) < EXACT


@pytest.mark.slow
def test_A07_a_graph_that_another_model_left_compiled_is_an_error_and_never_a_zero_sketch(auditor: Audited) -> None:
    """Two models of one class, compiled: the second one's hooks would not be in the first one's graph."""
    torch._dynamo.reset()
    batch = loops.tensors(5, 8)()[0]
    loops.class_loss(torch.compile(models.thrice().train(), backend="eager"), without_ids(batch)).backward()
    model = models.thrice().train()
    before = models.thrice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with (
            pytest.raises(CaptureError, match="captured 0 of 2 modules"),
            auditor.around(model, optimizer),
        ):
            loops.class_loss(torch.compile(model, backend="eager"), batch).backward()
            optimizer.step()
    finally:
        torch._dynamo.reset()
    assert drift(model, before) == 0, "refused before it moved anything"


def without_ids(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key != "sample_index"}


def test_A08_sketches_do_not_depend_on_the_scale_and_a_skipped_step_says_so(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    norms = {}
    for scale in (None, 1024.0, 65536.0):
        auditor = Audited(tmp_path / str(scale), data, signer)
        model = tiny_lora().train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        with auditor.around(model, optimizer):
            for number, batch in enumerate(loops.texts(3)):
                with torch.autocast("cpu", torch.float16, enabled=scale is not None):
                    loss = model(**batch).loss
                overflow = float("inf") if number == 1 and scale else 1.0
                scaler.scale(loss * overflow).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        steps, records = steps_of(auditor), records_of(auditor)
        good = records["step"] != 2
        norms[scale] = torch.from_numpy(records["grad_norm"][good].copy())
        assert [s["skipped"] for s in steps] == [False, scale is not None, False]
        assert [s["scaler_scale"] for s in steps] == ([None] * 3 if scale is None else [scale, scale, scale / 2])
        assert all(s["residual"] < HALF for s in steps if not s["skipped"])
        if scale is not None:
            assert (records["flags"][~good] & Flag.NOT_FINITE).all()
            assert (records["grad_norm"][~good] == 0).all()
    for scale in (1024.0, 65536.0):
        assert relative(norms[scale], norms[None]) < HALF


@pytest.mark.parametrize("fused_adamw", [False, True])
def test_A08_a_step_that_a_scaler_skips_leaves_the_weights_and_is_recorded_with_its_samples(
    auditor: Audited, fused_adamw: bool
) -> None:
    model = tiny_lora().train()
    before = tiny_lora()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=fused_adamw)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with auditor.around(model, optimizer):
        scaler.scale(model(**loops.texts(1)[0]).loss * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    (step,) = steps_of(auditor)
    assert (step["skipped"], step["scaler_scale"], step["records"]) == (True, 1024.0, 4)
    assert drift(model, before) == 0


def test_A10_samples_without_loss_tokens_are_zeros_and_their_neighbours_are_not_touched(auditor: Audited) -> None:
    setup = SetUp("", "A10", tiny_lora, loops.some_without_loss)
    training = setup.training(with_ids=True)
    auditor.on_step = compare = Comparison(setup, training)
    loops.plain(training, auditor)
    records = records_of(auditor)
    masked = records["n_tokens"] == 0
    assert masked.tolist() == [False, False, True, *[False] * 5]
    assert records["flags"].tolist() == [Flag.NO_LOSS_TOKEN if m else 0 for m in masked]
    assert (records["grad_norm"] == 0).tolist() == (records["weight"] == 0).tolist() == masked.tolist()
    assert max(compare.error, compare.loss_error) < EXACT
    assert all(step["residual"] < EXACT for step in steps_of(auditor))


def test_A10_a_whole_batch_without_loss_tokens_is_recorded_as_such(auditor: Audited) -> None:
    model = tiny_lora().train()
    batches = loops.texts(2)
    batches[0]["labels"][:] = -100
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with auditor.around(model, optimizer):
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    records = records_of(auditor)
    assert records["flags"].tolist() == [Flag.NO_LOSS_TOKEN] * 4 + [0] * 4
    assert (records["grad_norm"][:4] == 0).all()
    assert steps_of(auditor)[1]["residual"] < EXACT
    assert (
        verify_run(auditor.folder / "run", Trust.load([str(auditor.options["signer"].vkey)], [], None)).exit_code == 0
    )


def test_A11_a_loss_that_is_not_a_number_at_step_three_of_six_is_flagged_and_the_log_verifies(
    auditor: Audited,
) -> None:
    """In HF's Trainer, which filters such losses out of its own log."""

    model = tiny_lora().train()
    calls = iter(range(1, 100))
    forward = model.get_base_model().forward

    @functools.wraps(forward)
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if torch.is_grad_enabled() and model.training and next(calls) == 3:
            output.loss = output.loss * float("nan")
        return output

    model.get_base_model().forward = poisoned
    auditor.options["self_check"] = False  # its passes would be counted too
    setup = SetUp("", "A11", lambda: model, functools.partial(loops.texts, 5))
    loops.trainer(max_steps=6, logging_nan_inf_filter=True)(setup.training(with_ids=True), auditor)
    records = records_of(auditor)
    not_finite = (records["flags"] & Flag.NOT_FINITE) != 0
    assert sorted(set(records["step"][not_finite])) == [3, 4, 5, 6]  # the step destroyed the weights
    assert (records["step"] == 3).sum() == 3
    assert not_finite[records["step"] == 3].all()
    assert (records["grad_norm"][not_finite] == 0).all()
    step = steps_of(auditor)[2]
    assert (step["residual"], step["f"]) == (None, None)
    with RunReader.open(auditor.folder / "run") as run:
        for block in run.sketches().blocks():
            assert abs(block.rows).max() <= 127
    assert verified(auditor)


def test_A17_fused_experts_are_covered_and_an_idle_one_is_an_explicit_zero(
    auditor: Audited, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.mixtral(idle_expert=True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = keep(auditor)
    caplog.set_level("INFO", "gradtrail")
    with auditor.around(model, optimizer):
        model(**loops.texts(1)[0]).loss.backward()
        experts = {n: p.grad for n, p in model.named_parameters() if "experts" in n}
        optimizer.step()
    assert len(experts) == 4  # two 3-D parameters in each of two layers
    for grad in experts.values():
        assert [bool(grad[expert].any()) for expert in range(4)][2] is False
        assert grad.any()
    ((captured,),) = kept
    assert len(captured.sketch) == 4
    with RunReader.open(auditor.folder / "run") as run:
        tracking = run.manifest.tracking
    assert tracking["coverage"] == 1
    assert tracking["untracked"] == {}
    assert tracking["routes"]["any module, recomputed"] == 4  # experts and routers
    assert "tracked modules" in caplog.text


# --- more than one thing at a time --------------------------------------------------------------------------------


def test_two_models_are_audited_in_one_process_at_the_same_time(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    makes = (tiny_lora, models.gpt2)
    setups = [SetUp("", str(number), make) for number, make in enumerate(makes)]
    trainings = [setup.training(with_ids=True) for setup in setups]
    auditors = [Audited(tmp_path / setup.name, data, signer) for setup in setups]
    for setup, training, auditor in zip(setups, trainings, auditors, strict=True):
        auditor.on_step = Comparison(setup, training)
    first, second = (a.around(t.model, t.optimizer) for a, t in zip(auditors, trainings, strict=True))
    with first, second:
        for batch in loops.texts(2):
            for training in trainings:
                training.forward(batch).backward()
            for training in trainings:
                training.optimizer.step()
                training.optimizer.zero_grad()
    for auditor in auditors:
        assert auditor.on_step.samples == 8
        assert auditor.on_step.error < EXACT
        assert max(step["residual"] for step in steps_of(auditor)) < EXACT


def test_a_step_without_zero_grad_does_not_close_and_its_samples_are_still_right(auditor: Audited) -> None:
    setup = SetUp("", "", tiny_lora)
    training = setup.training(with_ids=True)
    auditor.on_step = compare = Comparison(setup, training)
    with auditor.around(training.model, training.optimizer):
        for batch in training.batches:
            training.forward(batch).backward()
            training.optimizer.step()
    first, second = (step["residual"] for step in steps_of(auditor))
    assert first < EXACT < 0.1 < second
    assert compare.error < EXACT


def test_a_loss_over_the_batch_beside_the_samples_marks_them_as_not_separable(auditor: Audited) -> None:
    """Mixtral's balance loss: the sum of the samples is still what the optimizer gets."""
    model = models.mixtral().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with auditor.around(model, optimizer):
        model(**loops.texts(1)[0], output_router_logits=True).loss.backward()
        optimizer.step()
    assert records_of(auditor)["flags"].tolist() == [Flag.NOT_SEPARABLE] * 4
    assert steps_of(auditor)[0]["residual"] < EXACT


def test_allowed_gaps_are_signed_into_the_run_with_their_share_of_the_gradient(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    model = models.mlp(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, models.CLASSES)
    ).train()
    model.body[1].eval()
    auditor = Audited(tmp_path, data, signer, allow_untracked=["body.1.*"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with auditor.around(model, optimizer):
        loops.class_loss(model, loops.tensors(6)()[0]).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    with RunReader.open(tmp_path / "run") as run:
        tracking = run.manifest.tracking
    assert set(tracking["untracked"]) == {"body.1.weight", "body.1.bias"}
    assert "batch normalisation" in tracking["reasons"]["body.1.weight"]
    squares = {name: float(grad.square().sum()) for name, grad in grads.items()}
    inside = sum(value for name, value in squares.items() if "body.1." not in name)
    assert steps_of(auditor)[0]["tracked_share"] == pytest.approx(inside / sum(squares.values()), rel=1e-5)


def test_full_fine_tuning_leaves_no_hook_and_no_patched_forward_behind(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    model = tiny_llama().train()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    setup = SetUp("", "", lambda: model)
    loops.plain(setup.training(with_ids=True), Audited(tmp_path, data, signer, mode="fused"))
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
