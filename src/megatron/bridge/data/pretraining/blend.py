# SPDX-License-Identifier: Apache-2.0
"""Blends: the corpora that a split draws from, and their weights."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.bridge.data.dataset_config import SPLITS
from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError, did_you_mean

Blend = tuple[list[str], list[float] | None]
BlendPerSplit = tuple[Blend | None, Blend | None, Blend | None]


def parse_blend(arguments: Sequence[str] | None, name: str = "data_paths") -> Blend | None:
    """Parse ``[prefix, prefix, ...]`` or ``[weight, prefix, weight, prefix, ...]``.

    Example:
        >>> parse_blend(["30", "a", "70", "b"])
        (['a', 'b'], [30.0, 70.0])
        >>> parse_blend(["a", "b"])
        (['a', 'b'], None)
    """
    if not arguments:
        return None
    weights = [_parse_number(argument) for argument in arguments[0::2]]
    prefixes = [str(argument).strip() for argument in arguments[1::2]]
    if len(arguments) % 2 == 0 and all(weight is not None for weight in weights):
        return prefixes, [weight for weight in weights if weight is not None]
    if any(_parse_number(argument) is not None for argument in arguments):
        raise UserError(
            f"{name}={' '.join(map(str, arguments))} mixes weights and paths: give a weight before every path, or "
            f"none at all (write a path that is a number as ./7)"
        )
    return [str(argument).strip() for argument in arguments], None


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
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
    """Build ``blend`` and ``blend_per_split`` of a ``GPTDatasetConfig`` from Megatron-LM's arguments.

    Args:
        data_paths: one blend: prefixes, or alternating weights and prefixes.
        data_args_path: file with the contents of ``data_paths``.
        per_split_data_args_path: JSON file with the blends ``train``, ``valid`` and ``test``.
        train_data_paths: blend of the training data, to be combined with the next two.
        valid_data_paths: blend of the validation data.
        test_data_paths: blend of the test data.
    """
    per_split = (train_data_paths, valid_data_paths, test_data_paths)
    ways = {
        "data_paths": data_paths,
        "data_args_path": data_args_path,
        "per_split_data_args_path": per_split_data_args_path,
        "train_data_paths/valid_data_paths/test_data_paths": any(per_split),
    }
    used = [name for name, given in ways.items() if given]
    if len(used) > 1:
        raise UserError(f"{' and '.join(used)} are both given: use only one of them")
    if data_args_path:
        return parse_blend(
            read_text(Path(data_args_path), f"data_args_path={data_args_path}").split(),
            data_args_path,
        ), None
    if per_split_data_args_path:
        return None, _per_split_file(per_split_data_args_path)
    if any(per_split):
        train, valid, test = (
            parse_blend(paths, f"{name}_data_paths")
            for name, paths in zip(SPLITS, per_split, strict=True)
        )
        return None, (train, valid, test)
    return parse_blend(data_paths), None


def _per_split_file(path: str) -> BlendPerSplit:
    """Read blends from a JSON file ``{"train": [...], "valid": [...], "test": [...]}``."""
    try:
        table = strict_json.loads(read_text(Path(path), f"per_split_data_args_path={path}"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise UserError(
            f'{path} must hold an object such as {{"train": ["30", "path"], "valid": ["path"]}}'
        )
    for key in table:
        if key not in SPLITS:
            raise UserError(
                f"{path}: unknown key {key!r}: use train, valid or test{did_you_mean(key, SPLITS)}"
            )
    train, valid, test = (
        parse_blend(_blend_arguments(table.get(name)), f"{path}: {name}") for name in SPLITS
    )
    return train, valid, test


def _blend_arguments(value: Any) -> list[str] | None:
    """Return the arguments of a blend, which is a list or a string in Megatron-LM's files."""
    if isinstance(value, str):
        return value.split()
    return None if value is None else [str(argument) for argument in value]


def split_problems(split: str | None) -> list[str]:
    """Return the problems of ``dataset.split``.

    Example:
        >>> split_problems("969,30,1")
        []
    """
    numbers = [_parse_number(share) for share in (split or "").split(",")]
    shares = [
        share_value
        for share_value in numbers
        if share_value is not None and 0 <= share_value < math.inf
    ]
    if len(shares) == len(numbers) <= len(SPLITS) and sum(shares) > 0:
        return []
    return [
        f'dataset.split={split!r}: with dataset.blend, give up to three shares such as "969,30,1"'
    ]


def blend_problems(name: str, blend: Blend | None) -> list[str]:
    if blend is None:
        return []
    if len(blend) != 2 or isinstance(blend[0], str):
        return [f"{name}={blend!r}: give a pair such as (['corpus_a', 'corpus_b'], [0.3, 0.7])"]
    prefixes, weights = blend
    if not prefixes:
        return [f"{name} names no corpus: give at least one path"]
    if weights is not None and len(weights) != len(prefixes):
        return [
            f"{name} has {len(prefixes)} paths and {len(weights)} weights: give one weight for each path"
        ]
    if weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in weights):
        return [
            f"{name} has the weights {list(weights)}: make all positive (remove a corpus with weight 0)"
        ]
    return []
