# SPDX-License-Identifier: Apache-2.0
"""Texts that a command reads a model with: ``--texts``."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.bridge.cli.support.parser import count
from megatron.bridge.utils.errors import UserError


def add_texts(parser: argparse.ArgumentParser, samples: int, length: int) -> None:
    """Add the options that ``token_ids`` needs.

    Args:
        parser: That of the command.
        samples: Texts that are read by default.
        length: Tokens of a text that count by default.
    """
    parser.add_argument(
        "--texts",
        type=Path,
        required=True,
        metavar="FILE",
        help=(
            "calibration texts: JSONL with the key text, or with messages as for fine-tuning, or a "
            "text in each line"
        ),
    )
    parser.add_argument(
        "--samples",
        type=count,
        default=samples,
        metavar="N",
        help="texts to read (default: %(default)s)",
    )
    parser.add_argument(
        "--seq-length",
        type=count,
        default=length,
        metavar="N",
        help="tokens of a text that count (default: %(default)s)",
    )


def token_ids(tokenizer: Any, path: Path, length: int) -> Iterator[list[int]]:
    """Yield the token ids of each text, up to ``length`` of them."""
    if not path.is_file():
        raise UserError(f"--texts {path} is not a file: give one with calibration texts")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            ids = _ids_of(tokenizer, line, path, number)[:length]
            if ids:
                yield ids


def _ids_of(tokenizer: Any, line: str, path: Path, number: int) -> list[int]:
    if path.suffix != ".jsonl":
        return tokenizer(line.strip())["input_ids"]
    try:
        record: Any = json.loads(line)
        messages = record.get("messages")
        text = None if messages else record["text"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path}:{number}: a line must be a JSON object with the key text or messages: correct it"
        ) from None
    if text is not None:
        return tokenizer(text)["input_ids"]
    if not tokenizer.chat_template:
        raise UserError(
            f"{path}:{number}: messages need a chat template, which the model's tokenizer has not: give texts with the "
            "key text"
        )
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
