# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: odd numbers of them, experts that no token chooses, dense layers among the sparse."""

import json

import torch
from megatron.core.models.backends import LocalSpecProvider
from safetensors.torch import load_file, save_file

from megatron.bridge.backends.specs import layer_specs
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider
from tests.families.row import Row

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 3,
    "router_aux_loss_coef": 0.0,
}
SIX = {**SIZES, "num_experts": 6, "moe_intermediate_size": 20}
# 40 tokens choose two experts each: some have no token
THIRTY = {**SIX, "num_experts": 30, "num_experts_per_tok": 2}
OLMOE = {**SIZES, "num_experts": 6}
del OLMOE["head_dim"]  # its norm of queries is as wide as the hidden state
GLM = {
    **SIZES,
    "num_attention_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
del GLM["router_aux_loss_coef"]  # it has none
LAYOUTS = ("tp2", "pp2", "vp2", "ep2", "etp2")


class OneByOne(TorchSpecProvider):
    """Layers whose experts are modules of their own, as without a grouped matrix product."""

    grouped_mlp_modules = LocalSpecProvider.grouped_mlp_modules


def sequential(config):
    """A layer spec with such layers only."""
    block = layer_specs.decoder_block_spec(config, "torch")
    block.layer_specs = [layer_specs.layer_spec(config, OneByOne(), moe=True)] * len(
        block.layer_specs
    )
    return block


def _random_tensor(name, shape, generator):
    """As large as in other layers: float32 would round the sums of a larger one by more than tests allow."""
    width = 0.2 if len(shape) < 2 else min(0.2, 1.4 / shape[-1] ** 0.5)
    mean = 1.0 if "norm" in name and len(shape) == 1 else 0.0
    return mean + width * torch.randn(shape, generator=generator)


def add_next_token_layer(directory):
    """Store, as the hub does, a layer of multi-token prediction, which transformers neither reads nor writes."""
    layer = f"model.layers.{GLM['num_hidden_layers']}."
    generator = torch.Generator().manual_seed(5)
    stored = {
        name: value
        for path in directory.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    last = f"model.layers.{GLM['num_hidden_layers'] - 1}."
    shapes = {
        name.replace(last, layer): tensor.shape
        for name, tensor in stored.items()
        if name.startswith(last)
    }
    width = GLM["hidden_size"]
    shapes |= {f"{layer}{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{layer}eh_proj.weight"] = (width, 2 * width)
    tensors = {name: _random_tensor(name, shape, generator) for name, shape in shapes.items()}
    tensors[f"{layer}embed_tokens.weight"] = stored["model.embed_tokens.weight"]
    tensors[f"{layer}shared_head.head.weight"] = stored["lm_head.weight"]
    save_file(tensors, directory / "mtp.safetensors", {"format": "pt"})
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    path.write_text(json.dumps(index))


ROWS = [
    Row("mixtral", "MixtralForCausalLM", {**SIZES, "num_local_experts": 6}, LAYOUTS),
    Row(
        "mixtral_window",
        "MixtralForCausalLM",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
        ("ep2",),
    ),
    Row(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **SIX,
            "shared_expert_intermediate_size": 28,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
        LAYOUTS,
    ),
    Row(
        "qwen2_moe_windows",
        "Qwen2MoeForCausalLM",
        {
            **SIX,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
        ("ep2",),
    ),
    Row(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**SIX, "norm_topk_prob": True, "mlp_only_layers": [0]},
        LAYOUTS,
        four=("tp2ep2", "tp2pp2"),
    ),
    Row(
        "qwen3_moe_sequential",
        "Qwen3MoeForCausalLM",
        {**SIX, "norm_topk_prob": False},
        ("tp2", "pp2", "ep2", "etp2"),
        provider={"transformer_layer_spec": sequential, "moe_grouped_gemm": False},
    ),
    Row(
        "qwen3_moe_idle_experts",
        "Qwen3MoeForCausalLM",
        {**THIRTY, "tie_word_embeddings": True},
        ("ep2", "pp2"),
    ),
    Row(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {**GLM, "use_qk_norm": True, "attention_bias": True},
        LAYOUTS,
    ),
    Row(
        "glm4_moe_groups",
        "Glm4MoeForCausalLM",
        {
            **GLM,
            "n_group": 3,
            "topk_group": 2,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
        },
        ("ep2",),
    ),
    Row(
        "glm4_moe_next_tokens",
        "Glm4MoeForCausalLM",
        {**GLM, "num_nextn_predict_layers": 1},
        ("tp2", "pp2", "ep2"),
        provider={"mtp_loss_scaling_factor": 0.0},  # transformers does not train it
        rewrite=add_next_token_layer,
    ),
    Row("olmoe", "OlmoeForCausalLM", {**OLMOE, "norm_topk_prob": False}, LAYOUTS),
    Row(
        "olmoe_tied",
        "OlmoeForCausalLM",
        {**OLMOE, "norm_topk_prob": True, "tie_word_embeddings": True, "clip_qkv": 0.7},
        ("pp2",),
    ),
]
