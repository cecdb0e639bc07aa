# SPDX-License-Identifier: Apache-2.0
"""``megatron-bridge serve`` as OpenAI's client sees it: the engine's answers, streamed or not, and refusals."""

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import psutil
import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.inference.llm import LLM
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.utils.errors import UserError
from tests import toy_vision
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_adapter_bank import adapters  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_llm import model_dir  # noqa: F401 - a fixture
from tests.unit_tests.project.tree import ROOT

BESIDE = ROOT / ".cache/serve"  # where scripts/extra.sh installs it
if BESIDE.is_dir():
    sys.path.append(str(BESIDE))

pytestmark = pytest.mark.skipif(
    find_spec("uvicorn") is None or find_spec("openai") is None,
    reason="no server: run scripts/extra.sh serve",
)
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
"""A PNG of one red pixel."""
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
KEY = "0123456789abcdef0123"
OPTIONS = ["--dtype", "float32", "--kv-memory", "16MB", "--port", "0", "--name", "toy"]


@contextmanager
def started(directory, *options, **environment):
    """A server and its address; it is ended if the test has not done so."""
    command = [
        sys.executable,
        "-m",
        "megatron.bridge.cli.main",
        "serve",
        str(directory),
        *OPTIONS,
        *options,
    ]
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{BESIDE}", "OMP_NUM_THREADS": "1"}
    variables = os.environ | path | environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving toy at http://127.0.0.1:"), line
            yield process, line.split()[-1]
        finally:
            if process.poll() is None:
                process.terminate()


@pytest.fixture(scope="module")
def server(model_dir, adapters):  # noqa: F811
    named = [it for name, path in adapters.items() for it in ("--adapters", f"{name}={path}")]
    with started(model_dir, *named, MEGATRON_BRIDGE_API_KEY=KEY) as made:
        yield made


@pytest.fixture(scope="module")
def address(server):
    return server[1]


@pytest.fixture(scope="module")
def client(address):
    from openai import OpenAI

    return OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def llm(model_dir, adapters):  # noqa: F811
    with LLM(str(model_dir), adapters=adapters, dtype="float32", kv_memory=1 << 24) as made:
        yield made


