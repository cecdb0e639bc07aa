# SPDX-License-Identifier: Apache-2.0
"""Multipliers, caps and rotary embeddings by layer: applied once, wherever embeddings and logits are made."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.check import compare_logits
from megatron.bridge.models.features.activations import gelu_tanh
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.config.serialize import dump_yaml, load_yaml
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.toy_models import LLAMA
from tests.workers import forget_model_parallel

TINY = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "vocab_size": 101,
    "seq_length": 40,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_func": gelu_tanh,
    "gated_linear_unit": True,
}


def build(seed=1, **changes):
    """A model with the same random weights for the same ``seed``."""
    forget_model_parallel()
    provider = GPTModelProvider(**TINY | changes)
    provider.initialize_model_parallel(seed=seed)
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    harness.randomise(chunk)
    return chunk


def run(chunk, **kwargs):
    ids, labels = torch.arange(80).view(2, 40), torch.arange(80).flip(0).view(2, 40)
    positions = torch.arange(40).expand(2, -1)
    return chunk(ids, positions, None, **dict.fromkeys(kwargs, labels))


@pytest.mark.parametrize("tied", [False, True])
def test_losses_see_the_same_logits(tied):
    chunk = build(
        logits_scaling=3.0,
        final_logit_softcapping=0.5,
        share_embeddings_and_output_weights=tied,
        should_pad_vocab=True,  # masked after the cap: a capped mask would take part in the softmax
    )
    logits, losses = run(chunk), run(chunk, labels=True)
    assert logits[..., :101].abs().max() < 0.5
    assert logits.shape[-1] == 128
    labels = torch.arange(80).flip(0)
    expected = F.cross_entropy(logits[..., :101].flatten(0, 1), labels, reduction="none")
    torch.testing.assert_close(losses.flatten(), expected)


def test_logits_are_scaled_and_capped():
    plain = run(build())
    torch.testing.assert_close(run(build(logits_scaling=3.0)), plain / 3.0)
    capped = run(build(logits_scaling=3.0, final_logit_softcapping=0.5))
    torch.testing.assert_close(capped, torch.tanh(plain / 3.0 / 0.5) * 0.5)


@pytest.mark.parametrize("mtp", [None, 1])
def test_embeddings_are_scaled_once(mtp):
    chunk = build(embedding_multiplier=2.5, mtp_num_layers=mtp)
    ids = torch.arange(40)[None]
    found = chunk.embedding(ids, ids)
    torch.testing.assert_close(found[:, 0], chunk.embedding.word_embeddings.weight[:40] * 2.5)


def test_the_root_of_the_width_is_rounded_to_the_precision_of_the_embeddings():
    chunk = build(embedding_multiplier="sqrt_hidden_size", bf16=True).module
    rows = chunk.embedding.word_embeddings.weight[:40]
    found = chunk.embedding(torch.arange(40)[None], None)[:, 0]
    assert torch.equal(found, rows * torch.tensor(48**0.5, dtype=torch.bfloat16))
    assert not torch.equal(found, (rows.float() * 48**0.5).bfloat16())


@pytest.mark.parametrize(
    "recompute", [{}, {"recompute_granularity": "full", "recompute_method": "uniform"}]
)
def test_recomputed_layers_have_the_same_gradients(recompute):
    features = {
        "num_layers": 4,
        "norm_placement": "both",
        "residual_multiplier": 0.4,
        "qk_norm_across_heads": True,
        "attn_logit_softcapping": 2.0,
        "window_size": (6, 0),
        "window_attn_skip_freq": [1, 0, 0, 1],
        "no_rope_freq": [0, 0, 1, 0],
        "local_rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    }
    if recompute:
        recompute = {**recompute, "recompute_num_layers": 1}
    gradients = []
    for extra in ({}, recompute):
        chunk = build(**features, **extra).train()
        run(chunk, labels=True).mean().backward()
        gradients.append([parameter.grad for parameter in chunk.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=0.0, rtol=0.0)


def test_a_layer_takes_its_own_rotary_embedding():
    """Only the layers with a window change with the local base, only the others with the global one."""
    window = {"window_size": (50, 0), "window_attn_skip_freq": [1, 0]}
    local = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    chunk = build(**window, local_rope_parameters=local)
    both = chunk.rotary_pos_emb(40)
    assert both.shape == (2, 40, 1, 1, 12)
    torch.testing.assert_close(both[1], both[0] / 2.0)
    seen = {}
    for index, layer in enumerate(chunk.decoder.layers):
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda _module, inputs, index=index: seen.__setitem__(index, inputs[:2])
        )
    run(chunk)
    first = {name: value.clone() for name, value in zip("qk", seen[0], strict=True)}
    same = build(**window, rope_parameters={"rope_type": "linear", "factor": 2.0})
    same.decoder.layers[0].self_attention.core_attention.register_forward_pre_hook(
        lambda _module, inputs: seen.__setitem__("same", inputs[:2])
    )
    run(same)
    torch.testing.assert_close(first["q"], seen["same"][0])
    torch.testing.assert_close(first["k"], seen["same"][1])


def test_layers_without_rotary_embedding():
    chunk = build(no_rope_freq=[0, 1])
    seen = {}
    for index, layer in enumerate(chunk.decoder.layers):
        attention = layer.self_attention
        attention.linear_qkv.register_forward_hook(
            lambda _module, _inputs, output, index=index: seen.__setitem__(
                ("fused", index), output[0]
            )
        )
        attention.core_attention.register_forward_pre_hook(
            lambda _module, inputs, index=index: seen.__setitem__(("query", index), inputs[0])
        )
    run(chunk)
    for index, rotated in enumerate((True, False)):
        plain = seen["fused", index].view(40, 2, 4, 36)[..., :12]
        assert torch.equal(plain, seen["query", index]) != rotated


@pytest.mark.parametrize("name", ["window_attn_skip_freq", "no_rope_freq"])
def test_lists_by_layer_have_a_number_for_each(name):
    with pytest.raises(UserError, match=f"{name} has 3 layers, num_layers=2"):
        GPTModelProvider(**TINY, **{name: [0, 1, 1]}).finalize()


def test_local_rotary_embedding_that_cannot_be():
    with pytest.raises(
        UserError, match="local_rope_parameters has no effect with position_embedding_type='none'"
    ):
        build(
            local_rope_parameters={"rope_type": "default", "rope_theta": 5.0},
            position_embedding_type="none",
        )


def test_features_survive_yaml():
    provider = GPTModelProvider(
        **TINY, embedding_multiplier="sqrt_hidden_size", norm_placement="post"
    )
    again = load_yaml(dump_yaml(provider))
    assert again == provider
    assert again.activation_func is gelu_tanh


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "glm4", "olmo2", "granite"])
def test_every_layer_is_compared_with_its_own(family_case, name):
    case = family_case(name)
    _, model = harness.build(case, "one")
    hf = AutoModelForCausalLM.from_pretrained(case.checkpoint, attn_implementation="eager")
    report = compare_logits.compare(
        compare_logits.run_hf(hf, case.batch[0]), compare_logits.run_megatron(model, case.batch[0])
    )
    assert set(report.layers) == {"embedding", *(f"layer {index}" for index in range(4))}
    assert max(report.layers.values()) < 1e-4


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "Gemma2ForCausalLM",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True",
        ),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window is missing"),
        ("Gemma2ForCausalLM", {"sliding_window": 0}, "sliding_window"),
        (
            "Gemma3ForCausalLM",
            {"attn_logit_softcapping": 5.0},
            "attn_logit_softcapping=5.0 is not supported",
        ),
        ("GemmaForCausalLM", {"hidden_act": "laplace"}, "hidden_act='laplace' is not supported"),
    ],
)
def test_what_cannot_be_represented_is_refused(model, changes, message):
    config = getattr(transformers, model).config_class(
        **{**LLAMA, "architectures": [model], **changes}
    )
    with pytest.raises(UserError, match=message):
        AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


def test_a_changed_old_config_has_one_spelling(family_case, tmp_path):
    """What the newer keys say replaces the older ones, or two answers would stand side by side."""
    case = family_case("gemma3_old_style")
    source = json.loads((case.checkpoint / "config.json").read_text())
    source["rope_theta"], source["rope_local_base_freq"] = 1000.0, 50.0
    del source["rope_parameters"]["full_attention"]["rope_theta"], source["layer_types"]
    source["rope_scaling"] = source.pop("rope_parameters")["full_attention"]
    old = tmp_path / "old"
    shutil.copytree(case.checkpoint, old)
    (old / "config.json").write_text(json.dumps(source))
    bridge = AutoBridge.from_hf_pretrained(old)
    provider = bridge.to_megatron_provider()
    provider.local_rope_parameters["rope_theta"] = 70.0
    provider.window_attn_skip_freq = [0, 1, 1, 1]
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_parameters"]["sliding_attention"]["rope_theta"] == 70.0
    assert written["layer_types"] == ["full_attention", *["sliding_attention"] * 3]
    gone = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
    assert not gone & set(written)
    again = AutoBridge.from_hf_pretrained(tmp_path / "out").to_megatron_provider(load_weights=False)
    assert again.local_rope_parameters == provider.local_rope_parameters
    assert again.rope_parameters == provider.rope_parameters
