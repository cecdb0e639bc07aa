# SPDX-License-Identifier: Apache-2.0
"""Completions of prompts by the package's engine, on the weights that are trained.

The engine runs in the same processes and layout as the training and reads its weights, so nothing is copied. All
ranks call the same functions; each data-parallel rank computes its share, and every rank gets all results.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.bridge.data.finetuning.rows import EpochRows
from megatron.bridge.data.prompts.prompts import Prompt, prompt_at
from megatron.bridge.data.records.chat_template import template_text
from megatron.bridge.data.records.end_tokens import end_of_turn, end_tokens
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.inference.engine import Engine, EngineConfig, InferenceJob
from megatron.bridge.inference.requests import NOT_FINITE, Completion, Sampling
from megatron.bridge.models.chunk_info import evaluation_mode
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.config.blocks.reinforcement import GRPOConfig
from megatron.bridge.training.optim.optimizer import gathered_params
from megatron.bridge.training.reinforcement.advantages import Scores, score_rewards
from megatron.bridge.training.reinforcement.rewards import ScoredCompletion
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError

ScoreCompletions = Callable[[Sequence[ScoredCompletion]], Tensor]
"""Rewards of completions, fp32 [completions, functions], equal on all ranks."""


@dataclass
class Rollout:
    """A completion to train on. All log-probabilities are fp32 [tokens of the completion]."""

    prompt_tokens: list[int]
    tokens: list[int]  # including the token that ends it
    advantage: float
    is_trained: bool  # False for truncated completions that are left out of the loss
    # as the engine returned them, of the distribution without truncation and temperature
    sampler_log_probs: Tensor
    old_log_probs: Tensor | None = None  # by the training pass, before the first step
    reference_log_probs: Tensor | None = None
    # experts that the engine chose, integers [tokens of prompt and completion - 1, layers with experts, topk]
    experts: Tensor | None = None

    @property
    def trained_tokens(self) -> int:
        return len(self.tokens) if self.is_trained else 0


@dataclass
class Generation:
    """The completions of one generation, group by group, and what is logged of them."""

    rollouts: list[Rollout]
    metrics: dict[str, float]
    shown: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Completions for people: prompt, completion, rewards and advantage. Not part of checkpoints."""


@dataclass
class _Group:
    prompt: Prompt
    jobs: list[InferenceJob]
    completions: list[ScoredCompletion]


class PromptStream:
    """The prompts of a run, in an order that depends on the seed alone."""

    def __init__(self, dataset: EpochRows, seed: int, drawn: int = 0) -> None:
        self._dataset = dataset
        self._seed = seed
        self.drawn = drawn
        """Prompts that the run has drawn so far."""

    def draw(self) -> tuple[Prompt, int]:
        """The next prompt, and the seed of its completions."""
        position = self.drawn
        self.drawn += 1
        digest = hashlib.blake2b(f"{self._seed}:{position}".encode(), digest_size=8).digest()
        return prompt_at(self._dataset, position), int.from_bytes(digest, "big") >> 1


def generate_rollouts(
    run: Run, settings: GRPOConfig, prompts: PromptStream, score: ScoreCompletions, names: list[str]
) -> Generation:
    """Draw prompts, complete each ``num_generations`` times, and compare the rewards. Called on all ranks.

    Random states, gradients and weights do not change.

    Args:
        run: The run, whose weights are used as they are.
        settings: What to generate.
        prompts: Where prompts are drawn from.
        score: Calls the reward functions.
        names: Names of the reward functions.
    """
    count = run.config.train.global_batch_size * settings.steps_per_generation
    needed = count // settings.num_generations
    started = time.perf_counter()
    with (
        gathered_params(run.model),
        evaluation_mode(run.model),
        Engine(run.model, engine_config(run, settings), _transformers_tokenizer(run)) as engine,
    ):
        groups: list[_Group] = []
        tables: list[Tensor] = []
        empty_groups = 0
        generated_tokens = 0
        drawn_groups = 0
        rounds = settings.dynamic_sampling_rounds if settings.dynamic_sampling else 0
        for remaining in range(rounds, -1, -1):
            new = _complete(run, engine, settings, prompts, needed - len(groups))
            table = score([completion for group in new for completion in group.completions])
            has_signal = score_rewards(table, settings).has_signal.tolist()
            drawn_groups += len(new)
            empty_groups += has_signal.count(False)
            generated_tokens += sum(
                len(completion.tokens) for group in new for completion in group.completions
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
        metrics=_metrics(groups, table, scores, names),
    )
    generation.metrics["groups without signal"] = empty_groups / drawn_groups
    generation.metrics["rollout tokens/s"] = generated_tokens / seconds
    generation.shown = _shown(groups, table, scores, names, settings.log_completions)
    return generation


