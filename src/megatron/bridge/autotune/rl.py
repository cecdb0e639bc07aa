# SPDX-License-Identifier: Apache-2.0
"""Layouts for reinforcement learning, which computes log-probabilities and updates over packed samples.

A step of PPO or GRPO computes log-probabilities of a batch (forward passes of the policy and of a reference) and then
trains on it. Each data-parallel rank packs its samples into rows of at most ``max_token_len`` tokens, so the lengths
of the samples decide the number of microbatches. All ranks wait for the rank with the most rows.
"""

import copy
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.bridge.autotune.gpus import gpu
from megatron.bridge.autotune.search.candidate import Candidate
from megatron.bridge.autotune.search.price import Price, Pricer
from megatron.bridge.autotune.search.search import Search
from megatron.bridge.autotune.time.simulate import makespan
from megatron.bridge.data.finetuning.packing import pack
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError

OFFLOADS = ("params", "grads", "optimizer", "reference")
"""What can be offloaded to host memory while it is not needed."""


@dataclass(frozen=True)
class RLJob:
    lengths: np.ndarray  # tokens of each sample of a step, prompt plus response
    max_token_len: int  # maximum tokens of a packed row in the update
    log_prob_max_token_len: int  # maximum tokens of a packed row in forward-only passes
    critic: bool = False  # a second model of the same size is trained
    reference: bool = True  # a frozen copy of the model also computes log-probabilities
    offload: tuple[str, ...] = ()  # names from ``OFFLOADS``
    engine: float = 0.5  # fraction of GPU memory that the inference engine uses during generation

    @property
    def effective_length(self) -> int:
        """The sequence length with the same average attention cost per token as the samples."""
        lengths = self.lengths.astype(float)
        return max(1, round(float((lengths**2).sum() / lengths.sum())))


@dataclass(frozen=True)
class RLStep:
    """The cost of a step of reinforcement learning without generation; times are seconds."""

    job: RLJob
    price: Price  # of the update
    log_probs: float  # forward passes of the policy, the reference and the critic
    update: float
    rows: tuple[
        int, int
    ]  # packed rows in the update on the rank with the most: with and without balancing
    unbalanced: float  # time of the update if ranks take the samples in order

    @property
    def seconds(self) -> float:
        return self.log_probs + self.update


def read_lengths(path: Path) -> np.ndarray:
    """Read the token counts of samples, one per line."""
    lines = read_text(path, f"--lengths {path}").split()
    if not lines or not all(line.isascii() and line.isdecimal() and int(line) for line in lines):
        raise UserError(
            f"--lengths {path}: write the number of tokens of one sample per line, at least 1"
        )
    return np.array([int(line) for line in lines])


def drawn_lengths(count: int, prompt: int, response: int) -> np.ndarray:
    """Draw lengths of ``count`` samples: log-normal prompts and responses, truncated at ``prompt`` and ``response``.

    The medians are half and a quarter of the limits, and the standard deviations of the logarithm are 0.5 and 0.8: most
    responses of a reasoning model are short, some reach the limit. These are assumptions; prefer measured lengths.
    """
    random = np.random.default_rng(0)
    prompts = np.minimum(random.lognormal(np.log(prompt / 2), 0.5, count), prompt)
    responses = np.minimum(random.lognormal(np.log(response / 4), 0.8, count), response)
    return np.maximum(prompts, 1).astype(int) + np.maximum(responses, 1).astype(int)


