# SPDX-License-Identifier: Apache-2.0
"""Every recipe builds offline and quickly, holds its promises, and changes only where its golden file changes.

After a wanted change: ``UPDATE_GOLDEN=1 pytest tests/unit_tests/recipes``, then review the difference.
"""

import copy
import importlib
import inspect
import operator
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.bridge import recipes
from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.data.config import MockAudioConversationProvider, MockVLMConversationProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes import builders
from megatron.bridge.recipes.catalog import catalog, find, search
from megatron.bridge.recipes.llama import llama3_8b_finetune_config, llama3_8b_pretrain_config
from megatron.bridge.recipes.options import (
    FINETUNE_DEFAULTS,
    PRETRAIN_DEFAULTS,
    FinetuneOptions,
    PretrainOptions,
)
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.resolve.requirements import RECOMPUTED_BY_ENGINE
from megatron.bridge.utils.config.origins import Origins, annotated_yaml, leaf_values
from megatron.bridge.utils.config.overrides import apply_overrides, settle_types
from megatron.bridge.utils.config.serialize import to_plain
from megatron.bridge.utils.errors import UserError
from scripts.docs import recipes as recipes_page
from tests.toy_run import save_llama
from tests.unit_tests.recipes import public_names

GOLDEN = Path(__file__).parent / "golden"
DPO = "llama32_1b_dpo_config"


def text_of(config):
    return annotated_yaml(config, Origins.of(config), defaults=False)


