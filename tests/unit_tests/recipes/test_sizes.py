# SPDX-License-Identifier: Apache-2.0
"""The numbers of a size are the published ones, and its name, its place on the hub and its recipes agree."""

import re

import pytest

from megatron.bridge import AutoBridge
from megatron.bridge.autotune.meta_model import parameter_count
from megatron.bridge.models.conversion.declare import vision
from megatron.bridge.models.conversion.declare.fields import IRRELEVANT
from megatron.bridge.recipes.builders import finetune_recipe
from megatron.bridge.recipes.catalog import catalog
from megatron.bridge.recipes.sizes import (
    ProviderSize,
    VisionSize,
    hf_config,
    published_size,
    size_of,
    sized,
)
from megatron.bridge.utils.errors import UserError
from scripts.docs import recipe_configs
from tests.families import configs

PARTS = ("text_config", "vision_config", "audio_config")
# said twice, or of the language model alone, or not read by transformers
IGNORED = {
    **IRRELEVANT,
    **vision._HARMLESS,
    **vision._HARMLESS_IN_VISION,
    **dict.fromkeys(("dtype", "image_token_id", "image_start_token_id", "image_end_token_id")),
}
VARIANT = "16k|64k|128k|1m|fp8|fp8_blockwise|mxfp8|nvfp4|low_precision"
STAGE = re.compile(rf"(_({VARIANT}))?_(pretrain|finetune|distill|dpo|grpo|qlora)_config\w*$")


def key(recipe):
    """What a recipe is named after; Ministral 3 has the same name with images and without them."""
    with_images = isinstance(sized(recipe.size), VisionSize)
    return STAGE.sub("", recipe.name).upper() + (" with images" if with_images else "")


SIZES = {key(recipe): sized(recipe.size) for recipe in catalog().values()}


@pytest.mark.sampled
@pytest.mark.parametrize("source", recipe_configs.sources(), ids=lambda path: path.stem)
def test_configs_are_the_published_ones(source):
    """`make recipe-configs` writes them. A recipe trains what the downloaded file describes, there and back."""
    bridge = recipe_configs.bridge_of(source)
    file = recipe_configs.target(source)
    assert file.read_text() == recipe_configs.text_of(bridge)
    size = size_of(file.stem.replace("--", "/"))
    assert isinstance(size, VisionSize) == (source.parent == recipe_configs.VISION)
    reference, own = bridge.to_megatron_provider(load_weights=False), size.provider()
    for name in ("bf16", "fp16", "params_dtype"):  # of the files; a run has its own
        setattr(own, name, getattr(reference, name))
    if isinstance(size, VisionSize):
        said, known = bridge.hf_config.to_dict(), hf_config(size.numbers).to_dict()
        for part in [part for part in PARTS if said.get(part)]:
            assert configs.different_keys(said.pop(part), known.pop(part), IGNORED) == []
        assert configs.different_keys(said, known, IGNORED) == []
        reference.vision = own.vision = None  # compared above
    for provider in (reference, own):
        provider.__dict__.update(trimmed(vars(provider)))
    assert configs.different_providers(reference, own) == []
    if not isinstance(size, VisionSize):
        again = AutoBridge.from_hf_config(hf_config(AutoBridge.hf_config_of(size.provider())))
        assert (
            configs.different_providers(
                size.provider(), again.to_megatron_provider(load_weights=False)
            )
            == []
        )


def test_there_is_a_source_for_every_config():
    assert set(recipe_configs.CONFIGS.iterdir()) == set(
        map(recipe_configs.target, recipe_configs.sources())
    )


def test_a_size_that_was_never_published():
    size = size_of("HuggingFaceTB/SmolLM2-135M", {"hidden_dropout": 0.1}, num_hidden_layers=6)
    assert (size.published, size.provider().num_layers, size.provider().hidden_dropout) == (
        False,
        6,
        0.1,
    )
    assert published_size("HuggingFaceTB/SmolLM2-135M").provider().num_layers == 30
    assert published_size("HuggingFaceTB/SmolLM2-136M") is None


def test_a_model_whose_config_is_not_in_the_package():
    with pytest.raises(UserError, match=r"SmolLM2-153M; did you mean \S*/SmolLM2-135M .*Size with"):
        finetune_recipe("HuggingFaceTB/SmolLM2-153M")()


def trimmed(values):
    """Without what a layer of ``block_configs`` says that it has not."""
    blocks = values.get("block_configs")
    if blocks is None:
        return values
    return values | {
        "block_configs": [
            {
                part: {key: item for key, item in sizes.items() if item}
                for part, sizes in block.items()
            }
            for block in blocks
        ]
    }


def words(text):
    """Letters and digits alone; half a billion is written in two ways."""
    return re.sub(r"[^a-z0-9]|(?<=\d)p(?=\d)", "", re.sub(r"_(\d)00m", r"_0\1b", text.lower()))


@pytest.mark.parametrize("recipe", catalog().values(), ids=lambda recipe: recipe.name)
def test_name_description_and_tokenizer_agree(recipe):
    assert words(recipe.what).startswith(words(STAGE.sub("", recipe.name)))
    data = {"data_paths": ["x"]} if recipe.mode == "pretrain" else {"dataset_root": "x"}
    size = SIZES[key(recipe)]
    assert recipe(**data).tokenizer.tokenizer_model == size.hub_id


# Voxtral Mini is named after the layers of its decoder, without the embedding and the audio tower
MOST = {"VOXTRAL_MINI_3B with images": 1.6}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_the_name_says(name):
    """Published names round generously, and some leave the embedding out."""
    said = re.search(r"(?<![A-Z0-9])(?:(\d+)X)?(\d+(?:P\d+)?)([BM])(?![0-9])", name)
    if said is None:
        return
    times, number, unit = said.groups()
    expected = int(times or 1) * float(number.replace("P", ".")) * {"B": 1e9, "M": 1e6}[unit]
    assert 0.75 < parameter_count(SIZES[name].provider()) / expected < MOST.get(name, 1.4)


def test_what_no_bridge_reads_is_a_provider():
    (size,) = (size for size in SIZES.values() if isinstance(size, ProviderSize))
    assert not size.published
    assert parameter_count(size.provider()) == pytest.approx(175e9, rel=0.01)
