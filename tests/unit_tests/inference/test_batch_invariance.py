# SPDX-License-Identifier: Apache-2.0
"""A request gives the same bits alone and in any company, also when it has to be computed again."""

import contextlib
import random

import pytest

from megatron.bridge.inference.decoding_state import Kept
from megatron.bridge.inference.engine import Engine
from megatron.bridge.inference.requests import Sampling
from tests.families import decoding, harness
from tests.families.row import Row
from tests.families.rows import ROWS

# widths are multiples of 8, as of all published models
EVEN = Row(
    "qwen3_next_even",
    "Qwen3NextForCausalLM",
    {
        **ROWS["qwen3_next"].config,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "num_experts": 8,
    },
)
NAMES = ("llama_tied", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next_even", "nemotron_h", "lfm2")
IN_FLOAT32 = ("llama_tied", "qwen3_next_even")

ROOMY = {"chunk": 8, "rows": 64, "max_requests": 8, "pack": True}


@pytest.fixture(scope="module")
def even_case(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROWS, EVEN.name, EVEN)
        yield harness.make_reference(EVEN, tmp_path_factory.mktemp("even"))


def random_requests(seed, vocabulary, count):
    draw = random.Random(seed)
    shared = [draw.randrange(vocabulary) for _ in range(16)]
    found = []
    for index in range(count):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 20))]
        if index % 2:
            prompt = shared + prompt
        options = {
            "max_new_tokens": draw.randint(1, 24),
            "logprobs": draw.choice((0, 2)),
            "seed": index,
        }
        options |= draw.choice(
            ({}, {"temperature": 1.1}, {"temperature": 0.8, "top_p": 0.9}, {"prompt_logprobs": 1})
        )
        found.append((prompt, Sampling(**options)))
    return found


def alone(model, config, requests):
    completions = []
    for prompt, sampling in requests:
        with Engine(model, config) as engine:
            (job,) = engine.submit(prompt, sampling)
            list(engine.run())
        completions.append(job.completion)
    return completions


def together(model, config, requests, seed):
    """All requests, which come while others run; some are cancelled and asked again."""
    draw = random.Random(seed)
    waiting, jobs = list(enumerate(requests)), {}
    with Engine(model, config) as engine:
        while waiting or not engine.is_idle:
            while waiting and (engine.is_idle or draw.random() < 0.5):
                index, (prompt, sampling) = waiting.pop(draw.randrange(len(waiting)))
                (jobs[index],) = engine.submit(prompt, sampling)
            engine.step()
            going_on = [index for index, job in jobs.items() if not job.is_over]
            if going_on and draw.random() < 0.05:
                index = draw.choice(going_on)
                engine.cancel(jobs.pop(index))
                waiting.append((index, requests[index]))
        assert not any(lane.running or lane.waiting for lane in engine.lanes)
    return [jobs[index].completion for index in range(len(requests))]


@pytest.mark.sampled
@pytest.mark.parametrize("schedules", [2, pytest.param(144, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in NAMES),
        *(
            pytest.param(name, "float32", marks=[pytest.mark.slow] * (name not in IN_FLOAT32))
            for name in NAMES
        ),
    ],
)
def test_company_changes_no_bit(family_case, even_case, name, dtype, schedules):
    """With much and with little memory, and replayed steps; 144 schedules of each model and precision are 2,016."""
    case = even_case if name == EVEN.name else family_case(name)
    model = decoding.decoder(case, "one", bf16=dtype == "bfloat16")
    requests = random_requests(1, case.row.config["vocab_size"], 12)
    expected = [alone(model, config_of(case, rings), requests) for rings in (False, True)]
    for seed in range(schedules):
        rings = seed % 4 in (1, 2)
        little = {"kv_memory": tight(model, rings), "max_requests": 5} if seed % 2 else {}
        assert (
            together(model, config_of(case, rings, graphs=True, **little), requests, seed)
            == expected[rings]
        )


@pytest.mark.parametrize("name", ["lfm2", "llama_tied"])
def test_a_step_that_fails_is_computed_again(family_case, name):
    case = family_case(name)
    model = decoding.decoder(case, "one")
    requests = random_requests(2, case.row.config["vocab_size"], 4)
    expected, calls = alone(model, config_of(case, False), requests), []

    def interrupt(*_):
        calls.append(0)
        if len(calls) in (1, 2, 4, 9):
            raise KeyboardInterrupt

    with Engine(model, config_of(case, False)) as engine:
        jobs = [engine.submit(*request)[0] for request in requests]
        hook = (
            model[0].get_submodule("decoder.final_layernorm").register_forward_pre_hook(interrupt)
        )
        while not engine.is_idle:
            with contextlib.suppress(KeyboardInterrupt):
                engine.step()
        hook.remove()
    assert len(calls) > 9
    assert [job.completion for job in jobs] == expected


def config_of(case, rings, **changes):
    return decoding.engine_config(case, **{**ROOMY, "window_rings": rings, **changes})


def tight(model, rings):
    """Memory for so few tokens that texts lose theirs and are computed again."""
    return sum(96 * it.per_token + 5 * it.per_request for it in Kept.of(model, rings))
