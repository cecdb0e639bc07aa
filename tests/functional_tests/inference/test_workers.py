# SPDX-License-Identifier: Apache-2.0
"""``LLM`` that starts its own ranks: the same answers as in one process, refusals, and a rank that is killed."""

import os
import signal

import pytest

from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture

OPTIONS = {"dtype": "float32", "kv_memory": 1 << 24}


def test_two_ranks_of_a_plain_script(model_dir):  # noqa: F811
    greedy = Sampling(max_new_tokens=12, logprobs=0)
    with LLM(str(model_dir), **OPTIONS) as llm:
        expected = llm.generate(TEXT, greedy)
    with LLM(str(model_dir), tp=2, **OPTIONS) as llm:
        found = llm.generate(TEXT, greedy)
        assert [one[0].tokens for one in found] == [one[0].tokens for one in expected]
        assert [one[0].text for one in found] == [one[0].text for one in expected]
        with pytest.raises(UserError, match="no tokens"):
            llm.generate([[]])
        *pieces, completion = llm.stream(TEXT[0], greedy)
        assert "".join(pieces) == completion.text == expected[0][0].text
        (first, *_) = llm.stream(TEXT[0], greedy)  # the others are not heard
        assert isinstance(first, str)
        messages = [{"role": "user", "content": "who?"}]
        assert llm.chat(messages, greedy).finish_reason
        sampled = Sampling(max_new_tokens=30, temperature=1.5, ignore_eos=True)
        *_, stopped = llm.stream(TEXT[1], sampled, lambda: True)
        assert stopped.finish_reason == "cancelled"
        assert len(stopped.tokens) < 30
        rank = llm._workers._processes[1]
        os.kill(rank.pid, signal.SIGSTOP)
        llm._workers._send(1, "a message that is never read, so that the pipe is reset")
        rank.kill()
        rank.join()
        with pytest.raises(UserError, match=r"rank 1 of 2 ended"):
            llm._workers._receive(1)


@pytest.mark.slow
def test_a_model_that_no_rank_can_load(tmp_path):
    with pytest.raises(UserError, match=r"no config|no checkpoint"):
        LLM(str(tmp_path), tp=2)
