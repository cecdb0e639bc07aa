# SPDX-License-Identifier: Apache-2.0
"""The real numbers of published models: their config.json comes back, in either spelling, and counts add up."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from megatron.bridge import AutoBridge
from tests.families import configs, published
from tests.families.spelling import respelled

FILES = {path.stem: path for path in sorted(Path(published.__path__[0]).glob("*.json"))}
# trainable parameters, as the files on the hub add up
COUNTS = {
    "HuggingFaceTB--SmolLM2-135M": 134_515_008,
    "HuggingFaceTB--SmolLM2-360M": 361_821_120,
    "HuggingFaceTB--SmolLM2-1.7B": 1_711_376_384,
    "codellama--CodeLlama-7b-hf": 6_738_546_688,
    "meta-llama--Llama-2-7b-hf": 6_738_415_616,
    "meta-llama--Llama-2-13b-hf": 13_015_864_320,
    "meta-llama--Llama-2-70b-hf": 68_976_648_192,
    "meta-llama--Llama-3.1-405B": 405_853_388_800,
    "meta-llama--Llama-3.2-1B": 1_235_814_400,
    "meta-llama--Llama-3.2-3B": 3_212_749_824,
    "meta-llama--Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama--Meta-Llama-3-70B": 70_553_706_496,
}


def bridged(directory, config):
    """The bridge for a folder with nothing but this config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return AutoBridge.from_hf_pretrained(directory)


@pytest.mark.parametrize("name", FILES)
def test_config_round_trip(name, tmp_path):
    problems = configs.round_trip(bridged(tmp_path / name, json.loads(FILES[name].read_text())).hf_config)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", FILES)
def test_the_other_spelling_means_the_same(name, tmp_path):
    config = json.loads(FILES[name].read_text())
    one, other = (
        bridged(tmp_path / str(style), spelled).to_megatron_provider(load_weights=False)
        for style, spelled in enumerate((config, respelled(config)))
    )
    problems = configs.different_providers(one, other)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", FILES)
def test_sizes_add_up(name, tmp_path):
    config = bridged(tmp_path / name, json.loads(FILES[name].read_text())).hf_config
    count = count_of(config)
    assert count == COUNTS.get(name, count)
    with torch.device("meta"):
        hf = getattr(transformers, config.architectures[0])(config)
    tied = {id(value): value for value in hf.state_dict(keep_vars=True).values()}
    assert count == sum(value.numel() for value in tied.values())


def count_of(config):
    """How many numbers the plan of the model converts, without the layers that transformers has no modules for."""
    bridge = AutoBridge.from_hf_config(config)
    tasks = bridge.plan(bridge.to_megatron_provider(load_weights=False).meta_model()).tasks
    shapes = {name: shape for task in tasks if not task.is_copy for name, shape in task.hf_shapes.items()}
    beyond = f"layers.{config.num_hidden_layers}."
    return sum(math.prod(shape) for name, shape in shapes.items() if beyond not in name)
