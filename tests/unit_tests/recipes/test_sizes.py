# SPDX-License-Identifier: Apache-2.0
"""The numbers of a size are the published ones, and its name, its place on the hub and its recipes agree."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.meta_model import parameter_count
from megatron.bridge.models.conversion.declare import vision
from megatron.bridge.recipes.catalog import catalog
from megatron.bridge.recipes.sizes import ProviderSize, Size, VisionSize, hf_config
from tests.families import configs, published, published_vision

FILES = Path(published.__path__[0])
# parts of a published config that are models of their own here
TEXTS = {"google/gemma-3-4b-pt", "google/gemma-3-12b-pt", "google/gemma-3-27b-pt"}
PARTS = {"text_config", "vision_config"}
# said twice, or of the language model alone
OF_PARTS = dict.fromkeys(("dtype", "image_token_id", "image_start_token_id", "image_end_token_id"))
SHORT = {"sliding_window_pattern"}
VARIANT = "16k|64k|128k|fp8|fp8_blockwise|mxfp8|nvfp4|low_precision"
STAGE = re.compile(rf"(_({VARIANT}))?_(pretrain|finetune|distill|dpo)_config\w*$")


def sizes():
    """Every size, by the name of the constant."""
    names = dict.fromkeys(recipe.module for recipe in catalog().values())
    modules = [importlib.import_module(name) for name in names]
    return {name: value for module in modules for name, value in vars(module).items() if isinstance(value, Size)}


SIZES = sizes()
FROM_HUB = {name: size for name, size in SIZES.items() if size.published}


def published_file(size):
    if isinstance(size, VisionSize):
        return Path(published_vision.__path__[0]) / f"{size.hub_id.replace('/', '--')}.json"
    name = re.sub(r"^(mistralai/Ministral-3-\d+B)-Base-2512$", r"\1-text", size.hub_id)
    return FILES / f"{name.replace('/', '--')}{'-text' if size.hub_id in TEXTS else ''}.json"


@pytest.mark.parametrize("name", FROM_HUB)
def test_numbers_are_the_published_ones(name, tmp_path):
    """Key by key, but for those without meaning for the model; and nothing is written that it does not say."""
    size = FROM_HUB[name]
    (tmp_path / "config.json").write_text(published_file(size).read_text())
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    numbers = {**size.numbers, "dtype": bridge.hf_config.dtype}  # of the files; a run has its own
    ignored = {**configs.harmless(bridge), "model_type": ("kimi_k2",)}
    said, known = (trimmed(config.to_dict()) for config in (bridge.hf_config, hf_config(numbers)))
    if isinstance(size, VisionSize):
        ignored |= {**vision._HARMLESS, **vision._HARMLESS_IN_VISION, **OF_PARTS}
    for part in PARTS & said.keys():
        assert configs.different_keys(said.pop(part), known.pop(part), ignored) == []
    assert configs.different_keys(said, known, ignored) == []
    reference = bridge.to_megatron_provider(load_weights=False)
    own = replace(size, numbers=numbers, training={}).provider()
    if isinstance(size, VisionSize):
        reference.vision = own.vision = None  # compared above
        own.bf16, own.params_dtype = reference.bf16, reference.params_dtype  # of the files; a run has its own
    for provider in (reference, own):
        provider.__dict__.update(trimmed(vars(provider)))
    assert configs.different_providers(reference, own) == []


@pytest.mark.parametrize("name", [name for name in SIZES if not isinstance(SIZES[name], ProviderSize)])
def test_numbers_mean_what_they_mean_to_transformers(name):
    """``recipes.hf_config_compat`` renames keys as transformers does, without importing it."""
    numbers = SIZES[name].numbers
    reference = AutoBridge.from_hf_config(hf_config(numbers)).to_megatron_provider(load_weights=False)
    own = replace(SIZES[name], training={}).provider()
    assert configs.different_providers(reference, own) == []
    assert hf_config(AutoBridge.hf_config_of(own)).to_dict() == hf_config(said_by(reference)).to_dict()
    again = AutoBridge.from_hf_config(hf_config(AutoBridge.hf_config_of(own)))
    assert configs.different_providers(reference, again.to_megatron_provider(load_weights=False)) == []


def said_by(provider):
    """Its config, without a key that transformers keeps beside the list it is the short form of."""
    return {key: value for key, value in AutoBridge.hf_config_of(provider).items() if key not in SHORT}


def trimmed(values):
    """Without what a layer of ``block_configs`` says that it has not."""
    blocks = values.get("block_configs")
    if blocks is None:
        return values
    return values | {
        "block_configs": [
            {part: {key: item for key, item in sizes.items() if item} for part, sizes in block.items()}
            for block in blocks
        ]
    }


def words(text):
    """Letters and digits alone; half a billion is written in two ways."""
    return re.sub(r"[^a-z0-9]|(?<=\d)p(?=\d)", "", re.sub(r"_(\d)00m", r"_0\1b", text.lower()))


@pytest.mark.parametrize("recipe", catalog().values(), ids=lambda recipe: recipe.name)
def test_name_and_description_agree(recipe):
    assert words(recipe.what).startswith(words(STAGE.sub("", recipe.name)))


@pytest.mark.parametrize("recipe", catalog().values(), ids=lambda recipe: recipe.name)
def test_tokenizer_is_that_of_the_size_in_the_name(recipe):
    data = {"data_paths": ["x"]} if recipe.mode == "pretrain" else {"dataset_root": "x"}
    size = SIZES[STAGE.sub("", recipe.name).upper()]
    assert recipe.build(**data).tokenizer.tokenizer_model == size.hub_id


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_the_name_says(name):
    """Published names round generously, and some leave the embedding out."""
    said = re.search(r"(?<![A-Z0-9])(?:(\d+)X)?(\d+(?:P\d+)?)([BM])(?![0-9])", name)
    if said is None:
        return
    times, number, unit = said.groups()
    expected = int(times or 1) * float(number.replace("P", ".")) * {"B": 1e9, "M": 1e6}[unit]
    assert 0.75 < parameter_count(SIZES[name].provider()) / expected < 1.4


def test_what_no_bridge_reads_is_a_provider():
    (size,) = (size for size in SIZES.values() if isinstance(size, ProviderSize))
    assert not size.published
    assert parameter_count(size.provider()) == pytest.approx(175e9, rel=0.01)
