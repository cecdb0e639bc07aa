# SPDX-License-Identifier: Apache-2.0
"""Answers about videos against transformers'. Needs torchvision and PyAV, so it runs in its own process."""

import inspect

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
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


def hf_answer(folder, messages, prompt):
    """Transformers' tensors of the video, and its answer."""
    rules = MediaRules(str(folder), str(folder / "data"))
    encoder = RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(1024, media=rules))
    record = {"messages": [*messages, {"role": "assistant", "content": "Nothing."}]}
    given = composite_sample(encoder, AutoProcessor.from_pretrained(folder), record, {})
    assert given["input_ids"][0, : len(prompt)].tolist() == prompt
    sequences = ("input_ids", "mm_token_type_ids")  # the answer is not asked
    given = {key: value[:, : len(prompt)] if key in sequences else value for key, value in given.items()}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    known = {*inspect.signature(model.forward).parameters, "input_ids"} - {"attention_mask"}
    found = model.generate(
        **{name: value for name, value in given.items() if name in known},
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = found.sequences[0, len(prompt) :].tolist()
    return tokens, [float(one[0].log_softmax(-1)[token]) for one, token in zip(found.logits, tokens, strict=True)]