def fetch(address, path, body=None, key=KEY, **headers):
    """Status, headers and text of a request."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(address + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def refusal(address, path, body):
    status, _, text = fetch(address, path, body)
    return status, json.loads(text)["error"]["message"]


# ---- completions ------------------------------------------------------------------------------------------------


def test_completions_are_the_engines(client, llm):
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=5, n=2, logprobs=3, stop=["e"])
    expected = [choice for text in TEXT[:1] for choice in llm.generate(text, sampling)[0]]
    found = client.completions.create(
        model="toy",
        prompt=TEXT[0],
        max_tokens=20,
        seed=5,
        n=2,
        logprobs=3,
        stop="e",
        temperature=1.0,
    )
    assert [choice.text for choice in found.choices] == [one.text for one in expected]
    assert [choice.finish_reason for choice in found.choices] == [
        one.finish_reason for one in expected
    ]
    for choice, one in zip(found.choices, expected, strict=True):
        starts = [len(llm.hf.decode(one.tokens[:count])) for count in range(len(one.tokens))]
        if one.finish_reason == "stop":  # what stands at or behind the stop text is cut with it
            starts = [start for start in starts if start < len(one.text)]
        shown = len(starts)
        assert choice.logprobs.token_logprobs == [it.logprob for it in one.logprobs][:shown]
        assert choice.logprobs.tokens == [llm.hf.decode([token]) for token in one.tokens[:shown]]
    assert found.usage.prompt_tokens == len(expected[0].prompt_tokens)
    assert found.usage.completion_tokens == sum(len(one.tokens) for one in expected)


def test_several_prompts_texts_and_ids(client, llm):
    ids = [llm.hf.encode(text) for text in TEXT]
    one = client.completions.create(model="toy", prompt=TEXT, temperature=0)
    other = client.completions.create(model="toy", prompt=ids, temperature=0)
    expected = [choices[0].text for choices in llm.generate(TEXT, Sampling(max_new_tokens=16))]
    assert [it.text for it in one.choices] == [it.text for it in other.choices] == expected


def test_streamed_completions_join_to_the_whole(client):
    options = {
        "model": "toy", "prompt": TEXT[:2], "max_tokens": 24, "temperature": 1.2, "seed": 3, "n": 2, "logprobs": 2
    }  # fmt: skip
    whole = client.completions.create(**options)
    pieces = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert pieces[-1].usage == whole.usage
    for expected in whole.choices:
        mine = [it for piece in pieces for it in piece.choices if it.index == expected.index]
        assert "".join(it.text for it in mine) == expected.text
        assert [it.finish_reason for it in mine if it.finish_reason] == [expected.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for it in mine for x in getattr(it.logprobs, name)] == getattr(
                expected.logprobs, name
            ), name


@pytest.mark.parametrize("stop", ["e", "er", "a"])
def test_streams_hold_back_scores_of_text_that_may_be_cut(client, stop):
    options = {"model": "toy", "prompt": TEXT[0], "max_tokens": 40, "seed": 5, "temperature": 1.0}
    options |= {"logprobs": 1, "stop": stop}
    (whole,) = client.completions.create(**options).choices
    pieces = [it for one in client.completions.create(**options, stream=True) for it in one.choices]
    assert "".join(it.text for it in pieces) == whole.text
    scores = [score for it in pieces for score in it.logprobs.token_logprobs]
    assert scores == whole.logprobs.token_logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(client, llm, stream):
    ids = llm.hf.encode(TEXT[1])
    found = client.completions.create(
        model="toy", prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0, stream=stream
    )
    choices = [it for piece in found for it in piece.choices] if stream else found.choices
    scores = [score for it in choices for score in it.logprobs.token_logprobs]
    expected = [one.logprob for one in llm.logprobs([ids])[0]]
    assert scores[0] is None
    assert scores[1:-1] == expected
    tops = [top for it in choices for top in it.logprobs.top_logprobs]
    best = [one.is_most_likely for one in llm.logprobs([ids])[0]]
    assert [
        score == max(top.values()) for score, top in zip(scores[1:-1], tops[1:-1], strict=True)
    ] == best
    assert "".join(it.text for it in choices).startswith(llm.hf.decode(ids))


# ---- chat -------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Who?"}]


def test_chat_is_the_engines(client, llm):
    expected = llm.chat(MESSAGES, Sampling(max_new_tokens=20, logprobs=2))
    found = client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_completion_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert [it.logprob for it in choice.logprobs.content] == [
        it.logprob for it in expected.logprobs
    ]
    assert [len(it.top_logprobs) for it in choice.logprobs.content] == [2] * len(expected.tokens)
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}],
        }
    ]
    other = client.chat.completions.create(
        model="toy", messages=parts, max_tokens=20, temperature=0
    )
    assert other.choices[0].message.content == expected.text


def test_streamed_chat_joins_to_the_whole(client):
    options = {
        "model": "toy",
        "messages": MESSAGES,
        "max_tokens": 30,
        "temperature": 1.3,
        "seed": 4,
        "n": 2,
    }
    whole = client.chat.completions.create(**options)
    pieces = list(client.chat.completions.create(**options, stream=True))
    for expected in whole.choices:
        mine = [it for piece in pieces for it in piece.choices if it.index == expected.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(it.delta.content or "" for it in mine) == expected.message.content
        assert mine[-1].finish_reason == expected.finish_reason


def test_answers_follow_a_schema(client):
    """Each choice and each row of a batch; other requests run meanwhile."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    plain = {"model": "toy", "messages": MESSAGES, "seed": 1, "max_tokens": 60}
    options = {**plain, "n": 4, "response_format": named}
    free = client.chat.completions.create(**plain).choices[0].message.content
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(client.chat.completions.create, **plain)
        answers = [threads.submit(client.chat.completions.create, **options) for _ in range(2)]
        assert running.result().choices[0].message.content == free
    choices = [choice for answer in answers for choice in answer.result().choices]
    over = [choice for choice in choices if choice.finish_reason == "stop"]
    assert len(over) >= 4
    assert all(type(json.loads(choice.message.content)["a"]) is int for choice in over)
    stream = client.chat.completions.create(**options, stream=True)
    texts = ["", "", "", ""]
    for piece in stream:
        texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answers[0].result().choices]
    (refused,) = [
        refusal(str(client.base_url).removesuffix("/v1/"), "/v1/chat/completions", body)
        for body in [{**plain, "structured_outputs": {"regex": "a("}}]
    ]
    assert refused[0] == 400
    assert "regex" in refused[1]


