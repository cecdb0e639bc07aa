# SPDX-License-Identifier: Apache-2.0
"""A bridge that a user writes outside this package, with nothing but the public names."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
)
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.errors import UserError
from tests.families.harness import read_weights
from tests.toy_models import make_llama
from tests.unit_tests.models.test_llama import TOLERANCE, assert_same_files, difference, tokens

HALF = 0.5


class ScaledMapping(MegatronParamMapping):
    """A mapping that computes: Megatron holds half of the number."""

    def hf_to_megatron(self, hf_weights, megatron_module):
        return hf_weights * HALF

    def megatron_to_hf(self, megatron_weights, megatron_module):
        return {} if megatron_weights is None else {self.hf_param: megatron_weights / HALF}


class UsersBridge(MegatronModelBridge):
    """Everything said by hand."""

    def provider_bridge(self, hf_pretrained):
        config = hf_pretrained.config
        return GPTModelProvider(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            vocab_size=config.vocab_size,
            seq_length=config.max_position_embeddings,
            layernorm_epsilon=config.rms_norm_eps,
            rotary_base=config.rope_parameters["rope_theta"],
            share_embeddings_and_output_weights=False,
            normalization="RMSNorm",
            gated_linear_unit=True,
            add_bias_linear=False,
            activation_func=torch.nn.functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )

    def mapping_registry(self):
        hf, ours = "model.layers.*", "decoder.layers.*"
        return MegatronMappingRegistry(
            AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            AutoMapping("output_layer.weight", "lm_head.weight"),
            AutoMapping("decoder.final_layernorm.weight", "model.norm.weight"),
            AutoMapping(f"{ours}.input_layernorm.weight", f"{hf}.input_layernorm.weight"),
            self.norm_mapping(
                f"{ours}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight"
            ),
            QKVMapping(
                f"{ours}.self_attention.linear_qkv.weight",
                q=f"{hf}.self_attn.q_proj.weight",
                k=f"{hf}.self_attn.k_proj.weight",
                v=f"{hf}.self_attn.v_proj.weight",
            ),
            AutoMapping(
                f"{ours}.self_attention.linear_proj.weight", f"{hf}.self_attn.o_proj.weight"
            ),
            GatedMLPMapping(
                f"{ours}.mlp.linear_fc1.weight",
                gate=f"{hf}.mlp.gate_proj.weight",
                up=f"{hf}.mlp.up_proj.weight",
            ),
            AutoMapping(f"{ours}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight"),
        )

    norm_mapping = AutoMapping


class ComputingBridge(UsersBridge):
    """Its mapping and its hooks compute."""

    norm_mapping = ScaledMapping

    def maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict):
        weight = super().maybe_modify_loaded_hf_weight(hf_param, hf_state_dict)
        return -weight if hf_param == "lm_head.weight" else weight

    def maybe_modify_converted_hf_weight(self, task, converted_weights_dict, hf_state_dict):
        assert set(converted_weights_dict) <= set(hf_state_dict)
        if task.global_param_name == "output_layer.weight":
            return {name: -weight for name, weight in converted_weights_dict.items()}
        return converted_weights_dict


@pytest.fixture
def registered(monkeypatch):
    """Bridges registered by a test, under their own architecture name, are forgotten after it."""
    model_bridge.architectures()  # the built-in families register once, and not in the copy
    monkeypatch.setattr(model_bridge, "_REGISTRY", dict(model_bridge._REGISTRY))

    def register(bridge, name="MyForCausalLM"):
        return MegatronModelBridge.register_bridge(source=name, target=GPTModel)(bridge)

    return register


def save_as(directory, architecture, **changes):
    hf = make_llama(directory, num_hidden_layers=2, **changes)
    path = directory / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", architecture))
    return hf


def test_user_defined_bridge_converts(registered, tmp_path):
    registered(UsersBridge)
    hf = save_as(tmp_path / "hf", "MyForCausalLM")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert difference(hf, model[0], *tokens()) <= TOLERANCE
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_files(tmp_path / "hf", tmp_path / "out")
    assert "MyForCausalLM" in AutoBridge.list_supported_models()


def test_mapping_and_hooks_that_compute(registered, tmp_path):
    registered(ComputingBridge)
    hf = save_as(tmp_path / "hf", "MyForCausalLM")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    assert torch.equal(model[0].output_layer.weight, -hf.lm_head.weight)
    halved = model[0].decoder.layers[1].pre_mlp_layernorm.weight
    assert torch.equal(halved, hf.model.layers[1].post_attention_layernorm.weight * HALF)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_files(tmp_path / "hf", tmp_path / "out")
    streamed = dict(bridge.export_hf_weights(model, show_progress=False))
    assert all(torch.equal(streamed[name], weight) for name, weight in hf.state_dict().items())


def test_a_user_can_replace_a_built_in_bridge(registered, tmp_path):
    registered(UsersBridge, "LlamaForCausalLM")
    save_as(tmp_path, "LlamaForCausalLM")
    assert isinstance(AutoBridge.from_hf_pretrained(tmp_path)._bridge, UsersBridge)


def test_a_parameter_without_a_mapping_is_named(registered, tmp_path):
    class Forgetful(UsersBridge):
        def mapping_registry(self):
            return MegatronMappingRegistry(*super().mapping_registry().get_all_mappings()[:-1])

    registered(Forgetful)
    save_as(tmp_path, "MyForCausalLM")
    with pytest.raises(
        UserError, match=r"parameter decoder.layers.0.mlp.linear_fc2.weight has no mapping; did you"
    ):
        AutoBridge.from_hf_pretrained(tmp_path).to_megatron_model(wrap_with_ddp=False)


def test_a_tensor_claimed_twice_is_named(registered, tmp_path):
    class Greedy(UsersBridge):
        def mapping_registry(self):
            mappings = super().mapping_registry().get_all_mappings()
            return MegatronMappingRegistry(
                *mappings[:3],
                AutoMapping("decoder.layers.*.input_layernorm.weight", "model.norm.weight"),
                *mappings[4:],
            )

    registered(Greedy)
    save_as(tmp_path, "MyForCausalLM")
    with pytest.raises(UserError, match=r"both claim model.norm.weight"):
        AutoBridge.from_hf_pretrained(tmp_path).to_megatron_model(wrap_with_ddp=False)


class HalvingBridge(UsersBridge):
    """One mapping computes; there are no hooks."""

    norm_mapping = ScaledMapping


class RowMapping(ScaledMapping):
    """The same number in a matrix of one row; ``hf_shapes`` says so."""

    def hf_to_megatron(self, hf_weights, megatron_module):
        return super().hf_to_megatron(hf_weights, megatron_module)[0]

    def megatron_to_hf(self, megatron_weights, megatron_module):
        found = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: weight[None] for name, weight in found.items()}

    def hf_slice_shapes(self, shard):
        return {name: (1, *shape) for name, shape in super().hf_slice_shapes(shard).items()}


def without_source(tmp_path, bridge_class, register):
    """A model with random numbers, and a bridge that knows nothing but its config."""
    register(UsersBridge)
    hf = save_as(tmp_path / "hf", "MyForCausalLM")
    register(bridge_class)
    bridge = AutoBridge.from_hf_config(AutoBridge.from_hf_pretrained(tmp_path / "hf").hf_config)
    return hf, bridge, bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)


@pytest.mark.parametrize("options", [{}, {"distributed_save": False}])
def test_computed_tensors_are_written_without_a_source(registered, tmp_path, options):
    hf, bridge, model = without_source(tmp_path, HalvingBridge, registered)
    bridge.load_hf_weights(model, tmp_path / "hf")
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False, **options)
    found = read_weights(tmp_path / "out")
    assert found.keys() == hf.state_dict().keys()
    assert all(torch.equal(found[name], weight) for name, weight in hf.state_dict().items())


def test_a_mapping_says_what_shape_it_computes(registered, tmp_path):
    class Rows(UsersBridge):
        norm_mapping = RowMapping

    _, bridge, model = without_source(tmp_path, Rows, registered)
    bridge.save_hf_weights(model, tmp_path / "out", show_progress=False)
    shapes = {name: weight.shape for name, weight in read_weights(tmp_path / "out").items()}
    assert shapes["model.layers.1.post_attention_layernorm.weight"] == (1, 48)


@pytest.mark.parametrize("options", [{}, {"distributed_save": False}])
def test_a_computed_tensor_of_another_shape_is_refused(registered, tmp_path, options):
    class Unsaid(RowMapping):
        hf_slice_shapes = MegatronParamMapping.hf_slice_shapes

        def megatron_to_hf(self, megatron_weights, megatron_module):
            found = super().megatron_to_hf(megatron_weights, megatron_module)
            return {name: weight[:, :3] for name, weight in found.items()}

    class Rows(UsersBridge):
        norm_mapping = Unsaid

    _, bridge, model = without_source(tmp_path, Rows, registered)
    with pytest.raises(
        UserError, match=r"layers\.0\.post_attention\S+ .*\[1, 3\].*\[48\].*hf_slice_shapes"
    ):
        bridge.save_hf_weights(model, tmp_path / "out", show_progress=False, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"distributed_save": False}])
@pytest.mark.parametrize("extra", [True, False])
def test_a_hook_adds_and_drops_no_tensors_without_being_seen(registered, tmp_path, extra, options):
    class Adding(UsersBridge):
        def maybe_modify_converted_hf_weight(self, task, converted_weights_dict, hf_state_dict):
            if task.global_param_name != "decoder.final_layernorm.weight":
                return converted_weights_dict
            return converted_weights_dict | {"model.extra": torch.ones(2)} if extra else {}

    _, bridge, model = without_source(tmp_path, Adding, registered)
    with pytest.raises(
        UserError,
        match=r"model\.extra.*has no place" if extra else r"not produce model\.norm\.weight",
    ):
        bridge.save_hf_weights(model, tmp_path / "out", show_progress=False, **options)


def test_a_mapping_of_several_tensors_has_to_say_their_shapes(registered, tmp_path):
    class Silent(MegatronParamMapping):
        def __init__(self, megatron_param, one, other):
            super().__init__(megatron_param, {"one": one, "other": other})

        def hf_to_megatron(self, hf_weights, megatron_module):
            return hf_weights["one"]

        def megatron_to_hf(self, megatron_weights, megatron_module):
            return dict.fromkeys(self.hf_names, megatron_weights)

    class Pairs(UsersBridge):
        @staticmethod
        def norm_mapping(ours, theirs):
            return Silent(ours, one=theirs, other=f"{theirs}_again")

    _, bridge, model = without_source(tmp_path, Pairs, registered)
    with pytest.raises(UserError, match=r"Silent .*pre_mlp_layernorm.*hf_slice_shapes"):
        bridge.save_hf_weights(model, tmp_path / "out", show_progress=False)
