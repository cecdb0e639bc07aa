# SPDX-License-Identifier: Apache-2.0
"""Reward functions: found by name or file, called once with columns, and errors that name function and sample."""

import math

import pytest

from megatron.bridge.data.prompts.prompts import Prompt
from megatron.bridge.training.config import GRPOConfig
from megatron.bridge.training.reinforcement.rewards import (
    ScoredCompletion,
    call_rewards,
    load_rewards,
)
from megatron.bridge.training.reinforcement.samples import render_page
from megatron.bridge.utils.errors import UserError

CHAT = [{"role": "user", "content": "3+4?"}]
COMPLETIONS = [
    ScoredCompletion(Prompt("a.jsonl:1", [1], "3+4=", {"answer": "7"}), [5], "7"),
    ScoredCompletion(Prompt("a.jsonl:2", [2], CHAT, {}), [6, 7], "eight"),
]


def rewards_of(*functions, **settings):
    return call_rewards(load_rewards(GRPOConfig(**settings), functions), COMPLETIONS)


def refusal_of(*functions, **settings):
    with pytest.raises(UserError) as refusal:
        rewards_of(*functions, **settings)
    return str(refusal.value)


def test_functions_get_prompts_completions_and_columns():
    seen = {}

    def score(**arguments):
        seen.update(arguments)
        return [1, None]

    async def later(completions, **_):
        return [2.5 for _ in completions]

    table = rewards_of(score, later)
    assert table[0].tolist() == [1.0, 2.5]
    assert math.isnan(table[1, 0])
    assert seen == {
        "prompts": ["3+4=", CHAT],
        "completions": ["7", [{"role": "assistant", "content": "eight"}]],
        "completion_ids": [[5], [6, 7]],
        "answer": ["7", None],
    }


def test_functions_of_files_and_modules(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    source = "from helper import VALUE\ndef three(completions, **_):\n    return [VALUE] * len(completions)\n"
    (tmp_path / "rewards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    names = ["rewards.py:three", "builtins:len"]
    assert [one.name for one in load_rewards(GRPOConfig(reward_funcs=names))] == ["three", "len"]
    assert rewards_of(reward_funcs=names[:1]).tolist() == [[3.0], [3.0]]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ["grpo.reward_funcs is empty", "rewards.py:score"]),
        (["rewards"], ["'rewards' names no function", "package.module:function"]),
        (["none.py:score"], ["none.py is not a file"]),
        (["no_such_package:score"], ["no_such_package cannot be imported"]),
        (["math:sqr"], ["math has no function sqr", "sqrt"]),
        (["builtins:len", "builtins:len"], ["two functions called len"]),
    ],
)
def test_names_that_lead_nowhere(names, words):
    message = refusal_of(reward_funcs=names)
    assert all(word in message for word in words), message


def test_weights_fit_the_functions():
    message = refusal_of(reward_funcs=["builtins:len"], reward_weights=[1.0, 2.0])
    assert "grpo.reward_weights=[1.0, 2.0] has 2 numbers for 1 reward functions" in message


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([1.0], ["score returns 1 rewards for 2 completions"]),
        (3, ["score returns a int"]),
        ([0.0, float("nan")], ["a.jsonl:2", "score returns nan", "'eight'"]),
        ([0.0, "good"], ["a.jsonl:2", "returns 'good'", "finite number"]),
    ],
)
def test_wrong_answers(answers, words):
    def score(**_):
        return answers

    message = refusal_of(score)
    assert all(word in message for word in words), message


def test_a_failure_names_the_sample():
    def score(completions, **_):
        return [int(text) for text in completions if isinstance(text, str)] + [
            1 / 0 for text in completions if not isinstance(text, str)
        ]

    message = refusal_of(score)
    assert all(word in message for word in ("a.jsonl:2", "'eight'", "score", "ZeroDivisionError"))


def test_the_page_shows_what_a_model_writes_as_text():
    line = {"step": 3, "prompt": CHAT, "completion": "<b>7</b>", "advantage": 0.5}
    page = render_page([{**line, "rewards": {"score": 1.0, "other": None}}])
    assert "&lt;b&gt;7&lt;/b&gt;" in page
    assert "score 1, other none" in page
    assert "user: 3+4?" in page
