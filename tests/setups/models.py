"""Tiny models with random weights, one per way in which a model can be built. Nothing is downloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import IA3Config, LoraConfig, TaskType, get_peft_model
from tiny import VOCABULARY, tiny_llama
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

transformers.logging.set_verbosity_error()

CLASSES = 5
_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SIZE | {"num_key_value_heads": 2}
_HEADS = _GROUPED | {"head_dim": 8}
_NO_DROPOUT = {"embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}


def gpt2(**changes: Any) -> nn.Module:
    """Return GPT-2: Conv1D, LayerNorm, learned positions, and a head that is the embedding's own table."""
    set_seed(9)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**(sizes | _NO_DROPOUT | changes)))


def wide_gpt2() -> nn.Module:
    """Return GPT-2 with matrices large enough to be folded on both sides, its table among them."""
    return gpt2(vocab_size=6144, n_embd=256, n_layer=1)


def wide_llama() -> nn.Module:
    """Return Llama with matrices large enough to be folded on both sides: those of queries, outputs and the MLP."""
    set_seed(10)
    return LlamaForCausalLM(LlamaConfig(**(_GROUPED | {"hidden_size": 256, "intermediate_size": 512})))


def neox() -> nn.Module:
    set_seed(1)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZE, hidden_dropout=0, attention_dropout=0))


def gemma() -> nn.Module:
    set_seed(1)
    return GemmaForCausalLM(GemmaConfig(**_HEADS))


def gemma3() -> nn.Module:
    """Return Gemma 3: its embedding multiplies what it looks up by a constant; two kinds of attention."""
    set_seed(1)
    return Gemma3ForCausalLM(Gemma3TextConfig(**_HEADS, sliding_window=8))


def qwen2() -> nn.Module:
    set_seed(1)
    return _without_zeros(Qwen2ForCausalLM(Qwen2Config(**_GROUPED)))


def qwen3() -> nn.Module:
    set_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**_HEADS))


def mixtral(idle_expert: bool = False) -> nn.Module:
    """Return Mixtral: all experts of a layer in one 3-D parameter.

    Args:
        idle_expert: Each token goes to one expert, and none to expert 2, whose score is the mean of two others'.
    """
    set_seed(1)
    config = MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=1 if idle_expert else 2)
    model = MixtralForCausalLM(config)
    if idle_expert:
        with torch.no_grad():
            for layer in model.model.layers:
                gate = layer.mlp.gate.weight
                gate[2] = (gate[0] + gate[1]) / 2
    return model