class NoTensors(TorchDispatchMode):
    """Refuses all work on tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"a recipe computes: {func}")


def refused(*_):
    raise AssertionError("a recipe opens a connection")


# option -> a value that no recipe has, and where it goes
LAYOUT = {
    "tensor_model_parallel_size": (3, "model.tensor_model_parallel_size"),
    "sequence_parallel": (False, "model.sequence_parallel"),
    "pipeline_model_parallel_size": (5, "model.pipeline_model_parallel_size"),
    "virtual_pipeline_model_parallel_size": (7, "model.virtual_pipeline_model_parallel_size"),
    "pipeline_layout": ("Et*99L", "model.pipeline_model_parallel_layout"),
    "context_parallel_size": (11, "model.context_parallel_size"),
    "expert_model_parallel_size": (13, "model.expert_model_parallel_size"),
    "expert_tensor_parallel_size": (17, "model.expert_tensor_parallel_size"),
    "recompute": (["mlp"], "model.recompute_modules"),
}
SCHEDULE = {
    "seq_length": (1021, "model.seq_length"),
    "train_iters": (7, "train.train_iters"),
    "global_batch_size": (19, "train.global_batch_size"),
    "micro_batch_size": (23, "train.micro_batch_size"),
    "lr": (0.5, "optimizer.lr"),
    "min_lr": (0.25, "optimizer.min_lr"),
    "warmup_fraction": (0.2, "scheduler.lr_warmup_fraction"),
    "eval_interval": (3, "validation.eval_interval"),
    "eval_iters": (4, "validation.eval_iters"),
    "precision": ("fp16_mixed", "mixed_precision"),
    "seed": (5, "rng.seed"),
    "dir": ("runs/x", "checkpoint.save"),
    "save_interval": (9, "checkpoint.save_interval"),
    "tokenizer": ("a/b", "tokenizer.tokenizer_model"),
}
OPTIONS = {
    "pretrain": {
        **LAYOUT,
        **SCHEDULE,
        "data_paths": (["a", "b"], "dataset.blend.0"),
        "split": ("8,1,1", "dataset.split"),
    },
    "sft": {
        **LAYOUT,
        **SCHEDULE,
        "pretrained_checkpoint": ("p", "checkpoint.pretrained_checkpoint"),
        "dataset_root": ("d", "dataset.dataset_root"),
        "peft": (LoRA(dim=3), "peft"),
    },
}


def at(config, path):
    for name in path.split("."):
        config = config[int(name)] if name.isdigit() else getattr(config, name)
    return config


@pytest.mark.parametrize("recipe", catalog().values(), ids=lambda recipe: recipe.name)
class TestEveryRecipe:
    @pytest.mark.sampled
    def test_builds_offline_without_a_tensor_what_its_golden_file_shows(self, recipe, monkeypatch):
        monkeypatch.setattr(socket.socket, "connect", refused)
        with NoTensors():
            first, second = recipe(), recipe()
        path = GOLDEN / f"{recipe.name}.yaml"
        text = text_of(first)
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text(), (
            "the recommendation changed: see the docstring of this file"
        )
        assert ConfigContainer.from_yaml(first.to_yaml()) == first
        first.model.num_layers = 1
        first.train.train_iters = 1
        assert second.model.num_layers > 1, "two configs share something"
        assert second.train.train_iters > 1, "two configs share something"

    @pytest.mark.sampled
    def test_validates_on_the_gpus_that_it_names(self, recipe):
        resolved = recipe().resolve(recipe.gpus)
        config, notes = resolved.config, resolved.notes
        modules = [
            name for name in config.model.recompute_modules or () if name in RECOMPUTED_BY_ENGINE
        ]
        expected = [
            f"model.recompute_modules={', '.join(modules)} needs Transformer Engine"
        ] * bool(modules)
        expected += [f"mixed_precision={config.mixed_precision} needs"] * bool(
            config.model.fp8 or config.model.fp4
        )
        # these have loss masks, made-up text has none
        made_up = isinstance(
            config.dataset, MockVLMConversationProvider | MockAudioConversationProvider
        )
        expected += ["model.calculate_per_token_loss=True is used"] * made_up
        pairs = zip(sorted(notes), sorted(expected), strict=True)
        assert all(note.startswith(text) for note, text in pairs), notes
        settle_types(config)

    @pytest.mark.sampled
    def test_every_option_has_an_effect(self, recipe):
        options = OPTIONS[recipe.mode]
        config = recipe(**{name: value for name, (value, _) in options.items()})
        assert {name: at(config, path) for name, (_, path) in options.items()} == {
            name: value for name, (value, _) in options.items()
        }
        assert at(config, "dataset.seq_length") == 1021
        assert recipe(embedding_and_loss_are_layers=True).model.account_for_loss_in_pipeline_split

    @pytest.mark.sampled
    def test_adapters(self, recipe):
        if recipe.mode == "pretrain":
            return
        for scheme, kind in (("lora", "LoRA"), ("dora", "DoRA")):
            config = recipe(peft=scheme, pretrained_checkpoint="p")
            rate = {"dpo": 5e-6, "grpo": 1e-5}.get(recipe.stage, 1e-4)
            assert (type(config.peft).__name__, config.optimizer.lr) == (kind, rate)
            config = config.resolve(recipe.gpus).config

    def test_is_exported_and_documented(self, recipe):
        family = importlib.import_module(recipe.module)
        assert getattr(family, recipe.name) is getattr(recipes, recipe.name) is recipe
        assert pickle.loads(pickle.dumps(recipe)) is copy.deepcopy(recipe) is recipe
        assert (recipe.__module__, recipe.__name__) == (recipe.module, recipe.name)
        assert recipe.__qualname__ == recipe.name
        assert inspect.getdoc(recipe) == recipe.summary
        parameters = inspect.signature(recipe).parameters
        recommended = {option: parameters[option].default for option in recipe.recommended}
        assert recommended == recipe.recommended

    def test_is_described(self, recipe):
        """What it trains, the GPUs that it is made for, and its name say the same stage."""
        phrase = {
            "pretrain": "pretraining",
            "sft": "full fine-tuning",
            "dpo": "DPO",
            "grpo": "GRPO",
            "qlora": "QLoRA",
        }
        kind = recipe.recommended.get("peft") or recipe.stage
        assert phrase.get(kind, "distilled") in recipe.what
        suffix = {"sft": "finetune"}.get(kind, kind)
        assert f"_{suffix}_config" in recipe.name
        assert recipe.gpus >= 1
        assert recipe.memory_gb is not None
        assert gpu(recipe.gpu_kind).memory > recipe.memory_gb * 1e9


def test_recipes_build_in_50_ms():
    """Each of them, of CPU time: other work on the machine does not count. The best of three does."""
    times = {name: min(timed(recipe) for _ in range(3)) for name, recipe in catalog().items()}
    assert {name: seconds for name, seconds in times.items() if seconds >= 0.05} == {}


def timed(recipe):
    start = time.process_time()
    recipe()
    return time.process_time() - start


def test_every_recipe_of_every_module_is_in_the_catalog():
    assigned = re.compile(r"^(\w+) = \w+_recipe\(", re.MULTILINE)
    sources = [path.read_text() for path in Path(recipes.__path__[0]).glob("*.py")]
    names = [name for source in sources for name in assigned.findall(source)]
    assert sorted(names) == list(catalog())


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(catalog())


def test_names_that_users_know():
    missing = [name for name in public_names.RECIPES if name not in catalog()]
    assert not missing
    assert callable(operator.attrgetter("default_peft_config", "default_squad_config")(recipes)[1])
    with pytest.raises(AttributeError, match="has no attribute 'llama3_8b'"):
        _ = recipes.llama3_8b


def test_the_options_tested_are_all_there_are():
    for options, kind in (
        (OPTIONS["pretrain"], PretrainOptions),
        (OPTIONS["sft"], FinetuneOptions),
    ):
        assert set(options) | {"embedding_and_loss_are_layers", "hf_model", "hf_path"} == set(
            kind.__annotations__
        )


def test_another_model_takes_the_place_of_the_recipes(tmp_path):
    save_llama(tmp_path, tie_word_embeddings=True)
    config = llama3_8b_finetune_config(
        hf_model=str(tmp_path),
        dataset_root="d",
        seq_length=16,
        tensor_model_parallel_size=2,
        recompute="full",
    )
    assert (config.model.num_layers, config.model.hidden_size) == (2, 32)
    assert config.model.share_embeddings_and_output_weights
    assert (config.model.seq_length, config.model.tensor_model_parallel_size) == (16, 2)
    assert (config.model.sequence_parallel, config.model.recompute_granularity) == (True, "full")
    assert (
        config.tokenizer.tokenizer_model == config.checkpoint.pretrained_checkpoint == str(tmp_path)
    )
    assert config.optimizer == llama3_8b_finetune_config().optimizer
    config = llama3_8b_pretrain_config(hf_model=str(tmp_path))
    assert (config.model.num_layers, config.checkpoint.pretrained_checkpoint) == (2, None)
    assert config.tokenizer.vocab_size == config.model.vocab_size  # made-up data has no other


def test_hf_path_is_another_name_of_hf_model(tmp_path):
    """The name in scripts written for Megatron Bridge."""
    folder = str(save_llama(tmp_path / "model"))
    for recipe in (llama3_8b_pretrain_config, llama3_8b_finetune_config, find(DPO)):
        assert (
            recipe(hf_path=folder)
            == recipe(hf_model=folder)
            == recipe(hf_model=folder, hf_path=folder)
        )
        assert recipe(hf_path=None) == recipe()
    another = builders.finetune_recipe("HuggingFaceTB/SmolLM2-135M", hf_model="c/d")
    assert another(hf_path=folder) == another(hf_model=folder)
    with pytest.raises(UserError, match=r"hf_model=a/b and hf_path=c/d .*leave one out"):
        llama3_8b_pretrain_config(hf_model="a/b", hf_path="c/d")


def test_data_is_made_up_only_where_there_is_none():
    assert find("llama3_8b_pretrain_config")(data_paths=["a"]).dataset.blend == (["a"], None)
    config = find("llama3_8b_finetune_config")(dataset_root="d")
    assert (config.dataset.dataset_root, config.tokenizer.tokenizer_model) == (
        "d",
        "meta-llama/Meta-Llama-3-8B",
    )


@pytest.mark.parametrize(
    ("recompute", "fields"),
    [
        (None, (None, None, None, None)),
        ("selective", ("selective", ["core_attn"], None, None)),
        ("full", ("full", None, "uniform", 1)),
        (["moe_act", "mla_up_proj"], ("selective", ["moe_act", "mla_up_proj"], None, None)),
    ],
)
def test_recompute(recompute, fields):
    model = find("deepseek_v2_pretrain_config")(recompute=recompute).model
    names = (
        "recompute_granularity",
        "recompute_modules",
        "recompute_method",
        "recompute_num_layers",
    )
    assert tuple(getattr(model, name) for name in names) == fields


def test_low_precision():
    recipe = find("llama3_8b_low_precision_pretrain_config")
    assert recipe() == find("llama3_8b_fp8_pretrain_config")()
    config = recipe("bf16_with_mxfp8_mixed", train_iters=7)
    assert (config.mixed_precision, config.train.train_iters) == ("bf16_with_mxfp8_mixed", 7)
    assert recipe(mixed_precision_recipe="bf16_with_mxfp8_mixed", train_iters=7) == config
    config = recipe("bf16_with_mxfp8_mixed", precision="bf16_with_nvfp4_mixed")
    assert config.mixed_precision == "bf16_with_nvfp4_mixed"
    assert next(iter(inspect.signature(recipe).parameters)) == "mixed_precision_recipe"


@pytest.mark.parametrize("recipe", [llama3_8b_pretrain_config, llama3_8b_finetune_config])
def test_unknown_option_is_named(recipe):
    with pytest.raises(
        UserError, match=r"there is no recipe option train_itres; did you mean train_iters "
    ):
        recipe(train_itres=5)


def test_adapters():
    lora, dora = (
        llama3_8b_finetune_config(peft="lora"),
        llama3_8b_finetune_config(peft="dora", lr=3e-5),
    )
    assert (type(lora.peft).__name__, lora.optimizer.lr) == ("LoRA", 1e-4)
    assert (type(dora.peft).__name__, dora.optimizer.lr) == ("DoRA", 3e-5)
    assert llama3_8b_finetune_config(peft="qlora").peft.base_precision == "nf4"
    gpt_oss = find("gpt_oss_20b_qlora_config")()
    assert gpt_oss.peft.base_precision == "mxfp4"
    assert gpt_oss.peft.base_keep_high == ["*.self_attention.*"]
    assert gpt_oss.checkpoint.pretrained_checkpoint == "openai/gpt-oss-20b"
    own = LoRA(dim=3)
    assert llama3_8b_finetune_config(peft=own).peft is own
    assert llama3_8b_finetune_config(peft=None) == llama3_8b_finetune_config()
    with pytest.raises(
        UserError,
        match=r"peft=lroa is not known; did you mean lora or qlora or dora\?; peft=None trains all weights",
    ):
        llama3_8b_finetune_config(peft="lroa")


def test_defaults_have_only_known_keys_and_complete_ones():
    without = {"sequence_parallel", "hf_path"}
    assert set(FinetuneOptions.__annotations__) - set(FINETUNE_DEFAULTS) == without
    without |= {"seq_length", "lr"}
    assert set(PretrainOptions.__annotations__) - set(PRETRAIN_DEFAULTS) == without


def test_catalog_finds_by_name_and_words():
    assert find("llama3_8b_pretrain_config") is llama3_8b_pretrain_config
    assert [recipe.gpus for recipe in search("405b h100 pretrain 128k")] == [1024]
    with pytest.raises(
        UserError, match=r"there is no recipe llama3_8b_pretrain; did you mean llama3_8b_pretrain_c"
    ):
        find("llama3_8b_pretrain")


@pytest.mark.parametrize(
    "statement",
    [
        "from megatron.bridge.recipes.catalog import catalog; [*map(help_of, catalog().values())]",
        "from megatron.bridge.recipes.llama import llama3_8b_pretrain_config as r; help_of(r)",
        "from megatron.bridge.recipes.builders import pretrain_recipe; pretrain_recipe('a/b')",
    ],
)
def test_recipes_are_listed_made_and_explained_without_torch(statement):
    code = "import inspect, sys\n"
    code += "help_of = lambda recipe: (recipe.layout, recipe.__doc__, inspect.signature(recipe))\n"
    code += (
        f"{statement}\nprint([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


class TestOwnRecipe:
    """A recipe of a user's module, which says only what it trains."""

    SOURCE = """
from megatron.bridge.recipes.builders import finetune_recipe, pretrain_recipe
from megatron.bridge.recipes.options import layout

tiny = pretrain_recipe("HuggingFaceTB/SmolLM2-135M", layout(tp=2), seq_length=64)
tuned = finetune_recipe("HuggingFaceTB/SmolLM2-135M", what="Tiny tuning", gpus=2, memory_gb=3)
"""

    @pytest.fixture
    def module(self, tmp_path, monkeypatch):
        (tmp_path / "a_users_recipes.py").write_text(self.SOURCE)
        monkeypatch.syspath_prepend(tmp_path)
        yield importlib.import_module("a_users_recipes")
        del sys.modules["a_users_recipes"]

    def test_knows_its_name_and_is_pickled_by_it(self, module):
        assert (module.tiny.name, module.tiny.__module__) == ("tiny", "a_users_recipes")
        assert pickle.loads(pickle.dumps(module.tiny)) is module.tiny
        assert module.tiny not in catalog().values()

    def test_describes_itself(self, module):
        assert module.tiny.summary == "pretraining, TP2."
        assert module.tuned.__doc__ == (
            "Tiny tuning, 2 x H100 80GB: 3 GB each, no model parallelism."
        )

    def test_needs_options_that_have_no_default(self, module):
        with pytest.raises(UserError, match=r"no default of lr: .*pass one"):
            module.tiny()
        assert module.tiny(lr=1e-3).optimizer.lr == 1e-3

    def test_without_a_name_it_builds_but_has_none(self):
        recipe = builders.finetune_recipe("HuggingFaceTB/SmolLM2-135M")
        assert recipe(train_iters=3).train.train_iters == 3
        assert repr(recipe) == f"<{__name__}.<recipe>: full fine-tuning, no model parallelism.>"
        with pytest.raises(pickle.PicklingError, match=f"lookup <recipe> on {__name__} failed"):
            pickle.dumps(recipe)

    def test_recommends_only_options_that_exist(self):
        with pytest.raises(UserError, match=r"no recipe option train_itres; did you mean train_it"):
            builders.finetune_recipe("HuggingFaceTB/SmolLM2-135M", train_itres=5)

    def test_cannot_be_changed(self, module):
        with pytest.raises(FrozenInstanceError):
            module.tiny.gpus = 4
        with pytest.raises(TypeError):
            module.tiny.recommended["lr"] = 1.0


