# SPDX-License-Identifier: Apache-2.0
"""Data of recipes: fields of a blend, and the default adapters and datasets of fine-tuning."""

from collections.abc import Sequence
from typing import Any

from megatron.bridge.data.loaders import get_blend_and_blend_per_split
from megatron.bridge.peft.base import PEFT
from megatron.bridge.recipes.defaults import METHODS, default_squad_config
from megatron.bridge.utils.errors import UserError

__all__ = [
    "DEFAULT_NULL_TOKENIZER_VOCAB_SIZE",
    "default_peft_config",
    "default_squad_config",
    "get_blend_fields_from_data_paths",
]

DEFAULT_NULL_TOKENIZER_VOCAB_SIZE = 32000
"""Vocabulary of mock data."""

BlendFields = tuple[Any, Any, str | None]


def get_blend_fields_from_data_paths(
    data_paths: Sequence[str] | None = None,
    data_args_path: str | None = None,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    per_split_data_args_path: str | None = None,
    mock: bool = False,
) -> BlendFields:
    """Return ``blend``, ``blend_per_split`` and ``split`` for ``GPTDatasetConfig``.

    Args:
        data_paths: Prefixes of corpora, or weights and prefixes in turn.
        data_args_path: File with the same.
        train_data_path: The same for training alone; validation and test have their own.
        valid_data_path: For validation.
        test_data_path: For testing.
        per_split_data_args_path: JSON file with those of all three splits.
        mock: Use mock data, as without any path.
    """
    paths = {
        "data_paths": data_paths,
        "data_args_path": data_args_path,
        "train_data_paths": train_data_path,
        "valid_data_paths": valid_data_path,
        "test_data_paths": test_data_path,
        "per_split_data_args_path": per_split_data_args_path,
    }
    given: dict[str, Any] = {name: value for name, value in paths.items() if value}
    if mock or not given:
        return None, None, "1,1,1"
    blend, blend_per_split = get_blend_and_blend_per_split(**given)
    return blend, blend_per_split, None if blend_per_split is not None else "9999,8,2"


def default_peft_config(peft_scheme: str | PEFT | None, **changes: Any) -> PEFT | None:
    """Return ``LoRA(**changes)`` or ``DoRA(**changes)``, and None for None and ``none``.

    Args:
        peft_scheme: ``lora``, ``dora``, ``qlora``, a ``PEFT`` object, which is returned unchanged, or None.
        **changes: Fields of the adapter.
    """
    if peft_scheme is None or isinstance(peft_scheme, PEFT):
        return peft_scheme
    scheme = peft_scheme.lower()
    if scheme == "none":
        return None
    if scheme not in METHODS:
        raise UserError(
            f"peft_scheme={peft_scheme} is not known: choose {', '.join(METHODS)}, or None"
        )
    if scheme == "qlora":
        changes = {"base_precision": "nf4", **changes}
    return METHODS[scheme](**changes)
