# SPDX-License-Identifier: Apache-2.0
"""Models that hear, as their user meets them: convert, verify with logits, export, load in transformers; refusals."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
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
