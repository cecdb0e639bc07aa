# SPDX-License-Identifier: Apache-2.0
"""Chat templates end within their limits, in the main thread and in others, and render as in transformers."""

import re
import threading
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megatron.bridge.data.records.template_process import PROCESS
from megatron.bridge.data.records.template_rendering import render_conversation
from megatron.bridge.data.records.template_sandbox import limited, render_here

MESSAGES = [
    {"role": "user", "content": "2 * 3?"},
    {"role": "assistant", "content": "sechs \N{GRINNING FACE} ü"},
]
OPTIONS = {"add_generation_prompt": True, "bos_token": "<s>", "template": "a variable"}
TEMPLATES = {
    "fixture": Path("tests/fixtures/v0.1/base/chat_template.jinja").read_text(),
    "arithmetic": "{{ 2 ** 10 * 3 }} {{ 'ab' * 3 }} {{ 3 * [1] }} {{ 1.5 * 2 }} {{ -2 ** 3 }} {{ True * 'a' }}",
    "marks": (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}"
        "{% endfor %}{{ tools | tojson(indent=2) }}{{ template }}{% if add_generation_prompt %}go{% endif %}"
    ),
    "tools of the environment": (
        "{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n * 7 %}{% if loop.last %}{% break %}"
        "{% endif %}{% endfor %}{{ ns.n }}{{ dict(a=1) }}{{ strftime_now('%Y') }}"
    ),
}
ENDLESS = {
    "a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a sum in one operation": "{{ ([[1] * 1000] * 1000000) | sum(start=[]) | length }}",
}
HUGE = {
    "a power tower": ("{{ 9 ** (9 ** 9) }}", "bits"),
    "a power of a message": ("{{ (messages | length + 7) ** (9 ** 9) }}", "bits"),
    "squares": (
        "{% set ns = namespace(n=3) %}{% for a in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "bits",
    ),
    "a repeated text": ("{{ 'a' * 10 ** 10 }}", "length"),
    "a repeated list": ("{{ 10 ** 10 * [1] }}", "length"),
    "a wide text": ("{{ 'a'.ljust(10 ** 11) }}", "^"),
    "a long text": ("{{ 'a' * 9000000 }}", "9,000,000 characters"),
}


def in_thread(function, *args):
    """The result of a call in another thread, or its exception."""
    outcome = []

    def call():
        try:
            outcome.append(function(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return outcome[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_spans_are_those_of_transformers(name):
    template, tools = TEMPLATES[name], [{"name": "add", "parameters": {}}]
    texts, spans = render_jinja_template(
        [MESSAGES],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=name == "marks",
        **OPTIONS,
    )
    expected = (texts[0], spans[0] if spans else [])
    arguments = (template, MESSAGES, tools, OPTIONS, name == "marks")
    assert tuple(render_conversation(*arguments)) == expected
    assert tuple(in_thread(render_conversation, *arguments)) == expected


@pytest.mark.parametrize("name", HUGE)
def test_huge_values_are_refused(name):
    template, words = HUGE[name]
    with pytest.raises((OverflowError, MemoryError), match=words):
        render_conversation(template, MESSAGES, None, {})
    error = in_thread(render_conversation, template, MESSAGES, None, {})
    assert isinstance(error, MemoryError | ValueError)
    assert re.search(words, str(error))


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_ended_for_other_threads(name):
    """The system ends the process, and the next conversation gets another one."""
    arguments = {"template": ENDLESS[name], "messages": MESSAGES, "tools": None, "options": {}}
    error = in_thread(PROCESS.render, {**arguments, "find_spans": False}, 0.5)
    assert isinstance(error, TimeoutError), error
    assert "takes more than" in str(error)
    arguments = (TEMPLATES["arithmetic"], MESSAGES, None, {})
    assert in_thread(render_conversation, *arguments) == render_conversation(*arguments)


def test_the_main_thread_ends_a_loop():
    message = "takes more than 0 s"
    with pytest.raises(TimeoutError, match=message), limited(cpu_seconds=0.2):
        render_here(ENDLESS["a loop"], MESSAGES, None, {}, False)
