# SPDX-License-Identifier: Apache-2.0
"""Whatever is exported loads in transformers with no missing, unexpected or mismatched tensor."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint import model_io
from megatron.bridge.peft.lora import LoRA
from tests.families import next_tokens
from tests.families.vision import harness as vision_harness
from tests.families.vision.rows import ROWS as VISION_ROWS
from tests.toy_heads import make
from tests.toy_models import make_llama

ONE_FILE, SHARDS = "5GB", "40KB"
CLASSES = {"head": "sequence_classification", "num_labels": 3}
WORDS = {"head": "token_classification", "num_labels": 3}
EMBEDDING = {"head": "embedding"}
UNTIED = {"share_embeddings_and_output_weights": False}
# base of the export -> settings of the model that is exported
CHANGES = {
    "classes": ({}, CLASSES),
    "classes of a tied model": ({"tie_word_embeddings": True}, CLASSES),
    "reward": ({}, {"head": "sequence_classification", "num_labels": 1}),
    "words": ({}, WORDS),
    "embedding": ({}, EMBEDDING),
    "embedding of a tied model": ({"tie_word_embeddings": True}, EMBEDDING),
    "untied": ({"tie_word_embeddings": True}, UNTIED),
    "vocabulary": ({}, {"vocab_size": 120}),
    "more layers": ({}, {"num_layers": 3}),
    "fewer layers": ({}, {"num_layers": 1}),
}


def loading_problems(folder):
    """What transformers says about the tensors of a folder, without what is empty."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, architecture)
    _, info = model_class.from_pretrained(folder, output_loading_info=True)
    return {name: value for name, value in info.items() if value}


def export(source, out, settings, strict=True, load_weights=True):
    bridge = AutoBridge.from_hf_pretrained(source)
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    for name, value in settings.items():
        setattr(provider, name, value)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, out, show_progress=False, strict=strict)
    return bridge, model


@pytest.mark.parametrize("shard_size", [ONE_FILE, SHARDS])
@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_model_loads(case, shard_size, tmp_path):
    source_settings, settings = CHANGES[case]
    make_llama(tmp_path / "hf", num_hidden_layers=2, shard_size=shard_size, **source_settings)
    keeps_sizes = settings in (CLASSES, WORDS, EMBEDDING)
    export(tmp_path / "hf", tmp_path / "out", settings, strict=False, load_weights=keeps_sizes)
    assert loading_problems(tmp_path / "out") == {}


@pytest.mark.parametrize("name", ["Qwen3Model", "GPT2Model"])
@pytest.mark.parametrize("settings", [CLASSES, WORDS], ids=["classes", "words"])
def test_an_embedding_model_becomes_a_classifier(name, settings, tmp_path):
    make(name, tmp_path / "hf")
    export(tmp_path / "hf", tmp_path / "out", settings)
    assert loading_problems(tmp_path / "out") == {}


@torch.no_grad()
@pytest.mark.parametrize("shard_size", [ONE_FILE, SHARDS])
def test_merged_adapters_with_a_new_head_load(shard_size, tmp_path):
    make_llama(tmp_path / "hf", num_hidden_layers=2, shard_size=shard_size)
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    provider = bridge.to_megatron_provider()
    provider.head, provider.num_labels = "sequence_classification", 3
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    adapted = LoRA(dim=2, modules_to_save=["output_layer"])(model)
    bridge.save_hf_pretrained(adapted, tmp_path / "out", show_progress=False)
    assert loading_problems(tmp_path / "out") == {}


def test_a_source_in_one_file_has_no_second_file(tmp_path):
    """transformers reads ``model.safetensors`` and does not look at the index next to it."""
    make_llama(tmp_path / "hf", num_hidden_layers=1, shard_size=ONE_FILE)
    export(tmp_path / "hf", tmp_path / "out", CLASSES)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == [
        "model.safetensors"
    ]


def test_unset_positions_are_those_of_the_sequences(tmp_path):
    """transformers refuses null for max_position_embeddings."""
    make_llama(tmp_path / "hf", num_hidden_layers=1)
    settings = {"max_position_embeddings": None, "seq_length": 32}
    export(tmp_path / "hf", tmp_path / "out", settings)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 32


