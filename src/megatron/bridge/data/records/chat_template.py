# SPDX-License-Identifier: Apache-2.0
"""Render conversations with chat templates, and find the text of the assistant in the result.

A template with ``{% generation %}`` marks marks the assistant's text itself. For any other template, the
conversation up to an answer is rendered twice: without the answer but with the generation prompt, and with the
answer. If the first text is a prefix of the second, and the second of the whole, then the text between them is the
answer, including its end-of-turn token. If not (some templates rewrite earlier turns), no span of the text is
certain, and the record is refused: training on everything would look just as plausible in a loss curve.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron.bridge.data.media.references import MediaReference
from megatron.bridge.data.records.formats import Chat, Message
from megatron.bridge.data.records.media_parts import as_parts
from megatron.bridge.data.records.template_rendering import render_conversation
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "last", "completion", "everything"]
PROBE = "the answer"
_STRINGS = re.compile(r"\bis (not )?string\b")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True)
class RenderedChat:
    text: str
    spans: list[Span]  # first character and end of each part that is in the loss, in order
    unused: list[str]  # the fields that the template does not render, one entry per message
    images: tuple[
        MediaReference, ...
    ] = ()  # the images and videos whose placeholders are expanded, in order


@dataclass(eq=False)
class ChatTemplate:
    """Renders conversations with a tokenizer's chat template."""

    hf: "PreTrainedTokenizerBase"
    template: str | None = None  # a template instead of the tokenizer's own
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # such as ``enable_thinking``
    parts: bool = False
    """Whether the template is a vision-language model's. A template that never checks whether content is a string
    (Llava's, SmolVLM's) gets lists of parts for text, too."""
    _checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.template is None and not self.hf.chat_template:
            raise UserError(
                f"the tokenizer {self.hf.name_or_path} has no chat template: set dataset.chat_template, or use prompt "
                f"and completion instead of messages"
            )

    def render(self, chat: Chat, train_on: TrainOn, location: str) -> RenderedChat:
        """Render ``chat`` and find the part that ``train_on`` selects."""
        text, marked = self._text(chat, len(chat.messages), False, location)
        unused = self._unused(chat, text, location)
        if train_on == "everything":
            return RenderedChat(text, [(0, len(text))], unused)
        selected = _selected_answers(chat, train_on)
        if GENERATION.search(self._source(chat, location)):
            spans = _choose_spans(marked, chat, selected, train_on, location)
        else:
            spans = [self._span(chat, index, text, location) for index in selected]
        self._refuse_header(chat, location)
        return RenderedChat(text, spans, unused)

    def prompt(self, chat: Chat, location: str, continues: bool = False) -> str:
        """Render the conversation as a prompt.

        Args:
            chat: The conversation.
            location: File and line, or field of a request, for messages.
            continues: End inside of the last message, which the model continues, instead of with
                the generation prompt.
        """
        count = len(chat.messages)
        return self._text(chat, count, not continues, location, continues)[0]

    def _unused(self, chat: Chat, text: str, location: str) -> list[str]:
        """Return the names of the fields that the template does not render."""

        def render(changed_chat: Chat) -> str:
            return self._text(changed_chat, len(changed_chat.messages), False, location)[0]

        unused = list(unused_fields(chat, text, render))
        for name, index in unused:
            if (
                index in chat.answers
                and index not in chat.excluded
                and not chat.messages[index]["content"]
            ):
                raise UserError(
                    f"{location}: message {index + 1} has {name} and no content, and the chat template does not "
                    f"render {name}, so the model would learn to answer with nothing: set dataset.chat_template "
                    f"to one that does, or give the message weight 0"
                )
        return [name for name, _ in unused]

    def _refuse_header(self, chat: Chat, location: str) -> None:
        """Refuse a template whose loss covers the text that it writes before every answer, such as the role."""
        if self._checked:
            return
        self._checked = True
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": PROBE}
        probe = replace(chat, messages=[question, answer])
        try:
            asked, prompted = (
                self._text(probe, 1, generate, location)[0] for generate in (False, True)
            )
            text, marked = self._text(probe, 2, False, location)
        except UserError:  # the template expects other messages
            return
        start = marked[0][0] if marked else len(prompted)
        header = text.removeprefix(asked).partition(PROBE)[0].strip().partition("\n")[0]
        if header and text[start:].partition(PROBE)[0].strip().startswith(header):
            raise UserError(
                f"{location}: the loss would cover {header!r}, which the template writes before each answer, though "
                f"inference gives it to the model: use a dataset.chat_template that also writes it for "
                f"add_generation_prompt, and outside of {{% generation %}} marks"
            )

    def _span(self, chat: Chat, index: int, text: str, location: str) -> Span:
        if index == 0:
            raise UserError(
                f"{location}: the conversation begins with an answer, so the prompt for it is unknown: put a message "
                f"before it, or give it weight 0"
            )
        before, _ = self._text(chat, index, True, location)
        through, _ = self._text(chat, index + 1, False, location)
        if not through.startswith(before):
            raise _ambiguous_answer(
                location,
                index,
                "the template renders the prompt differently when the answer is added",
            )
        if not text.startswith(through):
            raise _ambiguous_answer(
                location, index, "the template changes the answer once more messages follow"
            )
        return len(before), len(through)

    def _text(
        self, chat: Chat, count: int, generate: bool, location: str, continues: bool = False
    ) -> tuple[str, list[Span]]:
        """Render the first ``count`` messages; return the text and the parts that are marked as generated."""
        template = self._source(chat, location)
        messages = chat.messages[:count]
        if self.parts and not _STRINGS.search(template):
            messages = [
                {**message, "content": as_parts(message["content"])} for message in messages
            ]
        variables = {**self.hf.special_tokens_map, **self.options, **chat.template_options}
        try:
            return render_conversation(
                template,
                messages,
                chat.tools,
                {
                    "add_generation_prompt": generate,
                    "continue_final_message": continues,
                    **variables,
                },
                find_spans=bool(GENERATION.search(template)),
            )
        except Exception as error:  # the template is a program of its own
            part = "" if count == len(chat.messages) else f", given its first {count} messages"
            reason = one_line(error) or "it needs too much memory"
            raise UserError(
                f"{location}: the chat template refuses the conversation{part}: {reason}"
            ) from error

    def _source(self, chat: Chat, location: str) -> str:
        try:
            return self.hf.get_chat_template(self.template, chat.tools)  # pyright: ignore[reportArgumentType]
        except ValueError as error:  # several named templates, none of them the default
            raise UserError(f"{location}: {one_line(error)}") from error