def gpt_oss() -> nn.Module:
    """Return a gpt-oss: fused experts with biases, attention sinks, a router of bare parameters."""
    set_seed(1)
    config = GptOssConfig(**_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    return _without_zeros(GptOssForCausalLM(config))


def _without_zeros(model: nn.Module) -> nn.Module:
    """Give a value to what starts at zero, so that it takes part."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options))


def adapted(make: Callable[[], nn.Module] = tiny_llama, **options: Any) -> nn.Module:
    """Return a model with LoRA whose B is not zero, so that A has a gradient from the first step."""
    return with_values(get_peft_model(make(), lora(**options)))


def with_values(model: nn.Module) -> nn.Module:
    """Give a value to the halves of LoRA that start at zero."""
    set_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_(std=0.1)
    return model


def attending(make: Callable[[], nn.Module], implementation: str) -> nn.Module:
    """Return a model with one of transformers' implementations of attention."""
    model = make()
    getattr(model, "get_base_model", lambda: model)().set_attn_implementation(implementation)
    return model


def tied_llama() -> nn.Module:
    """Return Llama whose head is the embedding's own table."""
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def gpt2_lora(**changes: Any) -> nn.Module:
    """Return GPT-2 with LoRA on its fused query, key and value projection, a Conv1D."""
    return adapted(functools.partial(gpt2, **changes), target_modules=["c_attn"], fan_in_fan_out=True)


def sequence_classifier() -> nn.Module:
    """Return a classifier of whole texts: LoRA in the body, and a head that is trained as it is."""
    set_seed(7)
    body = LlamaForSequenceClassification(LlamaConfig(**_GROUPED, num_labels=CLASSES, pad_token_id=0))
    return adapted(
        lambda: body, task_type=TaskType.SEQ_CLS, target_modules=["q_proj", "v_proj"], modules_to_save=["score"]
    )


class Classifier(nn.Module):
    """Anything that turns a batch of tensors into logits, called as language models are."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Pooled(nn.Module):
    """Any encoder of sequences, averaged over its tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        return self.head((encoded[0] if isinstance(encoded, tuple) else encoded).mean(1))


def pooled(make: Callable[[], nn.Module]) -> nn.Module:
    set_seed(2)
    return Classifier(Pooled(make()))


class Vision(nn.Module):
    """A vision transformer: its class token and positions are bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        images = {"image_size": 8, "patch_size": 4, "num_channels": 2}
        self.inner = ViTForImageClassification(ViTConfig(**sizes, **images, num_labels=CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(pixel_values=x).logits


def vision() -> nn.Module:
    set_seed(2)
    return Classifier(Vision())


def bert() -> nn.Module:
    set_seed(1)
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return BertForSequenceClassification(BertConfig(**_SIZE, **no_dropout, num_labels=CLASSES))


def ia3() -> nn.Module:
    set_seed(7)
    config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    return get_peft_model(tiny_llama(), config)


def deepseek() -> nn.Module:
    """Return DeepSeek-V3: compressed attention, a dense layer, and one of experts with a shared one."""
    set_seed(1)
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    config = DeepseekV3Config(**_SIZE, num_key_value_heads=4, **ranks, **experts, topk_group=1, first_k_dense_replace=1)
    return DeepseekV3ForCausalLM(config)


def t5() -> nn.Module:
    """Return T5, whose relative positions are looked up once for all samples."""
    set_seed(1)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0, decoder_start_token_id=0, pad_token_id=0)
    )


def mamba() -> nn.Module:
    """Return Mamba, whose mixer reads the weights of two of its modules without calling them."""
    set_seed(1)
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4))


def mlp(*layers: nn.Module) -> Classifier:
    return Classifier(nn.Sequential(*layers))


def relu_in_place() -> nn.Module:
    set_seed(2)
    return mlp(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, CLASSES))


class Convolutions(nn.Module):
    """Conv2d with groups, GroupNorm, and Conv1d over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, groups=4, padding=1)
        self.along = nn.Conv1d(8, 6, 3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.relu(self.norm(self.first(x))))
        return self.head(torch.relu(self.along(h.mean(3))).mean(2))


def convolutions() -> nn.Module:
    set_seed(2)
    return Classifier(Convolutions())


class Attention(nn.Module):
    """torch's own multi-head attention, which reads its projections' weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.norm(x + mixed).mean(1))


def attention() -> nn.Module:
    set_seed(2)
    return Classifier(Attention())


class Thrice(nn.Module):
    """One linear module, used three times in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.head(x.mean(1))


def thrice() -> nn.Module:
    set_seed(2)
    return Classifier(Thrice())


class Tied(nn.Module):
    """Two linear modules with one weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))).mean(1))


def tied() -> nn.Module:
    set_seed(2)
    return Classifier(Tied())


class Blocks(nn.Module):
    """Three linear blocks, checkpointed or not; ``shared`` is used inside and outside of the checkpointed region."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        for block in self.blocks:
            x = self._run(block, x)
        return self.head(torch.tanh(self.shared(x)).mean(1))

    def _region(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(torch.tanh(block(x))))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self._region(block, x)
        return torch.utils.checkpoint.checkpoint(self._region, block, x, use_reentrant=self.reentrant)


def blocks(reentrant: bool | None) -> nn.Module:
    set_seed(2)
    return Classifier(Blocks(reentrant))
