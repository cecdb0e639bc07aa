# SPDX-License-Identifier: Apache-2.0
"""Megatron's fine-tuning format: JSONL lines whose fields fill a prompt template that ends in the answer."""

import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from megatron.bridge.data.finetuning.rows import EpochRows, PaddedRows, Row
from megatron.bridge.data.records.jsonl import read_jsonl
from megatron.bridge.data.records.samples import Sample, Samples
from megatron.bridge.data.tokenizer import Tokenizer, bos_token
from megatron.bridge.utils.errors import UserError

FIELD = re.compile(r"\{(\w+)\}")


class GPTSFTDataset(Dataset[Row]):
    """Rows of ``max_seq_length`` tokens with ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``.

    The parts of the template are tokenized separately; the space before the label belongs to the label. If a
    sample is too long, tokens of one field are removed; if it is still too long, it loses its end. A sample
    without a token in the loss is an error.

    Args:
        file_path: JSONL file.
        max_num_samples: number of rows to present; they repeat in a new order each epoch. None presents each line
            once, in the order of the file.
        add_bos: begin each sample with the beginning-of-sequence token.
        add_eos: end each sample with the end-of-document token, which is in the loss.
        label_key: field with the answer; the template must end with it.
        answer_only_loss: False takes the loss on the rest of the sample, too.
        truncation_field: field that loses tokens if a sample is too long.
        truncation_method: the end at which it loses them.
        prompt_template: text of a sample, with names of fields in braces.

    Raises:
        UserError: the template, the file or a line is wrong.
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
        bos = bos_token(tokenizer) if add_bos else None
        if add_bos and bos is None:
            raise UserError(
                "add_bos=True: the tokenizer has no beginning-of-sequence token: remove add_bos"
            )
        self._opening = [] if bos is None else [bos]
        self._end = [tokenizer.eod] if add_eos else []
        path = Path(file_path)
        samples = Samples.of(self._sample(line, location) for location, line in read_jsonl(path))
        if not len(samples):
            raise UserError(f"{path} is empty: give a file with at least one line")
        size = len(samples) if max_num_samples is None else max_num_samples
        rows = PaddedRows(samples, max_seq_length, tokenizer.eod)
        self.rows = EpochRows(rows, size, None if max_num_samples is None else seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def _sample(self, line: dict[str, Any], location: str) -> Sample:
        texts = [self._text(name, text, line, location) for name, text in self._parts]
        first, *later_texts = texts
        parts = [
            self.tokenizer.plain_tokens(first),
            *(self.tokenizer.continue_tokens(text) for text in later_texts),
        ]
        over = sum(map(len, parts)) + len(self._opening) + len(self._end) - self.max_seq_length - 1
        for index, (name, _) in enumerate(self._parts):
            if over > 0 and name == self.truncation_field:
                parts[index] = self._shorten(parts[index], over)
        context = [*self._opening, *(token for part in parts[:-1] for token in part)]
        tokens = np.array(
            [*context, *parts[-1], *self._end][: self.max_seq_length + 1], dtype=np.int32
        )
        trained = np.arange(len(tokens)) >= max(len(context) if self.answer_only_loss else 0, 1)
        if not trained.any():
            raise UserError(
                f"{location}: the sample has no token in the loss within max_seq_length={self.max_seq_length}: "
                f"increase it, or remove the line"
            )
        return Sample(tokens, trained)

    def _text(self, name: str | None, text: str, line: dict[str, Any], location: str) -> str:
        """A literal text, or a field and the text before it."""
        if name is not None:
            if not isinstance(line.get(name), str):
                keys = ", ".join(line) or "none"
                raise UserError(
                    f"{location}: the field {name!r} of the template must be a string (keys: {keys})"
                )
            text += line[name]
        return text

    def _shorten(self, tokens: list[int], over: int) -> list[int]:
        length = max(len(tokens) - over, 0)
        return (
            tokens[len(tokens) - length :] if self.truncation_method == "left" else tokens[:length]
        )


def _template_parts(
    template: str, label_key: str, truncation_field: str
) -> list[tuple[str | None, str]]:
    """Literal texts as (None, text), and fields as (name, text that is tokenized with it)."""
    fields = FIELD.findall(template)
    if not template.endswith(f"{{{label_key}}}") or fields.count(label_key) != 1:
        raise UserError(
            f"prompt_template={template!r} must end with {{{label_key}}} and contain it once"
        )
    if truncation_field not in fields:
        raise UserError(
            f"truncation_field={truncation_field!r} is not a field of prompt_template={template!r}"
        )
    parts: list[tuple[str | None, str]] = []
    texts = FIELD.split(template)  # literal, name, literal, name, ..., name, ""
    for literal, name in zip(texts[0::2], texts[1::2], strict=False):
        trailing_space = literal[len(literal.rstrip()) :] if name == label_key else ""
        before = literal[: len(literal) - len(trailing_space)]
        parts += [(None, before)] if before else []
        parts.append((name, trailing_space))
    return parts
