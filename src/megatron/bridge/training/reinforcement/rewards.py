# SPDX-License-Identifier: Apache-2.0
"""Functions that score completions: found by their names, called once for all, and checked."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.data.prompts.prompts import Prompt
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.reinforcement.judge import Judge, text_of
from megatron.bridge.training.reinforcement.reward_models import KEY, RewardModel
from megatron.bridge.utils.errors import UserError
from megatron.bridge.utils.user_functions import NamedFunction, failure_of, load_functions

USAGE = "function(prompts, completions, completion_ids, **columns) -> a number or None for each completion"


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion as a reward function sees it."""

    prompt: Prompt
    tokens: list[int]
    text: str  # without special tokens
    messages: list[dict[str, Any]] | None = None  # answers and results of tools

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The text, or for a conversation the answer as a list of messages: one, or more with tools."""
        if self.messages is not None:
            return self.messages
        if self.prompt.is_chat:
            return [{"role": "assistant", "content": self.text}]
        return self.text

    @property
    def shown_text(self) -> str:
        """The completion for people."""
        return text_of(self.content)


def load_rewards(
    settings: GRPOConfig, functions_of_script: Sequence[Callable[..., Any]] = ()
) -> list[NamedFunction]:
    """Import the functions of ``grpo.reward_funcs``, which runs their code.

    Args:
        settings: Names and weights.
        functions_of_script: Functions in addition to those with a name, after them.

    Raises:
        UserError: There is none, a name leads to no function, two have one name, or the weights do not fit.
    """
    judges = [] if settings.judge is None else [Judge(settings.judge)]
    entries = [*map(_as_reward, settings.reward_funcs), *judges, *functions_of_script]
    weights = settings.reward_weights
    if not entries:
        raise UserError(
            f"{KEY} is empty: name at least one function, such as {KEY}=[rewards.py:score], written as {USAGE}"
        )
    if weights is not None and len(weights) != len(entries):
        raise UserError(
            f"grpo.reward_weights={weights} has {len(weights)} numbers for {len(entries)} reward functions: give "
            "one for each"
        )
    return load_functions(KEY, entries)


def _as_reward(entry: str) -> str | RewardModel:
    """A name with a colon is that of a function, any other that of a model."""
    if ":" in entry or not entry:
        return entry
    model = RewardModel(entry)
    model.check()
    return model


def call_rewards(
    functions: Sequence[NamedFunction], completions: Sequence[ScoredCompletion]
) -> Tensor:
    """Call each function once with all completions.

    Returns:
        Rewards, NaN where a function returned None, fp32 [completions, functions].

    Raises:
        UserError: A function fails, or returns something else; it names function and sample.
    """
    arguments = {
        "prompts": [completion.prompt.content for completion in completions],
        "completions": [completion.content for completion in completions],
        "completion_ids": [completion.tokens for completion in completions],
        **_columns(completions),
    }
    columns = [
        _checked(entry, _call(entry, arguments, completions), completions) for entry in functions
    ]
    return torch.tensor(columns, dtype=torch.float32, device="cpu").T


def _columns(completions: Sequence[ScoredCompletion]) -> dict[str, list[Any]]:
    """The other keys of the records; those that a record lacks are None."""
    names = dict.fromkeys(key for completion in completions for key in completion.prompt.columns)
    return {
        name: [completion.prompt.columns.get(name) for completion in completions] for name in names
    }


def _call(
    entry: NamedFunction,
    arguments: dict[str, list[Any]],
    completions: Sequence[ScoredCompletion],
) -> Any:
    try:
        rewards = entry.function(**arguments)
        return asyncio.run(_wait(rewards)) if inspect.isawaitable(rewards) else rewards
    except UserError:
        raise
    except Exception as error:
        failure = failure_of(KEY, entry.function, error)
        if culprit := _first_failing(entry, arguments, completions):
            raise UserError(f"{culprit}: {failure}") from error
        raise failure from error


async def _wait(rewards: Any) -> Any:
    return await rewards


def _first_failing(
    entry: NamedFunction,
    arguments: dict[str, list[Any]],
    completions: Sequence[ScoredCompletion],
) -> str | None:
    """Call a function that failed once for each completion, to name the one with which it fails."""
    for index, completion in enumerate(completions):
        alone = {name: values[index : index + 1] for name, values in arguments.items()}
        try:
            rewards = entry.function(**alone)
            if inspect.isawaitable(rewards):
                asyncio.run(_wait(rewards))
        except Exception:
            return f"{completion.prompt.location}, completion {completion.text!r:.80}"
    return None


def _checked(
    entry: NamedFunction, rewards: Any, completions: Sequence[ScoredCompletion]
) -> list[float]:
    if isinstance(rewards, Tensor):
        rewards = rewards.tolist()
    try:
        values = list(rewards)
    except TypeError as error:
        raise UserError(
            f"{KEY}: {entry.name} returns a {type(rewards).__name__}: write it as {USAGE}"
        ) from error
    if len(values) != len(completions):
        raise UserError(
            f"{KEY}: {entry.name} returns {len(values)} rewards for {len(completions)} completions: "
            "return one for each, None for those that it does not score"
        )
    checked: list[float] = []
    for value, completion in zip(values, completions, strict=True):
        try:
            number = torch.nan if value is None else float(value)
        except (TypeError, ValueError):
            number = float("inf")
        if value is not None and not abs(number) < float("inf"):
            raise UserError(
                f"{completion.prompt.location}: {KEY}: {entry.name} returns {value!r:.60} for the "
                f"completion {completion.text!r:.80}: return a finite number, or None"
            )
        checked.append(number)
    return checked