def engine_config(run: Run, settings: GRPOConfig) -> EngineConfig:
    """The limits of generation.

    Weights are not packed on CPUs: that replaces their memory, which is a part of the buffers of the optimizer.
    """
    vocabulary = run.config.model.vocab_size
    assert vocabulary is not None, "a run has resolved the vocabulary"
    return EngineConfig(
        max_context=run.config.dataset.seq_length,
        vocabulary=vocabulary,  # that of the loss, which may be larger than the tokenizer's
        ends=end_ids(run.config, run.tokenizer),
        kv_memory=settings.kv_memory,
        max_requests=settings.max_requests,
    )


def end_ids(config: ConfigContainer, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a completion, as in chats with the finished model."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return frozenset({tokenizer.eod})
    folder = Path(tokenizer.path)
    template = template_text(getattr(config.dataset, "chat_template", None))
    ends = end_tokens(tokenizer.hf, folder if folder.is_dir() else None)
    return ends | {tokenizer.eod} | end_of_turn(tokenizer.hf, template)


def _transformers_tokenizer(run: Run) -> Any:
    return run.tokenizer.hf if isinstance(run.tokenizer, HuggingFaceTokenizer) else None


def _complete(
    run: Run, engine: Engine, settings: GRPOConfig, prompts: PromptStream, count: int
) -> list[_Group]:
    """Complete the next ``count`` prompts."""
    groups: list[_Group] = []
    for _ in range(count):
        prompt, seed = prompts.draw()
        sampling = Sampling(
            max_new_tokens=settings.max_completion_length,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p or 0.0,
            repetition_penalty=settings.repetition_penalty,
            seed=seed,
            n=settings.num_generations,
            logprobs=0,
            routed_experts=settings.router_replay,
        )
        try:
            groups.append(_Group(prompt, engine.submit(prompt.tokens, sampling), []))
        except UserError as error:
            raise UserError(f"{prompt.location}: {error}") from error
    for _ in engine.run():
        pass
    for group in groups:
        for job in group.jobs:
            if job.completion.finish_reason == "error":
                raise UserError(f"{group.prompt.location}: {NOT_FINITE}")
            tokens = list(job.completion.tokens)
            text = (
                job.completion.text if engine.hf is not None else run.tokenizer.detokenize(tokens)
            )
            group.completions.append(ScoredCompletion(group.prompt, tokens, text))
    return groups


def _make_rollouts(groups: list[_Group], scores: Scores, settings: GRPOConfig) -> list[Rollout]:
    jobs = [(group.prompt, job) for group in groups for job in group.jobs]
    rollouts: list[Rollout] = []
    for (prompt, job), advantage in zip(jobs, scores.advantages.tolist(), strict=True):
        completion = job.completion
        is_truncated = completion.finish_reason == "length"
        log_probs = [entry.logprob for entry in completion.logprobs]
        rollouts.append(
            Rollout(
                prompt_tokens=prompt.tokens,
                tokens=list(completion.tokens),
                advantage=advantage,
                is_trained=not (is_truncated and settings.mask_truncated_completions),
                sampler_log_probs=torch.tensor(log_probs, dtype=torch.float32, device="cpu"),
                experts=_experts_of(completion),
            )
        )
    return rollouts


def _experts_of(completion: Completion) -> Tensor | None:
    """The experts of a completion in a type that all operations of PyTorch know."""
    experts = completion.routed_experts
    if experts is None:
        return None
    is_small = experts.dtype.itemsize == 1
    return torch.from_numpy(experts if is_small else experts.astype("int16"))


def _metrics(
    groups: list[_Group], table: Tensor, scores: Scores, names: list[str]
) -> dict[str, float]:
    """Means over the completions that are trained on."""
    jobs = [job for group in groups for job in group.jobs]
    lengths = torch.tensor([float(len(job.completion.tokens)) for job in jobs], device="cpu")
    truncated = [job.completion.finish_reason == "length" for job in jobs]
    metrics = {
        "reward": scores.rewards.nanmean().item(),
        "completion length": lengths.mean().item(),
        "truncated completions": sum(truncated) / len(jobs),
    }
    for index, name in enumerate(names):
        metrics[f"reward {name}"] = table[:, index].nanmean().item()
    return metrics


def _shown(
    groups: list[_Group], table: Tensor, scores: Scores, names: list[str], count: int
) -> list[dict[str, Any]]:
    """The first completion of each of the first groups."""
    shown: list[dict[str, Any]] = []
    for index, group in enumerate(groups[:count]):
        place = index * len(group.jobs)
        rewards = dict(zip(names, table[place].tolist(), strict=True))
        shown.append(
            {
                "prompt": group.prompt.content,
                "completion": group.completions[0].text,
                "rewards": {
                    name: None if math.isnan(value) else value for name, value in rewards.items()
                },
                "advantage": scores.advantages[place].item(),
            }
        )
    return shown
