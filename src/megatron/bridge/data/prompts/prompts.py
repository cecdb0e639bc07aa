# SPDX-License-Identifier: Apache-2.0
"""Read prompts and convert them to tokens, together with what reward functions get to see of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.bridge.data.dataset_config import DatasetRequest, Split, Splits
from megatron.bridge.data.finetuning.builder import add_other_problems
from megatron.bridge.data.finetuning.rows import EpochRows, SampleRows
from megatron.bridge.data.records.encoding import TOO_LONG, EncodedRecords, RecordEncoder
from megatron.bridge.data.records.end_tokens import parse_chat
from megatron.bridge.data.records.formats import Chat
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.samples import EncodingReport, Sample, Samples
from megatron.bridge.data.records.sources import LocatedRecord
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.data.prompts.prompt_config import PromptDatasetConfig

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
"""Names of the arguments that every reward function gets."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its record."""

    location: str  # file and line of the record
    tokens: list[int]
    content: str | list[dict[str, Any]]  # the text, or the messages
    columns: dict[str, Any]  # all other keys of the record

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.content, str)


class PromptEncoder(RecordEncoder):
    """Tokenizes prompts.

    Args:
        tokenizer: The tokenizer.
        rules: How records are read.
        longest: Prompts with more tokens are refused or dropped.
        tools: JSON schemas of the tools that each prompt offers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: EncodingRules,
        longest: int,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(tokenizer, rules)
        self._longest = longest
        self._tools = tools
        self._has_checked_template = False

    def __call__(self, records: Sequence[LocatedRecord]) -> EncodedRecords:
        prompts, report = self.read_prompts(records)
        return EncodedRecords(samples_of(prompts, self.tokenizer.eod), report)

    def read_prompts(self, records: Sequence[LocatedRecord]) -> tuple[list[Prompt], EncodingReport]:
        """Convert records, and count those that are dropped.

        Raises:
            UserError: A record has no prompt, or one that is too long while
                ``dataset.truncation`` is ``refuse``.
        """
        report = EncodingReport(records=len(records))
        prompts: list[Prompt] = []
        for location, record in self._processed(records, report):
            prompt = self._read_prompt(location, record)
            if len(prompt.tokens) <= self._longest:
                prompts.append(prompt)
            elif self.rules.truncation == "drop":
                report.drop(TOO_LONG, location)
            else:
                raise UserError(
                    f"{location}: the prompt has {len(prompt.tokens)} tokens, more than "
                    f"{self._longest}, which dataset.seq_length and grpo.max_completion_length leave: "
                    "increase dataset.seq_length, lower grpo.max_completion_length, or set "
                    "dataset.truncation=drop"
                )
        report.samples = len(prompts)
        report.tokens = sum(len(prompt.tokens) for prompt in prompts)
        return prompts, report

    def _read_prompt(self, location: str, record: dict[str, Any]) -> Prompt:
        content = record.get("prompt")
        if not content or not isinstance(content, str | list):
            names = ", ".join(sorted(record))
            raise UserError(
                f"{location}: prompt={content!r:.60} must be a text or a list of messages (keys: "
                f"{names}); dataset.columns renames keys"
            )
        columns = {key: value for key, value in record.items() if key != "prompt"}
        for name in RESERVED_COLUMNS:
            if name in columns:
                raise UserError(
                    f"{location}: the key {name} is the name of an argument of every reward function: "
                    f"rename it with dataset.columns"
                )
        return Prompt(location, self._tokenize(content, location), content, columns)

    def _tokenize(self, content: str | list[dict[str, Any]], location: str) -> list[int]:
        if isinstance(content, str):
            if self._tools:
                raise UserError(
                    f"{location}: the prompt is a text, and only messages can offer the tools of grpo.tools: write "
                    "it as a list of messages"
                )
            return self.tokenizer.tokenize(content)
        chat = parse_chat({"messages": content, "tools": self._tools}, location)
        if chat.images:
            raise UserError(
                f"{location}: the prompt has images, which reinforcement learning does not support: "
                "remove them"
            )
        text = self.template.prompt(chat, location)
        self._check_template(chat, text, location)
        assert isinstance(self.tokenizer, HuggingFaceTokenizer), "template has refused others"
        return self.tokenizer.plain_tokens(text)

    def _check_template(self, chat: Chat, text: str, location: str) -> None:
        """Refuse a chat template that leaves the tools out of the prompt."""
        if not self._tools or self._has_checked_template:
            return
        if self.template.prompt(replace(chat, tools=None), location) == text:
            raise UserError(
                f"{location}: the chat template does not render tools, so the model would not know those of "
                "grpo.tools: set dataset.chat_template to one that does"
            )
        self._has_checked_template = True


def samples_of(prompts: Sequence[Prompt], end: int) -> Samples:
    """The prompts as samples without a token in the loss, for previews; ``end`` is a last target."""
    return Samples.of(
        Sample(
            np.array([*prompt.tokens, end], np.int32), np.zeros(len(prompt.tokens) + 1, np.bool_)
        )
        for prompt in prompts
    )


class PromptRows(SampleRows):
    """One prompt in each row."""

    def __init__(self, prompts: list[Prompt], padding: int) -> None:
        super().__init__(samples_of(prompts, padding), None, padding)
        self.prompts = prompts

    def titles(self, count: int) -> list[str]:
        return [f"prompt {index + 1}" for index in range(min(count, len(self)))]


def build_prompt_splits(config: "PromptDatasetConfig", request: DatasetRequest) -> Splits:
    """The prompts to train on, and those to evaluate if the run does and there are any."""
    train_size, valid_size, _ = request.sizes
    train = build_prompts(config, request.tokenizer, train_size)
    if not valid_size:
        return Splits(train, None, None)
    if config.source("valid") is None:
        print_rank_0(
            "note: the data has no held-out prompts, so nothing is evaluated: give a folder with files named training "
            "and validation, or set dataset.validation_split"
        )
        return Splits(train, None, None)
    return Splits(train, build_prompts(config, request.tokenizer, valid_size, "valid"), None)


def build_prompts(
    config: "PromptDatasetConfig", tokenizer: Tokenizer, size: int, split: Split = "train"
) -> EpochRows:
    """Read all prompts of a split.

    Args:
        config: The source and the limits.
        tokenizer: The tokenizer.
        size: Number of rows to present, in an order of each epoch.
        split: The split, which must exist.
    """
    source = config.limited_source(split)
    assert source is not None, "the caller has looked for the split"
    try:
        prompts, report = config.encoder(tokenizer).read_prompts(list(source.records()))
    except UserError as error:
        raise add_other_problems(error, config, tokenizer) from error
    if not prompts:
        raise UserError(
            f"{source.name} has no prompt that can be used: {'; '.join(report.lines()) or 'it is empty'}"
        )
    seed = config.seed if split == "train" else None  # held-out prompts keep the order of the file
    return EpochRows(PromptRows(prompts, tokenizer.eod), size, seed, report, source.name)


def prompt_at(dataset: EpochRows, position: int) -> Prompt:
    """The prompt at a position of the run, which has as many epochs as it needs."""
    rows: PromptRows = dataset.rows
    return rows.prompts[dataset.row_at(position)]
