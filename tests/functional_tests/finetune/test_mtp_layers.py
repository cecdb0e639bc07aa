# SPDX-License-Identifier: Apache-2.0
"""Training from what transformers saved: layers of multi-token prediction are declared and not stored."""

import json

import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.console import console
from tests.families import harness
from tests.families.row import Row
from tests.families.rows import ROWS
from tests.toy_run import SEQUENCE, toy_config

KEY = "num_nextn_predict_layers"
_V3 = ROWS["deepseek_v3"]


@pytest.fixture
def saved(tmp_path, run_in_process):
    """A fine-tuned copy of DeepSeek-V3 at toy size."""
    row = Row(_V3.name, _V3.model, {**_V3.config, KEY: 1})
    return harness.make_reference(row, tmp_path / "copy")


def run_from(case, folder, **model):
    """One step of a model of the published size, as a recipe has it, on the copy's weights."""
    config = toy_config(
        train={"train_iters": 1},
        checkpoint=CheckpointConfig(pretrained_checkpoint=str(case.checkpoint), save=str(folder)),
    )
    hf_config = AutoBridge.from_hf_pretrained(case.checkpoint).hf_config
    config.model = AutoBridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
    assert config.model.mtp_num_layers == 1
    for name, value in {"seq_length": SEQUENCE, **model}.items():
        setattr(config.model, name, value)
    with console().capture() as capture:
        run = pretrain(config, forward_step)
    return run, [line for line in capture.get().splitlines() if "multi-token" in line]


def test_a_run_trains_what_is_there_and_its_export_is_like_the_source(saved, tmp_path):
    run, said = run_from(saved, tmp_path / "run")
    assert run.progress.step == 1
    assert len(said) == 1
    assert f"checkpoint.pretrained_checkpoint={saved.checkpoint}" in said[0]
    assert "model.mtp_num_layers=None" in said[0]
    bridge = AutoBridge.from_hf_pretrained(saved.checkpoint)
    bridge.export_ckpt(tmp_path / "run", tmp_path / "out", show_progress=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[KEY] == 1
    before, after = (
        harness.read_weights(folder) for folder in (saved.checkpoint, tmp_path / "out")
    )
    assert before.keys() == after.keys()


def test_the_stages_of_a_recipe_lose_the_layer(saved):
    config = toy_config(checkpoint=CheckpointConfig(pretrained_checkpoint=str(saved.checkpoint)))
    hf_config = AutoBridge.from_hf_pretrained(saved.checkpoint).hf_config
    config.model = AutoBridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
    config.model.seq_length = SEQUENCE
    config.model.pipeline_model_parallel_size = 2
    config.model.pipeline_model_parallel_layout = "Et*3|tmL"
    model = config.resolve(world_size=2).config.model
    assert (model.mtp_num_layers, model.pipeline_model_parallel_layout) == (None, "Et*3|tL")


def test_a_dry_run_of_a_recipe(saved, capsys):
    """The recipe has the layer, in its numbers and in its stages."""
    words = ["train", "--recipe", "glm45_air_106b_finetune_config", "--dry-run"]
    words.append(f"checkpoint.pretrained_checkpoint={saved.checkpoint}")
    assert main(words) == 1  # the weights are those of a tiny model, which is told after the report
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("# the run would be refused: model.num_layers=") for line in lines)
    assert "  mtp_num_layers: null  # derived" in lines
    assert "  pipeline_model_parallel_layout: Et*3|(t*4|)*10t*3L  # derived" in lines
    assert len([line for line in lines if "multi-token" in line]) == 1
    assert main([*words, "model.mtp_num_layers=1"]) == 1
    assert "model.mtp_num_layers=1 from the command line" in capsys.readouterr().err
