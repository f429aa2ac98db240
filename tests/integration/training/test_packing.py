"""Documents packed into one row: one exact gradient each; refused or marked where they see each other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import EXACT, Oracle, assert_exact, keep_captured, texts_of, tokenized
from tiny import VOCABULARY, tiny_gpt2, tiny_llama, tiny_lora
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from attribution import AuditMode, PackingCollator
from attribution.capture.batch import Announced, read_batch
from attribution.capture.crossing import documents_see_each_other
from attribution.capture.segments import Segments
from attribution.errors import AttributionError, SampleIdentityError
from attribution.training.collators import IdCollator
from auditlog import DataManifest, RunReader, Signer
from auditlog.format.records import EventKind, Flag


def with_attention(make: Callable[[], torch.nn.Module], implementation: str) -> Callable[[], torch.nn.Module]:
    def made() -> torch.nn.Module:
        model = make()
        getattr(model, "get_base_model", lambda: model)().set_attn_implementation(implementation)
        return model.train()

    return made


MODELS = {
    "llama, sdpa": with_attention(tiny_lora, "sdpa"),
    "llama, eager": with_attention(tiny_lora, "eager"),
    "whole llama": with_attention(tiny_llama, "sdpa"),
    "gpt2, sdpa": with_attention(tiny_gpt2, "sdpa"),
    "gpt2, eager": with_attention(tiny_gpt2, "eager"),
}


def documents(seed: int = 0) -> list[dict[str, Any]]:
    """Seven documents of 1 to 9 tokens; some with loss on their end only."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate([6, 9, 1, 4, 7, 3, 8]):
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        labels = ids if number % 2 else [-100] * (length // 2) + ids[length // 2 :]
        made.append({"input_ids": ids, "labels": labels, "sample_index": 2 * number})
    return made


def run_step(
    folder: Path, data: DataManifest, signer: Signer, model: torch.nn.Module, batches: list[Any], **options: Any
) -> tuple[AuditMode, Any, Any, Any]:
    """One optimizer step over the batches, with weights that stay; audit mode, captured, records, steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with AuditMode(
        model, optimizer, data, run=folder / "run", signer=signer, on_head=folder / "auditor", **options
    ) as audit:
        captured = keep_captured(audit)
        for batch in batches:
            model(**batch).loss.backward()
        optimizer.step()
    with RunReader.open(folder / "run") as run:
        return audit, captured, run.records(), [event.json() for event in run.events(EventKind.STEP)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["observe", "fused"])
def test_each_packed_document_matches_autograd_on_itself_alone(
    tmp_path: Path, data: DataManifest, signer: Signer, name: str, mode: str
) -> None:
    model, examples = MODELS[name](), documents()
    oracle = Oracle(MODELS[name]())
    batches = [PackingCollator()(examples[:4]), PackingCollator()(examples[4:])]
    audit, captured, records, steps = run_step(tmp_path, data, signer, model, batches, mode=mode)
    assert assert_exact(audit, captured, oracle, texts_of(examples)) == len(records) == 7
    assert steps[0]["residual"] < EXACT
    assert records["slot"].tolist() == [0] * 7
    assert records["part"].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert records["flags"].tolist() == [0, 0, Flag.NO_LOSS_TOKEN, 0, 0, 0, 0]  # the third has one token


def test_A19_documents_that_see_each_other_are_refused_or_marked(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    def crossing() -> dict[str, Any]:
        batch = PackingCollator()(documents())
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}

    with pytest.raises(SampleIdentityError, match="see each other"):
        run_step(tmp_path / "refused", data, signer, tiny_lora().train(), [crossing()])
    _, _, records, steps = run_step(
        tmp_path / "marked", data, signer, tiny_lora().train(), [crossing()], on_crossing="mark"
    )
    assert (records["flags"] & Flag.NOT_SEPARABLE).all()
    assert steps[0]["residual"] < EXACT


def test_A19_a_cache_that_lets_documents_see_each_other_is_noticed(
    tmp_path: Path, data: DataManifest, signer: Signer
) -> None:
    """With a cache, which models make by default, transformers ignores that positions begin anew."""

    def cached() -> dict[str, Any]:
        return {key: value for key, value in PackingCollator()(documents()).items() if key != "use_cache"}

    with pytest.raises(AttributionError, match="see each other"):
        run_step(tmp_path / "refused", data, signer, tiny_lora().train(), [cached()])
    _, _, records, steps = run_step(
        tmp_path / "marked", data, signer, tiny_lora().train(), [cached()], on_crossing="mark"
    )
    assert (records["flags"] & Flag.NOT_SEPARABLE).all()
    assert steps[0]["residual"] < EXACT


def test_documents_are_tried_out_with_random_numbers_put_back() -> None:
    batch = PackingCollator()(documents())
    index = batch.pop("sample_index")
    segments = read_batch((), batch, Announced(index)).layout(1)[1]
    model = tiny_lora(dropout=0.3).train()
    state = torch.get_rng_state()
    assert not documents_see_each_other(model, batch, segments)
    assert documents_see_each_other(model, batch | {"use_cache": True}, segments)
    assert torch.equal(torch.get_rng_state(), state)
    alone = Segments.whole_rows(1, 1)
    assert not documents_see_each_other(model, batch | {"use_cache": True}, alone)


def test_the_collator_leaves_out_padding_and_ids_that_are_not_there() -> None:
    examples = [
        {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]},
        {"input_ids": torch.tensor([7, 8, 9]), "labels": torch.tensor([-100, -100, 9])},
        {"input_ids": []},
    ]
    batch = PackingCollator()(examples)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert "attention_mask" not in batch
    assert "sample_index" not in batch


# --- under the Trainer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("collator", [PackingCollator(), DataCollatorWithFlattening()], ids=["ours", "flattening"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_flattening_collators_keep_their_documents_apart_under_the_trainer(
    tmp_path: Path, data: DataManifest, signer: Signer, collator: Any, accumulation: int
) -> None:
    rows = tokenized(data).remove_columns("attention_mask")
    arguments = TrainingArguments(
        str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        learning_rate=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=tiny_lora().train(), args=arguments, train_dataset=rows, data_collator=collator)
    oracle = Oracle(tiny_lora())
    with AuditMode.attach(trainer, data, run=tmp_path / "run", signer=signer, on_head=tmp_path / "auditor") as audit:
        captured = keep_captured(audit)
        trainer.train()
    assert assert_exact(audit, captured, oracle, texts_of(rows)) == 20
    assert audit.recorder.worst_residual < EXACT


def packed_example(*documents: tuple[int, list[int]]) -> dict[str, Any]:
    ids = [token for _, tokens in documents for token in tokens]
    starts = [sum(len(t) for _, t in documents[:k]) for k in range(len(documents) + 1)]
    spans = [[s, e, 0] for s, e in pairwise(starts)]
    return {"input_ids": ids, "sample_index": [index for index, _ in documents], "sample_spans": spans}


def test_ids_come_back_behind_a_collator_that_stacks_or_flattens_packed_rows() -> None:
    examples = [packed_example((4, [1, 2, 3]), (5, [4, 5])), packed_example((6, [6, 7]), (7, [8]))]
    seen: list[set[str]] = []

    def stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(set(rows[0]))
        longest = max(len(row["input_ids"]) for row in rows)
        return {"input_ids": torch.tensor([r["input_ids"] + [0] * (longest - len(r["input_ids"])) for r in rows])}

    def flatten(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]])}

    stacked, flat = IdCollator(stack)(examples), IdCollator(flatten)(examples)
    assert seen == [{"input_ids"}]
    assert stacked["sample_index"].tolist() == flat["sample_index"].tolist() == [4, 5, 6, 7]
    assert stacked["sample_spans"].tolist() == [[0, 0, 3, 0], [0, 3, 5, 0], [1, 0, 2, 0], [1, 2, 3, 0]]
    assert flat["sample_spans"].tolist() == [[0, 0, 3, 0], [0, 3, 5, 0], [0, 5, 7, 0], [0, 7, 8, 0]]
    with pytest.raises(SampleIdentityError, match="changed packed rows"):
        IdCollator(lambda rows: flatten(rows[::-1]))(examples)


def test_a_collator_that_reorders_its_examples_is_refused() -> None:
    rows = [{"input_ids": [1, 2, 3], "sample_index": 0}, {"input_ids": [1, 2, 4, 5], "sample_index": 1}]

    def longest_first(rows: list[dict[str, Any]]) -> dict[str, Any]:
        rows = sorted(rows, key=lambda row: -len(row["input_ids"]))
        return {"input_ids": torch.tensor([r["input_ids"] + [0] * (4 - len(r["input_ids"])) for r in rows])}

    with pytest.raises(SampleIdentityError, match="put example 1 of the batch into row 0"):
        IdCollator(longest_first)(rows)
