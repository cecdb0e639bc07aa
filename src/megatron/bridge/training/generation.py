# SPDX-License-Identifier: Apache-2.0
"""Greedy generation with the model in training, under any parallelism.

Each token needs a forward pass over the whole text: suitable for a few samples, not for serving.
"""

from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron.bridge.training.config.resolve.data import sequence_multiple
from megatron.bridge.training.evaluation import evaluation_mode
from megatron.bridge.training.optim.param_gather import gathered_params
from megatron.bridge.training.state import Run
from megatron.bridge.utils.distributed import broadcast_object
from megatron.bridge.utils.errors import UserError

Tokens = list[list[int]]


@torch.no_grad()
def generate(run: Run, prompts: Tokens, max_new_tokens: int, stop: frozenset[int] = frozenset()) -> Tokens:
    """Continue each prompt greedily up to the end-of-document token; to be called on all ranks.

    Random states and gradients do not change.

    Args:
        run: The run.
        prompts: Token ids, at least one per prompt.
        max_new_tokens: Maximum number of tokens to generate.
        stop: Tokens that end a text, in addition to the end-of-document token.

    Returns:
        The generated tokens of each prompt, on every rank.

    Raises:
        UserError: A prompt and its new tokens do not fit into ``model.seq_length``.
    """
    _check_length(run, prompts, max_new_tokens)
    texts = [list(prompt) for prompt in prompts]
    open_texts = set(range(len(texts)))
    with gathered_params(run.model), evaluation_mode(run.model):
        for _ in range(max_new_tokens):
            chosen = _next_tokens(run, texts)
            for index in sorted(open_texts):
                texts[index].append(chosen[index])
                if chosen[index] == run.tokenizer.eod or chosen[index] in stop:
                    open_texts.discard(index)
            if not open_texts:
                break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _check_length(run: Run, prompts: Tokens, max_new_tokens: int) -> None:
    model = run.config.model
    assert all(prompts), "a prompt is empty"
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > model.seq_length:
        raise UserError(
            f"a prompt of {longest - max_new_tokens} tokens and {max_new_tokens} new tokens exceed "
            f"model.seq_length={model.seq_length}: shorten the prompt, or generate fewer tokens"
        )


def _next_tokens(run: Run, texts: Tokens) -> list[int]:
    """The most likely next token of each text, on every rank."""
    model = run.config.model
    longest = max(map(len, texts))
    multiple = sequence_multiple(run.config, padding_free=True)
    length = -(-longest // multiple) * multiple
    batch = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in zip(batch, texts, strict=True):
        row[: len(text)] = torch.tensor(text)  # attention is causal, so padding after a text has no effect
    batch = batch.to(torch.cuda.current_device())
    last = torch.tensor([len(text) - 1 for text in texts], device=batch.device)
    # interleaved schedules need one microbatch per stage: repeat the same one
    repeats = model.pipeline_model_parallel_size if len(run.model) > 1 else 1
    schedule = cast(Any, get_forward_backward_func())
    found = schedule(
        forward_step_func=lambda _, chunk: _forward(chunk, batch, last, run.tokenizer.vocab_size),
        data_iterator=[iter(()) for _ in run.model],
        model=run.model,
        num_microbatches=repeats,
        seq_length=length,
        micro_batch_size=len(texts),
        forward_only=True,
        collect_non_loss_data=True,
    )
    chosen = found[0].tolist() if found else []
    stages: Any = parallel_state.get_pipeline_model_parallel_group()
    return broadcast_object(chosen, parallel_state.get_pipeline_model_parallel_last_rank(), stages)


def _forward(chunk: MegatronModule, batch: torch.Tensor, last: torch.Tensor, vocabulary: int) -> tuple[Any, Any]:
    positions = torch.arange(batch.size(1), device=batch.device).expand_as(batch)
    group: Any = parallel_state.get_context_parallel_group()
    mine = {"tokens": batch, "position_ids": positions}
    if group.size() > 1:
        mine = get_batch_on_this_cp_rank(mine, is_hybrid_cp=False, cp_group=group)
    output = chunk(mine["tokens"], mine["position_ids"], None)

    def choose(logits: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        texts, positions = (mine["position_ids"] == last[:, None]).nonzero(as_tuple=True)
        chosen = torch.full_like(last, -1)
        if len(texts):
            full = gather_from_tensor_model_parallel_region(logits[texts, positions])
            chosen[texts] = full[:, :vocabulary].argmax(-1)  # without the padding of the vocabulary
        # the last token of a text is on one context-parallel rank
        torch.distributed.all_reduce(chosen, torch.distributed.ReduceOp.MAX, group)
        return chosen

    return output, choose
