# SPDX-License-Identifier: Apache-2.0
"""From logits to a token: a function of the logits, the text, and (seed, position, choice).

Processors and their order are those of transformers. The token is where one uniform number, a hash of seed,
position and choice, falls in the cumulative distribution: no generator has a state, so a text does not depend on
its company, the layout or a restart.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.bridge.inference.requests import Sampling


def uniform(seed: int, position: int, choice: int) -> float:
    """A number in [0, 1) that looks random.

    Example:
        >>> uniform(1, 2, 0) == uniform(1, 2, 0) != uniform(1, 3, 0)
        True
    """
    digest = hashlib.blake2b(f"{seed} {position} {choice}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose(
    logits: Tensor, sampling: Sampling, tokens: Sequence[int], prompt_length: int, seed: int, choice: int
) -> int:
    """The next token.

    Args:
        logits: [vocabulary] of the last token.
        tokens: the text so far.
        prompt_length: how many of its tokens are the prompt's.
        seed: of this text.
        choice: index of the completion.
    """
    if sampling.changes_logits:
        logits = penalized(logits.float(), sampling, tokens, prompt_length)
    if sampling.is_greedy:
        return int(logits.argmax())
    probabilities = truncated(logits.float() / sampling.temperature, sampling).double().softmax(-1)
    sums = probabilities.cumsum(-1)
    place = uniform(seed, len(tokens), choice) * sums[-1]
    token = int(torch.searchsorted(sums, place, right=True))
    return min(token, int(probabilities.nonzero()[-1]))


def penalized(logits: Tensor, sampling: Sampling, tokens: Sequence[int], prompt_length: int) -> Tensor:
    """The logits [vocabulary] with biases and penalties."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(tokens)), device=logits.device)
        old = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(old < 0, old * penalty, old / penalty)
    counts = Counter(tokens[prompt_length:])
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        generated = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
        logits[generated] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits [vocabulary], minus infinity for tokens that top-k, top-p or min-p leave out."""
    if 0 < sampling.top_k < logits.numel():
        smallest = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(descending=False)
        left_out = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        left_out[-1] = False
        logits = logits.masked_fill(torch.empty_like(left_out).scatter_(0, index, left_out), -torch.inf)
    if sampling.min_p > 0.0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.max(), -torch.inf)
    return logits
