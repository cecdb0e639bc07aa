# SPDX-License-Identifier: Apache-2.0
"""``/v1/responses`` with OpenAI's own client: texts, calls, reasoning, streams, and refusals."""

import json

import pytest
from transformers import AutoTokenizer

from tests.scripted_server import HAS_SERVER, scripted_server
from tests.unit_tests.data.conftest import tokenizer_dir  # noqa: F401 - a fixture
from tests.unit_tests.inference.test_chat_requests import CALL, TEMPLATE, USER, WEATHER

pytestmark = pytest.mark.skipif(not HAS_SERVER, reason="no server: run scripts/extra.sh serve")

TOOL = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def hf(tokenizer_dir):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ask(hf, answer, **options):
    with scripted_server(hf, [answer]) as (client, engine):
        response = client.responses.create(model="toy", **{"input": "Rome?", **options})
        return response, engine.submitted[0]


def chat_prompt(hf, messages, **options):
    """The prompt of the same request of ``/v1/chat/completions``."""
    with scripted_server(hf, ["."]) as (client, engine):
        client.chat.completions.create(model="toy", messages=messages, **options)
        return engine.submitted[0]


def test_a_text(hf):
    response, (prompt, sampling) = ask(
        hf, "Sun.", instructions="Be brief.", max_output_tokens=30, temperature=0.5, store=False
    )
    assert response.output_text == "Sun."
    assert response.status == "completed"
    assert response.usage.output_tokens == len(hf.encode("Sun.", add_special_tokens=False))
    messages = [{"role": "system", "content": "Be brief."}, USER]
    expected = chat_prompt(hf, messages, max_completion_tokens=30, temperature=0.5)
    assert (prompt, sampling) == expected


def test_an_answer_that_is_cut(hf):
    response, _ = ask(hf, "It rains and rains.", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_an_agent(hf):
    """The client's own items go back as they are: reasoning, a call, and its result."""
    texts = ["<think>Hm.</think>" + CALL, "Rain."]
    with scripted_server(hf, texts) as (client, engine):
        history = [{"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}]
        first = client.responses.create(model="toy", input=history, tools=[TOOL])
        reasoning, call = first.output
        assert reasoning.content[0].text == "Hm."
        assert json.loads(call.arguments) == {"city": "Rome", "days": 2}
        history += [item.model_dump(exclude_none=True) for item in first.output]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        second = client.responses.create(model="toy", input=[*history, result], tools=[TOOL])
        assert second.output_text == "Rain."
    function = {"name": "weather", "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    tool = {"role": "tool", "tool_call_id": call.call_id, "content": "It rains."}
    messages = [USER, {**answer, "reasoning_content": "Hm."}, tool]
    assert engine.submitted[1][0] == chat_prompt(hf, messages, tools=[WEATHER])[0]


@pytest.mark.parametrize("text", ["Sun.", "<think>Hm.</think>Sun." + CALL, CALL, ""])
def test_streams_end_with_the_response(hf, text):
    """Events join to the items; OpenAI's client keeps its own account of them."""
    options = {"model": "toy", "input": "Rome?", "tools": [TOOL]}
    with scripted_server(hf, [text, text]) as (client, _):
        whole = client.responses.create(**options)
        with client.responses.stream(**options) as stream:
            events = list(stream)
            final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == final.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")

    def facts(response):
        items = [
            item.model_dump(exclude={"id", "call_id", "parsed_arguments"})
            for item in response.output
        ]
        for item in items:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return items

    assert facts(final) == facts(whole)
    assert final.usage == whole.usage


def test_a_structured_answer(hf):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    _, (_, sampling) = ask(hf, "{}", text={"format": form})
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert sampling.grammar == chat_prompt(hf, [USER], response_format=response_format)[1].grammar
    assert sampling.grammar


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"previous_response_id": "resp_1"}, ["previous_response_id", "input"]),
        ({"background": True}, ["background"]),
        ({"include": ["file_search_call.results"]}, ["include", "file_search_call.results"]),
        ({"tools": [{"type": "web_search"}]}, ["web_search"]),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, ["input_file"]),
        ({"input": []}, ["input"]),
        ({"tool_choice": {"type": "function", "name": "wether"}}, ["wether"]),
    ],
)
def test_what_is_not_there_is_named(hf, options, words):
    from openai import BadRequestError

    with scripted_server(hf, []) as (client, _), pytest.raises(BadRequestError) as error:
        client.responses.create(model="toy", **{"input": "a", **options})
    assert all(word in str(error.value) for word in words), str(error.value)
