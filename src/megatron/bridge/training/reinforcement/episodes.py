# SPDX-License-Identifier: Apache-2.0
"""Completions that may call tools: what the model wrote, what the tools answered, and what comes next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.checkpoint.collective import on_first_rank
from megatron.bridge.data.prompts.prompts import Prompt
from megatron.bridge.inference.conversations.answer_messages import MessageWriter
from megatron.bridge.inference.conversations.options import ConversationOptions, read_options
from megatron.bridge.inference.conversations.planning import ChatPlan, plan_answer
from megatron.bridge.inference.conversations.tool_parsers import find_tool_format
from megatron.bridge.inference.prompts import PromptReader
from megatron.bridge.inference.requests import Completion
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.generation import derive_seed
from megatron.bridge.training.reinforcement.tools import Toolbox, ToolResult
from megatron.bridge.utils.errors import UserError

Json = dict[str, Any]


@dataclass
class Episode:
    """One completion of a prompt: a single answer, or answers with the results of tools between them."""

    prompt: Prompt
    seed: int  # of the group
    index: int  # in the group
    tokens: list[int] = field(default_factory=list[int])  # with those of results
    is_written: list[bool] = field(default_factory=list[bool])  # False for tokens of results
    log_probs: list[float] = field(default_factory=list[float])  # 0 for tokens of results
    messages: list[Json] = field(default_factory=list[Json])
    text: str = ""  # of the last answer, without special tokens
    is_truncated: bool = False
    experts: Tensor | None = None
    tool_calls: int = 0
    failed_calls: int = 0

    @property
    def waiting_calls(self) -> list[Json]:
        """The calls of the last answer, in OpenAI's form."""
        return self.messages[-1].get("tool_calls") or [] if self.messages else []

    def add_answer(self, completion: Completion, text: str) -> None:
        """Add what the model wrote.

        Args:
            completion: The engine's result for the prompt and all tokens so far.
            text: Its text.
        """
        tokens = list(completion.tokens)
        self.tokens += tokens
        self.is_written += [True] * len(tokens)
        self.log_probs += [entry.logprob for entry in completion.logprobs]
        self.text = text
        self.is_truncated = completion.finish_reason == "length"
        self.experts = experts_of(completion)

    def add_results(self, messages: Sequence[Json], tokens: Sequence[int]) -> None:
        """Add the results of tools, and the tokens with which the chat template renders them."""
        self.messages += messages
        self.tokens += tokens
        self.is_written += [False] * len(tokens)
        self.log_probs += [0.0] * len(tokens)

    def seed_of_turn(self) -> int:
        """The seed of the next answer after results."""
        return derive_seed(self.seed, self.index, len(self.tokens))


def experts_of(completion: Completion) -> Tensor | None:
    """The experts of a completion in a type that all operations of PyTorch know."""
    experts = completion.routed_experts
    if experts is None:
        return None
    is_small = experts.dtype.itemsize == 1
    return torch.from_numpy(experts if is_small else experts.astype("int16"))


class ToolTurns:
    """Reads the calls of answers, and continues completions with the results.

    Args:
        toolbox: The tools.
        reader: Converts conversations to tokens, with the tokenizer and the chat template of the run.
        settings: The limits of a completion.
    """

    def __init__(self, toolbox: Toolbox, reader: PromptReader, settings: GRPOConfig) -> None:
        self._toolbox = toolbox
        self._reader = reader
        self._settings = settings
        self._options: ConversationOptions = read_options({"tools": toolbox.schemas})
        self._source = reader.template_source(toolbox.schemas)
        self._format = find_tool_format(self._source)
        hf = reader.hf
        self._ends = {
            token for token in (hf.eos_token_id, *reader.end_of_turn()) if token is not None
        }

    def plan(self, prompt: list[int]) -> ChatPlan:
        """How to read the answer to a prompt of tokens."""
        return plan_answer(self._reader, self._options, prompt, self._source, self._format)

    def read_answer(self, episode: Episode, plan: ChatPlan) -> None:
        """Parse the last answer of an episode into a message, with calls if it has any."""
        writer = MessageWriter(plan.answer_format, id_seed=f"{episode.seed_of_turn()}")
        episode.messages.append(writer.write_message(episode.text))

    def call_tools(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Call the tools that the last answers ask for, and add their results; all ranks call this.

        The first rank calls the tools. An episode whose results leave no room for an answer ends with its calls.

        Returns:
            The episodes that go on.
        """
        calling = [
            episode for episode in episodes if episode.waiting_calls and not episode.is_truncated
        ]
        results = on_first_rank(lambda: [self._results_of(episode) for episode in calling])
        continued: list[Episode] = []
        for episode, results_of_episode in zip(calling, results, strict=True):
            episode.tool_calls += len(results_of_episode)
            episode.failed_calls += sum(result.failed for result in results_of_episode)
            messages = [
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"],
                    "content": result.text,
                }
                for call, result in zip(episode.waiting_calls, results_of_episode, strict=True)
            ]
            tokens = self._tokens_of(episode, messages)
            if len(episode.tokens) + len(tokens) < self._settings.max_completion_length:
                episode.add_results(messages, tokens)
                continued.append(episode)
        return continued

    def _results_of(self, episode: Episode) -> list[ToolResult]:
        functions = [call["function"] for call in episode.waiting_calls]
        return [
            self._toolbox.call(function["name"], function["arguments"]) for function in functions
        ]

    def _tokens_of(self, episode: Episode, results: list[Json]) -> list[int]:
        """The tokens between an answer with calls and the next answer.

        They are those that the template adds behind an answer with the same calls. The tokens of the model's own
        answer stay as it wrote them: another tokenization of its text would not be what it was rewarded for.
        """
        location = episode.prompt.location
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": "", "tool_calls": episode.waiting_calls}
        before = self._render([question, answer], location, is_prompt=False)
        after = self._render([question, answer, *results], location, is_prompt=True)
        ends = [index for index, token in enumerate(before) if token in self._ends]
        start = ends[-1] + 1 if ends else len(before)
        if after[:start] != before[:start]:
            raise UserError(
                f"{location}: grpo.tools: the chat template renders calls differently when results follow, so the "
                "tokens of the results are unknown: set dataset.chat_template to one that does not"
            )
        return after[start:]

    def _render(self, messages: list[Json], location: str, is_prompt: bool) -> list[int]:
        record = {"messages": messages, "tools": self._toolbox.schemas}
        return self._reader.conversation_tokens(record, location, is_prompt=is_prompt)
