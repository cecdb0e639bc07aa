# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention and multi-token prediction: what the families' rows do not show."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.meta_model import parameter_count
from megatron.bridge.models import MLAModelProvider
from megatron.bridge.models.features.routing import BestExpertGroups
from megatron.bridge.utils.config.serialize import dump_yaml, load_yaml
from megatron.bridge.utils.errors import UserError
from tests.families import harness, next_tokens, published
from tests.families.rows import ROWS


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return next_tokens.make_reference(tmp_path_factory.mktemp("next_tokens"))


# ---- multi-token prediction -------------------------------------------------------------------------------------


def test_gradients_and_bytes(reference, tmp_path):
    problems = harness.numbers_and_bytes(reference, "one", tmp_path / "out")
    assert not problems, "\n".join(problems)


@torch.no_grad()
def test_logits_of_every_depth(reference):
    hf, mtp = next_tokens.load(reference.checkpoint)
    ids, _ = reference.batch
    hidden = hf(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
    expected = next_tokens.next_logits(mtp, hidden, ids)

    _, (model,) = harness.build(reference, "one")
    found = []
    model.output_layer.register_forward_hook(
        lambda _module, _inputs, outputs: found.append(outputs[0].clone())
    )
    positions = torch.arange(ids.shape[1])[None]
    model(input_ids=ids, position_ids=positions, attention_mask=None)
    assert len(found) == next_tokens.DEPTHS + 1  # the model's own come last
    for wanted, logits in zip(expected, found, strict=False):
        error = (
            logits.transpose(0, 1)[..., : wanted.shape[-1]] - wanted
        ).abs().max() / wanted.std()
        assert error <= harness.LOGITS


def copy_of(reference, directory):
    directory.mkdir()
    for path in reference.checkpoint.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_is_none_is_refused(reference, tmp_path, name):
    directory = copy_of(reference, tmp_path / "hf")
    tensors = load_file(directory / "model-mtp.safetensors")
    tensors[f"model.layers.5.{name}.weight"][3, 4] += 1.0
    save_file(tensors, directory / "model-mtp.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError,
        match=rf"model.layers.5.{name}.weight differs from .* a copy: .* remove the layer",
    ):
        AutoBridge.from_hf_pretrained(directory).to_megatron_model(wrap_with_ddp=False)


def test_a_later_model_may_look_further(reference):
    tracker = MTPLossLoggingHelper.tracker
    tracker |= {name: torch.ones(1) for name in ("loss_values", "correct_values", "total_values")}
    _, model = harness.build(reference, "one", ddp=True)
    harness.forward_backward(model, *reference.batch)
    assert tracker["loss_values"].shape == (next_tokens.DEPTHS,)


# ---- routing ----------------------------------------------------------------------------------------------------


def test_groups_are_ranked_by_their_best_expert():
    scores = torch.tensor([[0.1, 0.9, 0.6, 0.7, 0.2, 0.3], [0.5, 0.5, 0.2, 0.8, 0.1, 0.0]])
    weights, experts = BestExpertGroups(1).get_replay_topk(scores, 2, 3, 1, None)
    # by the sum of two, the second group would win for the first token
    assert experts.tolist() == [[1, 0], [3, 2]]
    assert weights.tolist() == [pytest.approx([0.9, 0.1]), pytest.approx([0.8, 0.2])]


@pytest.mark.parametrize("name", ["moe_router_fusion", "moe_enable_routing_replay"])
def test_best_groups_need_the_routers_own_code(name):
    provider = provider_of(ROWS["deepseek_v2"])
    setattr(provider, name, True)
    with pytest.raises(
        UserError, match=f"moe_router_group_score='max' does not work with {name}=True"
    ):
        provider.finalize()


def test_groups_are_ranked_by_their_two_best_experts():
    scores = torch.tensor([[0.1, 0.9, 0.6, 0.7, 0.2, 0.3], [0.5, 0.6, 0.2, 0.7, 0.1, 0.0]])
    _, experts = BestExpertGroups(2).get_replay_topk(scores, 1, 3, 1, None)
    # by the best one, the first and the second group would win
    assert experts.tolist() == [[3], [1]]


# ---- the provider -----------------------------------------------------------------------------------------------


def config_of(row):
    config = getattr(transformers, row.model).config_class(**row.config, dtype=torch.float32)
    config.architectures = [row.model]
    return config


def provider_of(row):
    return AutoBridge.from_hf_config(config_of(row)).to_megatron_provider(load_weights=False)


def test_a_provider_survives_yaml():
    provider = provider_of(ROWS["deepseek_v3"])
    again = load_yaml(dump_yaml(provider))
    assert type(again) is MLAModelProvider
    assert again == provider


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": True}, "rope_scaling=True has no effect with multi-latent attention"),
        ({"make_query_groups_divisible_by": 4}, "make_query_groups_divisible_by=4 has no effect"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5 has no effect"),
        (
            {"tensor_model_parallel_size": 4},
            "tensor_model_parallel_size=4 does not divide q_lora_rank=22",
        ),
        ({"attention_output_gate": True}, "Megatron-Core refuses the model's config"),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
            "rope_type='proportional' is not supported with multi-latent attention",
        ),
    ],
)
def test_a_provider_refuses_what_has_no_effect(changes, message):
    provider = provider_of(ROWS["deepseek_v3"])
    for name, value in changes.items():
        setattr(provider, name, value)
    with pytest.raises(UserError, match=message):
        provider.finalize()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deepseek-ai--DeepSeek-V2-Lite", 15_706_484_224),
        ("deepseek-ai--DeepSeek-V3", 671_026_404_352),
    ],
)
def test_parameters_are_counted(name, parameters):
    raw = json.loads((Path(published.__path__[0]) / f"{name}.json").read_text())
    config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.mtp_num_layers = None  # published counts are of what answers
    assert parameter_count(provider) == parameters


# ---- configs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [False, True])
def test_kimi_k2_is_read_without_running_its_code(tmp_path, trust):
    row = ROWS["moonlight"]
    harness.save(harness.hf_model(row), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text()) | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (tmp_path / "hf" / "configuration_deepseek.py").write_text("raise AssertionError('was run')\n")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf", trust_remote_code=trust)
    assert bridge.to_megatron_provider(load_weights=False) == provider_of(row)
    bridge.save_hf_pretrained(
        bridge.to_megatron_model(wrap_with_ddp=False), tmp_path / "out", show_progress=False
    )
    assert (tmp_path / "out" / "config.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method='noaux_tc' is not supported: greedy and",
        ),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("deepseek_v2", {"topk_group": 1}, "have 2 experts, fewer than num_experts_per_tok=4"),
        ("deepseek_v2", {"n_group": None}, "needs n_group and topk_group"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "num_key_value_heads=2 is not num_attention_heads=6",
        ),
        ("deepseek_v3", {"qk_head_dim": 30}, "qk_head_dim=30 does not agree with"),
        (
            "glm4_moe_lite",
            {"first_k_dense_replace": 2},
            "first_k_dense_replace=2 and mlp_layer_types name",
        ),
    ],
)
def test_a_config_that_means_something_else_is_refused(name, changes, message):
    config = config_of(ROWS[name])
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(UserError, match=message):
        AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
