# SPDX-License-Identifier: Apache-2.0
"""What a chat template leaves out of a conversation.

A template is a program: it may ignore a message, a key of a message, or the tools. A field counts as rendered if
its text is part of the rendered conversation, or if the rendered conversation changes without the field.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.bridge.data.records.formats import Chat, Message
from megatron.bridge.utils.errors import UserError

RenderChat = Callable[[Chat], str]


class UnusedField(NamedTuple):
    """A field of a conversation that the template does not render."""

    name: str
    """``tools``, or the key of a message and its role."""
    message: int | None
    """Index of the message; None for the tools."""


def unused_fields(chat: Chat, text: str, render: RenderChat) -> Iterator[UnusedField]:
    """The fields of ``chat`` that leave no trace in ``text``.

    Args:
        chat: the conversation.
        text: the conversation as the template renders it.
        render: the template.
    """
    if chat.tools and _same(text, replace(chat, tools=None), render):
        yield UnusedField("tools", None)
    for index, message in enumerate(chat.messages):
        for key, value in message.items():
            rendered = isinstance(value, str) and value.strip() in text
            if key == "role" or rendered or value in ([], {}):
                continue
            if _same(text, _without(chat, index, key), render):
                yield UnusedField(f"{key} of role {message['role']}", index)


def _same(text: str, shorter: Chat, render: RenderChat) -> bool:
    try:
        return render(shorter) == text
    except UserError:  # the template cannot do without the field, so it reads it
        return False


def _without(chat: Chat, index: int, key: str) -> Chat:
    message: Message = {name: value for name, value in chat.messages[index].items() if name != key}
    if key == "content":
        message["content"] = ""
    return replace(chat, messages=[*chat.messages[:index], message, *chat.messages[index + 1 :]])
