"""Audit mode on TRL's trainers: ids through their preprocessing and packing, the fused head, preference pairs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from loops import EXACT, Oracle, assert_exact, character_tokenizer, keep_captured, relative_error, texts_of
from peft import LoraConfig
from tiny import tiny_llama, tiny_lora
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from attribution import AuditMode, dataset, keep_ids
from attribution.errors import SampleIdentityError
from attribution.training.hf import describe_dataset
from auditlog import DataManifest, RunReader, Signer
from auditlog.format.records import EventKind, Flag

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

HIDDEN_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON = {
    "per_device_train_batch_size": 3,
    "num_train_epochs": 1,
    "learning_rate": 0.0,  # weights stay, so that one oracle serves all steps
    "logging_steps": 100,
    "save_strategy": "no",
    "report_to": [],
    "seed": 5,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


def sft(folder: Path, rows: Dataset, model: torch.nn.Module | None = None, **changes: Any) -> SFTTrainer:
    return SFTTrainer(
        model=model or tiny_lora().train(),
        args=SFTConfig(str(folder / "out"), **(COMMON | {"max_length": 40} | changes)),
        train_dataset=rows,
        processing_class=character_tokenizer(),
    )


def train(folder: Path, data: DataManifest, signer: Signer, trainer: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Train under audit mode; returns it, its captured batches, the run's records and its steps."""
    with AuditMode.attach(
        trainer, data, run=folder / "run", signer=signer, on_head=folder / "auditor", **options
    ) as audit:
        captured = keep_captured(audit)
        trainer.train()
    with RunReader.open(folder / "run") as run:
        return audit, captured, run.records(), [event.json() for event in run.events(EventKind.STEP)]


def closes(steps: list[dict[str, Any]]) -> bool:
    return max(step["residual"] for step in steps) < EXACT


