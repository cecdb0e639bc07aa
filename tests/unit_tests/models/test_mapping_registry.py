# SPDX-License-Identifier: Apache-2.0
"""Looking mappings up from either side."""

import pytest

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.mappings.patterns import match, substitute
from megatron.bridge.models.conversion.param_mapping import AutoMapping, QKVMapping

REGISTRY = MegatronMappingRegistry(
    AutoMapping("embedding.weight", "embed"),
    QKVMapping("layers.*.qkv", q="h.*.q", k="h.*.k", v="h.*.v"),
    AutoMapping("layers.*.experts.fc2.weight*", "h.*.experts.*.down"),
    AutoMapping("vision.**", "visual.**"),
)


def test_lookup_from_megatron():
    assert REGISTRY.megatron_to_hf_lookup("embedding.weight").hf_param == "embed"
    assert REGISTRY.megatron_to_hf_lookup("layers.12.qkv").hf_names == [
        "h.12.q",
        "h.12.k",
        "h.12.v",
    ]
    assert (
        REGISTRY.megatron_to_hf_lookup("layers.1.experts.fc2.weight5").hf_param
        == "h.1.experts.5.down"
    )
    assert REGISTRY.megatron_to_hf_lookup("vision.a.b.c").hf_param == "visual.a.b.c"
    assert REGISTRY.megatron_to_hf_lookup("layers.1.2.qkv") is None


def test_lookup_from_hugging_face():
    assert REGISTRY.hf_to_megatron_lookup("h.3.k").megatron_param == "layers.3.qkv"
    assert (
        REGISTRY.hf_to_megatron_lookup("h.1.experts.5.down").megatron_param
        == "layers.1.experts.fc2.weight5"
    )
    assert REGISTRY.hf_to_megatron_lookup("h.3.k.weight") is None


def test_listing():
    assert len(REGISTRY) == len(REGISTRY.get_all_mappings()) == 4
    assert [m.megatron_param for m in REGISTRY.get_mappings_by_pattern("layers.**")] == [
        "layers.*.qkv",
        "layers.*.experts.fc2.weight*",
    ]
    assert REGISTRY.describe().splitlines()[1].split() == [
        "layers.*.qkv",
        "QKVMapping",
        "h.*.q,",
        "h.*.k,",
        "h.*.v",
    ]


def test_the_same_megatron_name_twice_is_an_error():
    with pytest.raises(ValueError, match=r"mapped more than once: a\.b"):
        MegatronMappingRegistry(AutoMapping("a.b", "c"), AutoMapping("a.b", "d"))


def test_wildcards():
    assert match("a.*.b", "a.x.b") == ("x",)
    assert match("a.*.b", "a.x.y.b") is None
    assert match("**.b", "a.x.y.b") == ("a.x.y",)
    assert substitute("a.*.b*", ("1", "2")) == "a.1.b2"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("layers.0.x", "first"),
        ("layers.10.x", "others.10"),
        ("layers.7.x", "others.7"),
        ("conv12.w", "conv.2"),
        ("conv1d.w", "conv.d"),
        ("conv2d.w", None),
    ],
)
def test_numbers_in_patterns_are_told_from_numbers_for_wildcards(name, found):
    registry = MegatronMappingRegistry(
        AutoMapping("layers.0.x", "first"),
        AutoMapping("layers.0.**", "never"),
        AutoMapping("layers.*.x", "others.*"),
        AutoMapping("conv1*.w", "conv.*"),
    )
    registry.megatron_to_hf_lookup(
        "layers.5.x"
    )  # what is remembered of one name must not answer for another
    registry.megatron_to_hf_lookup("conv3d.w")
    mapping = registry.megatron_to_hf_lookup(name)
    assert (mapping and mapping.hf_param) == found
