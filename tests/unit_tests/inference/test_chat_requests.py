# SPDX-License-Identifier: Apache-2.0
"""What agents send, with OpenAI's own client: histories, tools, reasoning, and fields that change no token."""

import http.client
import io
import json
import re
import socket
import sys
import time

import pytest
from transformers import AutoTokenizer

from tests.pages import blocks
from tests.scripted_server import HAS_SERVER, scripted_server
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.project.tree import ROOT

pytestmark = pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{{ message.tool_call_id }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": "Rome?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def hf(tokenizer_dir):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ask(hf, text, **options):
    """The answer to one request, and what the engine got."""
    with scripted_server(hf, [text]) as (client, engine):
        options = {"messages": [USER], **options}
        answer = client.chat.completions.create(model="toy", **options)
        return answer.choices[0], engine.submitted[0]


def join(pieces):
    """The message that the deltas of a stream make, as OpenAI's documentation joins them."""
    message = {"content": "", "reasoning_content": "", "tool_calls": {}}
    reasons = []
    for piece in pieces:
        (choice,) = piece.choices
        reasons.append(choice.finish_reason)
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            known = message["tool_calls"].setdefault(call.index, {"name": "", "arguments": ""})
            known["id"] = call.id or known.get("id")
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""
    assert [reason for reason in reasons if reason] == reasons[-1:]
    return message, reasons[-1]


NO_EFFECT = {
    "tools": [], "tool_choice": "none", "parallel_tool_calls": False, "user": "u", "store": True,
    "metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "s", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "reasoning_effort": "high", "response_format": {"type": "text"},
    "modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "functions": [],
    "function_call": "none", "web_search_options": None, "audio": None, "verbosity": "medium",
}  # fmt: skip


def test_fields_that_change_no_token_are_accepted(hf):
    _, (prompt, sampling) = ask(hf, "Sun")
    nulls = dict.fromkeys(NO_EFFECT)
    for body in (NO_EFFECT, nulls):
        choice, (same_prompt, same_sampling) = ask(hf, "Sun", extra_body=body)
        assert choice.message.content == "Sun"
        assert (same_prompt, same_sampling) == (prompt, sampling)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"functions": [{"name": "x"}]}, ["functions", "tools"]),
        ({"use_beam_search": True}, ["use_beam_search"]),
        ({"temprature": 1}, ["temprature", "temperature"]),
        ({"logit_bias": {"5": 101}}, ["logit_bias[5]", "-100", "100"]),
        ({"tool_choice": "required"}, ["tool_choice", "tools"]),
        ({"tool_choice": {"type": "function", "function": {"name": "wether"}}, "tools": [WEATHER]},
         ["wether", "weather"]),
        ({"tools": [WEATHER, WEATHER]}, ["tools", "name"]),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, ["tools", "name"]),
        ({"chat_template_kwargs": {"enable_thinkng": True}}, ["enable_thinkng", "enable_thinking"]),
        ({"chat_template_kwargs": {"chat_template": "x"}}, ["chat_template", "server"]),
        ({"response_format": {"type": "json_schema"}}, ["json_schema"]),
        ({"max_tokens": 70000}, ["max_tokens=70000", "65536"]),
        ({"max_completion_tokens": 70000}, ["max_completion_tokens=70000", "65536"]),
    ],
)  # fmt: skip
def test_what_would_change_tokens_is_named(hf, body, words):
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as error:
        ask(hf, "Sun", extra_body=body)
    assert all(word in error.value.message for word in words), error.value.message


def test_bodies_with_an_infinite_bias_are_refused(hf):
    with scripted_server(hf, []) as (client, _):
        for bias in ("1e39", "1e999", "Infinity"):
            body = b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": %s}}'
            status, text = post(client, "chat/completions", body % bias.encode())
            assert (status, "logit_bias" in text) == (400, True)


