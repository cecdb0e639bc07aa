# SPDX-License-Identifier: Apache-2.0
"""OpenAI's batch files through ``generate``: the server's answers, errors as lines, and resuming."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron.bridge.cli.main import main
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from tests.scripted_server import HAS_SERVER, LocalEngine, scripted_server
from tests.toy_models import LLAMA, make_llama
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_chat_requests import TEMPLATE, USER

pytestmark = pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")

OPTIONS = ["--dtype", "float32", "--kv-memory", "32MB", "--name", "toy", "--no-graphs"]
CHAT = "/v1/chat/completions"
DAYS = {"days": {"enum": [1, 2, 3]}}
SCHEMA = {"type": "object", "properties": DAYS, "required": ["days"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
BODIES = [
    (CHAT, {"messages": [USER], "max_tokens": 8, "temperature": 0}),
    (CHAT, {"messages": [USER], "max_tokens": 6, "seed": 4, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "seed": 1, "max_tokens": 200,
            "parallel_tool_calls": False, **NO_THINKING}),
    (CHAT, {"messages": [USER], "seed": 2, "max_tokens": 150, **NO_THINKING,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    (CHAT, {"messages": [USER], "max_tokens": 6, "temperature": 0, "tools": [TOOL]}),
    ("/v1/completions", {"prompt": TEXT[:2], "max_tokens": 6, "seed": 3, "echo": True, "n": 2}),
    ("/v1/completions", {"prompt": TEXT[0], "max_tokens": 20, "temperature": 0, "stop": "e", "logprobs": 2}),
    ("/v1/responses", {"input": "Rome?", "max_output_tokens": 6, "temperature": 0}),
]  # fmt: skip
REFUSED = [
    (CHAT, {"messages": [USER], "temprature": 1}, 400, "temperature"),
    (CHAT, {"messages": [USER], "model": "gpt-5"}, 404, "toy"),
    (CHAT, {"messages": [USER], "max_tokens": 5000}, 400, "context"),
    (CHAT, {"messages": [USER], "stream": True}, 400, "stream"),
    ("/v1/completions", {"prompt": [5, 99999]}, 400, "vocabulary"),
]
NO_REQUESTS = [
    ('{"custom_id": "a", ', "JSON"),
    ('{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}', "POST"),
    ('{"custom_id": "y", "method": "POST", "url": "/v1/images", "body": {}}', "/v1/chat/completions"),
    ('{"custom_id": "0", "method": "POST", "url": "/v1/completions", "body": {}}', "earlier"),
    ('{"method": "POST", "url": "/v1/completions", "body": {}}', "custom_id"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer_dir):  # noqa: F811
    directory = tmp_path_factory.mktemp("model")
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    hf.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    hf.chat_template = TEMPLATE
    make_llama(directory, vocab_size=len(hf), max_position_embeddings=1024)
    (directory / "chat_template.jinja").unlink()
    hf.save_pretrained(directory)
    return directory


def write_batch(path, bodies):
    requests = [
        {"custom_id": str(index), "method": "POST", "url": url, "body": body}
        for index, (url, body) in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))


def run(model_dir, batch, output, *options):
    arguments = [str(model_dir), "--prompts", str(batch), "--output", str(output)]
    return main(["generate", *arguments, *OPTIONS, *options])


@pytest.fixture(scope="module")
def answers(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    write_batch(folder / "in.jsonl", BODIES)
    assert run(model_dir, folder / "in.jsonl", folder / "out.jsonl") == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def without_ids(value):
    """The value without what differs between two equal requests: ids and times."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        left_out = ("id", "created", "created_at", "prompt_tokens_details", "input_tokens_details")
        return {key: without_ids(item) for key, item in value.items() if key not in left_out}
    return value


def test_answers_are_the_servers(model_dir, answers):
    with (
        LLM(str(model_dir), dtype="float32", kv_memory=1 << 25, graphs=False) as llm,
        scripted_server(llm.hf, [], context=1024, engine=LocalEngine(llm.engine)) as (client, _),
    ):
        for (url, body), line in zip(BODIES, answers, strict=True):
            served = client.post(url.removeprefix("/v1"), body=body, cast_to=object)
            assert (line["error"], line["response"]["status_code"]) == (None, 200)
            assert without_ids(line["response"]["body"]) == without_ids(served)


