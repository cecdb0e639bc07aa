# SPDX-License-Identifier: Apache-2.0
"""Answers of the model to a few prompts while it trains, under any layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.records.chat_template import template_text
from megatron.bridge.data.records.media_parts import text_of
from megatron.bridge.data.records.record_config import RecordDatasetConfig
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron.bridge.inference.engine import Engine, EngineConfig
from megatron.bridge.inference.prompts import Messages, PromptReader, parse_chat
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.runner import Pixels
from megatron.bridge.models.chunk_info import evaluation_mode
from megatron.bridge.models.vision.sharing import rank_share
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.optim.optimizer import gathered_params
from megatron.bridge.training.state import Run
from megatron.bridge.utils import json_lines
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import print_rank_0
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SAMPLES_FILE = "samples.jsonl"
Prompt = str | list[dict[str, Any]]
_WHERE = "a sample prompt (logger.sample_prompts)"


class GenerationSamples(Callback):
    """Continues a few prompts before the first step, every ``interval`` steps, and after the last step.

    The answers are printed, and appended to ``samples.jsonl`` in ``logger.log_dir`` if that is set.

    Args:
        prompts: Texts, or conversations whose next message is the assistant's.
        interval: Steps between samples; with None only before the first and after the last step.
        max_new_tokens: The maximum length of an answer.
        chat_template: The template for conversations; None uses the tokenizer's own.
        media: How images of conversations are processed; None refuses them.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        interval: int | None = None,
        max_new_tokens: int = 64,
        chat_template: str | None = None,
        media: MediaRules | None = None,
    ) -> None:
        if not prompts or max_new_tokens < 1 or (interval is not None and interval < 1):
            raise UserError(
                f"GenerationSamples needs a prompt, an interval and max_new_tokens of at least 1, not "
                f"{len(prompts)} prompts, interval={interval}, max_new_tokens={max_new_tokens}"
            )
        for prompt in prompts:
            _check(prompt)
        self._prompts = prompts
        self._interval = interval
        self._max_new_tokens = max_new_tokens
        self._template = chat_template
        self._media = media
        self._sampled_step: int | None = None

    @classmethod
    def of(cls, config: ConfigContainer) -> "list[GenerationSamples]":
        """The samples that ``logger.sample_prompts`` asks for, in the chat template of the data."""
        logger = config.logger
        if not logger.sample_prompts:
            return []
        data = config.dataset
        settings = (logger.sample_interval, logger.sample_max_new_tokens)
        template = template_text(getattr(data, "chat_template", None))
        media = data.media_rules() if isinstance(data, RecordDatasetConfig) else None
        return [cls(logger.sample_prompts, *settings, template, media)]

    def check(self, tokenizer: Tokenizer, seq_length: int) -> None:
        """Tokenize the prompts without generating.

        Raises:
            UserError: A prompt cannot be rendered, or does not fit into ``seq_length`` with its answer.
        """
        context_length(
            self._all_tokens(tokenizer, self._reader(tokenizer)), self._max_new_tokens, seq_length
        )

    def on_train_start(self, context: Run) -> None:
        self._sample(context)

    def on_train_step_end(self, context: Run) -> None:
        if context.is_due(self._interval):
            self._sample(context)

    def on_train_end(self, context: Run) -> None:
        if self._sampled_step != context.progress.step:
            self._sample(context)

    def _sample(self, run: Run) -> None:
        self._sampled_step = run.progress.step
        reader = self._reader(run.tokenizer, rank_share(run.config.model))
        pixels = reader.pixels if self._media else None
        prompts = self._all_tokens(run.tokenizer, reader)
        answers = generate(run, prompts, self._max_new_tokens, self._ends(run.tokenizer), pixels)
        texts = [
            prompt if isinstance(prompt, str) else text_of(prompt[-1]["content"])
            for prompt in self._prompts
        ]
        lines = [
            {"step": run.progress.step, "prompt": text, "answer": run.tokenizer.detokenize(answer)}
            for text, answer in zip(texts, answers, strict=True)
        ]
        for line in lines:
            print_rank_0(f"step {line['step']}: {line['prompt']} -> {line['answer']}")
        folder = run.config.logger.log_dir
        if folder is not None:
            on_first_rank(lambda: _append(Path(folder), lines))

    def _reader(self, tokenizer: Tokenizer, share: tuple[int, int] = (0, 1)) -> PromptReader:
        has_chat = any(not isinstance(prompt, str) for prompt in self._prompts)
        return PromptReader(
            _transformers_tokenizer(tokenizer) if has_chat else None,
            self._template,
            self._media,
            share,
        )

    def _all_tokens(self, tokenizer: Tokenizer, reader: PromptReader) -> list[list[int]]:
        return [
            tokenizer.tokenize(prompt) if isinstance(prompt, str) else reader.tokens(prompt, _WHERE)
            for prompt in self._prompts
        ]

    def _ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special token that the chat template puts after an answer, found by rendering one."""
        prompt = next((prompt for prompt in self._prompts if not isinstance(prompt, str)), None)
        if prompt is None:
            return frozenset()
        return frozenset(self._reader(tokenizer).end_of_turn(prompt))


def _transformers_tokenizer(tokenizer: Tokenizer) -> "PreTrainedTokenizerBase":
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"{_WHERE} that is a conversation needs a HuggingFaceTokenizer: write it as text"
        )
    return tokenizer.hf


def _check(prompt: Any) -> None:
    """Refuse what is neither a text nor a conversation."""
    if isinstance(prompt, list):
        parse_chat(cast(Messages, prompt), _WHERE)
    elif not isinstance(prompt, str) or not prompt:
        raise UserError(
            f"{_WHERE} {prompt!r} is neither a text nor a list of messages with role and content"
        )


def _append(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Append ``lines``; lines of this and later steps, which a killed run left, are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SAMPLES_FILE
    write_text(path, json_lines.text_until(path, lines[0]["step"] - 1) + json_lines.to_text(lines))


Tokens = list[list[int]]


def generate(
    run: Run,
    prompts: Tokens,
    max_new_tokens: int,
    stop: frozenset[int] = frozenset(),
    pixels: Pixels | None = None,
) -> Tokens:
    """Continue each prompt greedily up to the end-of-document token or one of ``stop``; called on all ranks.

    Random states, gradients and weights do not change; the caches live as long as the call. Every rank gets the
    new tokens of each prompt.
    """
    tokenizer = run.tokenizer
    config = EngineConfig(
        max_context=context_length(prompts, max_new_tokens, run.config.model.seq_length),
        vocabulary=tokenizer.vocab_size,
        ends=stop | {tokenizer.eod},
        max_requests=len(prompts),
    )
    sampling = Sampling(max_new_tokens=max_new_tokens)
    with (
        gathered_params(run.model),
        evaluation_mode(run.model),
        Engine(run.model, config, pixels=pixels) as engine,
    ):
        jobs = [engine.submit(prompt, sampling)[0] for prompt in prompts]
        for _ in engine.run():
            pass
    return [job.completion.tokens for job in jobs]


def context_length(prompts: Tokens, max_new_tokens: int, seq_length: int) -> int:
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > seq_length:
        raise UserError(
            f"a prompt of {longest - max_new_tokens} tokens and {max_new_tokens} new tokens exceed "
            f"model.seq_length={seq_length}: shorten the prompt, or generate fewer tokens"
        )
    return longest