def test_every_row_is_recorded_once_and_matches_autograd(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    trainer = sft(tmp_path, dataset(data))
    oracle, texts = Oracle(tiny_lora()), texts_of(trainer.train_dataset)
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert assert_exact(audit, captured, oracle, texts) == len(records) == 20
    assert closes(steps)
    assert not records["flags"].any()
    for step in steps:  # the fused head's own mean over the step's target tokens
        of_step = records[records["step"] == step["step"]]
        assert of_step["weight"] == pytest.approx(1 / of_step["n_tokens"].sum(), rel=1e-4)


@pytest.mark.parametrize("padding", ["padding_free", "a multiple of eight"])
def test_flattened_batches_give_one_record_per_document(
    tmp_path: Path, data: DataManifest, signer: Signer, padding: str
) -> None:
    changes = {"padding_free": True, "max_length": None}
    if padding != "padding_free":
        changes["pad_to_multiple_of"] = 8  # the padding behind the last document belongs to nobody
    trainer = sft(tmp_path, dataset(data), **changes)
    oracle, texts = Oracle(tiny_lora()), texts_of(trainer.train_dataset)
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert assert_exact(audit, captured, oracle, texts) == len(records) == 20
    assert closes(steps)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_packed_rows_are_the_same_with_their_ids(
    tmp_path: Path, data: DataManifest, strategy: str, shuffle: bool
) -> None:
    changes = {"packing": True, "packing_strategy": strategy, "max_length": 24, "shuffle_dataset": shuffle}
    plain = sft(tmp_path, dataset(data), **changes).train_dataset
    with keep_ids():
        packed = sft(tmp_path, dataset(data), **changes).train_dataset
    columns = [name for name in packed.column_names if not name.startswith("sample_")]
    assert sorted(columns) == sorted(plain.column_names)
    assert packed.select_columns(columns).to_list() == plain.select_columns(columns).to_list()
    # every span holds the tokens that its sample has there
    texts = texts_of(sft(tmp_path, dataset(data), max_length=None).train_dataset)
    for row in packed:
        for index, (start, end, place) in zip(row["sample_index"], row["sample_spans"], strict=True):
            assert row["input_ids"][start:end] == texts[index][0][place : place + end - start]
        if "seq_lengths" in row:
            assert [end - start for start, end, _ in row["sample_spans"]] == row["seq_lengths"]
    cut = {"bfd": 24, "bfd_split": None, "wrapped": None}[strategy]
    covered = sum(end - start for row in packed for start, end, _ in row["sample_spans"])
    assert covered == sum(len(ids[:cut]) for ids, _ in texts.values())


def fragments(packed: Dataset, texts: dict[int, tuple[list[int], list[int]]]) -> dict[int, list[tuple[Any, Any]]]:
    """Sample id -> its fragments' tokens and labels."""
    found: dict[int, list[tuple[Any, Any]]] = {}
    for row in packed:
        for index, (start, end, place) in zip(row["sample_index"], row["sample_spans"], strict=True):
            ids, labels = texts[index]
            found.setdefault(index, []).append((ids[place : place + end - start], labels[place : place + end - start]))
    return found


@pytest.mark.parametrize(("strategy", "length"), [("bfd", 40), ("bfd", 16), ("bfd_split", 16)])
def test_A19_packed_documents_give_one_record_each(
    tmp_path: Path, data: DataManifest, signer: Signer, strategy: str, length: int
) -> None:
    """Documents packed into rows, cut to the length of a row, or split over rows: each piece matches autograd."""
    texts = texts_of(sft(tmp_path, dataset(data), max_length=None).train_dataset)
    with keep_ids():
        trainer = sft(tmp_path, dataset(data), packing=True, packing_strategy=strategy, max_length=length)
    pieces = fragments(trainer.train_dataset, texts)
    oracle = Oracle(tiny_lora())
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert closes(steps)
    assert set(records["flags"].tolist()) <= {0, Flag.NO_LOSS_TOKEN}  # a rest of one token predicts nothing
    assert len(records) == sum(map(len, pieces.values()))
    assert (strategy == "bfd_split") == (len(records) > 20)  # some documents have more than 16 tokens
    expected: dict[int, list[Any]] = {
        index: [audit._layout.sketch(oracle.gradients(oracle.loss(*piece))) for piece in parts]
        for index, parts in pieces.items()
    }
    for micro in (m for step in captured for m in step):
        for slot, index in enumerate(micro.sample_index.tolist()):
            errors = [relative_error(micro.sketch[slot], sketch) for sketch in expected[index]]
            best = min(range(len(errors)), key=errors.__getitem__)
            assert errors[best] < EXACT
            expected[index].pop(best)
            span = micro.segments.spans[slot][0]
            ids = texts[index][0][span.place : span.place + span.end - span.start]
            assert ids == pieces[index][best][0]
            pieces[index].pop(best)
    assert not any(expected.values())


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_A19_a_stream_is_packed_with_its_ids(tmp_path: Path, data: DataManifest, signer: Signer, strategy: str) -> None:
    texts = texts_of(sft(tmp_path, dataset(data), max_length=None).train_dataset)
    with keep_ids():
        trainer = sft(
            tmp_path,
            dataset(data).to_iterable_dataset(),
            packing=True,
            packing_strategy=strategy,
            max_length=40,
            max_steps=2,
        )
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert assert_exact(audit, captured, Oracle(tiny_lora()), texts) == len(records) > 10
    assert closes(steps)


def test_A19_wrapped_packing_is_refused_or_marked(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    def make() -> SFTTrainer:
        with keep_ids():
            return sft(tmp_path, dataset(data), packing=True, packing_strategy="wrapped", max_length=24)

    with pytest.raises(SampleIdentityError, match="see each other"):
        train(tmp_path / "refused", data, signer, make())
    _, _, records, steps = train(tmp_path / "marked", data, signer, make(), on_crossing="mark")
    assert (records["flags"] & Flag.NOT_SEPARABLE).all()
    assert closes(steps)
    assert len(records) > 20  # texts that go on in the next row have a record in each


def test_A19_packing_without_keep_ids_is_refused_with_the_corrected_call(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    trainer = sft(tmp_path, dataset(data), packing=True, max_length=40)
    with pytest.raises(SampleIdentityError, match="no sample_index column") as caught:
        AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer)
    assert "with keep_ids():" in caught.value.advice()


def test_keep_ids_leaves_trl_as_it_was() -> None:
    before = SFTTrainer._prepare_dataset
    with pytest.raises(RuntimeError), keep_ids():
        assert SFTTrainer._prepare_dataset is not before
        raise RuntimeError
    assert SFTTrainer._prepare_dataset is before


def full(tied: bool) -> torch.nn.Module:
    """A whole model to train: TRL's head then uses a trained weight without calling the module."""
    model = tiny_llama()
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.train()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_a_trained_head_that_is_never_called_is_captured_exactly(
    tmp_path: Path, data: DataManifest, signer: Signer, tied: bool, packing: bool
) -> None:
    with keep_ids():
        trainer = sft(tmp_path, dataset(data), full(tied), packing=packing)
    texts = texts_of(sft(tmp_path, dataset(data), full(tied)).train_dataset)
    oracle = Oracle(full(tied))
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert audit._tracking.coverage == 1.0
    assert assert_exact(audit, captured, oracle, texts) == len(records) == 20
    assert closes(steps)


SETUPS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "workers": {"dataloader_num_workers": 2},
    "all columns": {"remove_unused_columns": False},
    "cut at the end": {"max_length": 9, "truncation_mode": "keep_end"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}


@pytest.mark.parametrize(
    ("setup", "mode"),
    [
        *((setup, "observe") for setup in SETUPS),
        ("gradient checkpointing", "fused"),
        ("gradient accumulation", "fused"),
    ],
)
def test_sft_setups_match_autograd(tmp_path: Path, data: DataManifest, signer: Signer, setup: str, mode: str) -> None:
    rows = dataset(data)
    trainer = SFTTrainer(
        model=tiny_lora().train(),
        args=SFTConfig(str(tmp_path / "out"), **(COMMON | {"max_length": 40} | SETUPS[setup])),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=character_tokenizer(),
    )
    oracle, texts = Oracle(tiny_lora()), texts_of(trainer.train_dataset)
    audit, captured, records, steps = train(tmp_path, data, signer, trainer, mode=mode)
    assert assert_exact(audit, captured, oracle, texts) == len(records) == 20
    assert closes(steps)


def test_saved_tensors_that_are_moved_or_packed_by_others_are_read_back(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    """Activation offloading is a pair of saved-tensor hooks around the step; TRL's own needs an accelerator."""
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.detach().clone()

    trainer = sft(tmp_path, dataset(data), full(tied=False))
    trainer.maybe_activation_offload_context = torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)
    oracle, texts = Oracle(full(tied=False)), texts_of(trainer.train_dataset)
    audit, captured, _, steps = train(tmp_path, data, signer, trainer)
    assert packed
    assert assert_exact(audit, captured, oracle, texts) == 20
    assert closes(steps)


@pytest.mark.parametrize("changes", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}], ids=["dft", "smoothing"])
def test_other_losses_are_said_to_be_an_unknown_unit(
    tmp_path: Path, data: DataManifest, signer: Signer, changes: dict[str, Any]
) -> None:
    trainer = sft(tmp_path, dataset(data), **changes)
    _, _, records, steps = train(tmp_path, data, signer, trainer)
    assert (records["flags"] == Flag.UNIT_UNKNOWN).all()
    assert (records["weight"] == 1).all()
    assert closes(steps)


