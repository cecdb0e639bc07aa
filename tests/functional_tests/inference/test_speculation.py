# SPDX-License-Identifier: Apache-2.0
"""Drafts under layouts of two processes: the same texts, and the same drafts on all ranks."""

import pytest

from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Sampling
from tests.families import decoding
from tests.unit_tests.inference.test_speculation import MTP, NGRAM, model_with_mtp

PROMPTS = ([3, 1, 4, 1, 5] * 4, [2, 7, 1, 8] * 2, [9] * 11)


def texts_with_and_without_drafts(case, layout, speculation):
    model = model_with_mtp(case, layout)
    texts = []
    for settings in (None, speculation):
        config = decoding.engine_config(case, pack=True, chunk=8, speculation=settings)
        with Engine(model, config) as engine:
            jobs = [
                engine.submit(prompt, Sampling(max_new_tokens=16, logprobs=0)) for prompt in PROMPTS
            ]
            list(engine.run())
        texts.append([job.completion for (job,) in jobs])
    return texts[0] == texts[1], engine.drafted_tokens, engine.accepted_tokens


@pytest.mark.parametrize(
    ("name", "layout", "speculation"),
    [
        ("mimo", "tp2", NGRAM),
        ("mimo", "tp2", MTP),
        ("mimo", "pp2", MTP),
        ("glm4_moe_next_tokens", "ep2", MTP),
        ("glm4_moe_next_tokens", "pp2", NGRAM),
    ],
)
def test_texts_are_those_without_drafts(two_workers, family_case, name, layout, speculation):
    first, second = two_workers.run(
        texts_with_and_without_drafts, family_case(name), layout, speculation
    )
    assert first == second
    is_same, drafted, accepted = first
    assert is_same
    assert drafted > 0
    assert accepted > 0 or speculation is MTP
