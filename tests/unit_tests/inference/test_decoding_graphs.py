# SPDX-License-Identifier: Apache-2.0
"""Steps that are replayed give the texts of steps that run; the graph and the kernel are stand-ins on a CPU."""

import pytest
import torch

from megatron.bridge.backends.attention import flash_attention
from megatron.bridge.inference import decoding_state
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from tests import recorded_graph
from tests.families import harness
from tests.families.rows import ROWS
from tests.unit_tests.backends import naive

PROMPTS = [[5, 6, 7], [9] * 20, [3], list(range(4, 14))]
SAMPLED = [
    Sampling(max_new_tokens=12, ignore_eos=True, logprobs=2),
    Sampling(max_new_tokens=30, temperature=0.9, top_k=5, seed=3, n=6),
    Sampling(max_new_tokens=5, temperature=1.3, seed=1, repetition_penalty=1.2),
    Sampling(max_new_tokens=12, ignore_eos=True, prompt_logprobs=0),
]


@pytest.fixture
def recorded(monkeypatch):
    """What was captured, on a machine whose kernel for all texts is the formula."""
    captured = recorded_graph.install(monkeypatch)
    monkeypatch.setattr(flash_attention, "is_supported", lambda query: True)
    monkeypatch.setattr(flash_attention, "attend_extents", naive.attend_extents)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(decoding_state, "can_pack", lambda weight: False)  # as for weights of a GPU
    return captured


def texts(folder, **options):
    with LLM(str(folder), dtype="float32", kv_memory=1 << 22, **options) as llm:
        return llm.generate(PROMPTS, SAMPLED)


def facts(completion):
    return completion.tokens, [round(it.logprob, 3) for it in completion.logprobs]


def test_replayed_steps_give_the_same_texts(tmp_path, recorded):
    harness.save(harness.hf_model(ROWS["llama_plain"]), tmp_path)
    expected = texts(tmp_path, cuda_graphs=False)
    assert recorded == []
    found = texts(tmp_path)
    assert [[facts(one) for one in few] for few in found] == [[facts(one) for one in few] for few in expected]
    assert sorted(graph.replays for graph in recorded) == [4, 25]  # of 16 rows while nine texts run, then of 8


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen2_tied_windows"])
def test_windows_and_sinks(tmp_path, recorded, name):
    harness.save(harness.hf_model(ROWS[name]), tmp_path)
    expected = texts(tmp_path, cuda_graphs=False)
    assert [one[0].tokens for one in texts(tmp_path)] == [one[0].tokens for one in expected]
    assert bool(recorded) == (name != "gpt_oss")


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma2", "deepseek_v3", "bamba"])
def test_other_kernels_are_not_captured(tmp_path, recorded, name):
    harness.save(harness.hf_model(ROWS[name]), tmp_path)
    texts(tmp_path)
    assert recorded == []