ROWS = """
one_pretrain_config = pretrain_recipe("a/b", what="One: memory_gb=1, größer", memory_gb=7, lr=3e-4)
two_pretrain_config = pretrain_recipe(
    "a/b",
    gpus=8,
    memory_gb=7,
)
three_pretrain_config = pretrain_recipe("a/b", gpus=8)
"""


class TestMemoryIsWritten:
    """`make recipes` edits the row of a recipe in its module."""

    @pytest.mark.parametrize("name", ["one_pretrain_config", "two_pretrain_config"])
    def test_in_its_row_and_nowhere_else(self, name):
        text = recipes_page.with_memory(ROWS, name, 123)
        before, row = ROWS.split(f"{name} = ")
        assert text == f"{before}{name} = " + row.replace("memory_gb=7", "memory_gb=123", 1)

    def test_where_the_row_has_a_number(self):
        with pytest.raises(SystemExit, match=r"three_pretrain_config: write memory_gb=0"):
            recipes_page.with_memory(ROWS, "three_pretrain_config", 5)

    @pytest.mark.parametrize("recipe", catalog().values(), ids=lambda recipe: recipe.name)
    def test_of_every_recipe(self, recipe):
        source = Path(sys.modules[recipe.module].__file__).read_text()
        assert recipes_page.with_memory(source, recipe.name, recipe.memory_gb) == source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "call", "accepted"),
    [
        ("recipes", "llama3_8b_pretrain_config(train_iters=5, precision='fp32')", True),
        ("recipes", "llama3_8b_pretrain_config(train_itres=5)", False),
        ("recipes.llama", "llama3_8b_pretrain_config(precision='fp9')", False),
        ("recipes.llama", "llama3_8b_pretrain_config(dataset_root='x')", False),
        ("recipes.llama", "llama3_8b_finetune_config(dataset_root='x', peft=None)", True),
        ("recipes.builders", "pretrain(LLAMA3_8B, {}, tensor_model_parallel=2)", False),
        (
            "recipes.builders",
            "pretrain(LLAMA3_8B, {}, {'lr': 3e-4}, tensor_model_parallel_size=2)",
            True,
        ),
        (
            "recipes.builders",
            "pretrain_recipe(LLAMA3_8B, {'lr': 3e-4}, tensor_model_parallel=2)",
            False,
        ),
        (
            "recipes.builders",
            "pretrain_recipe(LLAMA3_8B, {'lr': 3e-4}, tensor_model_parallel_size=2)",
            True,
        ),
    ],
)
def test_pyright_knows_the_options(module, call, accepted, tmp_path):
    snippet = Path(__file__).with_name(f"_snippet_{os.getpid()}.py")
    name = call.partition("(")[0]
    size = "from megatron.bridge.recipes.llama import LLAMA3_8B"
    try:
        snippet.write_text(f"from megatron.bridge.{module} import {name}\n{size}\n{call}\n")
        done = subprocess.run(
            [str(Path(sys.executable).with_name("pyright")), str(snippet)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        snippet.unlink()
    assert (done.returncode == 0) == accepted, done.stdout


@pytest.mark.parametrize("name", ["llama31_405b_pretrain_config", "llama32_1b_finetune_config"])
def test_every_value_can_be_typed_on_the_command_line(name):
    """What the dry run prints for a key is also what an override takes for it."""
    config = find(name)()
    for key, value in leaf_values(config).items():
        text = (
            yaml.safe_dump(to_plain(value), default_flow_style=True, width=10**6)
            .removesuffix("...\n")
            .strip()
        )
        (change,) = apply_overrides(config, [f"{key}={text}"])
        assert change.new == value, key


def test_table_of_the_page_is_current():
    """`make recipes` writes it."""
    assert recipes_page.PART.is_current(recipes_page.table())


@pytest.mark.parametrize("packed", [True, False])
def test_squad(packed):
    config = recipes.default_squad_config(2048, packed_sequence=packed)
    assert config.problems() == []
    record = {
        "context": "It rains.",
        "question": "What does it?",
        "answers": {"text": [" rain ", "rains"]},
    }
    assert config.process_example_fn(record) == {
        "prompt": "Context: It rains. Question: What does it? Answer:",
        "completion": " rain",
    }
    assert (config.packed_sequence_specs is not None) == packed


USUAL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama3_8b_finetune_config", USUAL),
        ("deepseek_v3_finetune_config", ["*.self_attention.linear_*", "linear_fc1", "linear_fc2"]),
        ("nemotronh_4b_finetune_config", [*USUAL, "out_proj"]),
        ("qwen3_next_80b_a3b_finetune_config", [*USUAL, "out_proj"]),
    ],
)
def test_adapters_are_where_the_model_has_linear_layers(name, targets):
    assert find(name)(peft="lora").peft.target_modules == targets
    assert recipes.default_peft_config("lora", dim=8).dim == 8
