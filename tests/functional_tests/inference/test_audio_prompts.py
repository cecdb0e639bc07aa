# SPDX-License-Identifier: Apache-2.0
"""Questions about audio: answers are those of transformers, in every layout, from Python, the CLI and the server."""

import base64
import json

import pytest
import torch
import transformers

from megatron.bridge.cli.main import main
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.prompts import as_messages
from megatron.bridge.inference.requests import Sampling
from tests import toy_audio
from tests.functional_tests.inference import test_server
from tests.refusals import refused
from tests.unit_tests.project.tree import ROOT

pytestmark = pytest.mark.skipif(not toy_audio.HAS_AUDIO, reason=toy_audio.NO_AUDIO)

NAMES = ("qwen2_audio", "voxtral")
QUESTION = "Which digit?"
TOKENS = 6
SAMPLING = Sampling(max_new_tokens=TOKENS, ignore_eos=True, logprobs=0)
FILES = {"a.wav": (0.5, 16_000, 1), "b.mp3": (0.9, 44_100, 2), "c.flac": (0.31, 8_000, 1)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in NAMES:
        made[name] = toy_audio.save(name, tmp_path_factory.mktemp(name), weights=True)
        for place, (file, facts) in enumerate(FILES.items()):
            toy_audio.recording(made[name], file, *facts, seed=10 * place)
    return made


def question(folder, *names):
    return as_messages(QUESTION, recordings=[folder / name for name in names])


def hf_answer(name, folder, *files):
    """Transformers' tokens, and their log-probabilities."""
    parts = [{"type": "audio", "audio": file} for file in files]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    inputs = toy_audio.their_inputs(name, folder, messages, folder)
    model = getattr(transformers, toy_audio.ROWS[name].model)
    model = model.from_pretrained(folder, dtype=torch.float32).eval()
    found = model.generate(
        **inputs,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    logprobs = [
        float(logits[0].log_softmax(-1)[token])
        for logits, token in zip(found.logits, tokens, strict=True)
    ]
    return tokens, logprobs


def assert_same(completion, expected):
    tokens, logprobs = expected
    assert completion.tokens == tokens
    assert [one.logprob for one in completion.logprobs] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("files", [["a.wav"], ["b.mp3", "c.flac"]], ids=len)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_transformers(run_in_process, folders, name, files):
    folder = folders[name]
    with LLM(str(folder)) as llm:
        completion = llm.chat(question(folder, *files), SAMPLING)
        other = llm.chat(question(folder, "a.wav", "b.mp3", "c.flac"), SAMPLING)
    assert_same(completion, hf_answer(name, folder, *files))
    assert abs(other.logprobs[0].logprob - completion.logprobs[0].logprob) > 1e-5


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_in_every_layout(two_workers, folders, name, layout):
    expected = hf_answer(name, folders[name], "b.mp3", "c.flac")
    for completion in two_workers.run(answered, folders[name], layout):
        assert_same(completion, expected)


def answered(folder, layout):
    with LLM(str(folder), **layout) as llm:
        return llm.chat(question(folder, "b.mp3", "c.flac"), SAMPLING)


def test_answers_do_not_depend_on_company(run_in_process, folders):
    folder = folders["qwen2_audio"]
    prompts = [
        question(folder, "a.wav", "b.mp3"),
        question(folder),
        "The weather",
        question(folder, "c.flac"),
    ]
    with LLM(str(folder)) as llm:
        alone = [next(llm.generate_each([prompt], SAMPLING))[0] for prompt in prompts]
    with LLM(str(folder), max_requests=3) as llm:
        together = [one[0] for one in llm.generate_each(prompts, SAMPLING)]
    assert together == alone


def test_the_command_answers_about_files(run_in_process, folders, tmp_path, capsys):
    folder = folders["voxtral"]
    options = ["--dtype", "float32", "--max-new-tokens", str(TOKENS), "--ignore-eos"]
    command = ["generate", str(folder), *options, "--temperature", "0"]
    tokens, _ = hf_answer("voxtral", folder, "b.mp3", "c.flac")
    expected = transformers.AutoTokenizer.from_pretrained(folder).decode(
        tokens, skip_special_tokens=True
    )
    files = ["--audio", str(folder / "b.mp3"), "--audio", str(folder / "c.flac")]
    assert main([*command, "--prompt", QUESTION, *files]) == 0
    assert capsys.readouterr().out == expected + "\n"
    lines = tmp_path / "prompts.jsonl"
    parts = [{"type": "audio", "audio": file} for file in ("b.mp3", "c.flac")]
    content = [*parts, {"type": "text", "text": QUESTION}]
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    assert main([*command, "--prompts", str(lines), "--media-root", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected
    assert main([*command, "--prompts", str(lines), *files]) == 1
    assert "--audio is for --prompt" in capsys.readouterr().err


def test_mistakes_in_prompts_are_named(run_in_process, folders):
    folder = folders["qwen2_audio"]
    with LLM(str(folder)) as llm:
        with refused("no.wav", "is not a file"):
            llm.chat(question(folder, "no.wav"), SAMPLING)
        with refused("an image", "audio only"):
            llm.chat(as_messages(QUESTION, images=[folder / "a.wav"]), SAMPLING)
        token = llm.hf.convert_tokens_to_ids("<|AUDIO|>")
        with refused(str(token), "no audio"):
            next(llm.generate_each([[1, token, 2]], SAMPLING))


@pytest.mark.skipif(not test_server.BESIDE.is_dir(), reason="no server: run scripts/extra.sh serve")
def test_the_server_answers_about_audio_in_requests(folders):
    """Requests are those of OpenAI's own client."""
    from openai import BadRequestError, OpenAI

    name = "qwen2_audio"
    folder = folders[name]
    tokens, logprobs = hf_answer(name, folder, "a.wav", "b.mp3")
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    expected = hf.decode(tokens, skip_special_tokens=True)
    beside = f"{ROOT / 'src'}:{test_server.BESIDE}:{toy_audio.BESIDE}"
    with test_server.started(folder, PYTHONPATH=beside) as (_, address):
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
        assert client.models.list().data[0].model_extra["input_modalities"] == ["text", "audio"]

        def ask(*parts):
            content = [*parts, {"type": "text", "text": QUESTION}]
            return client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=TOKENS,
                logprobs=True,
                extra_body={"ignore_eos": True},
            )

        def given(file):
            data = base64.b64encode((folder / file).read_bytes()).decode()
            return {"type": "input_audio", "input_audio": {"data": data, "format": file[-3:]}}

        answer = ask(given("a.wav"), given("b.mp3"))
        assert answer.choices[0].message.content == expected
        assert [one.logprob for one in answer.choices[0].logprobs.content] == pytest.approx(
            logprobs, abs=1e-4
        )
        url = "data:audio/wav;base64," + given("a.wav")["input_audio"]["data"]
        again = ask({"type": "audio_url", "audio_url": {"url": url}}, given("b.mp3"))
        assert again.choices[0].message.content == expected
        wrong = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        path = {"type": "audio_url", "audio_url": {"url": f"file://{folder}/a.wav"}}
        for part, words in ((wrong, "cannot be read"), (image, "audio only"), (path, "data:audio")):
            with pytest.raises(BadRequestError, match=words):
                ask(part)
        assert ask(given("a.wav"), given("b.mp3")).choices[0].message.content == expected
