# SPDX-License-Identifier: Apache-2.0
"""Questions about images: answers are those of transformers, in every layout and in any company."""

import base64
import inspect
import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from examples.conversion import compare_models, hf_to_megatron_generate_vlm
from megatron.bridge.cli.main import main
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.prompts import as_messages
from megatron.bridge.inference.refit.canary import Canary
from megatron.bridge.inference.refit.sender import Refit
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.console import console
from tests import toy_vision
from tests.functional_tests.data.test_processors import BESIDE, ran_beside
from tests.refusals import refused
from tests.unit_tests.inference.test_refit import Trainer

TOKENS = 6
SAMPLING = Sampling(max_new_tokens=TOKENS, ignore_eos=True, logprobs=0)
QUICK = ("qwen2_5_vl", "qwen3_vl", "gemma3_vl", "gemma4_vl", "paligemma")
OTHERS = sorted(
    set(toy_vision.TOYS) - {*QUICK, "nemotron_h_omni", "gemma4_unified"}
)  # the image processors of these need torchvision
ONE_IMAGE = ("paligemma", "llava_onevision")


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


def question(folder, *names):
    return as_messages("What is it?", [str(folder / name) for name in names])


def hf_answer(folder, *names):
    """Tokens and their log-probabilities."""
    ids, _, _, extra = compare_models.about_images(
        folder, [str(folder / name) for name in names], "What is it?"
    )
    return toy_vision.greedy_answer(folder, ids, extra, TOKENS)


def assert_same(completion, expected):
    tokens, logprobs = expected
    assert completion.tokens == tokens
    assert [one.logprob for one in completion.logprobs] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_answers_are_those_of_transformers(run_in_process, folders, name):
    folder = folders(name)
    images = ("a.png",) if name in ONE_IMAGE else ("a.png", "b.png")
    with LLM(str(folder)) as llm:
        assert_same(llm.chat(question(folder, *images), SAMPLING), hf_answer(folder, *images))


def mixed(folder):
    """Conversations with two images, with none, and with one; and a text."""
    return [
        question(folder, "a.png", "b.png"),
        question(folder),
        "The weather",
        question(folder, "b.png"),
    ]


def alone(folder, prompts, **cuts):
    with LLM(str(folder), **cuts) as llm:
        return [llm.generate_each([prompt], SAMPLING).__next__()[0] for prompt in prompts]


@pytest.mark.parametrize("name", QUICK)
def test_another_image_changes_the_answer(run_in_process, folders, name):
    with LLM(str(folders(name))) as llm:
        one, other = (
            llm.chat(question(folders(name), image), SAMPLING) for image in ("a.png", "b.png")
        )
    assert abs(one.logprobs[0].logprob - other.logprobs[0].logprob) > 1e-5


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_vl", "gemma3_vl", "gemma4_vl"])
def test_answers_are_bitwise_those_of_any_company(run_in_process, folders, name):
    """Even where so little memory makes prompts begin again, and steps hold less than a prompt with images."""
    folder = folders(name)
    prompts = [prompt for prompt in mixed(folder) for _ in range(2)]
    cuts = {"rows": 16, "chunk": 8}  # where a text is cut decides how it is rounded
    expected, of_cuts = alone(folder, prompts), alone(folder, prompts, **cuts)
    with LLM(str(folder)) as llm:
        per_token = llm.engine.config.kv_memory // llm.engine.lanes[0].arena.size
    for small in ({}, cuts, {"kv_memory": 112 * max(per_token, 128)}):
        with LLM(str(folder), max_requests=3, **small) as llm:
            found = [one[0] for one in llm.generate_each(prompts, SAMPLING)]
        assert found == (of_cuts if small == cuts else expected)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_answers_are_the_same_in_every_layout(two_workers, folders, layout):
    folder = folders("qwen3_vl")
    expected = hf_answer(folder, "a.png", "b.png")
    for completion in two_workers.run(answered, folder, layout):
        assert_same(completion, expected)


def answered(folder, layout):
    with LLM(str(folder), **layout) as llm:
        return llm.chat(question(folder, "a.png", "b.png"), SAMPLING)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3_vl"])
def test_log_probabilities_of_a_prompt_are_those_of_one_pass(run_in_process, folders, name):
    folder = folders(name)
    scoring = Sampling(max_new_tokens=0, prompt_logprobs=0)
    with LLM(str(folder)) as llm:
        found = next(llm.generate_each([question(folder, "a.png")], scoring))[0]
    ids, _, _, extra = compare_models.about_images(folder, [str(folder / "a.png")], "What is it?")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    known = inspect.signature(model.forward).parameters
    with torch.no_grad():
        logits = model(
            input_ids=ids, **{name: value for name, value in extra.items() if name in known}
        ).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([one.logprob for one in found.prompt_logprobs]), expected, atol=1e-4, rtol=0
    )


