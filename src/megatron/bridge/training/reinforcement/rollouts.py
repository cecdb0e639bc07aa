# SPDX-License-Identifier: Apache-2.0
"""Completions of prompts by the package's engine, on the weights that are trained.

All ranks call the same functions; each data-parallel rank computes its share, and every rank gets all results.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.data.finetuning.rows import EpochRows
from megatron.bridge.data.prompts.prompts import Prompt, prompt_at
from megatron.bridge.data.records.chat_template import template_text
from megatron.bridge.inference.conversations.planning import ChatPlan
from megatron.bridge.inference.prompts import PromptReader
from megatron.bridge.inference.requests import NOT_FINITE, Sampling
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.generation import (
    derive_seed,
    transformers_tokenizer,
)
from megatron.bridge.training.reinforcement.advantages import (
    Scores,
    score_rewards,
    weighted_sum,
)
from megatron.bridge.training.reinforcement.episodes import Episode, ToolTurns
from megatron.bridge.training.reinforcement.rewards import ScoredCompletion
from megatron.bridge.training.reinforcement.server_engine import (
    RolloutEngine,
    RolloutJob,
    RolloutServer,
    open_rollout_engine,
)
from megatron.bridge.training.reinforcement.tools import Toolbox
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError

ScoreCompletions = Callable[[Sequence[ScoredCompletion]], Tensor]
"""Rewards of completions, fp32 [completions, functions], equal on all ranks."""


@dataclass
class Rollout:
    """A completion to train on. All log-probabilities are fp32 [tokens of the completion]."""

    prompt_tokens: list[int]
    tokens: list[int]  # including the token that ends it
    advantage: float  # of the completion; 0 with a critic
    is_trained: bool  # False for completions that are left out of the loss
    # as the engine returned them, of the distribution without truncation and temperature
    sampler_log_probs: Tensor
    old_log_probs: Tensor | None = None  # by the training pass, before the first step
    reference_log_probs: Tensor | None = None
    # experts that the engine chose, integers [tokens of prompt and completion - 1, layers with experts, topk]
    experts: Tensor | None = None
    reward: float = math.nan
    # with a critic, fp32 [tokens of the completion]; of tokens outside of the loss they mean nothing
    token_advantages: Tensor | None = None
    values: Tensor | None = None  # what the critic predicted before the first step
    returns: Tensor | None = None  # what it learns
    # False for tokens of the results of tools, which are not in the loss; None if the model wrote all tokens
    is_written: Tensor | None = None

    @property
    def trained_tokens(self) -> int:
        if not self.is_trained:
            return 0
        return len(self.tokens) if self.is_written is None else int(self.is_written.sum())


@dataclass
class Generation:
    """The completions of one generation, group by group, and what is logged of them."""

    rollouts: list[Rollout]
    metrics: dict[str, float]
    shown: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Completions for people: prompt, completion, rewards and advantage. Not part of checkpoints."""


@dataclass
class _Group:
    """The completions of one prompt."""

    prompt: Prompt
    episodes: list[Episode]

    @property
    def completions(self) -> list[ScoredCompletion]:
        """The completions as reward functions see them."""
        return [
            ScoredCompletion(self.prompt, episode.tokens, episode.text, episode.messages or None)
            for episode in self.episodes
        ]


class PromptStream:
    """The prompts of a run, in an order that depends on the seed alone."""

    def __init__(self, dataset: EpochRows, seed: int, drawn: int = 0) -> None:
        self._dataset = dataset
        self._seed = seed
        self.drawn = drawn
        """Prompts that the run has drawn so far."""

    @property
    def count(self) -> int:
        """Number of different prompts."""
        return len(self._dataset.rows)

    def draw(self) -> tuple[Prompt, int]:
        """The next prompt, and the seed of its completions."""
        position = self.drawn
        self.drawn += 1
        return prompt_at(self._dataset, position), derive_seed(self._seed, position)