# ---- the rest ---------------------------------------------------------------------------------------------------


def test_models_and_tokenizer(client, address, llm):
    assert [model.id for model in client.models.list()] == ["toy", "small", "wide"]
    assert client.models.retrieve("small").parent == "toy"
    assert client.models.retrieve("toy").max_model_len == llm.max_context
    ids = llm.hf.encode(TEXT[3])
    found = json.loads(
        fetch(address, "/tokenize", {"prompt": TEXT[3], "return_token_strs": True})[2]
    )
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["token_strs"] == llm.hf.convert_ids_to_tokens(ids)
    chat = json.loads(fetch(address, "/tokenize", {"messages": MESSAGES})[2])
    assert llm.hf.decode(chat["tokens"]).endswith("<|turn|>assistant\n")
    plain = json.loads(
        fetch(address, "/tokenize", {"prompt": "Who?", "add_special_tokens": False})[2]
    )
    assert json.loads(fetch(address, "/detokenize", {"tokens": plain["tokens"]})[2]) == {
        "prompt": "Who?"
    }
    info = json.loads(fetch(address, "/tokenizer_info")[2])
    assert (info["eos_token"], info["chat_template"]) == (llm.hf.eos_token, llm.hf.chat_template)


def test_health_metrics_and_page(client, address):
    client.completions.create(
        model="toy", prompt="To", max_tokens=3, temperature=0, extra_body={"ignore_eos": True}
    )
    assert fetch(address, "/health", key=None)[0] == 200
    metrics = fetch(address, "/metrics")[2]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="toy"}} 0.0' in metrics
    for name in (
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
    ):
        (line,) = [line for line in metrics.splitlines() if line.startswith(f"vllm:{name}{{")]
        assert float(line.split()[-1]) > 0
    status, headers, page = fetch(address, "/", key=None)
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "http" not in page.replace("http-equiv", "")  # nothing is loaded from elsewhere
    assert "light-dark(" in page
    status, headers, html = fetch(address, "/render", {"text": "**bold** <b>not</b>"})
    assert (status, html) == (200, "<p><strong>bold</strong> &lt;b&gt;not&lt;/b&gt;</p>\n")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert fetch(address, "/render", {"text": "x"}, key=None)[0] == 401


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {"prompt": "x", "model": "other"}, 404, ["other", "toy"]),
        ("completions", {"prompt": "x", "temprature": 1}, 400, ["temprature", "temperature"]),
        ("completions", {"prompt": ""}, 400, ["prompt"]),
        ("completions", {"prompt": []}, 400, ["prompt"]),
        ("completions", {"prompt": [[]]}, 400, ["prompt"]),
        ("completions", {"prompt": ["x"] * 65}, 400, ["65", "64"]),
        ("completions", {"prompt": [10**9]}, 400, ["1000000000", "vocabulary"]),
        ("completions", {"prompt": [10**30], "echo": True}, 400, ["vocabulary"]),
        ("completions", {"prompt": [-1]}, 400, ["-1", "vocabulary"]),
        ("completions", {"prompt": [1] * 120, "max_tokens": 20}, 400, ["120", "128", "shorten"]),
        ("completions", {"prompt": "x", "max_tokens": -1}, 400, ["max_tokens"]),
        ("completions", {"prompt": "x", "n": 17}, 400, ["n:", "16"]),
        ("completions", {"prompt": "x", "logprobs": 21}, 400, ["logprobs", "20"]),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, 400, ["stop", "16"]),
        ("completions", {"prompt": "x", "stop": "a" * 257}, 400, ["stop", "256"]),
        ("completions", {"prompt": "x", "stop": ""}, 400, ["stop"]),
        ("completions", b'{"prompt": "x", "temperature": NaN}', 400, ["temperature"]),
        ("completions", {"prompt": "x", "temperature": "1"}, 400, ["temperature"]),
        ("completions", {"prompt": "x", "seed": 1 << 70}, 400, ["seed"]),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, ["logit_bias", "a"]),
        ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, 400, ["99999", "vocabulary"]),
        ("completions", {"prompt": "x", "best_of": 3}, 400, ["best_of"]),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, ["suffix"]),
        ("completions", {"prompt": "x", "stream_options": {}}, 400, ["stream_options", "stream"]),
        ("completions", {"prompt": "x", "stop_token_ids": [10**6]}, 400, ["1000000"]),
        ("completions", b"{", 400, ["JSON"]),
        ("completions", b'{"prompt": "\xff"}', 400, ["body"]),
        ("completions", b"[" * 50000, 400, ["body"]),
        ("completions", b'{"prompt": "x", "\\ud800": 1}', 400, ["unicode"]),
        ("completions", b'{"prompt": "\\ud800"}', 400, ["prompt"]),
        ("chat/completions", {"messages": []}, 400, ["messages"]),
        ("chat/completions", {"messages": [{"role": "usr", "content": "x"}]}, 400, ["usr", "user"]),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, ["content"]),
        (
            "chat/completions",
            {"messages": MESSAGES, "functions": [{}]},
            400,
            ["functions", "tools"],
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "chat_template": "x"},
            400,
            ["--chat-template"],
        ),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, ["logprobs"]),
        (
            "chat/completions",
            {"messages": MESSAGES, "response_format": {"type": "json"}},
            400,
            ["json_object"],
        ),
        (
            "chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            400,
            ["data:image", "'x'"],
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            400,
            ["images", "remove them"],
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x" * 4000}]},
            400,
            ["128", "shorten"],
        ),
    ],
)
def test_bad_requests_are_named(address, path, body, status, words):
    found, message = refusal(address, f"/v1/{path}", body)
    assert found == status
    assert all(word in message for word in words), message


