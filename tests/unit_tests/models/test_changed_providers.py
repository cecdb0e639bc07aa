# SPDX-License-Identifier: Apache-2.0
"""One setting of a provider changes: the exported config says so when it is read again, or the export is refused."""

import re

import pytest
import torch

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import function_fields
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.models.test_more_families import provider_of

ROWS = ("llama_tied", "qwen2", "gemma2", "mixtral")
WORDS = ("post", "both", "LayerNorm", "RMSNorm", "none", "learned_absolute", "two", "max")
WORDS += ("sigmoid", "softmax", "learnable", "sqrt_hidden_size", "yarn")
WITHOUT_EFFECT = {
    # (row, name) -> why the exported config need not say it
    ("llama_tied", "add_bias_linear"): "attention_bias and mlp_bias are off",
    ("gemma2", "add_bias_linear"): "attention_bias and mlp_bias are off",
    ("qwen2", "window_attn_skip_freq"): "there is no window",
    ("mixtral", "ffn_hidden_size"): "all layers have experts",
}
WITH_OTHERS = {
    # one that is derived changes with it, or a run refuses it alone
    "attention_bias": {"add_bias_linear"},
    "mlp_bias": {"add_bias_linear"},
    "moe_ffn_hidden_size": {"ffn_hidden_size"},
}
NOT_BUILT = re.compile(
    r"does not divide|not a multiple|even rotary dimension|list index out of range"
)


def other_values(name, provider):
    """Legal values, and some that are not, in the place of the provider's."""
    value = getattr(provider, name)
    if name == "window_size":
        return [(5, 0)]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 1]
    if isinstance(value, float):
        return [0.5 * value or 0.5]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    if callable(value):
        return [torch.tanh]
    if isinstance(value, list):
        return [value[::-1]]
    if value is None:
        return [True, 2, 0.5, [1] * provider.num_layers]
    return []


def exported(row, name, value):
    """The provider that an export reads back as, or None where the export or its config is refused."""
    provider = provider_of(row)
    setattr(provider, name, value)
    bridge = AutoBridge.from_hf_config(provider.hf_config)._bridge
    try:
        written = bridge.config_of(provider, provider.hf_config.to_dict())
        config = type(provider.hf_config)(**written)
        return provider, AutoBridge.from_hf_config(config).to_megatron_provider(False)
    except UserError:
        return None
    except (TypeError, KeyError):  # a value of a wrong type
        return None
    except Exception as error:
        if not NOT_BUILT.search(str(error)):
            raise
        return None


@pytest.mark.sampled
@pytest.mark.parametrize("row", ROWS)
def test_no_setting_is_lost_by_an_export(row):
    names = sorted(name for name in function_fields() if hasattr(provider_of(row), name))
    lost = []
    expressed = 0
    for name in names:
        if (row, name) in WITHOUT_EFFECT:
            continue
        for value in other_values(name, provider_of(row)):
            pair = exported(row, name, value)
            if pair is None or (name, value) == ("seq_len_interpolation_factor", 1):
                continue
            changed, read_again = pair
            different = {
                other for other in names if getattr(changed, other) != getattr(read_again, other)
            }
            expressed += not different
            if name == "num_layers":
                different.discard("window_attn_skip_freq")  # lists of another length are not built
            if different - WITH_OTHERS.get(name, set()):
                lost.append((name, value, different))
    assert lost == []
    assert expressed > 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("rotary_percent", 0.5), ("rope_scaling", True), ("seq_len_interpolation_factor", 2.0)],
)
def test_a_refusal_names_the_setting(name, value):
    provider = provider_of("llama_tied")
    setattr(provider, name, value)
    bridge = AutoBridge.from_hf_config(provider.hf_config)._bridge
    with pytest.raises(UserError, match=rf"LlamaForCausalLM cannot express {name}={value}"):
        bridge.changed_config(provider, provider.hf_config.to_dict())


@pytest.mark.parametrize("name", ["kv_channels", "num_query_groups"])
def test_a_size_that_is_left_open_is_the_one_that_follows(name):
    """A declared provider may leave sizes to be derived; the config then says nothing else."""
    provider, again = exported("llama_tied", name, None)
    derived = {
        "kv_channels": provider.hidden_size // provider.num_attention_heads,
        "num_query_groups": provider.num_attention_heads,
    }
    assert getattr(again, name) in (None, derived[name])