def generate_rollouts(
    run: Run,
    settings: GRPOConfig,
    prompts: PromptStream,
    score: ScoreCompletions,
    names: list[str],
    toolbox: Toolbox,
    server: RolloutServer | None,
) -> Generation:
    """Draw prompts, complete each ``num_generations`` times, and compare the rewards. Called on all ranks.

    Random states, gradients and weights do not change.

    Args:
        run: The run, whose weights are used as they are.
        settings: What to generate.
        prompts: Where prompts are drawn from.
        score: Calls the reward functions.
        names: Names of the reward functions.
        toolbox: Functions that completions may call.
        server: What generates; None for this package's engine.
    """
    count = run.config.train.global_batch_size * settings.steps_per_generation
    needed = count // settings.num_generations
    started = time.perf_counter()
    with open_rollout_engine(run, settings, server) as engine:
        turns = tool_turns(run, settings, toolbox) if toolbox else None
        groups: list[_Group] = []
        tables: list[Tensor] = []
        empty_groups = 0
        generated_tokens = 0
        drawn_groups = 0
        rounds = settings.dynamic_sampling_rounds if settings.dynamic_sampling else 0
        for remaining in range(rounds, -1, -1):
            drawn = [prompts.draw() for _ in range(needed - len(groups))]
            new = complete_prompts(run, engine, settings, drawn, settings.num_generations, turns)
            table = score([completion for group in new for completion in group.completions])
            has_signal = score_rewards(table, settings).has_signal.tolist()
            drawn_groups += len(new)
            empty_groups += has_signal.count(False)
            generated_tokens += sum(
                sum(episode.is_written) for group in new for episode in group.episodes
            )
            for group, rewards, is_useful in zip(
                new, table.split(settings.num_generations), has_signal, strict=True
            ):
                if is_useful or not settings.dynamic_sampling or remaining == 0:
                    groups.append(group)
                    tables.append(rewards)
            if len(groups) == needed:
                break
    seconds = time.perf_counter() - started
    table = torch.cat(tables)
    scores = score_rewards(table, settings)
    generation = Generation(
        rollouts=_make_rollouts(groups, scores, settings),
        metrics=_metrics(groups, table, scores.rewards, names),
    )
    if turns is not None:
        generation.metrics |= _tool_metrics(groups)
    if settings.active_critic is None:
        generation.metrics["groups without signal"] = empty_groups / drawn_groups
    generation.metrics["rollout tokens/s"] = generated_tokens / seconds
    generation.shown = _shown(groups, table, scores, names, settings)
    return generation


