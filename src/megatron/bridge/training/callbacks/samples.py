# SPDX-License-Identifier: Apache-2.0
"""What the model answers while it learns."""

import json
from pathlib import Path
from typing import Any

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.chat import ChatTemplate
from megatron.bridge.data.messages import Chat, parse
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.training.callbacks.base import Callback
from megatron.bridge.training.generation import generate
from megatron.bridge.training.state import Run
from megatron.bridge.utils.atomic import write_text
from megatron.bridge.utils.console import console
from megatron.bridge.utils.errors import UserError

FILE = "samples.jsonl"
ANSWER = "an answer"  # any text that no template contains
Prompt = str | list[dict[str, Any]]


class GenerationSamples(Callback):
    """Continues a few prompts before the first step, every ``interval`` steps, and after the last one.

    The texts are shown, and added to ``samples.jsonl`` in ``logger.log_dir``, if there is one.

    Args:
        prompts: texts, or conversations that end where the assistant is to answer.
        interval: steps between samples; None: only before and after.
        max_new_tokens: longest answer.
        chat_template: template for conversations; None takes the tokenizer's own.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        interval: int | None = None,
        max_new_tokens: int = 64,
        chat_template: str | None = None,
    ) -> None:
        if not prompts or max_new_tokens < 1 or (interval is not None and interval < 1):
            raise UserError(
                f"GenerationSamples needs a prompt, an interval and max_new_tokens of at least 1, not "
                f"{len(prompts)} prompts, interval={interval}, max_new_tokens={max_new_tokens}"
            )
        self._prompts = prompts
        self._interval = interval
        self._max_new_tokens = max_new_tokens
        self._template = chat_template
        self._shown_step: int | None = None

    def on_train_start(self, context: Run) -> None:
        """Before."""
        self._show(context)

    def on_train_step_end(self, context: Run) -> None:
        """At the interval."""
        if context.is_due(self._interval):
            self._show(context)

    def on_train_end(self, context: Run) -> None:
        """After, unless that was just done."""
        if self._shown_step != context.progress.step:
            self._show(context)

    def _show(self, run: Run) -> None:
        self._shown_step = run.progress.step
        prompts = [self._tokens(run, prompt) for prompt in self._prompts]
        answers = generate(run, prompts, self._max_new_tokens, self._ends(run))
        lines = [
            {"step": run.progress.step, "prompt": _shown(prompt), "answer": run.tokenizer.detokenize(answer)}
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]
        for line in lines:
            text = f"step {line['step']}: {line['prompt']} -> {line['answer']}"
            console().print(text, markup=False)
        folder = run.config.logger.log_dir
        if folder is not None:
            on_first_rank(lambda: _append(Path(folder), lines))

    def _tokens(self, run: Run, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return run.tokenizer.tokenize(prompt)
        return run.tokenizer.continue_tokens(self._chats(run).prompt(_chat(prompt), "prompt"))

    def _ends(self, run: Run) -> frozenset[int]:
        """The control token that the chat template puts behind an answer, found by rendering one."""
        prompt = next((prompt for prompt in self._prompts if not isinstance(prompt, str)), None)
        if prompt is None:
            return frozenset()
        answered = [*prompt, {"role": "assistant", "content": ANSWER}]
        text = self._chats(run).render(_chat(answered), "everything", "prompt").text
        ids = run.tokenizer.continue_tokens(text.rpartition(ANSWER)[2])
        return frozenset(token for token in ids[:1] if token in run.tokenizer.hf.added_tokens_decoder)

    def _chats(self, run: Run) -> ChatTemplate:
        if not isinstance(run.tokenizer, HuggingFaceTokenizer):
            raise UserError("a conversation as prompt needs a HuggingFaceTokenizer: give the prompt as a text")
        return ChatTemplate(run.tokenizer.hf, self._template)


def _chat(messages: list[dict[str, Any]]) -> Chat:
    parsed = parse({"messages": messages}, "prompt")
    assert isinstance(parsed, Chat), "messages are a chat"
    return parsed


def _shown(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _append(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Behind what earlier steps wrote; what a killed run wrote of this step and later ones is done again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [line for line in old if line["step"] < lines[0]["step"]]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [*kept, *lines]))
