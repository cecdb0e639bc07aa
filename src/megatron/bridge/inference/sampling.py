# SPDX-License-Identifier: Apache-2.0
"""Convert logits to tokens and log-probabilities, in a table that is sent to all ranks.

Logits processors and their order are those of transformers. To sample a token, the cumulative distribution is inverted
at a uniform number that is a hash of (seed, position, choice). No random number generator has state, so a text does not
depend on the rest of the batch, the layout, or a restart.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bridge.inference.grammars import GrammarFailedError, GrammarMatcher
from megatron.bridge.inference.requests import Sampling, TokenLogprob

_NO_TOKEN = -1  # of a row after a draft that is not accepted
FIXED = 3  # columns before the most likely tokens: token, its log-probability, most likely token


def uniform(seed: int, position: int, choice: int) -> float:
    """Return a pseudorandom number in [0, 1).

    Example:
        >>> uniform(1, 2, 0) == uniform(1, 2, 0) != uniform(1, 3, 0)
        True
    """
    digest = hashlib.blake2b(f"{seed} {position} {choice}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose(
    logits: Tensor,
    sampling: Sampling,
    tokens: Sequence[int],
    prompt_length: int,
    seed: int,
    choice: int,
    matcher: GrammarMatcher | None = None,
    excluded_ids: Sequence[int] = (),
) -> Tensor:
    """Sample the next token [] after ``tokens``, which begin with the prompt. Does not synchronize a GPU.

    Args:
        logits: [vocabulary], of the last of ``tokens``.
        sampling: Sampling of the request.
        tokens: Tokens of the prompt and of the text after it.
        prompt_length: Number of tokens of the prompt.
        seed: Seed of the text.
        choice: Index of the completion.
        matcher: Excludes the tokens that do not follow the grammar of the request.
        excluded_ids: Further tokens that are not chosen.
    """
    if sampling.changes_logits:
        logits = penalized(logits.float(), sampling, tokens, prompt_length)
    if matcher is not None:
        allowed = matcher.allowed_tokens(tokens[prompt_length:])
        logits = logits.float().masked_fill(~allowed.to(logits.device), -torch.inf)
    if excluded_ids:
        logits = logits.float().index_fill(
            -1, torch.tensor(excluded_ids, device=logits.device), -torch.inf
        )
    if sampling.is_greedy:
        return logits.argmax()
    probabilities = truncated(logits.float() / sampling.temperature, sampling).double().softmax(-1)
    sums = probabilities.cumsum(-1)
    threshold = uniform(seed, len(tokens), choice) * sums[-1]
    token = torch.searchsorted(sums, threshold, right=True)
    last = (probabilities > 0).cumsum(-1).argmax()  # first index with the highest count
    return torch.minimum(token, last)


def penalized(
    logits: Tensor, sampling: Sampling, tokens: Sequence[int], prompt_length: int
) -> Tensor:
    """Return the logits [vocabulary] with biases and penalties."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.repetition_penalty != 1.0:
        token_ids = torch.tensor(
            sorted(known_token for known_token in set(tokens) if known_token < len(logits)),
            device=logits.device,
        )
        old = logits[token_ids]
        penalty = sampling.repetition_penalty
        logits[token_ids] = torch.where(old < 0, old * penalty, old / penalty)
    counts = Counter(tokens[prompt_length:])
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        generated = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), device=logits.device, dtype=logits.dtype)
        logits[generated] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits [vocabulary], minus infinity for tokens that top-k, top-p or min-p exclude."""
    if 0 < sampling.top_k < logits.numel():
        smallest = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(descending=False)
        left_out = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        left_out[-1] = False
        logits = logits.masked_fill(
            torch.empty_like(left_out).scatter_(0, index, left_out), -torch.inf
        )
    if sampling.min_p > 0.0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(
            probabilities < sampling.min_p * probabilities.max(), -torch.inf
        )
    return logits


@dataclass(frozen=True)
class RowOutput:
    """What to compute from one row of logits."""

    row: int  # index of the row in the step
    sampling: Sampling  # sampling of the request
    tokens: Sequence[int]  # tokens of the text so far
    prompt_length: int  # number of prompt tokens
    seed: int  # seed of the text
    choice: int  # index of the completion
    target: int | None  # return the log-probability of this token instead of sampling
    top: int | None  # number of most likely tokens to return; None for no log-probabilities
    matcher: GrammarMatcher | None = None  # restricts the token that is sampled
    excluded_ids: Sequence[int] = ()  # tokens that are not sampled
    draft: int | None = (
        None  # the token sampled in the row before must be this one, else this row is not used
    )


def width_of(outputs: Sequence[RowOutput]) -> int:
    """Return the number of columns of the table of ``outputs``."""
    return FIXED + 2 * max((output.top or 0 for output in outputs), default=0)


def choose_outputs(logits: Tensor, outputs: Sequence[RowOutput], width: int) -> Tensor:
    """Return a table [outputs, width] from logits [outputs, vocabulary]: float64 holds token ids exactly.

    The token of a row with NaN is NaN, and that of a row whose grammar failed is infinite.
    """
    table = torch.zeros(len(outputs), width, dtype=torch.float64, device=logits.device)
    if not outputs:
        return table
    best = logits.argmax(-1)
    table[:, 0] = table[:, 2] = best
    for index, output in enumerate(outputs):
        if output.target is not None:
            table[index, 0] = output.target
        elif output.excluded_ids or not output.sampling.is_plain:
            # a grammar reads accepted tokens only
            is_refused = output.matcher is not None and output.draft is not None
            if is_refused and table[index - 1, 0] != output.draft:
                table[index, 0] = _NO_TOKEN
                continue
            table[index, 0] = _choose_token(logits[index], output)
    # a maximum is NaN if any value is
    samples = torch.tensor([output.target is None for output in outputs], device=logits.device)
    table[:, 0].masked_fill_(logits.amax(-1).isnan() & samples, torch.nan)
    scored = [index for index, output in enumerate(outputs) if output.top is not None]
    if scored:
        _score_tokens(logits, table, scored, (width - FIXED) // 2)
    return table


def _choose_token(logits: Tensor, output: RowOutput) -> Tensor | float:
    try:
        return choose(
            logits,
            output.sampling,
            output.tokens,
            output.prompt_length,
            output.seed,
            output.choice,
            output.matcher,
            output.excluded_ids,
        )
    except GrammarFailedError:  # ends this text; the others of the batch go on
        return torch.inf


def _score_tokens(logits: Tensor, table: Tensor, scored: list[int], top: int) -> None:
    rows = torch.tensor(scored, device=logits.device)
    logprobs = row_logprobs(logits[rows])
    chosen = table[rows, 0].nan_to_num(posinf=0.0).long().clamp(min=0)
    table[rows, 1] = logprobs.gather(-1, chosen[:, None])[:, 0].double()
    if top:
        best = _order_logprobs(logprobs).topk(min(top, logprobs.size(-1)), dim=-1).indices
        count = best.size(-1)
        table[rows, FIXED : FIXED + count] = best.double()
        table[rows, FIXED + top : FIXED + top + count] = logprobs.gather(-1, best).double()


def row_logprobs(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits, both [rows, vocabulary], in float32."""
    return logits.float().log_softmax(-1)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [rows] of ``tokens`` [rows] with the bits of completions."""
    return row_logprobs(logits.contiguous()).gather(-1, tokens[:, None])[:, 0]


def _order_logprobs(logprobs: Tensor) -> Tensor:
    """Return integers with the order of ``logprobs`` in which the first of equal values (common in bf16) is highest."""
    magnitude = logprobs.view(torch.int32).long() & 0x7FFFFFFF  # log-probabilities are not positive
    return (-magnitude << 20) - torch.arange(logprobs.size(-1), device=logprobs.device)


def read_logprob(row: Sequence[float], top: int, width: int) -> TokenLogprob:
    capacity = (width - FIXED) // 2
    pairs = zip(
        row[FIXED : FIXED + top], row[FIXED + capacity : FIXED + capacity + top], strict=True
    )
    token = int(row[0])
    return TokenLogprob(
        token, row[1], token == int(row[2]), {int(top_token): value for top_token, value in pairs}
    )
