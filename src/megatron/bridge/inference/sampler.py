# SPDX-License-Identifier: Apache-2.0
"""The tokens and log-probabilities that a step's logits give, as a table that is sent to all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bridge.inference.requests import Sampling, TokenLogprob
from megatron.bridge.inference.sampling import choose

FIXED = 3  # columns before the most likely tokens: the token, its log-probability, the most likely token


@dataclass(frozen=True)
class Output:
    """What is wanted of one row of logits."""

    row: int  # of the step
    sampling: Sampling  # of the request
    tokens: Sequence[int]  # the text so far
    prompt_length: int  # how many of its tokens are the prompt's
    seed: int  # of the text
    choice: int  # index of the completion
    target: int | None  # score this token instead of choosing one
    top: int | None  # how many most likely tokens are wanted; None if no log-probability is


def width_of(outputs: Sequence[Output]) -> int:
    """Columns of the table of ``outputs``."""
    return FIXED + 2 * max((output.top or 0 for output in outputs), default=0)


def choose_outputs(logits: Tensor, outputs: Sequence[Output], width: int) -> Tensor:
    """The table [outputs, width] of logits [outputs, vocabulary]: float64 holds token ids exactly."""
    table = torch.zeros(len(outputs), width, dtype=torch.float64, device=logits.device)
    if not outputs:
        return table
    best = logits.argmax(-1)
    table[:, 0] = table[:, 2] = best
    for index, output in enumerate(outputs):
        if output.target is not None:
            table[index, 0] = output.target
        elif not output.sampling.is_greedy or output.sampling.changes_logits:
            table[index, 0] = _choice(logits[index], output)
    scored = [index for index, output in enumerate(outputs) if output.top is not None]
    if scored:
        _score(logits, table, scored, (width - FIXED) // 2)
    return table


def _choice(logits: Tensor, output: Output) -> int:
    where = (output.tokens, output.prompt_length, output.seed, output.choice)
    return choose(logits, output.sampling, *where)


def _score(logits: Tensor, table: Tensor, scored: list[int], top: int) -> None:
    rows = torch.tensor(scored, device=logits.device)
    logprobs = logits[rows].float().log_softmax(-1)
    chosen = table[rows, 0].long()
    table[rows, 1] = logprobs.gather(-1, chosen[:, None])[:, 0].double()
    if top:
        best = _ordered(logprobs).topk(min(top, logprobs.size(-1)), dim=-1).indices
        count = best.size(-1)
        table[rows, FIXED : FIXED + count] = best.double()
        table[rows, FIXED + top : FIXED + top + count] = logprobs.gather(-1, best).double()


def _ordered(logprobs: Tensor) -> Tensor:
    """Numbers with the order of ``logprobs``, of equal ones the first highest: in bf16, there are many."""
    magnitude = logprobs.view(torch.int32).long() & 0x7FFFFFFF  # as a log-probability is not positive
    return (-magnitude << 20) - torch.arange(logprobs.size(-1), device=logprobs.device)


def read_logprob(row: Sequence[float], top: int, width: int) -> TokenLogprob:
    most = (width - FIXED) // 2
    pairs = zip(row[FIXED : FIXED + top], row[FIXED + most : FIXED + most + top], strict=True)
    token = int(row[0])
    return TokenLogprob(token, row[1], token == int(row[2]), {int(one): value for one, value in pairs})