def test_clients_read_the_bodies(answers):
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    kinds = {CHAT: ChatCompletion, "/v1/completions": Completion, "/v1/responses": Response}
    read = []
    for index, ((url, _), line) in enumerate(zip(BODIES, answers, strict=True)):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["custom_id"] == str(index)
        read.append(kinds[url].model_validate(line["response"]["body"], strict=True))
    assert len({line["id"] for line in answers}) == len(answers)
    (call,) = read[2].choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["days"] in (1, 2, 3)
    assert json.loads(read[3].choices[0].message.content)["days"] in (1, 2, 3)
    assert len(read[5].choices) == 4


def test_experts_of_tokens_are_in_the_line(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "experts")
    (tmp_path / "experts" / "model.safetensors.index.json").unlink(missing_ok=True)
    for path in (tmp_path / "experts").glob("*.safetensors"):
        path.unlink()
    sizes = {"vocab_size": len(AutoTokenizer.from_pretrained(model_dir))}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = Qwen3MoeConfig(**{**LLAMA, **sizes, **experts})
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    body = {"prompt": TEXT[0], "max_tokens": 3, "temperature": 0, "return_routed_experts": True}
    write_batch(tmp_path / "in.jsonl", [("/v1/completions", body)])
    assert run(tmp_path / "experts", tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    (choice,) = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"]
    found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    with LLM(str(tmp_path / "experts"), dtype="float32", kv_memory=1 << 25) as llm:
        ((expected,),) = llm.generate(TEXT[0], Sampling(max_new_tokens=3, routed_experts=True))
    assert np.array_equal(found, expected.routed_experts)
    assert found.shape[1:] == (4, 2)


def test_errors_are_lines(model_dir, tmp_path, capsys):
    bodies = [*BODIES[:1], *((url, body) for url, body, *_ in REFUSED), *BODIES[:1]]
    batch = tmp_path / "in.jsonl"
    write_batch(batch, bodies)
    with batch.open("a") as file:
        file.writelines(text + "\n" for text, _ in NO_REQUESTS)
    assert run(model_dir, batch, tmp_path / "out.jsonl") == 0
    assert f"{len(REFUSED) + len(NO_REQUESTS)} errors" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[len(REFUSED) + 1]
    assert first["response"]["body"]["choices"] == last["response"]["body"]["choices"]
    for line, (_, _, status, word) in zip(lines[1:], REFUSED, strict=False):
        assert line["response"]["status_code"] == status
        assert word in line["response"]["body"]["error"]["message"]
    for line, (_, word) in zip(lines[len(REFUSED) + 2 :], NO_REQUESTS, strict=True):
        assert line["response"] is None
        assert word in line["error"]["message"]


def test_a_killed_batch_goes_on(model_dir, tmp_path, answers, capsys):
    batch, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(batch, BODIES)
    done = [json.dumps(line) + "\n" for line in answers[:6]]
    output.write_text("".join(done) + '{"id": "batch_')
    assert run(model_dir, batch, output) == 0
    assert "8 answers" in capsys.readouterr().out
    lines = output.read_text().splitlines(keepends=True)
    assert lines[:6] == done
    assert [json.loads(line)["id"] for line in lines] == [line["id"] for line in answers]
    write_batch(batch, [*BODIES[:2], *BODIES[3:]])
    assert run(model_dir, batch, output) == 1
    assert "another --output" in capsys.readouterr().err


def test_options_that_bodies_have_instead_are_refused(model_dir, tmp_path, capsys):
    batch = tmp_path / "in.jsonl"
    write_batch(batch, BODIES[:1])
    for option in (["--temperature", "1"], ["-n", "2"], ["--chat"], ["--media-root", "x"]):
        assert run(model_dir, batch, tmp_path / "out.jsonl", *option) == 1
        assert option[0] in capsys.readouterr().err


def test_name_is_for_batch_files(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", str(model_dir), "--prompt", "a", "--name", "toy"]) == 1
    assert "--name" in capsys.readouterr().err
