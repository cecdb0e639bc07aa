# SPDX-License-Identifier: Apache-2.0
"""Tiny models of each kind of layer, by family."""

from transformers import AutoConfig

from megatron.bridge import AutoBridge

SEQUENCE = 256
BASE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "intermediate_size": 384,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"]},
    "gemma2": {**BASE, "head_dim": 16, "architectures": ["Gemma2ForCausalLM"]},
    "qwen3": {**BASE, "head_dim": 32, "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        **BASE,
        **EXPERTS,
        "num_experts": 8,
        "head_dim": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "architectures": ["Qwen3MoeForCausalLM"],
    },
    "deepseek_v3": {
        **BASE,
        **EXPERTS,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 0,
        "architectures": ["DeepseekV3ForCausalLM"],
    },
    "gpt_oss": {
        **BASE,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "architectures": ["GptOssForCausalLM"],
    },
    "mistral": {
        **BASE,
        "head_dim": 16,
        "sliding_window": 64,
        "architectures": ["MistralForCausalLM"],
    },
    "nemotron_h": {
        **BASE,
        "hybrid_override_pattern": "M-M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 16,
        "chunk_size": 64,
        "architectures": ["NemotronHForCausalLM"],
    },
    "qwen3_next": {
        **BASE,
        **EXPERTS,
        "num_experts": 8,
        "head_dim": 32,
        "shared_expert_intermediate_size": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "architectures": ["Qwen3NextForCausalLM"],
    },
}


def provider(family, layers=2, **values):
    """The provider of a tiny model of ``family``."""
    depth = (
        {} if family == "nemotron_h" else {"num_hidden_layers": layers}
    )  # its pattern has 4 layers
    hf = AutoConfig.for_model(family, **depth, **FAMILIES[family])
    model = AutoBridge.from_hf_config(hf).to_megatron_provider(load_weights=False)
    model.seq_length = SEQUENCE
    for name, value in values.items():
        setattr(model, name, value)
    return model
