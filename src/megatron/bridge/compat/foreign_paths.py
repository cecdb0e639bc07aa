# SPDX-License-Identifier: Apache-2.0
"""Modules under the paths at which other programs import them. Importing this module imports no other.

A finder answers for the paths of ``MODULES`` with the module that they stand for, so ``import
megatron.bridge.training.utils.train_utils`` gives ``megatron.bridge.compat.train_utils``. Python asks it first: a
package under another name would else be searched for files, which would be loaded a second time.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PACKAGE = "megatron.bridge"

MODULES = {
    "data.batch_utils": "compat.batches",
    "data.builders.gpt_sft": "compat.dataset_builders",
    "data.energon.energon_provider": "data.energon.energon_config",
    "data.utils": "compat.data_loaders",
    "inference.vlm": None,
    "inference.vlm.base": "compat.vlm_generation",
    "models.conversion.peft_bridge": "compat.peft_bridge",
    "models.conversion.utils": "compat.conversion_utils",
    "models.deepseek.common": "compat.deepseek_mappings",
    "models.hf_pretrained.utils": "compat.remote_code",
    "models.hybrid": None,
    "models.hybrid.hybrid_provider": "compat.hybrid_provider",
    "models.mamba.mamba_provider": "compat.hybrid_provider",
    "models.nemotronh": "models.nemotron",
    "models.nemotronh.nemotron_h_bridge": "models.nemotron.nemotron_h_bridge",
    "models.qwen_vl.modelling_qwen3_vl.attention": "compat.qwen3_vl",
    "models.qwen_vl.modelling_qwen3_vl.rope": "compat.qwen3_vl",
    "models.qwen_vl.modelling_qwen3_vl.text_model": "compat.qwen3_vl",
    "models.transformer_config": "compat.core_configs",
    "peft.recompute": "peft.utils",
    "recipes.deepseek.deepseek_v2": "recipes.deepseek",
    "recipes.deepseek.deepseek_v3": "recipes.deepseek",
    "recipes.gemma.gemma2": "recipes.gemma",
    "recipes.gemma.gemma3": "recipes.gemma",
    "recipes.gemma3_vl": "recipes.gemma",
    "recipes.gemma3_vl.gemma3_vl": "recipes.gemma",
    "recipes.glm.glm45": "recipes.glm",
    "recipes.glm_vl": "recipes.glm",
    "recipes.glm_vl.glm_45v": "recipes.glm",
    "recipes.gpt.gpt3_175b": "recipes.gpt",
    "recipes.gpt_oss.gpt_oss": "recipes.gpt_oss",
    "recipes.kimi": "recipes.moonshot",
    "recipes.kimi.kimi_k2": "recipes.moonshot",
    "recipes.llama.llama2": "recipes.llama",
    "recipes.llama.llama3": "recipes.llama",
    "recipes.ministral3": "recipes.mistral",
    "recipes.ministral3.ministral3": "recipes.mistral",
    "recipes.moonlight": "recipes.moonshot",
    "recipes.moonlight.moonlight_16b": "recipes.moonshot",
    "recipes.nemotron_vl": "recipes.nemotron",
    "recipes.nemotron_vl.nemotron_nano_v2_vl": "recipes.nemotron",
    "recipes.nemotronh": "recipes.nemotron",
    "recipes.nemotronh.nemotron_3_nano": "recipes.nemotron",
    "recipes.nemotronh.nemotron_nano_v2": "recipes.nemotron",
    "recipes.nemotronh.nemotronh": "recipes.nemotron",
    "recipes.olmoe": "recipes.olmo",
    "recipes.olmoe.olmoe_7b": "recipes.olmo",
    "recipes.qwen.qwen2": "recipes.qwen",
    "recipes.qwen.qwen3": "recipes.qwen",
    "recipes.qwen.qwen35": "recipes.qwen",
    "recipes.qwen.qwen3_moe": "recipes.qwen",
    "recipes.qwen.qwen3_next": "recipes.qwen",
    "recipes.qwen_vl": "recipes.qwen",
    "recipes.qwen_vl.qwen25_vl": "recipes.qwen",
    "recipes.qwen_vl.qwen3_vl": "recipes.qwen",
    "recipes.utils": None,
    "recipes.utils.dataset_utils": "compat.recipe_data",
    "recipes.utils.finetune_utils": "compat.recipe_data",
    "recipes.utils.optimizer_utils": "compat.recipe_optimizers",
    "recipes.utils.tokenizer_utils": "compat.recipe_data",
    "training.facade": "compat.training_calls",
    "training.fault_tolerance": "compat.fault_tolerance",
    "training.inprocess_restart": "compat.restarts",
    "training.model_load_save": "compat.model_load_save",
    "training.nvrx_straggler": "compat.slow_gpus",
    "training.post_training": None,
    "training.post_training.checkpointing": "compat.modelopt_state",
    "training.tokenizers": None,
    "training.tokenizers.config": "data.tokenizer",
    "training.tokenizers.tokenizer": "compat.tokenizer",
    "training.train": "compat.training_loop",
    "training.utils": None,
    "training.utils.checkpoint_utils": "compat.checkpoint_files",
    "training.utils.config_utils": "compat.config_utils",
    "training.utils.flop_utils": "compat.flop_utils",
    "training.utils.packed_seq_utils": "compat.packed_seq_utils",
    "training.utils.pg_utils": "compat.pg_utils",
    "training.utils.sig_utils": "compat.sig_utils",
    "training.utils.train_utils": "compat.train_utils",
    "utils.common_utils": "compat.common_utils",
    "utils.cuda_graph": "compat.cuda_graph",
}
"""Foreign path below ``megatron.bridge`` -> the module it stands for; None is a package of such paths."""


_PARENTS = frozenset(path.rpartition(".")[0] for path in MODULES)
_MODULES_WITH_CHILDREN = frozenset(path for path in _PARENTS if path.startswith("recipes."))
_MODULES_WITH_CHILDREN -= MODULES.keys()
"""Files of this package that are packages in foreign paths, such as ``recipes.llama``."""


def _as_package(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Let the module of ``spec`` have children, all of which are foreign paths."""
    if spec is not None and spec.submodule_search_locations is None:
        spec.submodule_search_locations = []
    return spec


class ForeignPathFinder:
    """Finds the modules of ``MODULES``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a foreign path, or None for any other name."""
        foreign = name.removeprefix(f"{_PACKAGE}.")
        if foreign == name:
            return None
        if foreign in _MODULES_WITH_CHILDREN:
            return _as_package(PathFinder.find_spec(name, path, target))
        if foreign not in MODULES:
            return None
        home = MODULES[foreign]
        if home is None:
            return ModuleSpec(name, None, is_package=True)
        return ModuleSpec(name, _StandIn(f"{_PACKAGE}.{home}"))


class _StandIn(Loader):
    """Loads a module under another name: both names are the same module."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._module = importlib.import_module(self._home)
        self._spec = self._module.__spec__
        if spec.name.removeprefix(f"{_PACKAGE}.") in _PARENTS and not hasattr(
            self._module, "__path__"
        ):
            self._module.__path__ = []
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = (
            self._spec
        )  # which the import system has replaced by that of the foreign path


def register() -> None:
    """Install the finder; safe to call more than once."""
    if not any(type(finder).__name__ == ForeignPathFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, ForeignPathFinder())  # type: ignore[arg-type]
