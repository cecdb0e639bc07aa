# SPDX-License-Identifier: Apache-2.0
"""Every recipe builds offline and quickly, holds its promises, and changes only where its golden file changes.

After a wanted change: ``UPDATE_GOLDEN=1 pytest tests/unit_tests/recipes``, then review the difference.
"""

import importlib
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.bridge.cli.summary import parameter_count
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes import core
from megatron.bridge.recipes.catalog import catalog, find, search
from megatron.bridge.recipes.llama import llama3, llama3_8b_finetune_config, llama3_8b_pretrain_config
from megatron.bridge.recipes.options import FinetuneOptions, PretrainOptions
from megatron.bridge.recipes.smollm import smollm2
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.config import origins
from megatron.bridge.utils.config.overrides import apply_overrides, check_types
from megatron.bridge.utils.config.serialize import to_plain
from megatron.bridge.utils.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
SIZES = {
    name: size
    for module in (llama3, smollm2)
    for name, size in vars(module).items()
    if type(size).__name__ == "Size"
}


def text_of(config):
    origins.start(config)
    return origins.annotated_yaml(config, defaults=False)


@pytest.mark.parametrize("recipe", catalog().values(), ids=lambda recipe: recipe.name)
class TestEveryRecipe:
    def test_golden(self, recipe):
        path = GOLDEN / f"{recipe.name}.yaml"
        text = text_of(recipe.build())
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), "the recommendation changed: see the docstring of this file"

    def test_validates_on_the_gpus_that_it_names(self, recipe):
        config = recipe.build()
        assert config.validate(recipe.gpus) == []
        check_types(config)

    def test_round_trips_through_yaml(self, recipe):
        config = recipe.build()
        assert ConfigContainer.from_yaml(config.to_yaml()) == config

    def test_builds_in_50_ms(self, recipe):
        recipe.build()
        assert min(timed(recipe.build) for _ in range(3)) < 0.05

    def test_is_exported_and_documented(self, recipe):
        family = importlib.import_module(recipe.module.rpartition(".")[0])
        function = getattr(family, recipe.name)
        assert recipe.name in family.__all__
        assert function.__name__ == recipe.name
        assert len(inspect.getsource(function.__code__).splitlines()) <= 16

    def test_configs_share_nothing(self, recipe):
        first, second = recipe.build(), recipe.build()
        first.model.num_layers = 1
        first.train.train_iters = 1
        assert second.model.num_layers > 1
        assert second.train.train_iters > 1


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(catalog())


CHANGED = {
    "tensor_model_parallel_size": 4,
    "sequence_parallel": False,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "embedding_and_loss_are_layers": True,
    "pipeline_layout": "Et*16|t*16L",
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "recompute": "full",
    "seq_length": 1024,
    "train_iters": 7,
    "global_batch_size": 16,
    "micro_batch_size": 2,
    "lr": 1e-5,
    "min_lr": 1e-7,
    "warmup_fraction": 0.2,
    "eval_interval": 3,
    "eval_iters": 4,
    "precision": "fp32",
    "seed": 5,
    "dir": "runs/x",
    "tokenizer": "a/b",
}
STAGES = [
    (llama3_8b_pretrain_config, PretrainOptions, {**CHANGED, "data_paths": ["a", "b"], "split": "8,1,1"}),
    (llama3_8b_finetune_config, FinetuneOptions, {**CHANGED, "dataset_root": "d", "pretrained_checkpoint": "p"}),
]
NEEDS = {"split": {"data_paths": ["a"]}, "save_interval": {"dir": "x"}}


@pytest.mark.parametrize(("recipe", "options", "changed"), STAGES, ids=["pretrain", "finetune"])
def test_every_option_has_an_effect(recipe, options, changed):
    changed = {**changed, "save_interval": 9}
    assert set(options.__annotations__) - {"peft"} == set(changed)
    for name, value in changed.items():
        needed = NEEDS.get(name, {})
        assert text_of(recipe(**needed, **{name: value})) != text_of(recipe(**needed)), name


@pytest.mark.parametrize("recipe", [llama3_8b_pretrain_config, llama3_8b_finetune_config])
def test_unknown_option_is_named(recipe):
    with pytest.raises(UserError, match=r"there is no recipe option train_itres; did you mean train_iters "):
        recipe(train_itres=5)


