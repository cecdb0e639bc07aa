# SPDX-License-Identifier: Apache-2.0
"""Blends: which corpora, with which weights, for which purpose."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.data.config import SPLITS, Blend
from megatron.bridge.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from megatron.bridge.data.config import GPTDatasetConfig

BlendPerSplit = tuple[Blend | None, Blend | None, Blend | None]


def parse_blend(words: Sequence[str] | None, name: str = "data_paths") -> Blend | None:
    """A blend from ``[prefix, prefix, ...]`` or ``[weight, prefix, weight, prefix, ...]``.

    Example:
        >>> parse_blend(["30", "a", "70", "b"])
        (['a', 'b'], [30.0, 70.0])
        >>> parse_blend(["a", "b"])
        (['a', 'b'], None)

    Raises:
        UserError: some prefixes have a weight and others have none.
    """
    if not words:
        return None
    weights = [_number(word) for word in words[0::2]]
    prefixes = [str(word).strip() for word in words[1::2]]
    if len(words) % 2 == 0 and all(weight is not None for weight in weights):
        return prefixes, [weight for weight in weights if weight is not None]
    if any(_number(word) is not None for word in words):
        raise UserError(
            f"{name}={' '.join(map(str, words))} mixes weights and paths: give a weight before each path, or "
            f"before none (a path that is a number: write ./7)"
        )
    return [str(word).strip() for word in words], None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def get_blend_and_blend_per_split(
    data_paths: Sequence[str] | None = None,
    data_args_path: str | None = None,
    per_split_data_args_path: str | None = None,
    train_data_paths: Sequence[str] | None = None,
    valid_data_paths: Sequence[str] | None = None,
    test_data_paths: Sequence[str] | None = None,
) -> tuple[Blend | None, BlendPerSplit | None]:
    """``blend`` and ``blend_per_split`` of a ``GPTDatasetConfig`` from one of Megatron's ways to name data.

    Args:
        data_paths: one blend: prefixes, or alternating weights and prefixes.
        data_args_path: file that holds the words of ``data_paths``.
        per_split_data_args_path: JSON file with the blends ``train``, ``valid`` and ``test``.
        train_data_paths: blend of the training data; the next two belong to it.
        valid_data_paths: blend of the validation data.
        test_data_paths: blend of the test data.

    Raises:
        UserError: more than one way is used, a file cannot be read, or weights and paths do not pair.
    """
    per_split = (train_data_paths, valid_data_paths, test_data_paths)
    ways = {
        "data_paths": bool(data_paths),
        "data_args_path": bool(data_args_path),
        "per_split_data_args_path": bool(per_split_data_args_path),
        "train_data_paths/valid_data_paths/test_data_paths": any(per_split),
    }
    used = [name for name, given in ways.items() if given]
    if len(used) > 1:
        raise UserError(f"{' and '.join(used)} are both given: name the data in one way only")
    if data_args_path:
        return parse_blend(_read(data_args_path, "data_args_path").split(), data_args_path), None
    if per_split_data_args_path:
        return None, _per_split_file(per_split_data_args_path)
    if any(per_split):
        train, valid, test = (
            parse_blend(words, f"{name}_data_paths") for name, words in zip(SPLITS, per_split, strict=True)
        )
        return None, (train, valid, test)
    return parse_blend(data_paths), None


def _read(path: str, key: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {error.strerror}") from error


def _per_split_file(path: str) -> BlendPerSplit:
    """Blends from a JSON file ``{"train": [...], "valid": [...], "test": [...]}``."""
    try:
        table = json.loads(_read(path, "per_split_data_args_path"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: line {error.lineno}: {error.msg}") from error
    if not isinstance(table, dict):
        raise UserError(f'{path} must hold an object such as {{"train": ["30", "path"], "valid": ["path"]}}')
    for key in table:
        if key not in SPLITS:
            raise UserError(f"{path}: {key!r} is none of train, valid, test{did_you_mean(key, SPLITS)}")
    train, valid, test = (parse_blend(_words(table.get(name)), f"{path}: {name}") for name in SPLITS)
    return train, valid, test


def _words(value: Any) -> list[str] | None:
    """A list, or a string of words, as Megatron's files have it."""
    if isinstance(value, str):
        return value.split()
    return None if value is None else [str(word) for word in value]


def split_shares(split: str) -> tuple[float, float, float]:
    """Shares that add up to 1.

    Example:
        >>> split_shares("8,1,1")
        (0.8, 0.1, 0.1)

    Raises:
        UserError: ``split`` is not one to three numbers, none negative, with a positive sum.
    """
    numbers = [_number(word) for word in split.split(",")]
    values = [value for value in numbers if value is not None and value >= 0 and math.isfinite(value)]
    if len(values) != len(numbers) or not 1 <= len(values) <= len(SPLITS) or sum(values) <= 0:
        raise UserError(f'dataset.split={split!r}: give up to three shares such as "969,30,1"')
    padded = [*values, 0.0, 0.0][: len(SPLITS)]
    train, valid, test = (value / sum(padded) for value in padded)
    return train, valid, test


def blend_problems(config: "GPTDatasetConfig") -> list[str]:
    """What is wrong with the blends and the split of ``config``, one sentence each."""
    if config.blend is None and config.blend_per_split is None:
        return ["dataset.blend is not set: name a corpus, or use MockGPTDatasetConfig for made-up data"]
    if config.blend_per_split is not None:
        return _per_split_problems(config)
    found = _weight_problems("dataset.blend", config.blend)
    try:
        split_shares(config.split or "")
    except UserError:
        found.append(f'dataset.split={config.split!r}: with dataset.blend give shares such as "969,30,1"')
    return found


def _per_split_problems(config: "GPTDatasetConfig") -> list[str]:
    found = []
    if config.blend is not None:
        found.append("dataset.blend and dataset.blend_per_split are both set: name the data in one way only")
    if config.split is not None:
        found.append(f"dataset.split={config.split!r} has no effect with dataset.blend_per_split: remove it")
    blends = config.blend_per_split or ()
    if len(blends) != len(SPLITS):
        return [*found, f"dataset.blend_per_split has {len(blends)} entries: give three (train, valid, test)"]
    for name, blend in zip(SPLITS, blends, strict=True):
        found += _weight_problems(f"dataset.blend_per_split ({name})", blend)
    return found


def _weight_problems(name: str, blend: Blend | None) -> list[str]:
    if blend is None:
        return []
    if len(blend) != 2 or isinstance(blend[0], str):
        return [f"{name}={blend!r}: give a pair such as (['corpus_a', 'corpus_b'], [0.3, 0.7])"]
    prefixes, weights = blend
    if not prefixes:
        return [f"{name} names no corpus"]
    if weights is not None and len(weights) != len(prefixes):
        return [f"{name} has {len(prefixes)} paths and {len(weights)} weights: give one weight for each path"]
    if weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in weights):
        return [f"{name} has the weights {list(weights)}: all must be positive (leave out a corpus of weight 0)"]
    return []
