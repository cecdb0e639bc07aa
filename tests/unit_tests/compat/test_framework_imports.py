# SPDX-License-Identifier: Apache-2.0
"""Every name that a framework imports from ``megatron.bridge`` is there, or documented as missing.

``framework_imports.json`` has the modules and names of each release or commit, below ``megatron.bridge``.
"""

import json
from importlib import import_module
from pathlib import Path

import pytest

IMPORTS = json.loads(Path(__file__).with_name("framework_imports.json").read_text())

MISSING = {
    "models.distillation_provider": "convert_to_distillation_provider",
    "models.gemma.gemma3_provider": "Gemma3LanguageModelEmbedding Gemma3SelfAttention "
    "TERowParallelLinearLayerNorm",
    "peft.multi_lora": "MultiLoRA",
    "peft.multi_lora_layers": "MultiLoRALinear _iter_multi_lora_modules clear_adapter_slot expose_adapter_slot "
    "hide_adapters init_adapter_slot load_adapter set_tokens_per_adapter_slot",
    "training.post_training.distillation": "ModelOptDistillConfig",
    "utils.instantiate_utils": "register_allowed_target_prefix",
}
"""Module -> names that docs/rl.md says are not there."""


@pytest.mark.parametrize("framework", IMPORTS)
def test_names_resolve(framework):
    """A name is an attribute, or a module, as ``from package import name`` finds it."""
    missing = [
        f"{module}:{name}"
        for module, names in IMPORTS[framework].items()
        for name in names.split()
        if name not in MISSING.get(module, "").split() and not resolves(module, name)
    ]
    assert not missing


def resolves(module, name):
    path = f"megatron.bridge.{module}".rstrip(".")
    try:
        return hasattr(import_module(path), name) or bool(import_module(f"{path}.{name}"))
    except ModuleNotFoundError:
        return False


def test_missing_names_are_missing():
    """A name that was added leaves the list."""
    named = [(module, name) for module, names in MISSING.items() for name in names.split()]
    assert not [pair for pair in named if resolves(*pair)]
