# SPDX-License-Identifier: Apache-2.0
"""Questions about images: logits and answers are those of transformers, in every layout."""

import inspect

import pytest
import torch
from transformers import AutoModelForImageTextToText

from examples.conversion import compare_models, hf_to_megatron_generate_vlm
from megatron.bridge import AutoBridge
from megatron.bridge.inference.image_prompt import answer, image_prompt
from megatron.bridge.utils.console import console
from tests import toy_vision
from tests.refusals import refused

TOKENS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = toy_vision.save(name, tmp_path_factory.mktemp(name), weights=True)
            toy_vision.picture(made[name], "a.png", 20, 12)
            toy_vision.picture(made[name], "b.png", 16, 24, 1)
        return made[name]

    return folder


def asked(folder):
    return image_prompt(folder, [str(folder / "a.png"), str(folder / "b.png")], "What is it?")


def hf_answer(folder, prompt):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt.tokens])
    known = inspect.signature(model.forward).parameters
    given = {name: value for name, value in prompt.hf_inputs().items() if name in known}
    found = model.generate(input_ids=ids, **given, max_new_tokens=TOKENS, do_sample=False)
    return found[0, ids.shape[1] :].tolist()


def built(folder, **sizes):
    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider()
    for name, value in sizes.items():
        setattr(provider, name, value)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    return [chunk.eval() for chunk in model]


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", "gemma3_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("internvl", "smolvlm"))],
)
def test_answers_are_those_of_transformers(run_in_process, folders, name):
    prompt = asked(folders(name))
    assert answer(built(folders(name)), prompt, TOKENS) == hf_answer(folders(name), prompt)


@pytest.mark.parametrize("layout", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_answers_are_the_same_in_every_layout(two_workers, folders, layout):
    folder = folders("qwen2_5_vl")
    expected = hf_answer(folder, asked(folder))
    assert two_workers.run(answered, folder, {layout: 2}) == [expected] * 2


def answered(folder, sizes):
    return answer(built(folder, **sizes), asked(folder), TOKENS)


def test_the_scripts_run(run_in_process, folders, capsys):
    folder = folders("qwen2_5_vl")
    shared = ["--image_path", str(folder / "a.png"), "--prompt", "What is it?"]
    assert hf_to_megatron_generate_vlm.main(["--hf_model_path", str(folder), *shared, "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out
    with console().capture() as captured:
        assert compare_models.main(["--hf-model", str(folder), *shared]) == 0
    assert "the models agree" in captured.get()


def test_what_cannot_be_asked_is_named(folders, tmp_path):
    with refused("--image-path", "missing.png"):
        image_prompt(folders("qwen2_5_vl"), [str(tmp_path / "missing.png")], "What?")
    with refused("--hf_model_path"):
        hf_to_megatron_generate_vlm.main(["--image_path", "a.png"])