def test_a_loss_function_of_the_user_gets_logits(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

    trainer = SFTTrainer(
        model=tiny_lora().train(),
        args=SFTConfig(str(tmp_path / "out"), **COMMON),
        train_dataset=dataset(data),
        processing_class=character_tokenizer(),
        compute_loss_func=summed,
    )
    oracle, texts = Oracle(tiny_lora()), texts_of(trainer.train_dataset)
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert assert_exact(audit, captured, oracle, texts) == 20
    assert records["weight"] == pytest.approx(1, rel=EXACT)
    assert closes(steps)


def test_noise_on_the_embeddings_leaves_ids_and_conservation(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    trainer = sft(tmp_path, dataset(data), neftune_noise_alpha=5.0)
    _, _, records, steps = train(tmp_path, data, signer, trainer)
    assert len(records) == 20
    assert not records["flags"].any()
    assert closes(steps)


def write_pairs(folder: Path, kind: str) -> DataManifest:
    """Ten rows: prompts of growing length with short completions, or preference pairs, or conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(10):
        prompt, answer, other = "a" * (3 + 2 * number) + ":", f" yes {number}", f" no {'x' * (number % 4)}"
        rows.append(
            {"about": f"case {number}"}
            | {
                "completions": {"prompt": prompt, "completion": answer},
                "preferences": {"prompt": prompt, "chosen": answer, "rejected": other},
                "conversations": {
                    "messages": [
                        {"role": "user", "content": prompt},
                        {"role": "assistant", "content": answer},
                        {"role": "user", "content": other},
                        {"role": "assistant", "content": answer + other},
                    ]
                },
            }[kind]
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataManifest.build(folder / "*.jsonl", text_fields=["about"])


@pytest.mark.parametrize(("kind", "changes"), [("completions", {}), ("conversations", {"assistant_only_loss": True})])
def test_loss_on_answers_only(tmp_path: Path, signer: Signer, kind: str, changes: dict[str, Any]) -> None:
    data = write_pairs(tmp_path / "data", kind)
    trainer = sft(tmp_path, dataset(data), max_length=None, **changes)
    oracle, texts = Oracle(tiny_lora()), texts_of(trainer.train_dataset)
    assert all(-100 in labels for _, labels in texts.values())
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert assert_exact(audit, captured, oracle, texts) == len(records) == 10
    assert closes(steps)


def test_E09_rows_that_the_trainer_dropped_are_listed_and_the_others_keep_their_ids(
    tmp_path: Path, signer: Signer
) -> None:
    """Prompts of 10 tokens and more leave no completion within max_length; max_steps ends within the epoch."""
    data = write_pairs(tmp_path / "data", "completions")
    trainer = sft(tmp_path, dataset(data), max_length=10, max_steps=1, per_device_train_batch_size=2)
    assert describe_dataset(trainer, data) == {
        "rows": 3,
        "distinct": 3,
        "absent": 7,
        "absent_first": [3, 4, 5, 6, 7, 8, 9],
    }
    oracle, texts = Oracle(tiny_lora()), texts_of(trainer.train_dataset)
    audit, captured, records, _ = train(tmp_path, data, signer, trainer)
    assert assert_exact(audit, captured, oracle, texts) == 2
    assert set(records["row"].tolist()) < {0, 1, 2}  # one of them was not reached


@pytest.mark.parametrize("whole_batch", [False, True])
def test_A10_samples_without_a_target_have_a_zero_sketch_and_their_neighbours_are_right(
    tmp_path: Path, signer: Signer, whole_batch: bool
) -> None:
    """TRL drops such rows itself; prepared rows are left as they are."""
    data = write_pairs(tmp_path / "data", "completions")
    full_rows = sft(tmp_path, dataset(data), max_length=None).train_dataset

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        n = 12 if whole_batch or row["sample_index"] % 3 == 1 else None
        return {"input_ids": row["input_ids"][:n], "labels": row["labels"][:n]}

    rows = full_rows.map(cut, remove_columns=["about", "prompt", "completion"])
    trainer = sft(tmp_path, rows, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
    oracle, texts = Oracle(tiny_lora()), texts_of(trainer.train_dataset)
    empty = {i for i, (_, labels) in texts.items() if all(label == -100 for label in labels)}
    assert 0 < len(empty) < 10
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert assert_exact(audit, captured, oracle, texts) == 10
    for record in records:
        is_empty = int(record["row"]) in empty
        assert (int(record["n_tokens"]) == 0) == is_empty
        assert bool(record["flags"] & Flag.NO_LOSS_TOKEN) == is_empty
        if is_empty:
            assert float(record["weight"]) == float(record["loss"]) == float(record["scale_raw"]) == 0
    assert all(step["residual"] is None or step["residual"] < EXACT for step in steps)


def test_bf16_autocast_closes_within_its_precision(tmp_path: Path, data: DataManifest, signer: Signer) -> None:
    trainer = sft(tmp_path, dataset(data), bf16=True)
    _, _, records, steps = train(tmp_path, data, signer, trainer)
    assert not records["flags"].any()
    assert max(step["residual"] for step in steps) < 2e-2


# --- preference pairs ---------------------------------------------------------------------------------------


def dpo(folder: Path, rows: Dataset, model: torch.nn.Module, **changes: Any) -> DPOTrainer:
    models = {name: changes.pop(name) for name in ("ref_model", "peft_config") if name in changes}
    return DPOTrainer(
        model=model,
        **models,
        args=DPOConfig(str(folder / "out"), **(COMMON | {"beta": 0.5} | changes)),
        train_dataset=rows,
        processing_class=character_tokenizer(),
    )


def log_likelihood(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(answer)), answer].sum()


def pair_loss(model: torch.nn.Module, reference: torch.nn.Module, row: dict[str, Any], beta: float) -> torch.Tensor:
    """The loss of Rafailov et al. 2023, equation 7, for one pair."""
    margin = torch.zeros(())
    for sign, answer in ((1, row["chosen_ids"]), (-1, row["rejected_ids"])):
        with torch.no_grad():
            before = log_likelihood(reference, row["prompt_ids"], answer)
        margin = margin + sign * (log_likelihood(model, row["prompt_ids"], answer) - before)
    return -torch.nn.functional.logsigmoid(beta * margin)


def shifted(model: torch.nn.Module) -> torch.nn.Module:
    """Another model than the one that is trained, so that the reference matters."""
    torch.manual_seed(3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other


PAIRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference computed beforehand": {"precompute_ref_log_probs": True},
    "no padding, which TRL does not do at present": {"padding_free": True},
    "accumulated, with checkpointing": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
}


@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        *((setup, "new adapter") for setup in PAIRS),
        *(("plain", kind) for kind in ("old adapter", "adapter and reference", "whole model")),
    ],
)
def test_a_preference_pair_is_one_sample_and_matches_autograd(
    tmp_path: Path, signer: Signer, setup: str, kind: str
) -> None:
    """The reference is the model without its adapter, a copy of the old adapter, or a model of its own."""
    data = write_pairs(tmp_path / "data", "preferences")
    model = full(tied=False) if kind == "whole model" else tiny_lora().train()
    oracle, reference, options = Oracle(model), copy.deepcopy(model), dict(PAIRS[setup])
    if kind in ("adapter and reference", "whole model"):
        reference = shifted(tiny_llama())
        options["ref_model"] = copy.deepcopy(reference)
    if kind == "new adapter":
        options["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules=HIDDEN_LAYERS)
        reference, weights = tiny_llama(), model.state_dict()
        model = tiny_llama()
    trainer = dpo(tmp_path, dataset(data), model, **options)
    if kind == "new adapter":
        trainer.model.load_state_dict(weights)
    rows = {row["sample_index"]: row for row in trainer.train_dataset}
    audit, captured, records, steps = train(tmp_path, data, signer, trainer)
    assert closes(steps)
    assert len(records) == 10
    assert (records["flags"] == Flag.UNIT_UNKNOWN).all()
    assert (records["weight"] == 1).all()
    for step in captured:
        for micro in step:
            for slot, index in enumerate(micro.sample_index.tolist()):
                share = 1 / (len(micro.sample_index) * len(step))
                loss = share * pair_loss(oracle.model, reference, rows[index], beta=0.5)
                expected = audit._layout.sketch(oracle.gradients(loss))
                assert relative_error(micro.sketch[slot], expected) < EXACT