@pytest.mark.parametrize("name", ["Qwen3Model", "GPT2Model"])
def test_an_embedding_model_is_a_megatron_checkpoint(name, tmp_path):
    make(name, tmp_path / "hf")
    bridge, model = export(tmp_path / "hf", tmp_path / "out", {})
    bridge.save_megatron_model(model, tmp_path / "megatron")
    names = {
        name
        for state in model_io.model_state(model, model_io.MODEL_METADATA).values()
        for name in state
    }
    assert not any(name.startswith("output_layer") for name in names)
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "again", show_progress=False)
    assert loading_problems(tmp_path / "again") == {}
    first, second = (tmp_path / folder / "model.safetensors" for folder in ("hf", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_5_vl", "gemma3_vl", "gemma4_vl_small", "gemma4_unified"]
)
def test_a_model_with_a_vision_tower_loads(name, tmp_path):
    """A merged adapter makes new tensors; those of the tower are copied."""
    vision_harness.make_reference(VISION_ROWS[name], tmp_path)
    source = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    model = source.to_megatron_model(wrap_with_ddp=False)
    source.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert loading_problems(tmp_path / "out") == {}
    adapted = LoRA(dim=2, target_modules=["linear_qkv", "linear_fc2"])(model)
    source.save_hf_pretrained(adapted, tmp_path / "merged", show_progress=False)
    assert loading_problems(tmp_path / "merged") == {}


@pytest.mark.parametrize("name", ["gemma4_vl", "gemma4_vl_small"])
def test_whether_images_are_seen_both_ways_is_written(name, tmp_path):
    vision_harness.make_reference(VISION_ROWS[name], tmp_path)
    sees_both_ways = VISION_ROWS[name].looks_ahead
    export(tmp_path / "hf", tmp_path / "out", {"bidirectional_images": not sees_both_ways})
    text = json.loads((tmp_path / "out/config.json").read_text())["text_config"]
    assert text["use_bidirectional_attention"] == (None if sees_both_ways else "vision")
    read_again = AutoBridge.from_hf_pretrained(tmp_path / "out").to_megatron_provider()
    assert read_again.bidirectional_images is not sees_both_ways


def test_keys_and_values_of_layers_that_share_others_are_copied(tmp_path):
    """Published checkpoints of Gemma 4 E2B and E4B have them, and transformers does not load them."""
    vision_harness.make_reference(VISION_ROWS["gemma4_vl_small"], tmp_path)
    source = tmp_path / "hf"
    index = json.loads((source / "model.safetensors.index.json").read_text())
    file = source / index["weight_map"]["model.language_model.norm.weight"]
    layer = "model.language_model.layers.5.self_attn"
    unused = {
        f"{layer}.k_proj.weight": torch.randn(24, 32),
        f"{layer}.v_proj.weight": torch.randn(24, 32),
        f"{layer}.k_norm.weight": torch.randn(12),
    }
    save_file({**load_file(file), **unused}, file, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(unused, file.name)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    export(source, tmp_path / "out", {})
    assert loading_problems(tmp_path / "out") == {}
    exported = load_file(tmp_path / "out" / file.name)
    assert all(exported[name].equal(value) for name, value in unused.items())


def test_keys_that_transformers_never_reads_stay(tmp_path):
    """Published files of Qwen3.5 have such keys in all parts."""
    vision_harness.make_reference(VISION_ROWS["qwen3_5_vl"], tmp_path)
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["deepstack_visual_indexes"] = []
    config["text_config"] |= {"mlp_only_layers": [], "output_gate_type": "swish"}
    config |= {"language_model_only": False, "a_note": "of other software"}
    path.write_text(json.dumps(config))
    export(tmp_path / "hf", tmp_path / "out", {})
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


def test_a_model_with_next_token_layers_loads_like_its_source(tmp_path):
    """transformers leaves these layers out, and names them if they are not the number of the published model."""
    source = next_tokens.make_reference(tmp_path / "hf").checkpoint
    _, model = export(source, tmp_path / "out", {})
    assert any(".mtp." in f".{name}" for name, _ in model[0].named_parameters())
    expected = loading_problems(source)
    assert loading_problems(tmp_path / "out") == expected
    assert not expected.keys() - {"unexpected_keys"}
    export(source, tmp_path / "without", {"mtp_num_layers": None}, strict=False)
    assert not loading_problems(tmp_path / "without").keys() - {"unexpected_keys"}
