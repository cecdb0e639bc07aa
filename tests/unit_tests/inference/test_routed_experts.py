# SPDX-License-Identifier: Apache-2.0
"""The experts that completions return are those of transformers' own routers."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError
from tests.families import decoding, routing


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v2",
        "ernie45_moe",
        "phimoe",
        "gemma4_experts",
        "nemotron_h_experts",
    ],
)
def test_experts_are_those_of_transformers(family_case, name):
    assert routing.difference(family_case(name), "one") == ""


def test_reused_prefixes_and_texts_without_memory_keep_their_experts(family_case):
    """A text that copies caches, loses its memory or is computed alone returns the same experts."""
    case = family_case("qwen3_moe")
    prompts = routing.prompts_with_a_common_beginning(101)
    model = decoding.decoder(case, "one")
    config = decoding.engine_config(case, chunk=8, rows=16, max_requests=4)
    sampling = replace(routing.SAMPLING, n=2)
    with Engine(model, config) as engine:
        jobs = [job for prompt in prompts for job in engine.submit(prompt, sampling)]
        while len(jobs[1].completion.tokens) < 4:
            engine.step()
        engine.lanes[0].restart()
        list(engine.run())
        assert engine.lanes[0].prefix_hits > 0
    for job in jobs:
        with Engine(model, config) as engine:
            alone = engine.submit(job.completion.prompt_tokens, sampling)[job.completion.choice]
            list(engine.run())
        assert np.array_equal(job.completion.routed_experts, alone.completion.routed_experts)


def test_texts_do_not_reuse_caches_without_experts(family_case):
    prompt = list(range(3, 40))
    config = decoding.engine_config(family_case("qwen3_moe"), chunk=8)
    with Engine(decoding.decoder(family_case("qwen3_moe"), "one"), config) as engine:
        (plain,) = engine.submit(prompt, Sampling(max_new_tokens=2))
        list(engine.run())
        assert plain.completion.routed_experts is None
        jobs = []
        for _ in range(2):
            jobs += engine.submit(prompt, Sampling(max_new_tokens=2, routed_experts=True))
            list(engine.run())
            assert engine.lanes[0].prefix_hits == 32 * (len(jobs) - 1)
    first, second = (job.completion.routed_experts for job in jobs)
    assert np.array_equal(first, second)


def test_scored_and_cancelled_texts(family_case):
    config = decoding.engine_config(family_case("qwen3_moe"), chunk=8, rows=8)
    prompt = list(range(3, 33))
    with Engine(decoding.decoder(family_case("qwen3_moe"), "one"), config) as engine:
        (scored,) = engine.submit(
            prompt, Sampling(max_new_tokens=0, prompt_logprobs=0, routed_experts=True)
        )
        list(engine.run())
        (cancelled,) = engine.submit(prompt[::-1], Sampling(max_new_tokens=2, routed_experts=True))
        engine.cancel(cancelled)
        assert cancelled.completion.routed_experts.shape == (0, 3, 3)
    assert scored.completion.routed_experts.shape == (29, 3, 3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama_tied", None, "no layers with experts"),
        ("qwen3_moe", "sinkhorn", "moe_router_load_balancing_type='sinkhorn'"),
    ],
)
def test_models_without_recordable_routers_are_refused(family_case, name, change, message):
    model = decoding.decoder(family_case(name), "one")
    if change:
        model[0].config.moe_router_load_balancing_type = change
    with (
        Engine(model, decoding.engine_config(family_case(name))) as engine,
        pytest.raises(UserError, match=message),
    ):
        engine.submit([1, 2], Sampling(max_new_tokens=2, routed_experts=True))