def test_who_is_let_in(address):
    body = {"prompt": "x", "max_tokens": 1}
    for key in (None, "", KEY[:-1], KEY + "x", "ä"):
        status, _, text = fetch(
            address, "/v1/completions", body, key and key.encode().decode("latin-1")
        )
        assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
    for size in (
        40 << 20,
        1 << 20,
    ):  # of the first, the client is still sending when it is too large
        status, message = refusal(address, "/v1/completions", b'{"prompt": "' + b"x" * size + b'"}')
    assert status == 413
    assert "1048576" in message
    assert refusal(address, "/v1/nothing", {})[0] == 404
    assert refusal(address, "/v1/models", {})[0] == 405
    assert (
        "access-control-allow-origin"
        not in fetch(address, "/v1/models", Origin="https://example.com")[1]
    )


def test_random_bodies_are_answered_or_refused(address):
    """Random values in all fields: never a failure of the server, never a hang."""
    rng = random.Random(0)
    values = [None, True, False, 0, 1, -1, 2, 0.5, 1e-320, 1e308, 1 << 64, "", "x", "ä🙂", [], [1], ["x"],
              [[1, 2]], {}, {"1": 1}, {"type": "text"}, {"include_usage": True}, MESSAGES,
              [None], [MESSAGES]]  # fmt: skip
    names = ["prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop",
             "stop_token_ids", "ignore_eos", "stream", "stream_options", "presence_penalty", "frequency_penalty",
             "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "echo", "best_of", "user",
             "add_special_tokens", "tokens", "nothing"]  # fmt: skip
    count = int(os.environ.get("FUZZ_REQUESTS", "150"))

    def ask(number):
        path = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")[number % 4]
        base = ({"prompt": "x"}, {"messages": MESSAGES}, {"prompt": "x"}, {"tokens": [5]})[
            number % 4
        ]
        body = {**base, **({"max_tokens": 3} if number % 4 < 2 else {})}
        body |= {rng.choice(names): rng.choice(values) for _ in range(rng.choice([0, 1, 1, 2, 3]))}
        return fetch(address, path, body)[0], body

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, range(count)))
    assert not [body for status, body in answers if status not in (200, 400)]
    assert {status for status, _ in answers} == {200, 400}