def post(client, path, body, method="POST", **headers):
    """Status and text of a request without a content type."""
    url = client.base_url.join(path)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
    connection.putrequest(method, url.path)
    for name, value in {"Content-Length": str(len(body or b"")), **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_an_agent_gives_back_what_it_got(hf):
    """The client's own objects are a history: calls, results, and the final answer."""
    texts = ["I look.\n" + CALL, "Sun", "Rain"]
    with scripted_server(hf, texts) as (client, engine):
        messages = [USER]
        for _ in range(2):
            answer = client.chat.completions.create(
                model="toy", messages=messages, tools=[WEATHER], tool_choice="auto"
            )
            message = answer.choices[0].message
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "hot"}
                for call in message.tool_calls or ()
            ]
        dumped = [it if isinstance(it, dict) else it.model_dump() for it in [*messages, USER]]
        client.chat.completions.create(model="toy", messages=dumped)
    prompt, _ = engine.submitted[2]
    call_id = messages[1].tool_calls[0].id
    assert f"assistant\nI look.{CALL}" in prompt
    assert f"tool\nhot{call_id}" in prompt
    assert "assistant\nSun" in prompt
    assert json.loads(messages[1].tool_calls[0].function.arguments) == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_reasoning_and_content(hf, stream):
    text = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    with scripted_server(hf, [text]) as (client, engine):
        thinking = client.chat.completions
        hf.chat_template = TEMPLATE
        answer = thinking.create(model="toy", messages=[USER], tools=[WEATHER], stream=stream)
        if stream:
            message, reason = join(answer)
            calls = list(message["tool_calls"].values())
            assert len({call["id"] for call in calls}) == 2
            found = [(call["name"], call["arguments"]) for call in calls]
            texts = (message["reasoning_content"], message["content"])
        else:
            choice = answer.choices[0]
            reason = choice.finish_reason
            found = [(it.function.name, it.function.arguments) for it in choice.message.tool_calls]
            texts = (choice.message.reasoning_content, choice.message.content)
    assert texts == ("Hm.", "I look.")
    assert found == [("weather", '{"city": "Rome", "days": 2}')] * 2
    assert reason == "tool_calls"
    assert '"name": "weather"' in engine.submitted[0][0]


def test_content_without_text_is_null(hf):
    choice, _ = ask(hf, CALL, tools=[WEATHER])
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"


def test_only_one_call_if_the_client_asks_for_it(hf):
    choice, _ = ask(hf, CALL + CALL, tools=[WEATHER], parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1


def test_tools_that_must_not_be_called_are_not_rendered(hf):
    choice, (prompt, _) = ask(hf, CALL, tools=[WEATHER], tool_choice="none")
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
    assert "<tools>" not in prompt


def test_a_template_without_tools_is_named(hf, monkeypatch):
    from openai import BadRequestError

    monkeypatch.setattr(hf, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(BadRequestError, match="does not render tools"):
        ask(hf, "x", tools=[WEATHER])


def test_switches_of_the_template(hf):
    for options in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        choice, (prompt, _) = ask(hf, "<think>x</think>", **options)
        assert prompt.endswith("<think>\n\n</think>\n\n")
        assert choice.message.content == "<think>x</think>"
    choice, (prompt, _) = ask(hf, "<think>x</think>y", reasoning_effort="high")
    assert not prompt.endswith("</think>\n\n")
    assert choice.message.reasoning_content == "x"


def test_equal_prompts_with_one_seed_get_one_seed(hf):
    with scripted_server(hf, ["a", "b"]) as (client, engine):
        client.completions.create(model="toy", prompt=["Who?", "Who?"], seed=3)
    assert [sampling.seed for _, sampling in engine.submitted] == [3, 3]


def test_small_questions_are_answered(hf):
    body = json.dumps({"messages": [USER], "max_tokens": 1}).encode()
    with scripted_server(hf, ["Sun"]) as (client, _):
        assert post(client, "chat/completions", body)[0] == 200
        status, text = post(client, "chat/completions", body, Origin="https://example.com")
        assert (status, "application/json" in text) == (415, True)
        form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
        status, text = post(client, "chat/completions", body, **form)
        assert (status, "Content-Type: application/json" in text) == (415, True)
        assert post(client, "/ping", None, "GET")[0] == 200
        assert "version" in post(client, "/version", None, "GET")[1]
        assert post(client, "chat/completions", None, "OPTIONS") == (204, "")


# ---- calls that must be made, over a real engine with random weights ----------------------------------------------


def grammar_follows(hf, grammar, text):
    """Whether a grammar allows a text and then its end."""
    from megatron.bridge.inference.grammars import GrammarMatcher, Grammars

    grammars = Grammars(hf, len(hf), frozenset({hf.eos_token_id}))
    grammars.check(grammar)
    matcher = GrammarMatcher(grammars, grammar)
    tokens = [*hf.encode(text, add_special_tokens=False), hf.eos_token_id]
    return all(matcher.allowed_tokens(tokens[:count])[it] for count, it in enumerate(tokens))


NAMED = {"type": "function", "function": {"name": "weather"}}
TIME = {"type": "function", "function": {"name": "time"}}
FORCED = {
    "hermes": (CALL, "\n" + CALL),
    "mistral": ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}', None),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        '; {"name": "time", "parameters": {}}',
    ),
    "glm45": ('[{"name": "weather", "arguments": {"city": "Rome"}}]', None),
    "harmony": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}',
        None,
    ),
}


