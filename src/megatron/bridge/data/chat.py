# SPDX-License-Identifier: Apache-2.0
"""A conversation as the text that its chat template makes of it, and the parts of that text to be learnt.

A template with ``{% generation %}`` marks says itself what the assistant writes. Of any other, the conversation up
to an answer is rendered twice: without the answer but with the prompt to generate one, and with it. Where the
first is a beginning of the second, and the second of the whole, what lies between them is the answer, its
end-of-turn mark included. Where not (templates that rewrite earlier turns do that), no span can be told from the
text, and the record is refused: learning from everything would look just as plausible in a loss curve.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron.bridge.data.messages import Chat
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "last", "completion", "everything"]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation.

    Attributes:
        text: all of it.
        spans: first and behind-last character of each part to be learnt, in order.
    """

    text: str
    spans: list[Span]


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template.

    Args:
        hf: tokenizer of transformers.
        template: a template instead of the tokenizer's own.
        options: values that the template reads, such as ``enable_thinking``.

    Raises:
        UserError: there is no template.
    """

    def __init__(
        self,
        hf: "PreTrainedTokenizerBase",
        template: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._hf = hf
        self._template = template
        self._options = options or {}
        if template is None and not hf.chat_template:
            raise UserError(
                f"the tokenizer {hf.name_or_path} has no chat template: give one with dataset.chat_template, or "
                f"use prompt and completion instead of messages"
            )

    def render(self, chat: Chat, train_on: TrainOn, where: str) -> Rendered:
        """The text of ``chat`` and what ``train_on`` says is to be learnt of it.

        Raises:
            UserError: the template refuses the conversation, or its answers cannot be told from the rest.
        """
        if train_on == "everything":
            text, _ = self._text(chat, len(chat.messages), False, where)
            return Rendered(text, [(0, len(text))])
        template = self._source(chat, where)
        if GENERATION.search(template):
            return self._marked(chat, train_on, where)
        text, _ = self._text(chat, len(chat.messages), False, where)
        wanted = _wanted(chat, train_on)
        return Rendered(text, [self._span(chat, place, text, where) for place in wanted])

    def prompt(self, chat: Chat, where: str) -> str:
        """The text of the conversation that asks for an answer."""
        return self._text(chat, len(chat.messages), True, where)[0]

    def _marked(self, chat: Chat, train_on: TrainOn, where: str) -> Rendered:
        text, spans = self._text(chat, len(chat.messages), False, where)
        answers = chat.answers
        wanted = _wanted(chat, train_on)
        if wanted == answers:
            return Rendered(text, spans)
        if len(spans) != len(answers):
            raise UserError(
                f"{where}: the template marks {len(spans)} parts as generated for {len(answers)} assistant "
                f"messages, so {_choice(train_on)} cannot tell which is which: use train_on=assistant, no weights"
            )
        return Rendered(text, [span for place, span in zip(answers, spans, strict=True) if place in wanted])

    def _span(self, chat: Chat, place: int, text: str, where: str) -> Span:
        if place == 0:
            raise UserError(
                f"{where}: the conversation begins with an answer, so the prompt for it is not known: put a "
                f"message before it, or give it weight 0"
            )
        before, _ = self._text(chat, place, True, where)
        through, _ = self._text(chat, place + 1, False, where)
        if not through.startswith(before):
            raise _ambiguous(where, place, "the prompt for it is rendered differently once it is there")
        if not text.startswith(through):
            raise _ambiguous(where, place, "it is rendered differently once more messages follow")
        return len(before), len(through)

    def _text(self, chat: Chat, count: int, generate: bool, where: str) -> tuple[str, list[Span]]:
        """The first ``count`` messages as text, and the parts marked as generated."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its hints promise one string
        template = self._source(chat, where)
        values = {**self._hf.special_tokens_map, **self._options, **chat.template_options}
        try:
            texts, spans = render(
                [chat.messages[:count]],
                tools=list(chat.tools) if chat.tools else None,
                chat_template=template,
                return_assistant_tokens_mask=bool(GENERATION.search(template)),
                add_generation_prompt=generate,
                **values,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            part = "" if count == len(chat.messages) else f", given its first {count} messages"
            raise UserError(f"{where}: the chat template refuses the conversation{part}: {error}") from error
        return texts[0], spans[0] if spans else []

    def _source(self, chat: Chat, where: str) -> str:
        try:
            return self._hf.get_chat_template(self._template, chat.tools)  # pyright: ignore[reportArgumentType]
        except ValueError as error:  # several named templates, none of them the default
            raise UserError(f"{where}: {' '.join(str(error).split())[:200]}") from error


def _wanted(chat: Chat, train_on: TrainOn) -> list[int]:
    answers = chat.answers
    if train_on == "last":
        answers = answers[-1:]
    elif train_on == "completion":
        answers = [place for place in answers if place >= chat.completion_start]
    return [place for place in answers if place not in chat.excluded]


def _choice(train_on: TrainOn) -> str:
    return f"train_on={train_on}" if train_on != "assistant" else "weight=0"


def _ambiguous(where: str, place: int, reason: str) -> UserError:
    return UserError(
        f"{where}: what the assistant wrote in message {place + 1} cannot be told from the rest of the chat "
        f"template's text, because {reason}: set dataset.split_turns=true (each answer becomes a sample, as at "
        f"inference) or dataset.train_on=last, or give a dataset.chat_template with {{% generation %}} marks"
    )
