# SPDX-License-Identifier: Apache-2.0
"""What Qwen, Mistral, Phi, SmolLM and gpt-oss configs may not say, and what they may say twice."""

import pytest
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.utils.errors import UserError
from tests.families.own_models import model_class
from tests.families.rows import ROWS
from tests.families.rows.mistral import YARN

PLAIN = {"rope_type": "default", "rope_theta": 70.0}


def provider_of(row, **changes):
    kind = model_class(ROWS[row].model)
    config = kind.config_class(**{**ROWS[row].config, **changes}, architectures=[ROWS[row].model])
    return AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 4},
            "use_sliding_window=False and layer_types has",
        ),
        (
            "qwen2",
            {"layer_types": ["linear_attention"] * 4},
            "layer_types='linear_attention' is not supported",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window=0 must be at least 1",
        ),
        (
            "mistral_window",
            {"layer_types": ["full_attention"] * 4},
            "key layer_types=.* is not known",
        ),
        (
            "ministral3",
            {"rope_parameters": PLAIN},
            "rope_parameters.llama_4_scaling_beta is missing",
        ),
        (
            "smollm3_untied_windows_biases",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
            "use_sliding_window=False and layer_types has sliding_attention",
        ),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported"),
    ],
)
def test_what_cannot_be_represented_is_refused(row, changes, message):
    with pytest.raises(UserError, match=message):
        provider_of(row, **changes)


def test_too_few_layers_with_and_without_rope():
    with pytest.raises(UserError, match="no_rope_layers has 2 layers, num_hidden_layers=4"):
        provider_of("smollm3", no_rope_layers=[1, 0], layer_types=["full_attention"] * 4)
    assert provider_of("smollm3", no_rope_layers=[1, 0, 1, 1, 0]).no_rope_freq == [0, 1, 0, 0]


def test_a_length_that_ministral3_repeats():
    plain = provider_of("ministral3")
    assert (
        provider_of("ministral3", rope_parameters={**YARN, "max_position_embeddings": 64}) == plain
    )


def test_a_window_that_is_switched_on_or_off_is_exported():
    bridge_of = {"qwen2": ("sliding_window", 9), "qwen2_tied_windows": ("sliding_window", None)}
    for row, (key, width) in bridge_of.items():
        kind = getattr(transformers, ROWS[row].model)
        config = kind.config_class(**ROWS[row].config, architectures=[ROWS[row].model])
        bridge = AutoBridge.from_hf_config(config)
        provider = bridge.to_megatron_provider(load_weights=False)
        provider.window_size = width and (width - 1, 0)
        changed = bridge._bridge.changed_config(provider, config.to_dict())
        assert changed == {key: width, "use_sliding_window": width is not None}


def test_the_width_of_experts_is_exported_where_no_layer_is_dense():
    config = transformers.MixtralConfig(
        **ROWS["mixtral"].config, architectures=["MixtralForCausalLM"]
    )
    bridge = AutoBridge.from_hf_config(config)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.ffn_hidden_size += 8
    assert bridge._bridge.changed_config(provider, config.to_dict()) == {}
    provider.moe_ffn_hidden_size += 16
    width = provider.moe_ffn_hidden_size
    assert bridge._bridge.changed_config(provider, config.to_dict()) == {"intermediate_size": width}


def test_experts_with_biases_are_whole_unless_a_user_cuts_them_which_is_refused():
    provider = provider_of("gpt_oss")
    provider.tensor_model_parallel_size, provider.sequence_parallel = 2, True
    assert (provider.expert_tensor_ranks, provider.expert_tensor_parallel_size) == (1, None)
    assert provider.resolved().expert_tensor_parallel_size == 1
    provider.expert_tensor_parallel_size = 2
    with pytest.raises(
        UserError, match=r"expert_tensor_parallel_size=2 cannot cut experts .*: leave it unset"
    ):
        provider.finalize()


def test_other_experts_are_cut_like_other_layers():
    provider = provider_of("mixtral")
    provider.tensor_model_parallel_size, provider.sequence_parallel = 2, True
    assert provider.resolved().expert_tensor_parallel_size == provider.expert_tensor_ranks == 2
    provider.expert_tensor_parallel_size = 1
    assert provider.resolved().expert_tensor_parallel_size == provider.expert_tensor_ranks == 1
