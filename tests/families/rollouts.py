# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of rollouts, and those of a training forward pass over the same tokens."""

from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.rollout_numerics import RolloutNumerics
from tests.families import decoding

SAMPLING = Sampling(max_new_tokens=13, temperature=1.0, seed=5, n=2, logprobs=0, prompt_logprobs=0)


def rollouts(model, config, vocabulary, sampling=SAMPLING, lengths=(5, 19, 40)):
    draw = torch.Generator().manual_seed(1)
    with Engine(model, config) as engine:
        jobs = []
        for length in lengths:
            prompt = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
            jobs += engine.submit(prompt, sampling)
        list(engine.run())
    return [job.completion for job in jobs]


def pack(completions, multiple=8):
    """The packed row of completions: ids, labels, positions, and the bounds of the sequences."""
    texts = [completion.prompt_tokens + completion.tokens for completion in completions]
    tokens, labels, positions, bounds = [], [], [], [0]
    for text in texts:
        padding = -len(text) % multiple
        tokens += text + [0] * padding
        labels += text[1:] + [0] * (padding + 1)
        positions += range(len(text) + padding)
        bounds.append(len(tokens))
    longest = max(stop - start for start, stop in pairwise(bounds))
    cu = torch.tensor(bounds, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    rows = (torch.tensor([values]) for values in (tokens, labels, positions))
    return (*rows, packed, bounds)


def rollout_logprobs(completions, bounds):
    """(rows of the generated tokens' predictions, their log-probabilities)"""
    rows, values = [], []
    for completion, start in zip(completions, bounds, strict=False):
        first = start + len(completion.prompt_tokens) - 1
        rows += range(first, first + len(completion.tokens))
        values += [token.logprob for token in completion.logprobs]
    return rows, torch.tensor(values)


def largest_difference(model, config, vocabulary, exact=True):
    """Largest difference between the log-probabilities of rollouts and of a training forward pass."""
    completions = rollouts(model, config, vocabulary)
    tokens, labels, positions, packed, bounds = pack(completions)
    prompts = [len(completion.prompt_tokens) for completion in completions]
    for chunk in model:
        chunk.train()
    inputs = {"labels": labels, "packed_seq_params": packed}
    if exact:
        options = {
            "vocabulary": vocabulary,
            "pack": config.pack,
            "chunk": min(config.chunk, config.rows),
        }
        with RolloutNumerics(model, **options) as numerics, numerics.microbatch(prompts):
            losses = model[0](tokens, positions, None, **inputs)
    else:
        losses = model[0](tokens, positions, None, **inputs)
    rows, expected = rollout_logprobs(completions, bounds)
    for chunk in model:
        chunk.eval()
    return (-losses.detach()[0, rows] - expected).abs().max().item()


def largest_difference_of_steps(case, layout, bf16):
    """The same for two microbatches of a training step under ``layout``, on the last pipeline stage; 0.0 on others."""
    model = decoding.decoder(case, layout, bf16=bf16)
    vocabulary = case.row.config["vocab_size"]
    config = decoding.engine_config(case, pack=True, chunk=8)
    completions = rollouts(model, config, vocabulary)
    differences = [0.0]

    def step(batches, chunk):
        batch = next(batches)
        tokens, labels, positions, packed, bounds = pack(batch)
        with numerics.microbatch([len(completion.prompt_tokens) for completion in batch]):
            output = chunk(tokens, positions, None, labels=labels, packed_seq_params=packed)

        def loss(losses):
            rows, expected = rollout_logprobs(batch, bounds)
            differences.append((-losses.detach()[0, rows] - expected).abs().max().item())
            return losses.mean(), {}

        return output, loss

    for chunk in model:
        chunk.train()
        unwrap(chunk).config.moe_aux_loss_coeff = 0.0
    batches = [completions, completions[::-1]]
    with RolloutNumerics(model, vocabulary=vocabulary, pack=True, chunk=8) as numerics:
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in model],
            model=model,
            num_microbatches=2,
            seq_length=pack(completions)[0].size(1),
            micro_batch_size=1,
            forward_only=False,
        )
    return max(differences)