def test_adapters():
    lora, dora = llama3_8b_finetune_config(peft="lora"), llama3_8b_finetune_config(peft="dora", lr=3e-5)
    assert (type(lora.peft).__name__, lora.optimizer.lr) == ("LoRA", 1e-4)
    assert (type(dora.peft).__name__, dora.optimizer.lr) == ("DoRA", 3e-5)
    own = LoRA(dim=3)
    assert llama3_8b_finetune_config(peft=own).peft is own
    assert llama3_8b_finetune_config(peft=None) == llama3_8b_finetune_config()
    with pytest.raises(
        UserError, match=r"peft=lroa is not known; did you mean lora or dora\?; peft=None trains all weights"
    ):
        llama3_8b_finetune_config(peft="lroa")


def test_defaults_have_only_known_keys_and_complete_ones():
    assert set(core.FINETUNE) == set(FinetuneOptions.__annotations__) - {"sequence_parallel"}
    assert set(PretrainOptions.__annotations__) - set(core.PRETRAIN) == {"sequence_parallel", "seq_length", "lr"}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_are_those_of_the_hugging_face_model(name):
    """Shapes of transformers' own class, on the meta device, from the same row."""
    numbers = dict(SIZES[name].numbers)
    config = AutoConfig.for_model(**numbers)
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer = sum(parameter.numel() for parameter in model.model.layers.parameters())
    total = sum(parameter.numel() for parameter in model.parameters()) + (layers - 1) * layer
    assert parameter_count(SIZES[name].provider()) == total


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("LLAMA3_8B", 8_030_261_248),
        ("LLAMA3_70B", 70_553_706_496),
        ("LLAMA31_405B", 405_853_388_800),
        ("LLAMA32_1B", 1_235_814_400),
        ("LLAMA32_3B", 3_212_749_824),
        ("SMOLLM2_135M", 134_515_008),
    ],
)
def test_parameter_counts_are_the_published_ones(name, published):
    assert parameter_count(SIZES[name].provider()) == published


def test_catalog_finds_by_name_and_words():
    assert find("llama3_8b_pretrain_config").function() is llama3_8b_pretrain_config
    assert [recipe.gpus for recipe in search("405b pretrain")] == [1024]
    with pytest.raises(
        UserError, match=r"there is no recipe llama3_8b_pretrain; did you mean llama3_8b_pretrain_c"
    ):
        find("llama3_8b_pretrain")


def test_listing_imports_no_torch():
    code = (
        "import sys; from megatron.bridge.recipes.catalog import catalog; catalog(); print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "accepted"),
    [
        ("llama3_8b_pretrain_config(train_iters=5, precision='fp32')", True),
        ("llama3_8b_pretrain_config(train_itres=5)", False),
        ("llama3_8b_pretrain_config(precision='fp9')", False),
        ("llama3_8b_pretrain_config(dataset_root='x')", False),
        ("llama3_8b_finetune_config(dataset_root='x', peft=None)", True),
        ("pretrain(LLAMA3_8B, {}, tensor_model_parallel=2)", False),
        ("pretrain(LLAMA3_8B, {}, tensor_model_parallel_size=2)", True),
    ],
)
def test_pyright_knows_the_options(call, accepted, tmp_path):
    snippet = Path(__file__).with_name(f"_snippet_{os.getpid()}.py")
    imports = (
        "from megatron.bridge.recipes.llama.llama3 import *\nfrom megatron.bridge.recipes.core import pretrain\n"
    )
    try:
        snippet.write_text(f"{imports}from megatron.bridge.recipes.llama.llama3 import LLAMA3_8B\n{call}\n")
        done = subprocess.run(["pyright", str(snippet)], capture_output=True, text=True, check=False)
    finally:
        snippet.unlink()
    assert (done.returncode == 0) == accepted, done.stdout


@pytest.mark.parametrize("name", ["llama31_405b_pretrain_config", "llama32_1b_finetune_config"])
def test_every_value_can_be_typed_on_the_command_line(name):
    """What the dry run prints for a key is also what an override takes for it."""
    config = find(name).build()
    for key, value in origins.values(config).items():
        text = yaml.safe_dump(to_plain(value), default_flow_style=True, width=10**6).removesuffix("...\n").strip()
        (change,) = apply_overrides(config, [f"{key}={text}"])
        assert change.new == value, key
