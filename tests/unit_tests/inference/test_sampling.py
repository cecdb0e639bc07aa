# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens: transformers' own processors, the distribution of many choices, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron.bridge.inference.requests import Sampling
from megatron.bridge.inference.sampling import choose, penalized, truncated, uniform
from megatron.bridge.utils.errors import UserError

VOCABULARY = 41


def random_logits(seed):
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 5, 40, 41, 100]),
    st.sampled_from([1.0, 0.999, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.9, 1.0]),
)
def test_truncation_is_that_of_transformers(seed, top_k, top_p, min_p):
    logits = expected = random_logits(seed)
    for value, neutral, kind in ((top_k, 0, TopKLogitsWarper), (top_p, 1.0, TopPLogitsWarper)):
        if value != neutral:
            expected = kind(value)(None, expected[None])[0]
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected[None])[0]
    found = truncated(logits, Sampling(top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(found, expected)


def test_temperature_is_that_of_transformers():
    logits = random_logits(1)
    assert torch.equal(TemperatureLogitsWarper(0.7)(None, logits[None])[0], logits / 0.7)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1), st.floats(0.3, 3.0))
def test_repetition_penalty_is_that_of_transformers(tokens, penalty):
    logits = random_logits(2)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([tokens]), logits[None].clone()
    )[0]
    found = penalized(logits, Sampling(repetition_penalty=penalty), tokens, 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_logit_bias_is_that_of_transformers():
    logits, bias = random_logits(3), {4: 2.5, 9: -100.0}
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = processor(torch.tensor([[1]]), logits[None].clone())[0]
    assert torch.equal(penalized(logits, Sampling(logit_bias=bias), [1], 1), expected)


def test_presence_and_frequency_count_generated_tokens_only():
    logits = torch.zeros(5)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    assert penalized(logits, sampling, [1, 1, 2, 3, 3, 3], 2).tolist() == [0, 0, -0.75, -1.25, 0]


def test_choices_follow_the_distribution():
    """Chi-square of 4,000 choices against softmax; the seeds are fixed, so the result is."""
    logits = random_logits(4) / 2
    sampling = Sampling(temperature=1.3)
    counts = torch.zeros(VOCABULARY)
    for seed in range(4000):
        counts[choose(logits, sampling, [0], 1, seed, 0)] += 1
    expected = (logits / 1.3).softmax(-1) * counts.sum()
    likely = expected > 5
    statistic = ((counts - expected).square() / expected)[likely].sum().item()
    freedom = int(likely.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_numbers_look_uniform_and_independent():
    for numbers in (
        [uniform(7, position, 0) for position in range(4000)],
        [uniform(seed, 3, 1) for seed in range(4000)],
        [uniform(7, 3, choice) for choice in range(4000)],
    ):
        values = torch.tensor(numbers, dtype=torch.float64)
        assert abs(values.mean() - 0.5) < 0.02
        assert abs(torch.corrcoef(torch.stack((values[1:], values[:-1])))[0, 1]) < 0.05


def test_greedy_takes_the_first_of_equals():
    assert choose(torch.tensor([0.0, 2.0, 2.0]), Sampling(), [0], 1, 0, 0) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", 10**6),
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 3),
        ("frequency_penalty", math.nan),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", ["x" * 2000]),
        ("stop", ["x"] * 100),
        ("stop", [3]),
        ("stop_ids", ["</s>"]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: -math.inf}),
        ("logit_bias", {1: 1e39}),
        ("logit_bias", [1]),
    ],
)
def test_what_has_no_meaning_is_refused(name, value):
    with pytest.raises(UserError, match=name):
        Sampling(**{name: value})


def test_an_unknown_parameter_names_the_nearest():
    with pytest.raises(UserError, match=r"line 3: temprature.*temperature"):
        Sampling.from_dict({"temprature": 1}, "line 3: ")
