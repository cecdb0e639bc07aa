# SPDX-License-Identifier: Apache-2.0
"""Greedy generation with the model in training, under any layout."""

from megatron.bridge.inference.engine import Engine, EngineConfig
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.training.evaluation import evaluation_mode
from megatron.bridge.training.optim.param_gather import gathered_params
from megatron.bridge.training.state import Run
from megatron.bridge.utils.errors import UserError

Tokens = list[list[int]]


def generate(run: Run, prompts: Tokens, max_new_tokens: int, stop: frozenset[int] = frozenset()) -> Tokens:
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
    with gathered_params(run.model), evaluation_mode(run.model), Engine(run.model, config) as engine:
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