def template_text(template: str | None) -> str | None:
    """Return the template in a config, or the content of the file that the config names."""
    if template is None or "{{" in template or "{%" in template:
        return template
    return read_text(Path(template), f"dataset.chat_template={template}")


def _selected_answers(chat: Chat, train_on: TrainOn) -> list[int]:
    """Return the indices of the answers in the loss."""
    answers = chat.answers
    if train_on == "last":
        answers = answers[-1:]
    elif train_on == "completion":
        answers = [index for index in answers if index >= chat.completion_start]
    return [index for index in answers if index not in chat.excluded]


def _choose_spans(
    spans: list[Span], chat: Chat, selected: list[int], train_on: TrainOn, location: str
) -> list[Span]:
    answers = chat.answers
    if selected == answers:
        return spans
    if len(spans) != len(answers):
        choice = "weight=0" if train_on == "assistant" else f"dataset.train_on={train_on}"
        raise UserError(
            f"{location}: the template marks {len(spans)} parts as generated for {len(answers)} assistant messages, "
            f"so {choice} cannot be applied: use dataset.train_on=assistant without weights"
        )
    return [span for index, span in zip(answers, spans, strict=True) if index in selected]


def _ambiguous_answer(location: str, index: int, reason: str) -> UserError:
    return UserError(
        f"{location}: the answer in message {index + 1} cannot be located in the rendered conversation, because "
        f"{reason}: set dataset.split_turns=true (each answer becomes a sample, as at inference) or "
        f"dataset.train_on=last, or give a dataset.chat_template with {{% generation %}} marks"
    )


RenderChat = Callable[[Chat], str]


class UnusedField(NamedTuple):
    """A field of a conversation that the template does not render."""

    name: str  # ``tools``, or the key of a message and its role
    message: int | None  # index of the message; None for the tools


def unused_fields(chat: Chat, text: str, render: RenderChat) -> Iterator[UnusedField]:
    """Yield the fields of ``chat`` without an effect on ``text``."""
    if chat.tools and _renders_same(text, replace(chat, tools=None), render):
        yield UnusedField("tools", None)
    for index, message in enumerate(chat.messages):
        for key, value in message.items():
            rendered = isinstance(value, str) and value.strip() in text
            if key == "role" or rendered or value in ([], {}):
                continue
            if _renders_same(text, _without_field(chat, index, key), render):
                yield UnusedField(f"{key} of role {message['role']}", index)


def _renders_same(text: str, shorter: Chat, render: RenderChat) -> bool:
    try:
        return render(shorter) == text
    except UserError:  # the template needs the field, so it reads the field
        return False


def _without_field(chat: Chat, index: int, key: str) -> Chat:
    message: Message = {name: value for name, value in chat.messages[index].items() if name != key}
    if key == "content":
        message["content"] = ""
    return replace(chat, messages=[*chat.messages[:index], message, *chat.messages[index + 1 :]])