def evaluate_prompts(
    run: Run,
    settings: GRPOConfig,
    prompts: PromptStream,
    score: ScoreCompletions,
    names: list[str],
    toolbox: Toolbox,
    server: RolloutServer | None,
) -> dict[str, float]:
    """Complete and score held-out prompts, the same ones with the same random numbers at every call.

    Args:
        run: The run, whose weights are used as they are.
        settings: What to generate.
        prompts: The held-out prompts, from the first.
        score: Calls the reward functions.
        names: Names of the reward functions.
        toolbox: Functions that completions may call.
        server: What generates; None for this package's engine.

    Returns:
        Means over all completions, by name.
    """
    count = settings.num_generations_eval or settings.num_generations
    completions = run.config.validation.eval_iters * run.config.train.global_batch_size
    needed = min(max(1, completions // count), prompts.count)
    with open_rollout_engine(run, settings, server) as engine:
        turns = tool_turns(run, settings, toolbox) if toolbox else None
        drawn = [prompts.draw() for _ in range(needed)]
        groups = complete_prompts(run, engine, settings, drawn, count, turns)
        table = score([completion for group in groups for completion in group.completions])
    metrics = _metrics(groups, table, weighted_sum(table, settings), names)
    return metrics if turns is None else metrics | _tool_metrics(groups)


def tool_turns(run: Run, settings: GRPOConfig, toolbox: Toolbox) -> ToolTurns:
    """What reads the calls of answers, for the tokenizer and the chat template of a run."""
    tokenizer = transformers_tokenizer(run)
    if tokenizer is None:
        raise UserError(
            "grpo.tools needs a Hugging Face tokenizer with a chat template: set tokenizer"
        )
    template = template_text(getattr(run.config.dataset, "chat_template", None))
    return ToolTurns(toolbox, PromptReader(tokenizer, template), settings)


def complete_prompts(
    run: Run,
    engine: RolloutEngine,
    settings: GRPOConfig,
    prompts: Sequence[tuple[Prompt, int]],
    count: int,
    turns: ToolTurns | None,
) -> list[_Group]:
    """Complete each prompt ``count`` times, with the tools that the completions call.

    Args:
        run: The run, whose tokenizer gives texts where the engine has none.
        engine: Generates; it is empty.
        settings: Lengths and sampling.
        prompts: Prompts and the seeds of their completions.
        count: Completions of each prompt.
        turns: Reads the calls of answers; None without tools.
    """
    groups: list[_Group] = []
    waiting: list[_Answer] = []
    for prompt, seed in prompts:
        episodes = [Episode(prompt, seed, index) for index in range(count)]
        plan = None if turns is None else turns.plan(prompt.tokens)
        sampling = _sampling(settings, settings.max_completion_length, seed, plan)
        jobs = _submit(engine, prompt, prompt.tokens, replace(sampling, n=len(episodes)))
        waiting += [
            _Answer(episode, job, plan) for episode, job in zip(episodes, jobs, strict=True)
        ]
        groups.append(_Group(prompt, episodes))
    _read_answers(run, engine, waiting, turns)
    turn = 0
    limit = settings.max_tool_calling_iterations
    while turns is not None and waiting and (limit is None or turn < limit):
        turn += 1
        waiting = [
            _ask_again(engine, settings, episode, turns)
            for episode in turns.call_tools([answer.episode for answer in waiting])
        ]
        _read_answers(run, engine, waiting, turns)
    return groups


@dataclass
class _Answer:
    """An answer that the engine computes."""

    episode: Episode
    job: RolloutJob
    plan: ChatPlan | None  # how to read it; None without tools


def _sampling(
    settings: GRPOConfig, max_new_tokens: int, seed: int, plan: ChatPlan | None
) -> Sampling:
    changes = {} if plan is None else plan.sampling_changes
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p or 0.0,
        repetition_penalty=settings.repetition_penalty,
        seed=seed,
        logprobs=0,
        routed_experts=settings.router_replay,
        **changes,
    )


def _submit(
    engine: RolloutEngine, prompt: Prompt, tokens: list[int], sampling: Sampling
) -> Sequence[RolloutJob]:
    try:
        return engine.submit(tokens, sampling)
    except UserError as error:
        raise UserError(f"{prompt.location}: {error}") from error


def _ask_again(
    engine: RolloutEngine, settings: GRPOConfig, episode: Episode, turns: ToolTurns
) -> _Answer:
    """Let the model answer the results of its calls."""
    tokens = [*episode.prompt.tokens, *episode.tokens]
    plan = turns.plan(tokens)
    remaining_tokens = settings.max_completion_length - len(episode.tokens)
    sampling = _sampling(settings, remaining_tokens, episode.seed_of_turn(), plan)
    (job,) = _submit(engine, episode.prompt, tokens, sampling)
    return _Answer(episode, job, plan)


def _read_answers(
    run: Run, engine: RolloutEngine, waiting: Sequence[_Answer], turns: ToolTurns | None
) -> None:
    """Compute the answers that wait, and add them to their episodes."""
    for _ in engine.run():
        pass
    for answer in waiting:
        completion = answer.job.completion
        if completion.finish_reason == "error":
            raise UserError(f"{answer.episode.prompt.location}: {NOT_FINITE}")
        text = completion.text
        if engine.hf is None:
            text = run.tokenizer.detokenize(list(completion.tokens))
        answer.episode.add_answer(completion, text)
        if turns is not None and answer.plan is not None:
            turns.read_answer(answer.episode, answer.plan)


def _make_rollouts(groups: list[_Group], scores: Scores, settings: GRPOConfig) -> list[Rollout]:
    episodes = [episode for group in groups for episode in group.episodes]
    rollouts: list[Rollout] = []
    for episode, advantage, reward in zip(
        episodes, scores.advantages.tolist(), scores.rewards.tolist(), strict=True
    ):
        has_results = not all(episode.is_written)
        is_left_out = episode.is_truncated and settings.mask_truncated_completions
        # without a reward there is no return that a critic could learn
        lacks_reward = settings.active_critic is not None and math.isnan(reward)
        rollouts.append(
            Rollout(
                prompt_tokens=episode.prompt.tokens,
                tokens=episode.tokens,
                advantage=advantage,
                is_trained=not (is_left_out or lacks_reward),
                reward=reward,
                sampler_log_probs=torch.tensor(
                    episode.log_probs, dtype=torch.float32, device="cpu"
                ),
                experts=episode.experts,
                is_written=torch.tensor(episode.is_written, device="cpu") if has_results else None,
            )
        )
    return rollouts


def _metrics(
    groups: list[_Group], table: Tensor, rewards: Tensor, names: list[str]
) -> dict[str, float]:
    """Means over completions; ``rewards`` are their weighted sums."""
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = torch.tensor([float(len(episode.tokens)) for episode in episodes], device="cpu")
    truncated = [episode.is_truncated for episode in episodes]
    metrics = {
        "reward": rewards.nanmean().item(),
        "completion length": lengths.mean().item(),
        "truncated completions": sum(truncated) / len(episodes),
    }
    for index, name in enumerate(names):
        metrics[f"reward {name}"] = table[:, index].nanmean().item()
    return metrics


def _tool_metrics(groups: list[_Group]) -> dict[str, float]:
    """Calls of tools for each completion, and the share of calls that failed."""
    episodes = [episode for group in groups for episode in group.episodes]
    calls = sum(episode.tool_calls for episode in episodes)
    failed = sum(episode.failed_calls for episode in episodes)
    return {"tool calls": calls / len(episodes), "failed tool calls": failed / max(calls, 1)}


def _shown(
    groups: list[_Group],
    table: Tensor,
    scores: Scores,
    names: list[str],
    settings: GRPOConfig,
) -> list[dict[str, Any]]:
    """The first completion of each of the first groups; with a critic, completions have no advantage."""
    has_advantage = settings.active_critic is None
    shown: list[dict[str, Any]] = []
    for index, group in enumerate(groups[: settings.log_completions]):
        first_of_group = index * len(group.episodes)
        rewards = dict(zip(names, table[first_of_group].tolist(), strict=True))
        shown.append(
            {
                "prompt": group.prompt.content,
                "completion": group.completions[0].shown_text,
                "rewards": {
                    name: None if math.isnan(value) else value for name, value in rewards.items()
                },
                "advantage": scores.advantages[first_of_group].item() if has_advantage else None,
            }
        )
    return shown
