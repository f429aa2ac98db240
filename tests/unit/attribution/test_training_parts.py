"""The small parts around audit mode: dataset, recipe, snapshot, what the manifest says of a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama, tiny_lora

from attribution import Recipe, dataset
from attribution.capture.modules import find_tracked
from attribution.errors import RecipeError, SketchMismatchError
from attribution.training.environment import describe_environment, describe_model, describe_tracking
from attribution.training.recipe import describe_recipe, load_recipe
from attribution.training.snapshot import load_trainable, save_snapshot
from auditlog import DataManifest
from auditlog.errors import DataError


def test_ids_survive_what_people_do_to_datasets(data: DataManifest) -> None:
    rows = dataset(data)
    assert rows["sample_index"] == list(range(20))
    changed = rows.map(lambda r: {"n": len(r["text"])}).filter(lambda r: r["n"] % 2 == 0).shuffle(seed=1)
    chosen = changed.select(range(3))
    for row in chosen:
        assert data.read_row(row["sample_index"])["text"] == row["text"]


def test_fields_that_some_rows_lack_are_none_and_mixed_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n{"text": "b"}\n')
    rows = dataset(DataManifest.build(tmp_path / "a.jsonl"))
    assert rows["n"] == [1, None]
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n{"text": "b", "n": "two"}\n')
    with pytest.raises(DataError, match="do not form one table"):
        dataset(DataManifest.build(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text('{"text": "a", "sample_index": 1}\n')
    with pytest.raises(DataError, match="has a field named sample_index"):
        dataset(DataManifest.build(tmp_path / "a.jsonl"))


def test_a_recipe_is_loaded_by_file_or_module_and_named_with_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("from attribution import Recipe\ndef build(manifest):\n    return Recipe(model=1, tokenizer=2)\n")
    assert load_recipe(f"{file}:build")(None) == Recipe(model=1, tokenizer=2)
    described = describe_recipe(f"{file}:build")
    assert described["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert described["file"] == "train.py"
    assert load_recipe("json:loads") is json.loads


@pytest.mark.parametrize("name", ["train.py", "nowhere.py:build", "json:nothing", "no_such_module:build"])
def test_a_recipe_that_does_not_load_is_named(name: str) -> None:
    with pytest.raises(RecipeError, match=name):
        load_recipe(name)


def test_a_snapshot_restores_the_trained_parameters_and_refuses_another_model(tmp_path: Path) -> None:
    model = tiny_lora()
    body = save_snapshot(tmp_path / "snapshots" / "final", find_tracked(model).trainable, None, step=3)
    assert body["path"] == "snapshots/final"
    for file in body["files"]:
        content = (tmp_path / body["path"] / file["name"]).read_bytes()
        assert (file["sha256"], file["size_bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
    other = tiny_lora()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    load_trainable(tmp_path / "snapshots" / "final", other)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
    with pytest.raises(SketchMismatchError, match="does not fit"):
        load_trainable(tmp_path / "snapshots" / "final", tiny_llama())


def test_the_base_models_digest_moves_with_any_frozen_weight_and_no_trained_one() -> None:
    model = tiny_lora()
    before = describe_model(model)
    assert before["class"] == "LlamaForCausalLM"
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_A" in n).add_(1)
    assert describe_model(model)["frozen_sha256"] == before["frozen_sha256"]
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "norm" in n).view(-1)[0] += 1e-3
    assert describe_model(model)["frozen_sha256"] != before["frozen_sha256"]


def test_what_is_described_is_plain_json() -> None:
    model = tiny_lora()
    described = [describe_model(model), describe_tracking(find_tracked(model), "observe"), describe_environment()]
    assert json.loads(json.dumps(described)) == described
    assert described[1]["coverage"] == 1.0
    assert "torch" in described[2]["packages"]
