# SPDX-License-Identifier: Apache-2.0
"""What happens to a sample that is longer than a row."""

from typing import Literal

import numpy as np

from megatron.bridge.data.examples import Example

Truncation = Literal["refuse", "drop", "left", "right", "keep_answer"]


def shorten(example: Example, limit: int, policy: Truncation, opening: int | None) -> Example:
    """At most ``limit`` tokens of ``example``.

    Args:
        example: a sample with more than ``limit`` tokens.
        limit: tokens to keep.
        policy: ``right`` cuts the end off, ``left`` the beginning. ``keep_answer`` keeps the last stretch of
            learnt tokens and as much as fits of what comes directly before it; an answer that does not fit alone
            loses its end.
        opening: the token that begins every text, such as BOS; where the sample begins with it, so does the rest,
            because a model has never seen a text without it. None: there is no such token.
    """
    assert policy in ("left", "right", "keep_answer"), policy
    if policy == "right":
        return _window(example, 0, limit)
    kept = int(opening is not None and example.tokens[0] == opening)
    end = len(example.tokens)
    if policy == "keep_answer":
        first, end = last_answer(example.trained)
        # of an answer that does not fit, the first token still needs one before it to be predicted from
        end = min(end, first + limit - min(first, kept + 1))
    start = end - limit + kept
    if start <= kept:
        return _window(example, 0, end)
    part = _window(example, start, end)
    if not kept:
        return part
    tokens = np.concatenate((example.tokens[:1], part.tokens))
    return Example(tokens, np.concatenate((example.trained[:1], part.trained)))


def last_answer(trained: np.ndarray) -> tuple[int, int]:
    """First and behind-last position of the last stretch of learnt tokens; the whole where there is none."""
    places = np.flatnonzero(trained)
    if not len(places):
        return 0, len(trained)
    end = int(places[-1]) + 1
    breaks = np.flatnonzero(~trained[:end])
    return (int(breaks[-1]) + 1 if len(breaks) else 0), end


def _window(example: Example, start: int, end: int) -> Example:
    tokens, trained = example.tokens[start:end], example.trained[start:end].copy()
    trained[:1] = False  # nothing predicts it
    return Example(tokens, trained)
