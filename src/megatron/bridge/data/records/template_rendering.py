# SPDX-License-Identifier: Apache-2.0
"""Render conversations with chat templates within limits of time and memory.

In the main thread a template runs in this process, and a signal ends it. No signal reaches other threads, such as
those of a server, so their templates run in a process of their own, which the operating system ends.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.bridge.data.records.template_process import PROCESS
from megatron.bridge.data.records.template_sandbox import RenderedText, limited, render_here


def render_conversation(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    find_spans: bool = False,
) -> RenderedText:
    """Render a conversation with transformers' function, within limits of time and memory.

    Args:
        template: The source of the chat template.
        messages: The messages of the conversation.
        tools: JSON schemas of the tools.
        options: ``add_generation_prompt``, ``continue_final_message``, and variables of the template.
        find_spans: Whether the template marks the text of the assistant with ``{% generation %}``.

    Raises:
        TimeoutError: The template takes too long.
        MemoryError: The template needs too much memory.
        Exception: The template refuses the conversation, or is wrong.
    """
    if threading.current_thread() is threading.main_thread():
        with limited():
            return render_here(template, messages, tools, options, find_spans)
    return PROCESS.render(
        {
            "template": template,
            "messages": list(messages),
            "tools": tools,
            "options": dict(options),
            "find_spans": find_spans,
        }
    )