def test_the_scripts_run(run_in_process, folders, capsys):
    folder = folders("qwen2_5_vl")
    shared = ["--image_path", str(folder / "a.png"), "--prompt", "What is it?"]
    assert (
        hf_to_megatron_generate_vlm.main(
            ["--hf_model_path", str(folder), *shared, "--max_new_tokens", "3"]
        )
        == 0
    )
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen2_5_vl", "paligemma"])
def test_logits_are_compared(run_in_process, folders, name):
    folder = folders(name)
    with console().capture() as captured:
        assert (
            compare_models.main(["--hf-model", str(folder), "--image_path", str(folder / "a.png")])
            == 0
        )
    assert "the models agree" in captured.get()


def test_files_of_conversations(run_in_process, folders, tmp_path, capsys):
    """Parts of messages, lists beside them, and bytes; paths start from the folder of the file."""
    folder = folders("qwen2_5_vl")
    toy_vision.picture(tmp_path, "a.png", 20, 12)
    data = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    text = {"type": "text", "text": "What is it?"}
    records = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, text]}]},
        {"messages": [{"role": "user", "content": "<image>What is it?"}], "images": ["a.png"]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": data}}, text],
                }
            ]
        },
    ]
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--max-new-tokens", "4", "--ignore-eos"]
    assert (
        main(["generate", str(folder), "--prompts", str(prompts), "--out", str(out), *options]) == 0
    )
    found = [json.loads(line)["tokens"] for line in out.read_text().splitlines()]
    assert found == [found[0]] * 3
    capsys.readouterr()
    one = ["--image", str(tmp_path / "a.png"), "--prompt", "What is it?"]
    assert main(["generate", str(folder), *one, *options]) == 0
    assert capsys.readouterr().out[:-1] == json.loads(out.read_text().splitlines()[0])["text"]


def test_what_cannot_be_asked_is_named(run_in_process, folders, tmp_path):
    folder = folders("qwen2_5_vl")
    whole = (folder / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("1", (5_000, 5_000)).save(folder / "large.png")
    with LLM(str(folder)) as llm:
        for name in ("missing.png", "cut.png"):
            with refused("the prompt", name):
                next(llm.stream(question(tmp_path, name)))
        with refused("the prompt", "pixels"):
            next(llm.stream(question(folder, *["large.png"] * 5)))
        token = llm.hf.convert_tokens_to_ids("<|image_pad|>")
        with refused(f"token {token}", "images"):
            llm.generate([[1, token, 2]])
        with refused("prompt 0", "context", "smaller"):
            llm.chat(question(folder, *["a.png"] * 90), SAMPLING)
        assert llm.chat(question(folder, "a.png"), SAMPLING).finish_reason == "length"
    with LLM(str(folder), media_root=str(tmp_path)) as llm, refused("a.png", "media_root"):
        llm.chat(question(folder, "a.png"))
    with LLM(str(folders("paligemma"))) as llm, refused("prompt_logprobs"):
        llm.logprobs("a")


def test_a_live_trainer_sends_its_tower_too(run_in_process, folders, tmp_path):
    folder = folders("qwen2_5_vl")
    trainer, asked = Trainer(folder), question(folder, "a.png")
    with LLM(str(folder), dtype="float32", kv_memory=1 << 24) as llm:
        before = llm.chat(asked, SAMPLING)
        trainer.step()
        Refit(llm, trainer.stream, trainer.chunks, Canary([[5, 9, 30, 31, 12]]), 30_000)()
        after = llm.chat(asked, SAMPLING)
    trainer.bridge.save_hf_pretrained(trainer.chunks, tmp_path / "export", show_progress=False)
    with LLM(str(tmp_path / "export"), dtype="float32", kv_memory=1 << 24) as fresh:
        expected = fresh.chat(asked, SAMPLING)
    assert after.logprobs == expected.logprobs != before.logprobs


@pytest.mark.slow
@pytest.mark.skipif(not BESIDE.is_dir(), reason="no torchvision: run scripts/extra.sh vlm")
def test_answers_about_videos_are_those_of_transformers():
    ran = ran_beside(
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/functional_tests/inference/video_prompts.py",
    )
    assert ran.returncode == 0, ran.stdout[-4000:]


def test_the_token_of_an_image_as_text_is_refused(run_in_process, folders):
    """Gemma's template writes another token, so nothing but the count tells them apart."""
    asked = question(folders("gemma3_vl"), "a.png")
    asked[0]["content"][1]["text"] = "What does <image_soft_token> mean?"
    with (
        LLM(str(folders("gemma3_vl"))) as llm,
        refused("prompt 0", "5 image or audio tokens", "need 4"),
    ):
        llm.chat(asked, SAMPLING)


def test_an_image_that_only_the_processor_refuses(run_in_process, folders):
    """A side of Pixtral's would have no pixel."""
    folder = folders("mistral3")
    Image.new("RGB", (200, 1)).save(folder / "thin.png")
    with LLM(str(folder)) as llm, refused("prompt 0", "thin.png", "200x1"):
        llm.chat(question(folder, "thin.png"), SAMPLING)
