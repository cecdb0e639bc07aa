# SPDX-License-Identifier: Apache-2.0
"""Models that hear, as their user meets them: convert, verify with logits, export, load in transformers; refusals."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models.vision.audio import seconds_of_stretch, tokens_of_stretch
from megatron.bridge.models.vision.tower import build_tower, dummy_media, encode
from megatron.bridge.utils.errors import UserError
from tests.families.vision.rows import AUDIO

ROWS = {row.name: row for row in AUDIO}


def make(row, folder):
    config = AutoConfig.for_model(row.name, **row.config)
    torch.manual_seed(0)
    getattr(transformers, row.model)(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_there_and_back(name, tmp_path):
    row = ROWS[name]
    model = str(make(row, tmp_path / "hf"))
    checkpoint = str(tmp_path / "megatron")
    exported = str(tmp_path / "exported")
    assert main(["convert", "--hf-model", model, "--megatron-path", checkpoint]) == 0
    assert main(["verify", "--hf-model", model, "--megatron-path", checkpoint]) == 0
    export = ["export", "--megatron-path", checkpoint, "--hf-model", model, "--hf-path", exported]
    assert main(export) == 0
    kind = getattr(transformers, row.model)
    again, report = kind.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values())
    before = kind.from_pretrained(model).state_dict()
    after = again.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize(
    ("name", "key"), [("qwen2_audio", "encoder_layerdrop"), ("voxtral", "layerdrop")]
)
def test_dropped_layers_are_refused(name, key, tmp_path):
    folder = make(ROWS[name], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["audio_config"][key] = 0.1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refusal:
        AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)
    assert f"audio_config.{key}=0.1 is not supported" in str(refusal.value)


def test_keys_that_change_nothing_are_read(tmp_path):
    folder = make(ROWS["voxtral"], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    plain = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)
    config["tie_word_embeddings"] = False
    config["text_config"]["sliding_window"] = None
    config["audio_config"] |= {"head_dim": 8, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    more = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)
    assert more.window_size == plain.window_size
    assert more.share_embeddings_and_output_weights is False


def test_tied_embeddings_that_the_class_does_not_know_are_refused(tmp_path):
    folder = make(ROWS["qwen2_audio"], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(UserError) as refusal:
        AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=False)
    assert "tie_word_embeddings=True" in str(refusal.value)


@pytest.mark.parametrize("name", ROWS)
def test_sizes_of_audio_are_those_of_the_tower(name):
    config = AutoConfig.for_model(name, **ROWS[name].config)
    tower = build_tower(config.to_dict(), torch.float32)
    features = encode(tower, dummy_media(tower))
    assert features.counts == [tokens_of_stretch(config.to_dict())]
    assert seconds_of_stretch(config.to_dict()) == 0.32
