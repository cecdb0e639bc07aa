# SPDX-License-Identifier: Apache-2.0
"""Prompts and completions: tokenised once, the loss on what is to be learnt only, nothing dropped in silence."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.bridge.data.config import DatasetRequest, Splits
from megatron.bridge.data.tokenizer import Tokenizer
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.config import FinetuningDatasetConfig

FILES = ("training.jsonl", "validation.jsonl", "test.jsonl")
PAIRS = (("prompt", "completion"), ("input", "output"))


@dataclass(frozen=True)
class Example:
    """One tokenised line.

    Attributes:
        tokens: all tokens, the end of document included.
        learn_from: index of the first token that is a target.
    """

    tokens: np.ndarray
    learn_from: int


class FinetuningDataset(Dataset[dict[str, Any]]):
    """Examples padded to ``seq_length``, in a new order each epoch.

    Args:
        examples: what there is.
        size: number of samples to present; examples repeat.
        seq_length: length of a sample.
        padding: token that fills a sample up (its loss is masked).
        seed: seed of the order; None keeps the file's.
    """

    def __init__(
        self, examples: Sequence[Example], size: int, seq_length: int, padding: int, seed: int | None
    ) -> None:
        self.examples = examples
        self.size = size
        self.seq_length = seq_length
        self.padding = padding
        self.seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        epoch, place = divmod(index, len(self.examples))
        return self._sample(self.examples[self._example(epoch, place)])

    def _example(self, epoch: int, place: int) -> int:
        if self.seed is None:
            return place
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
            self._order = (epoch, order)
        return int(self._order[1][place])

    def _sample(self, example: Example) -> dict[str, Any]:
        text = torch.full((self.seq_length + 1,), self.padding)
        count = len(example.tokens)
        text[:count] = torch.from_numpy(example.tokens)
        loss_mask = torch.zeros(self.seq_length)
        loss_mask[max(example.learn_from, 1) - 1 : count - 1] = 1.0  # position i predicts token i + 1
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self.seq_length),
        }


def build_finetuning_datasets(config: "FinetuningDatasetConfig", request: DatasetRequest) -> Splits:
    """Datasets of the requested sizes; only the training data is shuffled.

    Raises:
        UserError: a file is missing or has a wrong line, or no example is left.
    """
    datasets = []
    for name, size in zip(FILES, request.sizes, strict=True):
        if not size:
            datasets.append(None)
            continue
        examples = read_examples(Path(config.dataset_root) / name, config, request.tokenizer)
        seed = config.seed if name == FILES[0] else None
        padding = request.tokenizer.eod
        datasets.append(FinetuningDataset(examples, size, config.seq_length, padding, seed))
    return Splits(*datasets)


def read_examples(path: Path, config: "FinetuningDatasetConfig", tokenizer: Tokenizer) -> list[Example]:
    """Tokenised examples of a file, with a report of what was cut or dropped.

    Raises:
        UserError: a wrong line, a too long one with ``truncation=refuse``, or nothing left.
    """
    examples: list[Example] = []
    counts = {"cut": 0, "dropped as too long": 0, "dropped without a token to learn": 0}
    for number, record in read_jsonl(path):
        example = _tokenize(record, f"{path}:{number}", tokenizer)
        if len(example.tokens) - 1 > config.seq_length:
            if config.truncation == "refuse":
                raise _too_long(f"{path}:{number}", len(example.tokens) - 1, config.seq_length)
            if config.truncation == "drop":
                counts["dropped as too long"] += 1
                continue
            counts["cut"] += 1
            example = Example(example.tokens[: config.seq_length + 1], example.learn_from)
        if max(example.learn_from, 1) >= len(example.tokens):
            counts["dropped without a token to learn"] += 1
            continue
        examples.append(example)
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if not examples:
        raise UserError(f"{path} leaves no example to learn from ({said or 'it is empty'})")
    console().print(f"{path}: {len(examples)} examples{', ' + said if said else ''}")
    return examples


def _too_long(where: str, length: int, seq_length: int) -> UserError:
    return UserError(
        f"{where}: the sample has {length} tokens, more than dataset.seq_length={seq_length}: raise it, or choose "
        f"dataset.truncation=drop or right"
    )


def _tokenize(record: dict[str, Any], where: str, tokenizer: Tokenizer) -> Example:
    """Prompt and completion are tokenised apart: a prompt at inference has the same tokens."""
    if "text" in record:
        tokens, learn_from = tokenizer.tokenize(_text(record, "text", where)), 0
    else:
        prompt_key, completion_key = _pair(record, where)
        tokens = tokenizer.tokenize(_text(record, prompt_key, where))
        learn_from = len(tokens)
        tokens = tokens + tokenizer.continue_tokens(_text(record, completion_key, where))
    return Example(np.array([*tokens, tokenizer.eod], dtype=np.int64), learn_from)


def _pair(record: dict[str, Any], where: str) -> tuple[str, str]:
    for pair in PAIRS:
        if all(key in record for key in pair):
            return pair
    keys = ", ".join(sorted(record)) or "none"
    raise UserError(f"{where}: expected prompt and completion, input and output, or text; the keys are: {keys}")


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise UserError(f"{where}: {key} must be a text, not {type(value).__name__}")
    return value


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and objects of a JSONL file; empty lines are skipped.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the data file {path} cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: this line is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a line must be a JSON object, not {type(record).__name__}")
    return record