def shares(lengths: np.ndarray, ranks: int, balance: bool) -> list[np.ndarray]:
    """Assign samples to data-parallel ranks: in order, or with ``balance`` the longest first to the least loaded."""
    if not balance:
        return [lengths[rank::ranks] for rank in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for length in sorted(lengths.tolist(), reverse=True):
        load, rank = heapq.heappop(loads)
        assigned[rank].append(length)
        heapq.heappush(loads, (load + length, rank))
    return [np.array(share, dtype=int) for share in assigned]


def rows(lengths: np.ndarray, ranks: int, capacity: int, balance: bool = True) -> list[int]:
    """Return the number of packed rows of each rank, as the packer of fine-tuning creates them."""
    return [len(pack(share, capacity)) for share in shares(lengths, ranks, balance)]


class RLSearch:
    """Search the fastest layouts for a step of ``job``; the other arguments are those of ``Search``."""

    def __init__(
        self, config: ConfigContainer, world_size: int, card: str, job: RLJob, fixed: dict[str, Any]
    ) -> None:
        if job.lengths.max() > min(job.max_token_len, job.log_prob_max_token_len):
            raise UserError(
                f"a sample has {job.lengths.max():,} tokens, more than --max-token-len {job.max_token_len} or "
                f"--log-prob-max-token-len {job.log_prob_max_token_len}: raise it, or shorten the samples"
            )
        self.job = job
        self.world_size = world_size
        self.card = card
        self._rows: dict[tuple[int, int, bool], int] = {}
        row = _of_row(config, job.max_token_len, world_size)
        self.search = Search(row, world_size, card, fixed={**fixed, "micro_batch": 1})
        self.search.pricer.length = job.effective_length
        self.search.pricer.microbatches = lambda candidate: self.rows(candidate, job.max_token_len)

    @cached_property
    def _log_prob_pricer(self) -> Pricer:
        config = _of_row(self.search.config, self.job.log_prob_max_token_len, self.world_size)
        pricer = Pricer(config, self.world_size, self.card)
        pricer.length = self.job.effective_length
        pricer.microbatches = lambda candidate: self.rows(
            candidate, self.job.log_prob_max_token_len
        )
        return pricer

    def run(self, top: int) -> list[RLStep]:
        steps = [self.step(price) for price in self.search.run(4 * top).best if self.fits(price)]
        return sorted(steps, key=lambda step: step.seconds)[:top]

    def rows(self, candidate: Candidate, capacity: int, balance: bool = True) -> int:
        """Return the microbatches of a step on the rank with the most rows."""
        ranks = self.world_size // (candidate.tensor * candidate.pipeline * candidate.context)
        key = (ranks, capacity, balance)
        if key not in self._rows:
            self._rows[key] = max(rows(self.job.lengths, *key))
        count = self._rows[key]
        group = candidate.pipeline if candidate.virtual > 1 else 1
        return -(-count // group) * group

    def fits(self, price: Price) -> bool:
        """Return whether a GPU has memory for each of training, scoring and generation, with what stays on the GPU."""
        memory = gpu(self.card).memory
        resident_parts = set(OFFLOADS) - set(self.job.offload)
        weights, gradients, optimizer = self.search.pricer.parts(price.candidate)
        models = 1 + self.job.critic
        frozen = weights * (self.job.reference and "reference" in resident_parts)
        reserve = self.search.pricer.reserve(price.candidate)
        training = (
            reserve.inside(price.fullest)
            + frozen
            + (models - 1) * (weights + gradients + optimizer)
        )
        resting = models * (
            weights * ("params" in resident_parts)
            + gradients * ("grads" in resident_parts)
            + optimizer * ("optimizer" in resident_parts)
        )
        scoring = resting + frozen + weights * ("params" not in resident_parts)
        scoring += self._log_prob_pricer.forward_only(price.candidate)
        generating = reserve.around(resting + frozen) + self.job.engine * memory
        return max(reserve.around(training), reserve.around(scoring), generating) <= memory

    def step(self, price: Price) -> RLStep:
        candidate = replace(price.candidate, layout=None)
        scored = self._log_prob_pricer.price(candidate, makespan)
        assert scored is not None
        forward = replace(scored.prediction.pipeline, forward_only=True)
        passes = 1 + self.job.reference + self.job.critic
        counts = [
            self.rows(candidate, self.job.max_token_len, balance) for balance in (True, False)
        ]
        update = price.seconds * (1 + self.job.critic)
        return RLStep(
            job=self.job,
            price=price,
            log_probs=passes * makespan(forward, scored.prediction.times),
            update=update,
            rows=(counts[0], counts[1]),
            unbalanced=update * counts[1] / counts[0],
        )


def _of_row(config: ConfigContainer, tokens: int, world_size: int) -> ConfigContainer:
    """Return the config with one row of ``tokens`` as its microbatch and a batch size that suits any layout."""
    config = copy.copy(config)
    config.dataset, config.train = copy.copy(config.dataset), copy.copy(config.train)
    config.dataset.seq_length = tokens
    config.train.micro_batch_size, config.train.global_batch_size = 1, world_size
    return config


def settings(step: RLStep) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield layout and token budgets as keys of verl and of NeMo-RL; verl counts tokens per context rank."""
    job = step.job
    candidate = step.price.candidate
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": candidate.tensor,
        "pipeline_model_parallel_size": candidate.pipeline,
        "context_parallel_size": candidate.context,
        "expert_model_parallel_size": candidate.expert,
        "expert_tensor_parallel_size": candidate.expert_tensor or candidate.tensor,
    }
    actor, reference, rollout = (
        f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout")
    )
    verl: dict[str, Any] = {
        f"{role}.megatron.{key}": size for role in (actor, reference) for key, size in sizes.items()
    }
    if candidate.virtual > 1:
        verl[f"{actor}.megatron.virtual_pipeline_model_parallel_size"] = candidate.virtual
    verl |= {f"{actor}.use_dynamic_bsz": True}
    verl |= {f"{actor}.ppo_max_token_len_per_gpu": job.max_token_len // candidate.context}
    log_prob = job.log_prob_max_token_len // candidate.context
    verl |= {f"{role}.log_prob_max_token_len_per_gpu": log_prob for role in (reference, rollout)}
    offloads = {
        "params": "param_offload",
        "grads": "grad_offload",
        "optimizer": "optimizer_offload",
    }
    verl |= {f"{actor}.megatron.{key}": name in job.offload for name, key in offloads.items()}
    verl |= {f"{reference}.megatron.param_offload": "reference" in job.offload}
    verl |= {f"{rollout}.gpu_memory_utilization": job.engine}
    yield "verl", verl
    nemo = {f"policy.megatron_cfg.{key}": size for key, size in sizes.items()}
    nemo |= {
        "policy.megatron_cfg.sequence_parallel": candidate.tensor > 1,
        "policy.sequence_packing.enabled": True,
    }
    nemo |= {"policy.sequence_packing.train_mb_tokens": job.max_token_len}
    yield (
        "NeMo-RL",
        nemo | {"policy.sequence_packing.logprob_mb_tokens": job.log_prob_max_token_len},
    )
