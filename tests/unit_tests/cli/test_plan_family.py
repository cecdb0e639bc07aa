# SPDX-License-Identifier: Apache-2.0
"""``plan --family`` prints what a bridge declares, without a model."""

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.models.conversion.model_bridge import declared_bridges


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "llama"])
def test_the_map_of_a_family(name, capsys):
    assert main(["plan", "--family", name]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["num_key_value_heads", "num_query_groups"] in lines
    assert ["(implied)", "normalization", "=", "RMSNorm"] in lines
    assert [
        "decoder.layers.*.self_attention.linear_proj.weight",
        "AutoMapping",
        "model.layers.*.self_attn.o_proj.weight",
    ] in lines


def test_every_family_has_a_map(capsys):
    families = {bridge.__module__.split(".")[3] for bridge in declared_bridges().values()}
    for family in families:
        assert main(["plan", "--family", family]) == 0
    assert capsys.readouterr().out.count("Config keys") == len(declared_bridges())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "lama"], "did you mean llama"),
        ([], "give --hf-model DIR or --family NAME"),
    ],
)
def test_what_plan_needs(arguments, message, capsys):
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err
