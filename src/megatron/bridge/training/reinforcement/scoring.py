# SPDX-License-Identifier: Apache-2.0
"""What models say of the tokens of completions before a step: log-probabilities, and the values of a critic."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.models.chunk_info import evaluation_mode
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.optim.optimizer import gathered_params
from megatron.bridge.training.reinforcement.replay import RolloutReplay
from megatron.bridge.training.reinforcement.step import run_chunk
from megatron.bridge.training.state import BatchIterator, LossFunction, Run
from megatron.bridge.training.step.losses import LossReport
from megatron.bridge.utils import distributed

RunMicrobatch = Callable[[dict[str, Any], MegatronModule], tuple[dict[str, Any], Tensor]]
"""Runs a chunk on a microbatch of the host: the batch on the device, and on the last stage a number of each token
[tokens of this context-parallel rank]."""


def score_completions(
    run: Run,
    batches: Sequence[dict[str, Any]],
    tokens: int,
    reference: Sequence[MegatronModule] | None = None,
    without_adapters: bool = False,
    replay: RolloutReplay | None = None,
) -> Tensor:
    """Log-probabilities of the completions of a step, equal on all ranks, which must all call this.

    Args:
        run: The run.
        batches: The microbatches of this rank.
        tokens: Tokens of all completions of the step.
        reference: Chunks of another model in the same layout; None is the model of the run.
        without_adapters: Switch the adapters of the run off.
        replay: What the pass repeats of the generation, for the chunks that are scored.

    Returns:
        fp32 [tokens] on the host, 0 for tokens outside of the loss.
    """
    settings = run.config.grpo
    assert settings is not None, "grpo is not set"
    temperature = settings.temperature

    def run_microbatch(
        batch: dict[str, Any], model: MegatronModule
    ) -> tuple[dict[str, Any], Tensor]:
        on_device, output = run_chunk(batch, model, temperature, replay)
        is_last = unwrap(model).post_process
        return on_device, output[0] if is_last else output

    chunks = run.model if reference is None else list(reference)
    with ExitStack() as contexts:
        if replay is not None:
            contexts.enter_context(replay)
        for chunk in chunks if without_adapters else []:
            contexts.enter_context(_disabled_adapters(run, chunk))
        return score_tokens_of_step(run, chunks, batches, tokens, run_microbatch)


def score_tokens_of_step(
    run: Run,
    chunks: list[MegatronModule],
    batches: Sequence[dict[str, Any]],
    tokens: int,
    run_microbatch: RunMicrobatch,
) -> Tensor:
    """A number of each token of the completions of a step, without gradients, equal on all ranks.

    Args:
        run: The run whose schedule is used, and whose weights are gathered.
        chunks: The chunks of this rank.
        batches: The microbatches of this rank.
        tokens: Tokens of all completions of the step.
        run_microbatch: Computes the numbers of a microbatch.

    Returns:
        fp32 [tokens] on the host, 0 for tokens outside of the loss.
    """
    scores = torch.zeros(tokens, device=torch.cuda.current_device())

    def score_step(
        data_iterator: BatchIterator, model: MegatronModule
    ) -> tuple[Tensor, LossFunction]:
        batch, output = run_microbatch(next(data_iterator), model)

        def keep(scored: Tensor) -> tuple[Tensor, Tensor, LossReport]:
            places = batch["places"].flatten()
            is_scored = places >= 0
            scores[places[is_scored]] = scored[is_scored]
            count = torch.ones((), dtype=torch.int, device=scored.device)
            return scored.new_zeros(()), count, {}

        return output, keep

    with ExitStack() as contexts:
        contexts.enter_context(torch.no_grad())
        contexts.enter_context(gathered_params(run.model))
        contexts.enter_context(evaluation_mode(chunks))
        run.schedule(
            forward_step_func=score_step,
            data_iterator=[iter(batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(batches),
            seq_length=run.config.dataset.seq_length,
            micro_batch_size=run.config.train.micro_batch_size,
            forward_only=True,
        )
    # tensor-parallel ranks have the same numbers; all other ranks have different tokens, or none
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        scores.zero_()
    if distributed.world_size() > 1:
        dist.all_reduce(scores)
    return scores.cpu()


def _disabled_adapters(run: Run, chunk: MegatronModule) -> AbstractContextManager[Any]:
    peft = run.config.peft
    return nullcontext() if peft is None else cast(LoRA, peft).disable_adapter(unwrap(chunk))