# ---- load -------------------------------------------------------------------------------------------------------


def prompt_of(number):
    rng = random.Random(number)
    options = {
        "max_tokens": rng.randint(1, 40),
        "seed": number,
        "temperature": rng.choice([0, 1.0]),
    }
    options["model"] = rng.choice(["toy", "small", "wide"])
    return {
        "prompt": [rng.randrange(7, 300) for _ in range(rng.randint(1, 60))],
        "logprobs": 1,
        **options,
    }


async def one_client(client, number, expected, problems):
    """Ask, and behave well or badly; note an answer that is not the one of the request alone."""
    options, kind = prompt_of(number % len(expected)), number % 4
    if kind == 0:
        found = (await client.completions.create(**options)).choices[0]
        answer = found.text, found.logprobs.token_logprobs
    else:
        stream = await client.completions.create(**options, stream=True)
        text, scores = "", []
        async for piece in stream:
            text += piece.choices[0].text
            scores += piece.choices[0].logprobs.token_logprobs
            if kind == 1:  # leaves after the first piece
                await stream.close()
                return
            if kind == 2:  # reads slowly
                await asyncio.sleep(0.01)
        answer = text, scores
    if answer != expected[number % len(expected)]:
        problems.append((number, answer))


async def load(address, requests, clients, expected):
    from openai import AsyncOpenAI

    problems = []
    room = asyncio.Semaphore(clients)
    async with AsyncOpenAI(
        base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300
    ) as client:

        async def run(number):
            async with room:
                await one_client(client, number, expected, problems)

        await asyncio.gather(*(run(number) for number in range(requests)))
    return problems


def check_load(address, llm, requests, clients, distinct):
    expected = []
    for number in range(distinct):
        options = prompt_of(number)
        how = Sampling(
            options["max_tokens"], options["temperature"], seed=options["seed"], logprobs=1
        )
        how = replace(how, adapter_name=None if options["model"] == "toy" else options["model"])
        alone = llm.generate([options["prompt"]], how)[0][0]
        expected.append((alone.text, [one.logprob for one in alone.logprobs]))
    assert asyncio.run(load(address, requests, clients, expected)) == []
    for _ in range(100):  # those that left are forgotten at the next step
        metrics = fetch(address, "/metrics")[2]
        if 'vllm:kv_cache_usage_perc{model_name="toy"} 0.0' in metrics:
            break
    else:
        pytest.fail("the caches are not empty")
    assert 'vllm:num_requests_waiting{model_name="toy"} 0.0' in metrics


def test_answers_under_load_are_those_of_the_request_alone(address, llm):
    check_load(address, llm, requests=48, clients=16, distinct=12)


LONG_LOAD = 45_000


@pytest.mark.slow
def test_answers_under_long_load(address, llm):
    """64 clients, some 10 minutes; the memory of all processes does not grow with the requests."""
    here = psutil.Process().children(recursive=True)
    check_load(address, llm, 1000, 64, 50)
    before = sum(process.memory_info().rss for process in here)
    check_load(address, llm, LONG_LOAD, 64, 50)
    assert sum(process.memory_info().rss for process in here) < before * 1.02 + (16 << 20)


# ---- beginning and end ------------------------------------------------------------------------------------------

LONG = {
    "prompt": "x",
    "max_tokens": 100,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
    "n": 16,
}


def streaming(address, key=None):
    """An answer that the engine has begun, or that waits for its turn there."""
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(LONG).encode(), headers
    )
    return urllib.request.urlopen(request, timeout=120)


