# SPDX-License-Identifier: Apache-2.0
"""Pruned models: what is kept, what transformers computes with it, and the scores against a plain loop."""

import json

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models.surgery.importance import measure
from tests.toy_models import randomise

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
TOKENS = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(1))
DEAD_NEURONS, DEAD_GROUP, DEAD_CHANNELS = [3, 40, 41], 2, [0, 17]


def make(kind):
    torch.manual_seed(0)
    config_class, model_class = MODELS[kind]
    model = model_class(config_class(**SIZES, tie_word_embeddings=False)).eval()
    randomise(model)
    return model


def save(model, folder):
    model.save_pretrained(folder)
    words = {"end": 0} | {str(number): number for number in range(1, 96)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="end"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="end"
    ).save_pretrained(folder)
    lines = [json.dumps({"text": " ".join(map(str, row.tolist()))}) for row in TOKENS]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


def prune(folder, output, *options):
    words = ["prune", "--hf-model", folder, "--hf-path", output, "--texts", folder / "texts.jsonl"]
    return main([*map(str, words), *map(str, options)])


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values())
    return model.eval()


@torch.no_grad()
def logits_of(model):
    return model(TOKENS).logits


@torch.no_grad()
def silence(model):
    """Take the effect of some neurons, of a group of heads and of some channels from every layer."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[:, DEAD_NEURONS] = 0
        layer.mlp.up_proj.weight[DEAD_NEURONS] = 0
        width = 2 * SIZES["head_dim"]
        queries = slice(DEAD_GROUP * width, (DEAD_GROUP + 1) * width)
        keys = slice(DEAD_GROUP * SIZES["head_dim"], (DEAD_GROUP + 1) * SIZES["head_dim"])
        layer.self_attn.o_proj.weight[:, queries] = 0
        layer.self_attn.v_proj.weight[keys] = 0
        if layer.self_attn.v_proj.bias is not None:
            layer.self_attn.v_proj.bias[keys] = 0
        layer.mlp.down_proj.weight[DEAD_CHANNELS] = 0
        layer.self_attn.o_proj.weight[DEAD_CHANNELS] = 0
    model.model.embed_tokens.weight[:, DEAD_CHANNELS] = 0


@pytest.mark.parametrize("kind", MODELS)
def test_what_has_no_effect_is_removed_and_the_logits_stay(tmp_path, kind):
    model = make(kind)
    silence(model)
    folder = save(model, tmp_path / "source")
    sizes = ["--ffn-hidden-size", 61, "--key-heads", 3, "--hidden-size", 30]
    assert prune(folder, tmp_path / "small", *sizes) == 0
    small = load(tmp_path / "small")
    config = small.config
    assert (config.hidden_size, config.intermediate_size) == (30, 61)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 8)
    expected = logits_of(model)
    assert (logits_of(small) - expected).abs().max() <= 1e-4 * expected.std()
    # the bridge computes the same with the smaller model
    provider = AutoBridge.from_hf_pretrained(tmp_path / "small").to_megatron_provider()
    chunk = provider.provide_distributed_model(wrap_with_ddp=False)[0].eval()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        outputs = chunk(TOKENS, positions, None)[..., :96]
    assert (outputs - expected).abs().max() <= 1e-3 * expected.std()


@pytest.mark.parametrize("kind", MODELS)
def test_layers_that_change_little_are_removed(tmp_path, kind):
    model = make(kind)
    with torch.no_grad():
        for matrix in (model.model.layers[1].mlp.down_proj, model.model.layers[1].self_attn.o_proj):
            matrix.weight.mul_(1e-4)
    folder = save(model, tmp_path / "source")
    assert prune(folder, tmp_path / "small", "--layers", 3) == 0
    small = load(tmp_path / "small")
    del model.model.layers[1]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = 3
    assert torch.equal(logits_of(small), logits_of(model))


@torch.no_grad()
def test_scores_are_those_of_a_plain_loop():
    model = make("llama")
    scores = measure(model, [TOKENS[:1], TOKENS[1:]])
    assert scores.tokens == TOKENS.numel()
    states = model(TOKENS, output_hidden_states=True, use_cache=False).hidden_states
    for index, layer in enumerate(model.model.layers[:-1]):
        cosine = F.cosine_similarity(states[index], states[index + 1], dim=-1).mean()
        assert scores.layers[index].item() == pytest.approx(1 - cosine.item(), rel=1e-4, abs=1e-6)
        position_embeddings = model.model.rotary_emb(
            states[index], torch.arange(TOKENS.shape[1])[None]
        )
        normed = layer.input_layernorm(states[index])
        attended = (
            states[index] + layer.self_attn(normed, position_embeddings, attention_mask=None)[0]
        )
        inner = layer.post_attention_layernorm(attended)
        neurons = F.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner)
        assert torch.allclose(scores.neurons[index], neurons.flatten(0, 1).norm(dim=0), rtol=1e-4)


def test_sizes_and_data_that_do_not_fit_are_named(tmp_path, capsys):
    folder = save(make("llama"), tmp_path / "source")
    assert prune(folder, tmp_path / "small", "--layers", 5, "--key-heads", 9) == 1
    errors = capsys.readouterr().err
    assert "--layers 5" in errors
    assert "num_hidden_layers=4" in errors
    assert "--key-heads 9" in errors
    assert prune(folder, tmp_path / "small", "--hidden-size", 29) == 1
    assert "29" in capsys.readouterr().err
    assert prune(folder, tmp_path / "small") == 1
    assert "--layers" in capsys.readouterr().err
    (folder / "texts.jsonl").write_text("no json\n")
    assert prune(folder, tmp_path / "small", "--layers", 2) == 1
    assert "texts.jsonl:1" in capsys.readouterr().err
