# SPDX-License-Identifier: Apache-2.0
"""Megatron's fine-tuning format: JSONL lines whose fields fill a template, the last of them to be learnt."""

import re
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from megatron.bridge.data.examples import Example, Examples
from megatron.bridge.data.rows import Epochs, PaddedRows, Row
from megatron.bridge.data.sources import read_jsonl
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.bridge.utils.errors import UserError

FIELD = re.compile(r"\{(\w+)\}")


class GPTSFTDataset(Dataset[Row]):
    """Rows of ``max_seq_length`` tokens with ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``.

    The parts of the template are tokenised apart; the space before the label belongs to the label. Where a sample
    is too long, tokens of one field are left out; what is still too long loses its end. A sample without a token
    to learn is an error, not a row of zeros.

    Args:
        file_path: JSONL file.
        tokenizer: the tokenizer.
        max_seq_length: length of a row.
        max_num_samples: number of rows to present; they repeat, in a new order each epoch. None: each line once,
            in the order of the file.
        seed: seed of the order.
        add_bos: begin each sample with the beginning-of-sequence token.
        add_eos: end each sample with the end-of-document token, and learn it.
        label_key: field to learn; the template ends with it.
        answer_only_loss: False learns the rest of the sample, too.
        truncation_field: field of which tokens are left out.
        truncation_method: end of that field at which they are left out.
        prompt_template: text of a sample, with the names of fields in braces.

    Raises:
        UserError: the template, the file or a line is not as it should be.
    """

    def __init__(
        self,
        file_path: str,
        tokenizer: Tokenizer,
        max_seq_length: int = 1024,
        max_num_samples: int | None = None,
        seed: int = 1234,
        add_bos: bool = False,
        add_eos: bool = True,
        label_key: str = "output",
        answer_only_loss: bool = True,
        truncation_field: str = "input",
        truncation_method: Literal["left", "right"] = "right",
        prompt_template: str = "{input} {output}",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.label_key = label_key
        self.answer_only_loss = answer_only_loss
        self.truncation_field = truncation_field
        self.truncation_method = truncation_method
        self._parts = _template_parts(prompt_template, label_key, truncation_field)
        self._opening = [_bos(tokenizer)] if add_bos else []
        self._end = [tokenizer.eod] if add_eos else []
        path = Path(file_path)
        examples = Examples.of(self._example(line, f"{path}:{number}") for number, line in read_jsonl(path))
        if not len(examples):
            raise UserError(f"{path} is empty: give a file with at least one line")
        size = len(examples) if max_num_samples is None else max_num_samples
        rows = PaddedRows(examples, max_seq_length, tokenizer.eod)
        self.rows = Epochs(rows, size, None if max_num_samples is None else seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def _example(self, line: dict[str, Any], where: str) -> Example:
        pieces = [self._piece(name, text, line, where) for name, text in self._parts]
        over = sum(map(len, pieces)) + len(self._opening) + len(self._end) - self.max_seq_length - 1
        for place, (name, _) in enumerate(self._parts):
            if over > 0 and name == self.truncation_field:
                pieces[place] = self._shorter(pieces[place], over)
        context = [*self._opening, *(token for piece in pieces[:-1] for token in piece)]
        tokens = np.array([*context, *pieces[-1], *self._end][: self.max_seq_length + 1], dtype=np.int32)
        trained = np.arange(len(tokens)) >= max(len(context) if self.answer_only_loss else 0, 1)
        if not trained.any():
            raise UserError(
                f"{where}: the sample keeps no token to learn within max_seq_length={self.max_seq_length}: "
                f"raise it, or remove the line"
            )
        return Example(tokens, trained)

    def _piece(self, name: str | None, text: str, line: dict[str, Any], where: str) -> list[int]:
        """Tokens of a literal text, or of a field with the text before it."""
        if name is not None:
            if not isinstance(line.get(name), str):
                keys = ", ".join(line) or "none"
                raise UserError(f"{where}: the field {name!r} of the template is no text here (keys: {keys})")
            text += line[name]
        return self.tokenizer.continue_tokens(text)

    def _shorter(self, piece: list[int], over: int) -> list[int]:
        kept = max(len(piece) - over, 0)
        return piece[len(piece) - kept :] if self.truncation_method == "left" else piece[:kept]


def _template_parts(template: str, label_key: str, truncation_field: str) -> list[tuple[str | None, str]]:
    """Literal texts as (None, text) and fields as (name, text before it that is tokenised with it)."""
    fields = FIELD.findall(template)
    if not template.endswith(f"{{{label_key}}}") or fields.count(label_key) != 1:
        raise UserError(f"prompt_template={template!r} must end with {{{label_key}}}, and have it once")
    if truncation_field not in fields:
        raise UserError(f"truncation_field={truncation_field!r} is no field of prompt_template={template!r}")
    parts: list[tuple[str | None, str]] = []
    pieces = FIELD.split(template)  # literal, name, literal, name, ..., name, ""
    for literal, name in zip(islice(pieces, 0, None, 2), islice(pieces, 1, None, 2), strict=False):
        own = literal[len(literal.rstrip()) :] if name == label_key else ""
        before = literal[: len(literal) - len(own)]
        parts += [(None, before)] if before else []
        parts.append((name, own))
    return parts


def _bos(tokenizer: Tokenizer) -> int:
    token = tokenizer.hf.bos_token_id if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if not isinstance(token, int):
        raise UserError("add_bos=True, but the tokenizer has no beginning-of-sequence token: leave add_bos out")
    return token
