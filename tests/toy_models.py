# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face models in awkward shapes, made with transformers' own classes."""

import torch

# head width is not hidden / heads, the vocabulary divides by nothing, groups of three heads
LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 32,
}

LLAMA_VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True, "num_key_value_heads": 6},
}


def make_llama(directory=None, seed=0, dtype=torch.float32, shard_size="40KB", **changes):
    """A ``LlamaForCausalLM`` whose every number is random; saved with a tokenizer if ``directory`` is given."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})).eval()
    randomise(model)
    model = model.to(dtype)
    model.config.dtype = dtype
    if directory is not None:
        model.save_pretrained(directory, max_shard_size=shard_size)
        (directory / "tokenizer.json").write_text(
            '{"version": "1.0", "note": "carried over, not read"}'
        )
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
        (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\nA toy.\n")
    return model


def randomise(model):
    """Norms around one, everything else around zero, so that a dropped or swapped tensor shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)


def tokens(rows=2, length=40, vocab_size=101, seed=1):
    """Random token ids [rows, length] and their positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    return ids, torch.arange(length).expand(rows, -1)
