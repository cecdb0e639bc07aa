# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge port``: drafts of families that are not registered, tried on tiny models."""

import importlib
import json
import re
import sys

import pytest
import transformers

from megatron.bridge.cli.main import main
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.model_bridge import declared_bridges
from megatron.bridge.testing import check_family
from megatron.bridge.testing.draft import tiny_config

PASSING = (
    "Arcee",
    "Cwm",
    "SeedOss",
    "Starcoder2",
    "Olmo3",
    "Helium",
    "Ernie4_5",
    "Dots1",
    "SolarOpen",
    "Jais2",
    "Youtu",
    "Persimmon",
)
"""Drafts that need no edit; their architectures are forgotten first, should they be built in."""
DOTS = {
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@pytest.fixture
def ported(tmp_path, monkeypatch, capsys):
    """Runs the command on the defaults of an architecture's config: exit code, output, folder."""
    model_bridge.architectures()
    monkeypatch.setattr(model_bridge, "_REGISTRY", dict(model_bridge._REGISTRY))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def port(name, *options, **changes):
        model_bridge.forget(f"{name}ForCausalLM")
        config = getattr(transformers, f"{name}ForCausalLM").config_class(**changes)
        config.architectures = [f"{name}ForCausalLM"]
        path = tmp_path / f"{name}.json"
        path.write_text(config.to_json_string())
        code = main(["port", str(path), *options])
        said = capsys.readouterr()
        return code, said.out + said.err, tmp_path / "draft"

    return port


@pytest.mark.parametrize("name", PASSING)
def test_a_draft_passes_without_an_edit(ported, name):
    code, said, _ = ported(name, **(DOTS if name == "Dots1" else {}))
    assert code == 0, said
    assert f"{name}ForCausalLM is nearest to " in said
    assert (
        f"{name}ForCausalLM" not in model_bridge.architectures()
    )  # trying a draft registers nothing


def test_what_is_written_proves_itself_and_is_not_overwritten(ported, tmp_path, monkeypatch):
    code, said, folder = ported("SeedOss", "--output", str(tmp_path / "draft"))
    assert code == 0, said
    assert "key attention_out_bias in (False,): nothing reads it" in said
    monkeypatch.syspath_prepend(folder)
    row = importlib.import_module("test_seed_oss").ROW
    assert row.layouts == ("tp2", "pp2")
    check_family(row, layouts=())
    recipe = importlib.import_module("seed_oss_recipe").seed_oss_pretrain_config
    assert recipe(train_iters=2).model.num_layers == 64
    code, said, _ = ported("SeedOss", "--output", str(tmp_path / "draft"))
    assert code == 1
    assert f"{folder / 'seed_oss_bridge.py'} exists" in said
    for name in ("seed_oss_bridge", "test_seed_oss", "seed_oss_recipe"):
        del sys.modules[name]


def test_what_is_missing_is_told(ported):
    code, said, _ = ported("MiniMaxM2")
    assert code == 1
    assert (
        "tensor model.layers.*.block_sparse_moe.e_score_correction_bias: MixtralForCausalLM does not name it"
        in said
    )
    assert re.search(
        r"self_attn\.q_norm\.weight: MixtralForCausalLM does not name it; look at \w+ForCausalLM",
        said,
    )
    assert "the draft does not pass yet: docs/adding-a-family.md" in said


def test_other_names_of_sizes_are_made_small_too(ported):
    code, said, _ = ported("GPTJ")
    assert code == 1
    assert "GPTJForCausalLM is nearest to GPT2LMHeadModel" in said
    assert "tensor transformer.h.*.attn.q_proj.weight: GPT2LMHeadModel does not name it" in said


def test_matrices_that_the_nearest_family_stores_the_other_way_round(ported):
    """GPTBigCode is GPT-2 with one key head, which transformers derives from a switch, and with linear layers."""
    code, said, _ = ported("GPTBigCode")
    assert code == 0, said
    assert (
        "key num_key_value_heads=1: Field('num_key_value_heads', 'num_query_groups') reads it"
        in said
    )
    assert "key multi_query in (True,): look at the fields of FalconForCausalLM" in said


def test_a_scale_of_logits_is_turned_round_where_its_key_multiplies(ported, tmp_path):
    """HyperCLOVAX is Granite with more norms; at its default of one, nothing would tell how the scale is applied."""
    code, said, folder = ported(
        "HyperCLOVAX", "--output", str(tmp_path / "draft"), logits_scaling=1.0
    )
    assert code == 0, said
    written = (folder / "hyperclovax_bridge.py").read_text()
    assert (
        "Field('logits_scaling', 'logits_scaling', to=LOGIT_SCALE.to, back=LOGIT_SCALE.back)"
        in written
    )
    assert (
        "weights = replace_blocks(GraniteBridge.weights, post_norms('post_norm1', 'post_norm2'"
        in written
    )
    assert f"prove it under layouts: python -m pytest {folder / 'test_hyperclovax.py'}" in said


def test_a_key_that_only_initializes_may_have_any_value(ported, tmp_path):
    code, said, folder = ported("Youtu", "--output", str(tmp_path / "draft"))
    assert code == 0, said
    assert "key embedding_initializer_range: any value, it only initializes a new model" in said
    written = (folder / "youtu_bridge.py").read_text()
    assert (
        "irrelevant = {**DeepseekV3Bridge.irrelevant, 'embedding_initializer_range': None}"
        in written
    )
    assert "fixed" not in written  # what would repeat the base's is left out


def test_experts_are_few_under_a_key_that_is_stored_by_another_name(ported, tmp_path):
    code, said, folder = ported("Mellum", "--output", str(tmp_path / "draft"))
    assert code == 0, said
    assert "'num_local_experts': 8" in (folder / "test_mellum.py").read_text()


def test_a_config_of_small_sizes_is_used_where_other_small_sizes_do_not_run(ported):
    code, said, _ = ported("CodeGen")
    assert code == 1
    assert re.search(
        "a tiny CodeGenForCausalLM does not run .RuntimeError: .*: give a config of small sizes",
        said,
    )
    sizes = {
        "vocab_size": 101,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": 64,
        "rotary_dim": 4,
    }
    code, said, _ = ported("CodeGen", **sizes, bos_token_id=1, eos_token_id=2)
    assert code == 1
    assert "tensor transformer.h.*.attn.qkv_proj.weight: GPT2LMHeadModel does not name it" in said
    assert "lm_head.bias" not in said  # the draft has it, and no second norm
    assert "ln_2" not in said


def test_a_model_that_stays_large_is_refused_before_it_is_built(ported):
    code, said, _ = ported("XGLM", ffn_dim=200_000)
    assert code == 1
    assert re.search(
        r"a tiny XGLMForCausalLM still has \d{8} parameters: give a config of small sizes", said
    )


def test_mistakes(ported, tmp_path, capsys):
    for name, architectures, said in (
        ("llama.json", ["LlamaForCausalLM"], "LlamaForCausalLM is supported"),
        (
            "none.json",
            ["LlamaForQuestionAnswering"],
            "LlamaForQuestionAnswering.* names no causal model",
        ),
    ):
        path = tmp_path / name
        path.write_text(json.dumps({"model_type": "llama", "architectures": architectures}))
        assert main(["port", str(path)]) == 1

        assert re.search(said, capsys.readouterr().err)
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 16}))
    assert main(["port", str(path)]) == 1
    assert re.search(rf"transformers refuses {path}: .*hidden size \(16\)", capsys.readouterr().err)
    assert main(["port", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err


def test_a_tiny_config_keeps_each_kind_of_layer():
    kinds = ["a", "a", "a", "a", "b", "c"]
    config = {
        "num_hidden_layers": 6,
        "layer_types": kinds,
        "embd_dropout": 0.1,
        "resid_pdrop": 0.1,
        "q_lora_rank": None,
    }
    tiny = tiny_config(config, {})
    assert set(tiny["layer_types"]) == {"a", "b", "c"}
    assert len(tiny["layer_types"]) == tiny["num_hidden_layers"] == 4
    assert tiny["embd_dropout"] == tiny["resid_pdrop"] == 0.0
    assert tiny["q_lora_rank"] is None


def test_every_declared_family_can_be_a_base():
    assert len(declared_bridges()) > 30
