# SPDX-License-Identifier: Apache-2.0
"""Answers about videos against transformers'. Needs torchvision and PyAV, so it runs in its own process."""

import pytest
import torch
from transformers import AutoProcessor

from examples.conversion.compare_models import about_images
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.prompts import as_messages
from megatron.bridge.inference.requests import Sampling
from tests import toy_vision
from tests.functional_tests.data.processors_oracle import composite_sample
from tests.functional_tests.data.video_training import write

TOKENS = 6


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v", "internvl", "smolvlm"])
def test_answers_are_those_of_transformers(name, tmp_path):
    folder = write(name, tmp_path)
    video = {"type": "video", "video": "first.mp4"}
    messages = [{"role": "user", "content": [video, {"type": "text", "text": "What moves?"}]}]
    sampling = Sampling(max_new_tokens=TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(folder), media_root=str(folder / "data")) as llm:
        found = llm.chat(messages, sampling)
    tokens, logprobs = hf_answer(folder, messages, found.prompt_tokens)
    assert found.tokens == tokens
    assert [one.logprob for one in found.logprobs] == pytest.approx(logprobs, abs=1e-4)


def test_an_image_processor_of_torchvision(tmp_path):
    folder = toy_vision.save("nemotron_h_omni", tmp_path, weights=True)
    image, sampling = (
        str(folder / toy_vision.picture(folder, "a.png", 20, 12)),
        Sampling(TOKENS, ignore_eos=True),
    )
    with LLM(str(folder)) as llm:
        found = llm.chat(as_messages("What is it?", [image]), sampling)
    ids, _, _, extra = about_images(folder, [image], "What is it?")
    assert found.tokens == toy_vision.greedy_answer(folder, ids, extra, TOKENS)[0]


def hf_answer(folder, messages, prompt):
    """Transformers' tensors of the video, and its answer."""
    rules = MediaRules(str(folder), str(folder / "data"))
    encoder = RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(1024, media=rules))
    record = {"messages": [*messages, {"role": "assistant", "content": "Nothing."}]}
    given = composite_sample(encoder, AutoProcessor.from_pretrained(folder), record, {})
    assert given["input_ids"][0, : len(prompt)].tolist() == prompt
    sequences = ("input_ids", "mm_token_type_ids")  # the answer is not asked
    given = {
        key: value[:, : len(prompt)] if key in sequences else value for key, value in given.items()
    }
    return toy_vision.greedy_answer(folder, torch.tensor([prompt]), given, TOKENS)