def killed(model_dir, number, rank):  # noqa: F811
    """A server of two ranks, of which one is killed in the middle of a stream; its port."""
    options = ["--tp", "2", "--port", str(number), "--max-requests", "1", "--max-queue", "40"]
    with started(model_dir, *options) as (process, address):
        assert fetch(address, "/v1/models", key=None, Host="evil.example")[0] == 403
        first, second = streaming(address), streaming(address)
        status, headers, _ = fetch(address, "/v1/completions", LONG, key=None)
        assert (status, headers["retry-after"]) == (429, "1")
        ranks = [
            it
            for it in psutil.Process(process.pid).children()
            if "spawn_main" in " ".join(it.cmdline())
        ]
        assert len(ranks) == 2
        ranks[rank].kill()
        for answer in (first, second):
            last = answer.read().decode().rstrip().splitlines()[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_ended"
        assert process.wait(timeout=60) == 1
    return int(address.rsplit(":", 1)[1])


def test_a_killed_rank_ends_the_server(model_dir):  # noqa: F811
    killed(model_dir, 0, 1)


@pytest.mark.slow
def test_ranks_killed_again_and_again(model_dir):  # noqa: F811
    port = 0
    for number in range(50):
        port = killed(model_dir, port, number % 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], ["0.0.0.0", "--api-key-file"]),
        (["--port", "70000"], ["70000", "65535"]),
        (["--api-key-file", "nowhere"], ["nowhere"]),
        (["--host", "192.0.2.1", "--api-key-file", "KEY"], ["192.0.2.1", "--port"]),
    ],
)
def test_bad_options_are_named(model_dir, tmp_path, monkeypatch, capsys, options, words):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "KEY").write_text(KEY)
    assert main(["serve", str(model_dir), *OPTIONS, *options]) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_weak_keys_are_refused(model_dir, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("MEGATRON_BRIDGE_API_KEY", "short")
    assert main(["serve", str(model_dir), *OPTIONS]) == 1
    assert "MEGATRON_BRIDGE_API_KEY" in (error := capsys.readouterr().err)
    assert "16" in error


def test_the_script_of_the_api(model_dir, capsys):  # noqa: F811
    module = importlib.util.spec_from_file_location(
        "script", ROOT / "scripts/inference/openai_server.py"
    )
    script = importlib.util.module_from_spec(module)
    module.loader.exec_module(script)
    with pytest.raises(UserError, match="--hf_model_path"):
        script.main([])
    options = ["--hf_model_path", str(model_dir), "--host", "0.0.0.0", "--cache-mla-latents"]
    with pytest.raises(UserError, match="--api-key-file"):
        script.main(options)
    assert "--cache-mla-latents has no effect" in capsys.readouterr().err


def test_sigterm_finishes_what_runs(server):
    """The last test of the server that the others use."""
    process, address = server
    answers = [streaming(address, KEY) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    for answer in answers:
        assert answer.read().decode().rstrip().endswith("data: [DONE]")
    assert process.wait(timeout=120) == 0
    with pytest.raises(urllib.error.URLError):
        fetch(address, "/health")


def test_images_of_requests(tmp_path):
    """A server of a vision-language model reads the images that a request holds."""
    folder = toy_vision.save("qwen2_5_vl", tmp_path, weights=True)
    content = [{"type": "text", "text": "What is it?"}, IMAGE]
    messages = [{"role": "user", "content": content}]
    sampling = Sampling(max_new_tokens=4, ignore_eos=True, logprobs=0)
    with LLM(str(folder), dtype="float32", kv_memory=1 << 24) as llm:
        expected = llm.chat(messages, sampling)
    body = {
        "messages": messages,
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
    }
    with started(folder, MEGATRON_BRIDGE_API_KEY=KEY) as (_, address):
        (served,) = json.loads(fetch(address, "/v1/models")[2])["data"]
        assert served["input_modalities"] == ["text", "image"]
        found = json.loads(fetch(address, "/v1/chat/completions", body)[2])
        assert found["usage"]["prompt_tokens"] == len(expected.prompt_tokens)
        logprobs = [one["logprob"] for one in found["choices"][0]["logprobs"]["content"]]
        assert logprobs == [one.logprob for one in expected.logprobs]
        for url in (
            "http://127.0.0.1/a.png",
            "/etc/hostname",
            "file:///etc/hostname",
            "data:text/plain,x",
        ):
            wrong = [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            ]
            status, message = refusal(address, "/v1/chat/completions", {"messages": wrong})
            assert (status, "data:image/png" in message) == (400, True)
        broken = [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
                ],
            }
        ]
        assert "messages" in refusal(address, "/v1/chat/completions", {"messages": broken})[1]
        assert refusal(address, "/v1/chat/completions", b"[" * (1 << 21))[0] == 400
