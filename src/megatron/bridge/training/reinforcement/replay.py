# SPDX-License-Identifier: Apache-2.0
"""What a pass over completions repeats of their generation: the engine's numbers, and its choice of experts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.backends.moe.router_replay import ExpertReplay
from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.inference.engine import EngineConfig
from megatron.bridge.inference.rollout_numerics import RolloutNumerics, with_values
from megatron.bridge.inference.sampling import token_logprobs
from megatron.bridge.utils import distributed


class RolloutReplay(AbstractContextManager["RolloutReplay"]):
    """A context for the forward and backward passes of some chunks, on all ranks.

    Args:
        chunks: This rank's chunks of a model.
        engine: The limits with which the completions were generated.
        is_exact: Compute with the engine's numbers.
        replays_experts: Choose the experts that the engine chose, for batches that have them.
    """

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        engine: EngineConfig,
        is_exact: bool,
        replays_experts: bool,
    ) -> None:
        self._vocabulary = engine.vocabulary
        self._replays_experts = replays_experts
        self._numerics: RolloutNumerics | None = None
        self._experts: ExpertReplay | None = None
        if is_exact:
            self._numerics = RolloutNumerics(
                chunks,
                vocabulary=engine.vocabulary,
                pack=engine.pack,
                chunk=min(engine.chunk, engine.rows),
            )
        elif replays_experts:
            self._experts = ExpertReplay([unwrap(chunk) for chunk in chunks])
        self._contexts = ExitStack()

    @property
    def is_exact(self) -> bool:
        return self._numerics is not None

    def __enter__(self) -> Self:
        with ExitStack() as contexts:
            if self._numerics is not None:
                contexts.enter_context(self._numerics)
            if self._experts is not None:
                contexts.enter_context(self._experts)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.close()

    def microbatch(
        self, prompt_lengths: Sequence[int], experts: Tensor | None
    ) -> AbstractContextManager[None]:
        """A context for the forward pass of one packed row.

        Args:
            prompt_lengths: Tokens of the prompt of each sequence.
            experts: Experts [1, tokens of this context-parallel rank, layers with experts, topk], -1 where routers
                choose; None where nothing was recorded.
        """
        rows = experts[0] if experts is not None and self._replays_experts else None
        if self._numerics is not None:
            return self._numerics.microbatch(prompt_lengths, rows)
        if self._experts is not None and rows is not None:
            return self._experts.microbatch(rows)
        return nullcontext()

    def engine_log_probs(self, log_probs: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [tokens] with the engine's bits, and the gradients of ``log_probs``.

        Args:
            log_probs: Log-probabilities of ``tokens`` as training computes them, [tokens].
            logits: Their logits with the engine's values, this rank's shard of the vocabulary [tokens, shard].
            tokens: The tokens, [tokens].
        """
        # the engine normalizes complete rows, without the padding of the vocabulary
        rows: Any = gather_from_tensor_model_parallel_region(logits.detach())
        return with_values(log_probs, token_logprobs(rows[:, : self._vocabulary], tokens))


class SamplerMismatch:
    """How far log-probabilities of training are from those of the engine, over the microbatches of a step."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def clear(self) -> None:
        self._parts = []

    def add(self, log_probs: Tensor, sampler_log_probs: Tensor, mask: Tensor) -> None:
        """Count the tokens with mask 1 whose log-probability the engine returned, not NaN; all are [tokens]."""
        differences = (log_probs.detach() - sampler_log_probs).abs()
        is_counted = (mask > 0) & ~sampler_log_probs.isnan()
        counted = torch.where(is_counted, differences, 0.0).double()
        self._parts.append(torch.stack((counted.sum(), is_counted.sum(), counted.amax())))

    def reduce(self) -> tuple[float, float] | None:
        """The mean and the maximum over all ranks, which must all call this; None if nothing was counted."""
        parts = torch.zeros(1, 3, dtype=torch.float64, device=torch.cuda.current_device())
        if self._parts:
            parts = torch.stack(self._parts)
        sums = parts[:, :2].sum(0)
        highest = parts[:, 2].amax()
        if distributed.world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
        total, count = sums.tolist()
        return (total / count, highest.item()) if count else None
