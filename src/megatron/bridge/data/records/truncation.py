# SPDX-License-Identifier: Apache-2.0
"""Shortening samples that are longer than a row."""

import numpy as np

from megatron.bridge.data.records.record_config import Truncation
from megatron.bridge.data.records.samples import Sample


def shorten(sample: Sample, limit: int, policy: Truncation, opening: int | None) -> Sample:
    """At most ``limit`` tokens of ``sample``.

    ``policy`` ``right`` removes the end, ``left`` the beginning. ``keep_answer`` keeps the last run of trained tokens
    and as much as fits of what comes directly before it; an answer that does not fit alone loses its end. If the sample
    begins with ``opening``, such as BOS, so does the result, because the model has never seen a text without it.
    """
    assert policy in ("left", "right", "keep_answer"), policy
    if policy == "right":
        return _window(sample, 0, limit)
    kept = int(opening is not None and sample.tokens[0] == opening)
    end = len(sample.tokens)
    if policy == "keep_answer":
        first, end = last_answer(sample.trained)
        # if the answer does not fit, its first token still needs one before it to be predicted from
        end = min(end, first + limit - min(first, kept + 1))
    start = end - limit + kept
    if start <= kept:
        return _window(sample, 0, end)
    part = _window(sample, start, end)
    if not kept:
        return part
    tokens = np.concatenate((sample.tokens[:1], part.tokens))
    return Sample(tokens, np.concatenate((sample.trained[:1], part.trained)))


def last_answer(trained: np.ndarray) -> tuple[int, int]:
    """Start and end of the last run of trained tokens; the whole sample if there is none."""
    places = np.flatnonzero(trained)
    if not len(places):
        return 0, len(trained)
    end = int(places[-1]) + 1
    breaks = np.flatnonzero(~trained[:end])
    return (int(breaks[-1]) + 1 if len(breaks) else 0), end


def _window(sample: Sample, start: int, end: int) -> Sample:
    tokens, trained = sample.tokens[start:end], sample.trained[start:end].copy()
    trained[:1] = False  # nothing predicts the first token
    return Sample(tokens, trained)
