# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction that a config declares, and that a checkpoint or a model is without."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.checkpoint.model_io import read_run_config
from megatron.bridge.cli.main import main
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError
from tests.families import harness, next_tokens
from tests.families.row import Row
from tests.families.rows import ROWS

INDEX = "model.safetensors.index.json"
KEY = "num_nextn_predict_layers"


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v32"])
def as_saved(request, tmp_path_factory):
    """What transformers makes of a model: the key, and none of the layers."""
    row = ROWS[request.param]
    declared = Row(row.name, row.model, {**row.config, KEY: 1})
    return harness.make_reference(declared, tmp_path_factory.mktemp(row.name))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint that has the layers, as on the hub."""
    return next_tokens.make_reference(tmp_path_factory.mktemp("next_tokens"))


def _without(provider):
    provider.mtp_num_layers = None
    return provider


def _said(action):
    """What a call returns, and its lines on the console."""
    with console().capture() as capture:
        found = action()
    return found, [line for line in capture.get().splitlines() if "multi-token" in line]


# ---- the checkpoint has none ------------------------------------------------------------------------------------


def test_a_model_without_the_layers_has_the_numbers_and_files_of_its_source(as_saved, tmp_path):
    assert json.loads((as_saved.checkpoint / "config.json").read_text())[KEY] == 1
    problems, said = _said(lambda: harness.numbers_and_bytes(as_saved, "one", tmp_path / "out"))
    assert not problems, "\n".join(problems)
    assert len(said) == 1
    assert str(as_saved.checkpoint) in said[0]
    assert "mtp_num_layers=None" in said[0]


def test_an_import_and_an_export_give_the_same_files(as_saved, tmp_path):
    _, said = _said(
        lambda: AutoBridge.import_ckpt(as_saved.checkpoint, tmp_path / "megatron", False)
    )
    assert len(said) == 1
    assert read_run_config(tmp_path / "megatron")["model"]["mtp_num_layers"] is None
    bridge = AutoBridge.from_hf_pretrained(as_saved.checkpoint)
    bridge.export_ckpt(tmp_path / "megatron", tmp_path / "out", show_progress=False)
    assert harness.different_files(as_saved, tmp_path / "out") == []


def test_the_command_line(as_saved, tmp_path, capsys):
    model, megatron, out = as_saved.checkpoint, tmp_path / "megatron", tmp_path / "out"
    words = ["--hf-model", str(model), "--megatron-path", str(megatron), "--no-progress"]
    assert main(["convert", *words]) == 0
    assert main(["export", *words, "--hf-path", str(out)]) == 0
    assert main(["plan", "--hf-model", str(model)]) == 0
    assert "every one is mapped once" in capsys.readouterr().out
    for options in ([], ["--skip-logits"]):
        assert main(["verify", str(model), str(megatron), "--no-progress", *options]) == 0
    assert harness.different_files(as_saved, out) == []


def test_a_config_alone_keeps_its_layers(as_saved, tmp_path):
    """Nobody has seen the weights: a model from a config is a new one."""
    shutil.copyfile(as_saved.checkpoint / "config.json", tmp_path / "config.json")
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    assert bridge.to_megatron_provider(load_weights=False).mtp_num_layers == 1
    assert (
        AutoBridge.from_hf_config(bridge.hf_config).to_megatron_provider(False).mtp_num_layers == 1
    )


def test_a_user_who_wants_the_layers_is_told_that_they_are_not_there(as_saved):
    bridge = AutoBridge.from_hf_pretrained(as_saved.checkpoint)
    provider = bridge.to_megatron_provider()
    provider.mtp_num_layers = 1
    with pytest.raises(
        UserError, match="set mtp_num_layers to None in the provider to skip them"
    ) as caught:
        provider.provide_distributed_model(wrap_with_ddp=False)
    assert "enorm.weight is missing" in str(caught.value)


def test_weights_from_elsewhere_decide(whole, tmp_path):
    """The config of one folder, the weights of another."""
    stripped = shutil.copytree(whole.checkpoint, tmp_path / "stripped")
    index = json.loads((stripped / INDEX).read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if "mtp" not in file
    }
    (stripped / INDEX).write_text(json.dumps(index))
    shutil.copyfile(whole.checkpoint / "config.json", tmp_path / "config.json")
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    assert (
        bridge.to_megatron_provider(hf_path=whole.checkpoint).mtp_num_layers == next_tokens.DEPTHS
    )
    assert bridge.to_megatron_provider(hf_path=stripped).mtp_num_layers is None


# ---- the model has none -----------------------------------------------------------------------------------------


def test_layers_that_a_user_leaves_out_are_carried_over(whole, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(whole.checkpoint)
    provider = _without(bridge.to_megatron_provider())
    model, said = _said(lambda: provider.provide_distributed_model(wrap_with_ddp=False))
    assert len(said) == 1
    assert str(whole.checkpoint) in said[0]
    assert not [name for name, _ in model[0].named_parameters() if name.startswith("mtp")]
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert harness.different_files(whole, tmp_path / "out") == []


def test_layers_left_out_are_carried_over_by_conversions_of_files(whole, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(whole.checkpoint)
    bridge.save_megatron_checkpoint(
        _without(bridge.to_megatron_provider(False)), tmp_path / "megatron", False
    )
    other = AutoBridge.from_hf_pretrained(whole.checkpoint)
    _, said = _said(
        lambda: other.export_ckpt(tmp_path / "megatron", tmp_path / "out", show_progress=False)
    )
    assert len(said) == 1
    assert harness.different_files(whole, tmp_path / "out") == []
    words = [str(whole.checkpoint), str(tmp_path / "megatron"), "--no-progress"]
    assert main(["verify", *words]) == main(["verify", *words, "--skip-logits"]) == 0


def test_a_trained_model_has_its_weights_and_the_layers_of_its_source(whole, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(whole.checkpoint)
    model = _without(bridge.to_megatron_provider()).provide_distributed_model(wrap_with_ddp=False)
    with torch.no_grad():
        model[0].decoder.final_layernorm.weight.add_(1.0)
        model[0].embedding.word_embeddings.weight.add_(1.0)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    before, after = (
        harness.read_weights(folder) for folder in (whole.checkpoint, tmp_path / "out")
    )
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    copies = {
        f"model.layers.{4 + depth}.embed_tokens.weight" for depth in range(next_tokens.DEPTHS)
    }
    assert changed == {"model.norm.weight", "model.embed_tokens.weight", *copies}


def test_an_export_that_need_not_be_like_its_source_says_that_the_layers_are_gone(whole, tmp_path):
    bridge = AutoBridge.from_hf_pretrained(whole.checkpoint)
    model = _without(bridge.to_megatron_provider()).provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False, strict=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[KEY] == 0
    assert not [
        name for name in harness.read_weights(tmp_path / "out") if name.endswith("enorm.weight")
    ]


# ---- in between -------------------------------------------------------------------------------------------------


@pytest.fixture(
    params=["model.layers.5.enorm.weight", "model.layers.4.mlp.experts.3.up_proj.weight"]
)
def incomplete(request, whole, tmp_path):
    """A copy of the checkpoint that lacks one tensor of the layers, and its name."""
    folder = shutil.copytree(whole.checkpoint, tmp_path / "hf")
    file, index = folder / "model-mtp.safetensors", json.loads((folder / INDEX).read_text())
    tensors = load_file(file)
    del tensors[request.param], index["weight_map"][request.param]
    save_file(tensors, file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))
    return folder, request.param


@pytest.mark.parametrize("leave_out", [False, True])
def test_layers_of_which_some_tensors_are_missing_are_refused(incomplete, leave_out):
    folder, name = incomplete
    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider()
    assert provider.mtp_num_layers == next_tokens.DEPTHS
    if leave_out:
        _without(provider)
    with pytest.raises(UserError, match="incomplete: download the model again") as caught:
        provider.provide_distributed_model(wrap_with_ddp=False)
    assert f"tensor {name} is missing" in str(caught.value)


def test_a_tensor_that_is_of_no_layer_is_carried(whole, tmp_path):
    folder = shutil.copytree(whole.checkpoint, tmp_path / "hf")
    index = json.loads((folder / INDEX).read_text())
    name = "model.layers.4.surplus.weight"
    index["weight_map"][name] = "surplus.safetensors"
    save_file({name: torch.ones(2)}, folder / "surplus.safetensors", {"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))
    provider = _without(AutoBridge.from_hf_pretrained(folder).to_megatron_provider())
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    assert AutoBridge.from_hf_pretrained(folder).plan(model).unread == (name,)