@pytest.mark.parametrize("name", FORCED)
def test_calls_that_must_be_made(hf, name):
    call, another = FORCED[name]
    closing = "]" if name == "mistral" else ""
    with scripted_server(hf, [call + closing] * 2, tool_parser=name) as (client, engine):
        for choice in (NAMED, "required"):
            answer = client.chat.completions.create(
                model="toy", messages=[USER], tools=[WEATHER, TIME], tool_choice=choice
            )
            (made,) = answer.choices[0].message.tool_calls
            assert made.function.name == "weather"
            assert answer.choices[0].finish_reason == "tool_calls"
    grammars = [sampling.grammar for _, sampling in engine.submitted]
    for grammar in grammars:
        assert grammar_follows(hf, grammar, call + closing)
        assert not grammar_follows(hf, grammar, "It is sunny")
    assert not grammar_follows(hf, grammars[0], (call + closing).replace("Rome", "Rome\n"))
    assert not grammar_follows(hf, grammars[0], (call + closing).replace("weather", "time"))
    if another is not None:
        found = [grammar_follows(hf, grammar, call + another) for grammar in grammars]
        assert found == [False, True]


def test_formats_of_answers(hf):
    """OpenAI's and vLLM's forms make the same grammar, also behind reasoning."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "x", "schema": schema, "strict": True}
    forms = [
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"guided_json": schema},
    ]
    found = {ask(hf, "x", extra_body=form)[1][1].grammar for form in forms}
    assert len(found) == 1
    for text, follows in {
        '{"a": 1}': True,
        '<think>x</think>\n\n{"a":1}': True,
        '{"a": "1"}': False,
    }.items():
        assert grammar_follows(hf, *found, text) == follows
    for form, text in {
        "regex": ("[ab]+", "ab"),
        "choice": (["x", "y"], "y"),
        "grammar": ('start: "x"', "x"),
        "json_object": (True, "{}"),
    }.items():
        value, good = text
        _, (_, sampling) = ask(hf, "x", extra_body={"structured_outputs": {form: value}})
        assert grammar_follows(hf, sampling.grammar, good)
        assert not grammar_follows(hf, sampling.grammar, "zz")


def test_a_reader_that_stalls_loses_its_request(hf, monkeypatch):
    """Its request ends in the engine, and the log has one line."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    text = "Sun " * 20_000
    with scripted_server(hf, [text], seconds=1.0, ends=False) as (client, engine):
        body = json.dumps({"messages": [USER], "stream": True}).encode()
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            end = time.monotonic() + 30
            while not engine.forgotten and time.monotonic() < end:
                time.sleep(0.05)
        assert set(engine.forgotten) == {0}
    (line,) = log.getvalue().strip().splitlines()
    assert "has not read its answer for 1 s" in line


PAGE = ROOT / "docs/serving.md"


def run_example(title, address, model="toy"):
    """Execute a client of the page against a server at another address, with another name."""
    (source,) = [block.text for block in blocks(PAGE) if block.title == title]
    assert "http://127.0.0.1:8000/v1" in source
    source = source.replace("http://127.0.0.1:8000/v1", address)
    source = re.sub(r'model="\w+"', f'model="{model}"', source)
    exec(compile(source, title, "exec"), {"__name__": "__main__"})


def test_the_client_of_the_page(hf, capsys):
    with scripted_server(hf, ["A toy."]) as (client, engine):
        run_example("ask.py", str(client.base_url))
    assert capsys.readouterr().out == "A toy."
    assert "Who are you?" in engine.submitted[0][0]


def test_the_agent_of_the_page(hf, capsys):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with scripted_server(hf, ["<think>Hm.</think>" + call, "Yes."]) as (client, engine):
        run_example("agent.py", str(client.base_url))
    assert capsys.readouterr().out == "Yes.\n"
    assert "tool\nIt rains in Rome." in engine.submitted[1][0]


def test_an_answer_is_continued(hf):
    """The prompt is that of transformers, and the answer is what follows."""
    begun = [USER, {"role": "assistant", "content": "It rains"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    choice, (prompt, _) = ask(hf, " today.", messages=begun, extra_body=options)
    assert choice.message.content == " today."
    for message in begun:
        message["tool_calls"] = []
    expected = hf.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    assert prompt == expected
    assert prompt.endswith("It rains")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"continue_final_message": True}, ["continue_final_message", "assistant"]),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            ["continue_final_message", "add_generation_prompt"],
        ),
        ({"add_generation_prompt": False}, ["add_generation_prompt", "continue_final_message"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens=9", "max_tokens=8"]),
        ({"min_tokens": 1, "structured_outputs": {"regex": "a"}}, ["min_tokens", "format"]),
    ],
)
def test_contradictions_are_named(hf, body, words):
    from openai import BadRequestError

    with scripted_server(hf, []) as (client, _), pytest.raises(BadRequestError) as error:
        client.chat.completions.create(model="toy", messages=[USER], extra_body=body)
    assert all(word in str(error.value) for word in words)


def test_the_minimum_reaches_the_engine(hf):
    _, (_, sampling) = ask(hf, "Sun", extra_body={"min_tokens": 3})
    assert sampling.min_new_tokens == 3
