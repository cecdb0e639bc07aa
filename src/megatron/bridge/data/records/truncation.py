# SPDX-License-Identifier: Apache-2.0
"""Truncate samples that are longer than a row."""

import numpy as np

from megatron.bridge.data.records.record_config import Truncation
from megatron.bridge.data.records.samples import Sample


def shorten(sample: Sample, limit: int, policy: Truncation, opening: int | None) -> Sample:
    """Truncate ``sample`` to at most ``limit`` tokens.

    The ``policy`` ``right`` removes the end, ``left`` the beginning. ``keep_answer`` keeps the last run of trained
    tokens and as many tokens directly before it as fit; it truncates the end of an answer that does not fit alone. If
    the sample begins with ``opening``, such as BOS, the result does, too: the model has never seen a text without it.
    """
    assert policy in ("left", "right", "keep_answer"), policy
    if policy == "right":
        return _sample_window(sample, 0, limit)
    opening_length = int(opening is not None and sample.tokens[0] == opening)
    end = len(sample.tokens)
    if policy == "keep_answer":
        first, end = last_answer(sample.trained)
        # the first token of the answer is predicted from the token before it, even if the answer does not fit
        end = min(end, first + limit - min(first, opening_length + 1))
    start = end - limit + opening_length
    if start <= opening_length:
        return _sample_window(sample, 0, end)
    part = _sample_window(sample, start, end)
    if not opening_length:
        return part
    tokens = np.concatenate((sample.tokens[:1], part.tokens))
    return Sample(tokens, np.concatenate((sample.trained[:1], part.trained)))


def last_answer(trained: np.ndarray) -> tuple[int, int]:
    """Return the start and end of the last run of trained tokens, or of the whole sample if there is none."""
    places = np.flatnonzero(trained)
    if not len(places):
        return 0, len(trained)
    end = int(places[-1]) + 1
    breaks = np.flatnonzero(~trained[:end])
    return (int(breaks[-1]) + 1 if len(breaks) else 0), end


def _sample_window(sample: Sample, start: int, end: int) -> Sample:
    tokens = sample.tokens[start:end]
    trained = sample.trained[start:end].copy()
    trained[:1] = False  # nothing predicts the first token
    return Sample(tokens, trained)
