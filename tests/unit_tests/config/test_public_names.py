# SPDX-License-Identifier: Apache-2.0
"""The names in YAML files are stable: every config class has one, and files of older versions still load."""

import dataclasses

import pytest

from megatron.bridge.data.config import DatasetConfig
from megatron.bridge.models.model_provider import ModelProvider
from megatron.bridge.peft.base import PEFT
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.config.names import PUBLIC_NAMES, locate, name_of
from megatron.bridge.utils.config.serialize import from_plain, to_plain
from megatron.bridge.utils.errors import UserError


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_name_stands_for_one_thing(name):
    assert name_of(locate(name)) == name


def below(kind):
    return {kind}.union(*(below(child) for child in kind.__subclasses__()))


@pytest.mark.parametrize("kind", [DatasetConfig, ModelProvider, PEFT])
def test_every_class_that_a_config_can_hold_has_a_name(kind):
    for name in PUBLIC_NAMES:
        locate(name)  # so that all subclasses are there
    ours = {found for found in below(kind) if found.__module__.startswith("megatron.bridge.")}
    unnamed = {found.__name__ for found in ours if found.__name__ not in PUBLIC_NAMES}
    # abstract: what users hold are their subclasses
    datasets = {
        "DatasetConfig",
        "RecordDatasetConfig",
        "StreamingDatasetConfig",
        "_TextPairsConfig",
    }
    assert unnamed <= {*datasets, "ModelProvider", "PEFT", "LowRankPEFT", "SplitLoRA"}


def test_every_block_of_a_config_has_a_name():
    text = " ".join(str(entry.type) for entry in dataclasses.fields(ConfigContainer))
    blocks = {
        word for word in text.replace("'", " ").replace(".", " ").split() if word.endswith("Config")
    }
    assert blocks - {"DatasetConfig"} <= PUBLIC_NAMES.keys()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("megatron.bridge.training.config.TrainingConfig", "TrainingConfig"),
        ("megatron.bridge.training.distillation.config.DistillConfig", "DistillConfig"),
        ("megatron.bridge.training.param_groups.ParameterOverride", "ParameterOverride"),
        ("megatron.bridge.training.mixed_precision.MixedPrecisionConfig", "MixedPrecisionConfig"),
    ],
)
def test_module_paths_of_older_files_are_read(written, name):
    assert to_plain(from_plain({"_target_": written}))["_target_"] == name


def test_functions_of_older_files_are_read():
    old = {"_target_": "megatron.bridge.models.activations.gelu_tanh", "_call_": False}
    assert to_plain(from_plain(old)) == {"_target_": "gelu_tanh", "_call_": False}


def test_a_misspelled_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean TrainingConfig"):
        from_plain({"_target_": "TrainigConfig"})
