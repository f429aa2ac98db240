"""``gradtrail modules``: routes, costs and gaps of a model, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

from attribution.cli import app
from attribution.errors import RecipeError

SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def document(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["modules", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_module_of_a_model_is_listed_with_route_and_cost(llama: str) -> None:
    found = document(llama, "--tokens", "100")
    by_name = {m["name"]: m for m in found["modules"]}
    assert found["coverage"] == 1.0
    assert len(by_name) == 2 + 2 * 9 + 1  # embedding and head, seven maps and two norms a layer, the last norm
    q = by_name["model.layers.0.self_attn.q_proj"]
    assert (q["kind"], q["route"], q["entries"]) == ("linear", "exact", 24 * 24)
    assert q["flops"] == 2 * 100 * 24 * 24 + 2 * 24 * 24
    assert by_name["model.norm"]["kind"] == "elementwise"
    assert by_name["model.embed_tokens"]["kind"] == "embedding"


def test_fused_linear_maps_cost_no_second_product(llama: str) -> None:
    observed, fused = (document(llama, *mode)["modules"] for mode in ([], ["--fused"]))
    for plain, cheap in zip(observed, fused, strict=True):
        assert (cheap["route"] == "fused") == (plain["kind"] == "linear")
        assert cheap["flops"] < plain["flops"] or plain["kind"] != "linear"


def test_lora_leaves_only_the_adapters(llama: str) -> None:
    found = document(llama, "--lora", "4")
    assert all("lora_" in m["name"] for m in found["modules"])
    assert found["trainable_entries"] == sum(m["entries"] for m in found["modules"])


def test_experts_are_recomputed_and_nothing_is_left_out(tmp_path: Path) -> None:
    MixtralConfig(**SMALL, num_local_experts=4).save_pretrained(tmp_path)
    found = document(str(tmp_path))
    assert {m["route"] for m in found["modules"] if ".mlp." in m["name"]} == {"recomputed"}
    assert found["coverage"] == 1.0


def test_layers_are_gathered_into_one_line_unless_all_are_asked_for(tmp_path: Path) -> None:
    GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=61).save_pretrained(tmp_path)
    short, long = (CliRunner().invoke(app, ["modules", str(tmp_path), *more]).stdout for more in ([], ["--all"]))
    assert "transformer.h.*.attn.c_attn" in short
    assert "transformer.h.1.attn.c_attn" in long
    assert "tracked: 100.00%" in short


def test_a_gap_is_named_with_its_reason(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import torch\n"
        "from attribution import Recipe\n\n\n"
        "def build(manifest):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))\n"
        "    return Recipe(model=model, tokenizer=None)\n"
    )
    done = CliRunner().invoke(app, ["modules", f"{recipe}:build"])
    assert "batch normalisation mixes samples" in done.stdout
    assert "tracked: 66.67%" in done.stdout


def test_a_model_that_cannot_be_built_is_refused_without_asking_the_network(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["modules", str(tmp_path / "nowhere")])
    assert isinstance(done.exception, RecipeError)
    assert "config.json" in done.exception.advice()
