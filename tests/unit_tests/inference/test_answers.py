# SPDX-License-Identifier: Apache-2.0
"""Bytes and offsets of the tokens of an answer, which may be parts of characters."""

import base64
import io

import numpy as np
import pytest

from megatron.bridge.inference.engine import Detokenizer
from megatron.bridge.inference.requests import TokenLogprob, encode_experts
from megatron.bridge.inference.server.answers import (
    ChatFormat,
    Choice,
    CompletionFormat,
    TokenTexts,
)
from megatron.bridge.inference.server.engine_loop import ChoiceProgress
from tests.scripted_server import HAS_SERVER
from tests.unit_tests.data.conftest import TEXT, tokenizer, tokenizer_dir  # noqa: F401 - fixtures
from tests.unit_tests.data.test_tokenizer import sentencepiece_like


@pytest.fixture(params=["byte level", "sentencepiece"])
def hf(request, tmp_path, tokenizer):  # noqa: F811
    return tokenizer.hf if request.param == "byte level" else sentencepiece_like(tmp_path).hf


def answer(hf, text):
    """The tokens of an answer and its end, and its text as the engine gives it."""
    ids = hf.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(hf)
    for token in ids:
        detokenizer.add(token)
    detokenizer.finish()
    return [*ids, hf.eos_token_id], detokenizer.text


@pytest.mark.parametrize("text", [*TEXT, "the cat", "\n日本🙂", "é"])
def test_bytes_join_to_the_text_and_offsets_point_into_it(hf, text):
    ids, shown = answer(hf, text)
    scored = [TokenLogprob(token, -1.0, True, {token: -1.0, ids[0]: -2.0}) for token in ids]
    choice = Choice(0, [1], text=shown, logprobs=scored)
    content = ChatFormat(TokenTexts(hf), 1).whole(choice)["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == shown
    assert [one["top_logprobs"][0]["bytes"] for one in content] == [one["bytes"] for one in content]
    found = CompletionFormat(TokenTexts(hf), 1).whole(choice)["logprobs"]
    pieces = [bytes(one["bytes"]) for one in content]
    for place, offset in enumerate(found["text_offset"]):
        before = b"".join(pieces[:place])
        assert offset == len(before.decode(errors="ignore"))
    assert found["text_offset"][-1] == len(shown)


def test_tokens_behind_a_stop_text_are_not_visible(tokenizer):  # noqa: F811
    hf = tokenizer.hf
    ids = hf.encode("as the gentle rain from heaven", add_special_tokens=False)
    detokenizer = Detokenizer(hf, ["rain"])
    seen = []
    for token in ids:
        detokenizer.add(token)
        seen.append(detokenizer.visible_tokens(detokenizer.stopped))
        assert hf.decode(ids[: seen[-1]]) == detokenizer.text[: len(hf.decode(ids[: seen[-1]]))]
        if detokenizer.stopped:
            break
    assert seen == sorted(seen)
    starts = [len(hf.decode(ids[:count])) for count in range(len(ids))]
    assert detokenizer.text == "as the gentle "
    assert seen[-1] == sum(start < len(detokenizer.text) for start in starts)


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_experts_are_the_base64_text_of_an_array_when_an_answer_is_over(tokenizer, kind):  # noqa: F811
    experts = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    answers = kind(TokenTexts(tokenizer.hf))
    choice = Choice(0, [1])
    steps = [
        ChoiceProgress(0, 0, "a", [5]),
        ChoiceProgress(
            0, 0, "b", [6], finish_reason="stop", routed_experts=encode_experts(experts)
        ),
    ]
    pieces = []
    for step in steps:
        choice.add(step)
        pieces.append(answers.piece(choice, step))
    assert "routed_experts" not in pieces[0]
    for answer_object in (pieces[1], answers.whole(choice)):
        file = io.BytesIO(base64.b64decode(answer_object["routed_experts"]))
        assert np.array_equal(np.load(file), experts)


@pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")
def test_requests_ask_for_experts():
    from megatron.bridge.inference.server.schemas import CompletionRequest

    for asked in (True, False, None):
        request = CompletionRequest(prompt="a", return_routed_experts=asked)
        assert request.sampling(max_new_tokens=1).routed_experts is bool(asked)
