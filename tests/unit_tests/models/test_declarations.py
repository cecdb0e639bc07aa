# SPDX-License-Identifier: Apache-2.0
"""What is said about mistakes in a declaration, keys that nothing claims, and plans that do not close."""

import re

import pytest
import transformers

from megatron.bridge import AutoBridge
from megatron.bridge.models import families
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.declare import vocabulary
from megatron.bridge.models.conversion.declare.fields import Field, kind_indices, read_all
from megatron.bridge.models.families import (
    DENSE,
    LLAMA_LIKE,
    ROPE,
    DecoderBridge,
    attention,
    ends,
    mlp,
    register_bridge,
)
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.utils.errors import UserError, misspelling
from tests.toy_models import LLAMA, make_llama


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What a test registers is forgotten after it."""
    model_bridge.architectures()
    monkeypatch.setattr(model_bridge, "_REGISTRY", dict(model_bridge._REGISTRY))


def declare(architecture="MyForCausalLM", **parts):
    whole = {"fields": DENSE, "fixed": LLAMA_LIKE, "weights": (ends(), attention(), mlp()), **parts}
    return register_bridge(architecture, model_type="llama")(type("Mine", (DecoderBridge,), whole))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"fixed": {**LLAMA_LIKE, "norm_placment": "post"}},
            r"Mine\.fixed\['norm_placment'\].*mean norm_placement",
        ),
        (
            {"fields": (*DENSE, Field("eps", "layernorm_epsilom"))},
            r"layernorm_epsilom.*mean layernorm_epsilon",
        ),
        ({"fields": (*DENSE, (ROPE,))}, r"Mine\.fields\[\d+\].* star"),
        ({"fields": (*DENSE, ROPE)}, r"Mine\.fields reads 'rope_parameters' twice.*override"),
        ({"weights": (ends(), *attention())}, r"Mine\.weights\[1\]=QKVMapping.*without a star"),
        (
            {"irrelevant": {"use_cache": False}},
            r"Mine\.irrelevant\['use_cache'\]=False .*\(False,\)",
        ),
    ],
)
def test_a_mistake_in_a_declaration_is_found_when_it_is_imported(parts, said):
    with pytest.raises(UserError, match=said):
        declare(**parts)


def test_all_mistakes_are_told_together():
    with pytest.raises(UserError) as error:
        declare(irrelevant={"a": 1, "b": 2})
    assert len(str(error.value).splitlines()) == 2


def test_two_keys_of_one_setting_must_agree():
    fields = (
        Field("residual_dropout", "hidden_dropout"),
        Field("embedding_dropout", "hidden_dropout"),
    )
    assert read_all(fields, {"residual_dropout": 0.1, "embedding_dropout": 0.1}) == {
        "hidden_dropout": 0.1
    }
    with pytest.raises(
        UserError, match=r"residual_dropout=0\.1 and embedding_dropout=0\.2 set hidden_dropout"
    ):
        read_all(fields, {"residual_dropout": 0.1, "embedding_dropout": 0.2})


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["full", "odd"], r"layer_types='odd' is not supported; known: full, none"),
        (["full"], r"layer_types lists 1 layers, num_hidden_layers=2: make them agree"),
    ],
)
def test_kinds_of_layers_are_checked(kinds, said):
    with pytest.raises(UserError, match=said):
        kind_indices("layer_types", kinds, ("full", "none"), {"num_hidden_layers": 2})
    assert kind_indices(
        "layer_types", ["none", "full"], ("full", "none"), {"num_hidden_layers": 2}
    ) == [1, 0]


def test_a_constant_is_checked_and_written():
    field = families.constant("norm_topk_prob", True, None)
    assert read_all((field,), {"norm_topk_prob": None}) == {}
    assert field.write(object()) is True
    with pytest.raises(UserError, match="norm_topk_prob=False is not supported: True and None are"):
        read_all((field,), {"norm_topk_prob": False})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "attention_bias",
            True,
            r"attention_bias=True is not known: ATTENTION_BIAS or \w+ reads it in \w+ForC",
        ),
        (
            "layer_types",
            [],
            r"layer_types=\[\] is not known: LAYER_TYPES or \w+ reads it in \w+ForCausalLM",
        ),
        (
            "query_scale_base",
            2,
            r"query_scale_base=2 is not known: remove it if it changes nothing",
        ),
        (
            "num_key_value_head",
            2,
            r"num_key_value_head=2 is not known; did you mean num_key_value_heads\?",
        ),
    ],
)
def test_an_unknown_key_names_what_claims_it(key, value, said):
    declare()
    config = transformers.LlamaConfig(**LLAMA).to_dict() | {"architectures": ["MyForCausalLM"]}
    for known in ("attention_bias", "mlp_bias"):
        config.pop(known)
    with pytest.raises(UserError, match=said):
        AutoBridge.from_hf_config(Plain(config | {key: value})).to_megatron_provider(
            load_weights=False
        )


class Plain:
    """A config that is nothing but its keys."""

    def __init__(self, keys):
        self.keys_, self.architectures = keys, keys["architectures"]

    def to_dict(self):
        return dict(self.keys_)


def test_other_capitals_are_the_same_architecture():
    found = model_bridge.bridge_for(Plain({"architectures": ["PhiMoEForCausalLM"]}))
    assert type(found).__name__ == "PhimoeBridge"
    assert model_bridge.is_known(Plain({"architectures": ["LLaMAForCausalLM"]}))


@pytest.mark.parametrize("name", ["BloomForCausalLM", "ZayaForCausalLM"])
def test_another_architecture_is_no_misspelling(name):
    with pytest.raises(UserError, match=rf"{name} is not supported: .*adding-a-family") as error:
        model_bridge.bridge_for(Plain({"architectures": [name]}))
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "candidates", "found"),
    [
        ("LlamaForCasualLM", ["LlamaForCausalLM", "GemmaForCausalLM"], "LlamaForCausalLM"),
        ("eps", ["epoch", "seps"], "seps"),
        ("layer_types", ["dtype", "layer_norm"], ""),
    ],
)
def test_only_a_small_edit_distance_is_a_misspelling(name, candidates, found):
    assert misspelling(name, candidates) == (f"; did you mean {found}?" if found else "")


@pytest.fixture
def plan_error(tmp_path):
    """The error of a plan with settings that other architectures have."""
    hf = make_llama(tmp_path / "hf")
    del hf

    def error(**fixed):
        declare(
            "LlamaForCausalLM", fields=(*DENSE, *families.BIASES), fixed={**LLAMA_LIKE, **fixed}
        )
        bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
        with pytest.raises(UserError) as found:
            bridge.plan(bridge.to_megatron_provider(load_weights=False).meta_model())
        return str(found.value)

    return error


def test_a_plan_tells_each_kind_once_with_the_setting_that_makes_it(plan_error):
    text = plan_error(norm_placement="both")
    name = "decoder.layers.0.self_attn_bda.norm.weight"
    assert re.search(
        rf"{name} has no mapping; norm_placement makes it \(4 like this: decoder\.layers\.\*\.",
        text,
    )
    assert text.count("self_attn_bda") == 2  # the first name and the pattern
    assert "did you mean" not in text


def test_left_over_tensors_are_grouped(plan_error):
    text = plan_error(
        gated_linear_unit=True, share_embeddings_and_output_weights=False, qk_layernorm=True
    )
    assert "q_layernorm.weight has no mapping" in text
    assert "qk_layernorm" in text


def test_every_setting_of_the_table_is_one_of_a_provider():
    names = {name for text in vocabulary.MADE_BY.values() for name in re.split(r", | or ", text)}
    assert all(hasattr(GPTModelProvider, name) for name in names)
