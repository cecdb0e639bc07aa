# SPDX-License-Identifier: Apache-2.0
"""The text model of a multimodal checkpoint alone: the vision tower is carried over."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.utils.errors import UserError
from tests.families.rows.mistral import SIZE, YARN
from tests.quantize import store_in_fp8
from tests.toy_models import randomise, tokens
from tests.unit_tests.models.test_llama import TOLERANCE, assert_same_files, difference

VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
TEXTS = {
    "mistral": {**SIZE, "model_type": "mistral", "sliding_window": 7},
    "ministral3": {**SIZE, "model_type": "ministral3", "rope_parameters": YARN},
}


def make(directory, text="ministral3", tied=False, spelled=True):
    """A random model whose two parts are both small, saved in one file; ``spelled`` says whether it is tied."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(0)
    config = Mistral3Config(text_config=TEXTS[text], vision_config=VISION, tie_word_embeddings=tied)
    model = Mistral3ForConditionalGeneration(config).eval()
    model.config.dtype = torch.float32
    randomise(model)
    model.save_pretrained(directory)
    (directory / "README.md").write_text("The card of a toy.\n")
    if not spelled:
        change_config(
            directory, lambda config: [part.pop("tie_word_embeddings") for part in both(config)]
        )
    return model


def both(config):
    return config, config["text_config"]


def change_config(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def load(directory):
    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider()
    provider.vision = None
    return bridge, provider.provide_distributed_model(wrap_with_ddp=False)


@pytest.mark.parametrize(
    ("text", "tied"), [("mistral", False), ("ministral3", False), ("ministral3", True)]
)
def test_logits_and_every_byte(tmp_path, text, tied):
    hf = make(tmp_path / "hf", text, tied)
    bridge, model = load(tmp_path / "hf")
    assert difference(hf, model[0], *tokens()) <= TOLERANCE
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert_same_files(tmp_path / "hf", tmp_path / "out")
    assert "vision_tower.ln_pre.weight (as in the source)" in str(bridge.plan(model))
    assert all(name.startswith("language_model.") for name, _ in bridge.export_hf_weights(model))


def test_ties_that_the_config_does_not_spell(tmp_path):
    hf = make(tmp_path / "hf", spelled=False)
    bridge, model = load(tmp_path / "hf")
    assert difference(hf, model[0], *tokens()) <= TOLERANCE
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    make(tmp_path / "tied", tied=True, spelled=False)
    with pytest.raises(UserError, match=r"language_model\.lm_head\.weight is missing"):
        load(tmp_path / "tied")


def test_a_trained_text_model_keeps_its_vision_tower(tmp_path):
    hf = make(tmp_path / "hf")
    bridge = AutoBridge.from_hf_pretrained(tmp_path / "hf")
    provider = bridge.to_megatron_provider()
    provider.rotary_base, provider.vision = 90.0, None
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    with torch.no_grad():
        model[0].decoder.final_layernorm.weight.mul_(2.0)
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    expected = hf.state_dict() | {
        "model.language_model.norm.weight": 2 * hf.model.language_model.norm.weight
    }
    found = type(hf).from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out")
    )
    assert after.pop("text_config")["rope_parameters"]["rope_theta"] == 90.0
    del before["text_config"]
    assert after == before


def test_a_model_in_float8(tmp_path):
    hf = make(tmp_path / "hf")
    skip = ("vision_tower", "multi_modal", "embed", "norm", "lm_head")
    values = store_in_fp8(tmp_path / "hf", block=None, skip=skip, activation_scheme="static")
    names = {"language_model.model": "model.language_model", "language_model.lm_head": "lm_head"}
    for name, value in values.items():
        for stored, here in names.items():
            if name.startswith(stored):
                hf.get_parameter(name.replace(stored, here)).data.copy_(value)
    bridge, model = load(tmp_path / "hf")
    assert difference(hf, model[0], *tokens()) <= TOLERANCE
    bridge.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == values.keys()
    assert all(torch.equal(value, values[name]) for name, value in written.items())


def test_an_export_without_the_vision_tower_is_refused(tmp_path):
    make(tmp_path / "hf")
    bridge, model = load(tmp_path / "hf")
    bare = AutoBridge.from_hf_config(bridge.hf_config)
    message = r"vision_tower\.\*\* is not converted .* is not given: use source_path"
    with pytest.raises(UserError, match=message):
        bare.save_hf_pretrained(model, tmp_path / "out", show_progress=False)
    bare.save_hf_pretrained(
        model, tmp_path / "out", show_progress=False, source_path=tmp_path / "hf"
    )
    assert_same_files(tmp_path / "hf", tmp_path / "out")

    path = tmp_path / "hf" / "model.safetensors"
    save_file(
        {name: value for name, value in load_file(path).items() if "vision" not in name}, path
    )
    with pytest.raises(
        UserError, match=r"vision_tower\.\*\* is not converted .* has no such tensors"
    ):
        AutoBridge.from_hf_pretrained(tmp_path / "hf").save_hf_pretrained(model, tmp_path / "again")


def test_verify_compares_the_text(tmp_path):
    make(tmp_path / "hf")
    places = [str(tmp_path / "hf"), str(tmp_path / "megatron")]
    assert main(["convert", "--hf-model", places[0], "--megatron-path", places[1]]) == 0
    assert main(["verify", *places, "--skip-logits"]) == 0
    assert main(["verify", *places]) == 0


def put(key, value, config):
    config[key] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: put("model_type", "llama", config["text_config"]),
            "model_type='llama' is not supp",
        ),
        (
            partial(put, "quantization_config", {"quant_method": "hqq"}),
            "quant_method='hqq' is not supported",
        ),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, change, message):
    make(tmp_path)
    change_config(tmp_path, change)
    with pytest.raises(UserError, match=message):
        AutoBridge.from_hf_pretrained(tmp_path).to_megatron_provider()
