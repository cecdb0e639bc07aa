# SPDX-License-Identifier: Apache-2.0
"""A layer feature is one object: what it declares is checked, built, priced and rehearsed without further code."""

import copy
import dataclasses
from typing import ClassVar

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron.bridge.autotune import meta_model
from megatron.bridge.autotune.memory import fullest_stage, memory_per_rank
from megatron.bridge.autotune.predict import predict
from megatron.bridge.cli.rehearse import toy_config
from megatron.bridge.cli.support import dry_run
from megatron.bridge.models import GPTModelProvider
from megatron.bridge.models.features.feature import LayerFeature
from megatron.bridge.models.features.registry import FEATURES, FeatureFields
from megatron.bridge.models.flops import local_flops_per_token
from megatron.bridge.recipes.catalog import find
from megatron.bridge.training.config.rules import model as model_rules
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.autotune.test_memory import configured

# the feature: all that the framework knows of it is in these three classes


@dataclasses.dataclass
class GateFields:
    gate_rank: int | None = None
    """Rank of a gate on the output of each layer; None disables it."""


class Gate(nn.Module):
    def __init__(self, config):
        super().__init__()
        sizes = {"dtype": config.params_dtype}
        self.down = nn.Parameter(torch.zeros(config.gate_rank, config.hidden_size, **sizes))
        self.up = nn.Parameter(torch.zeros(config.hidden_size, config.gate_rank, **sizes))

    def forward(self, x):
        return x * (x @ self.down.T @ self.up.T + 1)


class OutputGates(LayerFeature):
    switches: ClassVar = {"gate_rank": None}
    pricing: ClassVar = {"gate_rank": "modules"}
    modules = (Gate,)

    def check(self, config):
        if config.gate_rank and config.gate_rank % 2:
            yield f"gate_rank={config.gate_rank} must be even: use {config.gate_rank + 1}"

    def change_model(self, model, config):
        if config.gate_rank:
            for layer in [part for part in model.modules() if isinstance(part, TransformerLayer)]:
                layer.output_gate = Gate(config)
                layer.register_forward_hook(lambda one, _, out: (one.output_gate(out[0]), out[1]))

    def operations(self, module, length):
        return 1000.0 * module.down.size(0)

    def saved_elements(self, module):
        return module.down.size(0) + 2 * module.down.size(1)  # the narrow tensor and both factors

    def notes(self, config):
        if config.gate_rank:
            yield f"gates of rank {config.gate_rank} are assumed to be fused"

    def toy_sizes(self, config, toy):
        return {"gate_rank": toy.head_dim // 4} if config.gate_rank else {}


@dataclasses.dataclass
class GatedProvider(GateFields, GPTModelProvider):
    """In the package, ``registry.FeatureFields`` would inherit the fields: the second file."""


LAYERS, RANK, HIDDEN = 3, 8, 64


@pytest.fixture
def registered():
    feature = OutputGates()
    FEATURES.append(feature)
    yield
    FEATURES.remove(feature)


def gated(**changed):
    settings = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "seq_length": 256,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gate_rank": RANK,
        "backend": "torch",
    }
    return GatedProvider(**{**settings, **changed})


@pytest.mark.usefixtures("registered")
def test_the_provider_and_the_rules_check_it():
    with pytest.raises(UserError, match="gate_rank=7 must be even: use 8"):
        gated(gate_rank=7).finalize()
    config = configured(gated(gate_rank=7))
    (problem,) = model_rules.layer_features_fit(config, 1)
    assert problem == "model: gate_rank=7 must be even: use 8"
    gated().finalize()


@pytest.mark.usefixtures("registered")
def test_all_problems_are_said_together():
    provider = gated(gate_rank=7, num_labels=3)
    with pytest.raises(UserError) as refused:
        provider.finalize()
    assert "gate_rank=7" in str(refused.value)
    assert "num_labels=3" in str(refused.value)


@pytest.mark.usefixtures("registered")
def test_the_model_has_it_and_computes_with_it():
    (plain,) = gated(gate_rank=None).provide_distributed_model(wrap_with_ddp=False)
    (model,) = gated().provide_distributed_model(wrap_with_ddp=False)
    missing = model.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert {name.rpartition(".")[2] for name in missing} == {"down", "up"}
    assert len(missing) == 2 * LAYERS
    ids = torch.arange(24).view(1, -1)
    arguments = {"input_ids": ids, "position_ids": ids, "attention_mask": None}
    torch.testing.assert_close(model(**arguments), plain(**arguments))
    for layer in model.decoder.layers:  # gates of zero change nothing
        nn.init.constant_(layer.output_gate.down, 0.1)
        nn.init.constant_(layer.output_gate.up, 0.1)
    assert not torch.allclose(model(**arguments), plain(**arguments))


@pytest.mark.usefixtures("registered")
def test_its_costs_are_in_the_dry_run():
    config = configured(gated()).resolve(1).config
    plain = copy.deepcopy(config)
    plain.model.gate_rank = None
    tokens = config.dataset.seq_length * config.train.micro_batch_size
    with_gates, without = (fullest_stage(memory_per_rank(each, 1)) for each in (config, plain))
    saved_bytes = LAYERS * tokens * (RANK + 2 * HIDDEN) * 2
    assert with_gates.parameters - without.parameters == LAYERS * 2 * RANK * HIDDEN
    assert with_gates.activations - without.activations == saved_bytes
    chunks = [meta_model.whole_model(each.model) for each in (config, plain)]
    flops = [local_flops_per_token([chunk], config.dataset.seq_length) for chunk in chunks]
    per_layer = 2 * 2 * RANK * HIDDEN + 1000 * RANK
    assert flops[0] - flops[1] == 3 * LAYERS * per_layer  # forward, and twice backward
    seconds = [predict(each, 1, "H100 80GB").seconds for each in (config, plain)]
    assert seconds[0] > seconds[1]
    assert f"gates of rank {RANK} are assumed to be fused" in dry_run._caveats(config, None, None)


@pytest.mark.usefixtures("registered")
def test_a_rehearsal_has_its_toy_size():
    config = configured(gated(gate_rank=64)).resolve(1).config
    assert toy_config.shrink(config, 1, 1).config.model.gate_rank == 4
    config.model.gate_rank = None
    assert toy_config.shrink(config, 1, 1).config.model.gate_rank is None


def test_latents_of_experts_are_narrower_than_a_toy():
    recipe = find("nemotron_3_super_pretrain_config")
    config = recipe().resolve(recipe.gpus).config
    model = toy_config.shrink(config, recipe.gpus, 1).config.model
    assert 0 < model.moe_latent_size < model.hidden_size


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: type(feature).__name__)
def test_a_feature_names_fields_of_providers(feature):
    """Of a typo in a declaration, nothing would be said."""
    known = {field.name for field in dataclasses.fields(GPTModelProvider)}
    named = [*feature.switches, *feature.per_layer, *feature.needs, *feature.needs.values()]
    named += [feature.prefix_switch] * bool(feature.prefixes)
    assert set(named) <= known
    assert all(name.endswith("*") or name in known for name in feature.pricing)


def test_each_setting_of_a_feature_says_how_it_is_priced():
    priced = [name for feature in FEATURES for name in feature.pricing]
    own = {field.name for field in dataclasses.fields(FeatureFields)}
    assert own <= set(priced)
    assert len(priced) == len(set(priced))
