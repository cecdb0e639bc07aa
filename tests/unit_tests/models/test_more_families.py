# SPDX-License-Identifier: Apache-2.0
"""Text families made of parts of others: what their configs may not say, and features that only they have."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN, XIELUActivation

from megatron.bridge import AutoBridge
from megatron.bridge.backends.specs import layer_features
from megatron.bridge.backends.specs.torch_spec import TorchSpecProvider
from megatron.bridge.models.conversion.model_bridge import bridge_for
from megatron.bridge.models.features import activations, routing
from megatron.bridge.utils.errors import UserError
from tests.families import harness
from tests.families.own_models import model_class
from tests.families.rows import ROWS
from tests.families.rows.qwen3_5 import EXPERTS

UNEQUAL = {**ROWS["phimoe_long_rope"].config["rope_parameters"], "long_mscale": 1.3}


def provider_of(row, **changes):
    kind = model_class(ROWS[row].model)
    config = kind.config_class(**{**ROWS[row].config, **changes}, architectures=[ROWS[row].model])
    return AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            "gpt2",
            {"activation_function": "laplace"},
            "activation_function='laplace' is not supported",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported"),
        ("opt", {"word_embed_proj_dim": 12}, "word_embed_proj_dim=12 must be hidden_size=24"),
        ("opt", {"layerdrop": 0.1}, "layerdrop=0.1 is not supported"),
        (
            "falcon_40b",
            {"parallel_attn": False},
            "parallel_attn=False and num_ln_in_parallel_attn=None with",
        ),
        (
            "arcee",
            {"rope_parameters": {"rope_type": "ntk_alpha", "alpha": 3.0}},
            "rope_type='ntk_alpha' is not a kind",
        ),
        ("hunyuan_moe", {"moe_topk": [2, 3, 2, 3]}, r"moe_topk=\[2, 3, 2, 3\] must be one number"),
        ("hunyuan_moe", {"moe_topk": 7}, "moe_topk=7 is more than num_experts=6"),
        ("ernie45_moe", {"use_bias": True}, "use_bias=True is not supported"),
        (
            "ernie45_moe",
            {"moe_layer_start_index": 9},
            "moe_layer_start_index=9 and moe_layer_end_index=.* leave no",
        ),
        ("lfm2_moe", {"conv_bias": True}, "conv_bias=True is not supported"),
        ("exaone_moe", {"n_group": 4, "topk_group": 2}, "n_group=4 does not divide num_experts=6"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supported: 2 are"),
        (
            "phimoe_long_rope",
            {"rope_parameters": UNEQUAL},
            "short_mscale=1.2 and long_mscale=1.3 must be equal",
        ),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_rms_norm=True is not supported"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_what_cannot_be_represented_is_refused(row, changes, message):
    with pytest.raises(UserError, match=message):
        provider_of(row, **changes)


@pytest.mark.parametrize(
    "name",
    ["gelu", "gelu_new", "quick_gelu", "relu", "relu2", "relu6", "silu", "mish", "tanh", "sigmoid"],
)
def test_activations_compute_what_those_of_transformers_do(name):
    x = torch.linspace(-8, 8, 101)
    found = provider_of("arcee", hidden_act=name).activation_func(x)
    torch.testing.assert_close(found, ACT2FN[name](x))


def test_positions_on_three_axes_change_nothing_in_a_text():
    rope = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
    plain = provider_of("qwen3_5", rope_parameters=rope)
    axes = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert provider_of("qwen3_5", rope_parameters={**rope, **axes}) == plain


def test_a_scale_of_logits_is_written_as_it_was_read():
    for scale in (0.3, 0.0625, 0.1, 1.7, 1 / 3):
        provider = provider_of("cohere", logit_scale=scale)
        bridge = bridge_for(SimpleNamespace(architectures=["CohereForCausalLM"]))
        assert bridge.megatron_to_hf_config(provider)["logit_scale"] == pytest.approx(
            scale, rel=1e-14
        )


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ("gpt2", {"seq_length": 71}, "seq_length=71 is more than max_position_embeddings=70"),
        (
            "cohere",
            {"norm_placement": "post"},
            "parallel_residual='shared_norm' excludes norm_placement='post'",
        ),
        (
            "cohere",
            {"parallel_residual": "both"},
            "parallel_residual='both': choose one of shared_norm, own_norms",
        ),
        ("hunyuan_dense", {"qk_layernorm": False}, "qk_norm_after_rope=True has no norms"),
        ("cohere_head_norms", {"qk_layernorm": True}, "qk_norm_by_head=True excludes"),
        (
            "ernie45_moe",
            {"moe_enable_routing_replay": True},
            "does not work with moe_enable_routing_replay=True",
        ),
        (
            "phimoe",
            {"moe_router_fusion": True},
            "moe_router_sparsemixer_eps=0.05 does not work with moe_router_fusion",
        ),
        (
            "falcon_h1",
            {"mamba_beside_attention": {"ssm_multiplier": 1}},
            "no multiplier ssm_multiplier",
        ),
        (
            "apertus",
            {"gated_linear_unit": True},
            "activation_func=xielu is for feed-forward layers without a gate",
        ),
        (
            "granitemoe",
            {"moe_router_norm_topk": False},
            "is for moe_router_score_function='sigmoid'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(row, changes, message):
    provider = provider_of(row)
    for name, value in changes.items():
        setattr(provider, name, value)
    with pytest.raises(UserError, match=message):
        provider.meta_model()


def test_long_texts_of_phimoe_have_the_long_factors_of_the_published_code():
    (chunk,) = provider_of("phimoe_long_rope").meta_model()
    rope, width = chunk.rotary_pos_emb, 16
    for length, factor in (
        (64, ROWS["phimoe_long_rope"].config["rope_parameters"]["short_factor"]),
        (65, [1.2] * 8),
    ):
        powers = torch.arange(0, width, 2).float() / width
        expected = torch.arange(length).float()[:, None] / (torch.tensor(factor) * 70.0**powers)
        torch.testing.assert_close(
            rope.get_freqs_non_repeated(length), expected, rtol=1e-5, atol=1e-5
        )
    assert rope.attention_factor == 1.2


def test_xielu_is_that_of_transformers_before_training():
    expected = XIELUActivation(dtype=torch.float32)
    config = SimpleNamespace(use_cpu_initialization=True, params_dtype=torch.float32)
    x = torch.linspace(-4, 4, 101)
    for found in (activations.XIELU(config, torch.distributed.group.WORLD), activations.xielu):
        torch.testing.assert_close(found(x), expected(x))


def test_sparse_mixers_keep_the_auxiliary_loss():
    grads, weights, ids = [], {}, torch.arange(24).view(1, -1)
    for eps in (None, 0.05):
        provider = provider_of("phimoe", num_hidden_layers=1)
        provider.moe_router_sparsemixer_eps, provider.moe_aux_loss_coeff = eps, 0.5
        (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
        weights = weights or chunk.state_dict()
        chunk.load_state_dict(weights)
        (0 * chunk.train()(input_ids=ids, position_ids=ids, attention_mask=None)).sum().backward()
        grads.append(chunk.decoder.layers[0].mlp.router.weight.grad)
    assert grads[0].norm() > 0
    torch.testing.assert_close(*grads)


def test_a_table_of_positions_is_as_long_as_the_checkpoint_says_on_shorter_sequences():
    provider = provider_of("opt")
    provider.seq_length = 16
    (chunk,) = provider.meta_model()
    assert chunk.embedding.position_embeddings.weight.shape == (72, 24)


def test_dropout_of_embeddings_is_their_own():
    provider = provider_of("gpt2", embd_pdrop=0.25, resid_pdrop=0.5)
    (chunk,) = provider.meta_model()
    assert (chunk.embedding.embedding_dropout.p, chunk.decoder.layers[0].hidden_dropout) == (
        0.25,
        0.5,
    )


def test_norms_of_each_head_need_a_group_of_heads_on_every_rank():
    provider = provider_of("cohere_head_norms")
    provider.tensor_model_parallel_size = 6
    with pytest.raises(
        UserError,
        match=r"qk_norm_by_head=True cannot split num_query_groups=3 over .*=6 ranks: set",
    ):
        layer_features._check(provider, TorchSpecProvider())


def test_a_layer_norm_of_transformer_engine_cannot_go_without_a_bias():
    provider = provider_of("cohere")
    with pytest.raises(UserError, match=r"layernorm_bias=False .*: set model.backend='torch'"):
        layer_features._check_norms(provider, None)


def test_a_correction_chooses_experts_and_is_in_no_weight():
    class Router:
        expert_bias = torch.tensor([0.0, 0.0, 0.0, 0.9])

    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.96, 0.02, 0.01, 0.01]])
    weights, experts = routing.CorrectedSoftmax(Router(), 0.6).get_replay_topk(scores, 2)
    assert experts.tolist() == [[3, 0], [0, 3]]
    wanted = torch.tensor(
        [[0.05 / 0.6, 0.5 / 0.6], [0.96 / 0.97, 0.01 / 0.97]]
    )  # 0.55 is below the smallest
    torch.testing.assert_close(weights, wanted)


def stack_experts(directory):
    """Store the experts of a layer in two tensors, as modules of transformers hold them."""
    stored = {
        name: value
        for path in directory.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    tensors = {name: value for name, value in stored.items() if ".experts." not in name}
    for layer in range(EXPERTS["num_hidden_layers"]):
        parent = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack(
                [
                    stored[f"{parent}.{expert}.{kind}_proj.weight"]
                    for expert in range(EXPERTS["num_experts"])
                ]
            )
            for kind in ("gate", "up", "down")
        )
        tensors |= {f"{parent}.gate_up_proj": torch.cat((gate, up), 1), f"{parent}.down_proj": down}
    for path in directory.glob("*.safetensors"):
        path.unlink()
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, parts in files.items():
        save_file({name: tensors[name] for name in parts}, directory / file, {"format": "pt"})
    index = {name: file for file, parts in files.items() for name in parts}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def test_experts_that_two_tensors_hold(family_case, tmp_path):
    """Qwen3.5's experts in the form of transformers' modules: the same logits, and the same bytes back."""
    whole = family_case("qwen3_5_moe")
    shutil.copytree(whole.directory, tmp_path / "case")
    case = harness.Case(whole.name, tmp_path / "case")
    stack_experts(case.checkpoint)
    bridge, model = harness.build(case, "one", ddp=True)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert harness.different_files(case, tmp_path / "out") == []
    logits = harness.forward_backward(model, *case.batch)
    assert harness.different_logits(case.logits, logits) == []
