# SPDX-License-Identifier: Apache-2.0
"""Convert texts and conversations to tokens.

For prompts with images, the engine needs to know where their tokens are, and which tokens attend to later ones.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.bridge.backends.attention.block_mask import AttentionWindow, looking_ahead
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.positions import Positions
from megatron.bridge.data.media.processing import load_media_processor
from megatron.bridge.data.media.processor import MediaProcessor
from megatron.bridge.data.media.processor_files import chat_template, read_config
from megatron.bridge.data.media.references import MAX_PIXELS, AudioReference, MediaReference
from megatron.bridge.data.records.chat_template import ChatTemplate, RenderedChat
from megatron.bridge.data.records.encoding import expand
from megatron.bridge.data.records.end_tokens import (
    declared_ends,
    end_of_turn,
    end_tokens,
    parse_chat,
)
from megatron.bridge.data.records.formats import Chat
from megatron.bridge.data.tokenizer import encode_beginning
from megatron.bridge.inference.requests import Sampling
from megatron.bridge.models.vision.audio import AUDIO_MODELS
from megatron.bridge.models.vision.merge import look_ahead, media_rows
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class PromptImages:
    references: tuple[MediaReference, ...]
    rows: NDArray[
        np.int64
    ]  # [prompt], index of the feature row that replaces each embedding; -1 for text
    positions: Positions | None = None  # [3, prompt], for models with three position axes

    def positions_of(self, start: int, count: int) -> Positions:
        """Return positions [3, count] from token ``start`` on; generated tokens continue the prompt's positions."""
        assert self.positions is not None
        known = self.positions[:, start : start + count]
        length = self.positions.shape[1]
        later = np.arange(max(start, length), start + count) - length + self.positions.max() + 1
        return np.concatenate((known, np.broadcast_to(later, (3, len(later)))), axis=1)


class TokensWithImages(list[int]):
    """The token ids of a prompt with ``images``, which have placeholder tokens."""

    def __init__(self, tokens: Sequence[int], images: PromptImages) -> None:
        super().__init__(tokens)
        self.images = images


class PromptSight:
    """What the tokens of a prompt attend to in addition to earlier tokens: images and later tokens."""

    def __init__(self, config: Any, has_processor: bool) -> None:
        self._config = config
        self._has_processor = has_processor
        has_tower = getattr(config, "vision", None) is not None
        tokens = config.placeholders if has_tower else ()
        self.placeholders = frozenset(token for token in tokens if token is not None)

    def check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse images without a vision tower, placeholders without images, and attention beyond a window."""
        images = getattr(prompt, "images", None)
        if images is not None and not (self.placeholders and self._has_processor):
            raise UserError(
                "the prompt has images or audio, but the model has no tower for them: remove them"
            )
        if images is None and (image_tokens := self.placeholders.intersection(prompt)):
            raise UserError(
                f"the prompt has the image or audio token {min(image_tokens)}, but no images and no audio: give a "
                "conversation with such parts, or remove the token"
            )
        if sampling.prompt_logprobs is not None and getattr(
            self._config, "bidirectional_prompt", False
        ):
            raise UserError(
                "prompt_logprobs: the prompt has bidirectional attention, so earlier tokens alone do not predict its "
                "tokens: remove it"
            )
        ahead = self._ahead(prompt)
        if ahead is not None and self._config.window_size is not None:
            looking_ahead(torch.tensor([ahead]), AttentionWindow(self._config.window_size[0], 0))

    def facts(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return ``images`` and ``ahead`` of ``scheduler.Text``."""
        return {"images": getattr(prompt, "images", None), "ahead": self._ahead(prompt)}

    def _ahead(self, prompt: Sequence[int]) -> list[int] | None:
        if getattr(self._config, "bidirectional_prompt", False):
            return list(range(len(prompt)))[::-1]
        if getattr(self._config, "bidirectional_images", False) and hasattr(prompt, "images"):
            ahead = look_ahead(
                torch.tensor([prompt]), self._config.image_token_id, self._config.video_token_id
            )
            later_tokens: list[int] = ahead[0].tolist()
            return later_tokens
        return None


__all__ = [
    "PromptImages",
    "PromptReader",
    "PromptSight",
    "TokensWithImages",
    "as_list",
    "as_messages",
    "declared_ends",
    "end_of_turn",
    "end_tokens",
    "is_conversation",
    "parse_chat",
]

Prompt = str | list[int]  # a text, or token ids
Messages = list[dict[str, Any]] | Mapping[str, Any]
"""Messages with ``role`` and ``content``, or a record with ``messages`` and ``images``."""


def is_conversation(prompt: Any) -> bool:
    """Return whether a prompt is ``Messages`` instead of a text or token ids."""
    if isinstance(prompt, Mapping):
        return True
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_messages(
    question: str, images: Sequence[str | Path] = (), recordings: Sequence[str | Path] = ()
) -> list[dict[str, Any]]:
    """Return a user message with a question about the images and recordings at the given paths."""
    files = {"image": images, "audio": recordings}
    parts = [
        {"type": kind, kind: str(Path(path).absolute())}
        for kind, paths in files.items()
        for path in paths
    ]
    return [
        {
            "role": "user",
            "content": [*parts, {"type": "text", "text": question}] if parts else question,
        }
    ]


def _with_argument_texts(chat: Chat) -> Chat:
    """Return a conversation in which the arguments of calls are JSON texts."""
    messages: list[dict[str, Any]] = []
    for message in chat.messages:
        calls: list[dict[str, Any]] = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**function, "arguments": arguments}})
        messages.append({**message, "tool_calls": calls} if calls else message)
    return replace(chat, messages=messages)


def _render_calls(chat: Chat, render: Callable[[Chat], str]) -> str:
    """Render a conversation; templates such as DeepSeek's join the arguments of calls to texts."""
    try:
        return render(chat)
    except UserError:
        if not any(message.get("tool_calls") for message in chat.messages):
            raise
        return render(_with_argument_texts(chat))


class PromptReader:
    """Convert prompts to token ids.

    ``hf`` is the transformers tokenizer, if there is one. ``template`` overrides the templates of image processor and
    tokenizer. ``media`` is None for a model without images. ``share`` is (rank, size) in the group of ranks that divide
    the images.
    """

    def __init__(
        self,
        hf: Any,
        template: str | None = None,
        media: MediaRules | None = None,
        share: tuple[int, int] = (0, 1),
        max_context: int | None = None,
    ) -> None:
        self.hf = hf
        self.media = media
        self.max_context = max_context
        self.template = template or (chat_template(media.processor_path) if media else None)
        self._share = share

    @cached_property
    def modalities(self) -> list[str]:
        """What prompts may consist of."""
        if self.media is None:
            return ["text"]
        kind = read_config(self.media.processor_path).get("model_type")
        return ["text", "audio" if kind in AUDIO_MODELS else "image"]

    @cached_property
    def chat_template(self) -> str | None:
        """The template in use: that of a family whose files have none, or ``template``, or None for the tokenizer's."""
        if self.template or self.media is None or self.hf is None or self.hf.chat_template:
            return self.template
        return self.processor.chat_template

    @cached_property
    def processor(self) -> MediaProcessor:
        """The processor of images or audio, loaded for the first of them."""
        assert self.media is not None, "tokens() has refused images"
        return load_media_processor(self.media, self.hf)

    def tokens(
        self, prompt: Prompt | Messages, location: str, continues: bool = False
    ) -> list[int]:
        """Return the token ids of a text with special tokens, or of a conversation.

        Args:
            prompt: The text, its token ids, or messages.
            location: What messages of errors begin with.
            continues: The last message is the beginning of the answer, which the model continues.
        """
        if is_conversation(prompt):
            return self._of_chat(prompt, location, continues)  # type: ignore[arg-type]
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt  # type: ignore[return-value]
        if not isinstance(prompt, str):
            raise UserError(
                f"{location} is a {type(prompt).__name__}: give a text or a list of token ids"
            )
        if self.hf is None:
            raise UserError(
                f"{location} is a text, but the model has no tokenizer: give token ids, or --tokenizer"
            )
        # a rendered template may already begin with BOS, and some tokenizers put EOS behind each text
        return encode_beginning(self.hf, prompt)

    def template_source(self, tools: Sequence[Any] = ()) -> str:
        """Return the chat template for conversations with these tools; empty without one."""
        if self.hf is None:
            return ""
        try:
            return str(self.hf.get_chat_template(self.chat_template, list(tools) or None))
        except ValueError:  # there is none
            return ""

    def _render_chat(self, chat: Chat, location: str, continues: bool) -> str:
        template = ChatTemplate(self.hf, self.chat_template, parts=self.media is not None)
        return _render_calls(chat, lambda given: template.prompt(given, location, continues))

    def conversation_tokens(
        self, record: Mapping[str, Any], location: str, is_prompt: bool
    ) -> list[int]:
        """Return the token ids of a conversation without images.

        Args:
            record: Its ``messages`` and ``tools``.
            location: What messages of errors begin with.
            is_prompt: End with the generation prompt, instead of with the last message.
        """
        chat = parse_chat(record, location)
        template = ChatTemplate(self.hf, self.chat_template)

        def render(given: Chat) -> str:
            if is_prompt:
                return template.prompt(given, location)
            return template.render(given, "everything", location).text

        return self.hf.encode(_render_calls(chat, render), add_special_tokens=False)

    def check_tokenizer(self, location: str) -> None:
        """Refuse conversations if the model has no tokenizer; ``location`` is what the message begins with."""
        if self.hf is None:
            raise UserError(
                f"{location}: a conversation needs a tokenizer, which the model does not have"
            )

    def _of_chat(self, messages: Messages, location: str, continues: bool) -> list[int]:
        self.check_tokenizer(location)
        chat = parse_chat(messages, location)
        if chat.images:
            return self._with_images(chat, location, continues)
        text = self._render_chat(chat, location, continues)
        return self.hf.encode(text, add_special_tokens=False)

    def _with_images(self, chat: Chat, location: str, continues: bool) -> TokensWithImages:
        if self.media is None:
            raise UserError(
                f"{location}: the prompt has images or audio, but the model has no processor for them: remove them, or "
                "give the folder of a vision-language or audio model with its preprocessor_config.json"
            )
        references = self.processor.references(
            ((item.kind, item.raw) for item in chat.images), location
        )
        template = ChatTemplate(self.hf, self.chat_template, parts=True)
        text = template.prompt(chat, location, continues)
        text = expand(RenderedChat(text, [], []), references, self.processor, location).text
        tokens = np.array(self.hf.encode(text, add_special_tokens=False))
        rows = media_rows(torch.from_numpy(tokens), *self.processor.token_ids).numpy()
        self._check_images(references, len(tokens), int((rows >= 0).sum()), location)
        positions = (
            self.processor.positions(tokens, references) if self.processor.has_grids else None
        )
        return TokensWithImages(tokens.tolist(), PromptImages(tuple(references), rows, positions))

    def _check_images(
        self, media: Sequence[MediaReference], length: int, placeholders: int, location: str
    ) -> None:
        """Refuse invalid images now and on all ranks, not during a step; check the cheap limits first."""
        if self.max_context is not None and length > self.max_context:
            raise UserError(
                f"{location}: the prompt with its images or audio has {length} tokens, more than the context of "
                f"{self.max_context}: use fewer or smaller images, or less audio"
            )
        pictures = [item for item in media if not isinstance(item, AudioReference)]
        if (size := sum(item.height * item.width for item in pictures)) > MAX_PIXELS:
            raise UserError(
                f"{location}: the images have {size:,} pixels, more than {MAX_PIXELS:,}: make them smaller"
            )
        if placeholders != (needed := self.processor.total_tokens(media)):
            raise UserError(
                f"{location}: the prompt has {placeholders} image or audio tokens, but its media need {needed}: "
                f"remove {self.processor.token} from the text"
            )
        for item in media:
            self.processor.pixels([item])

    def end_of_turn(self, before: list[dict[str, Any]] | None = None) -> set[int]:
        """Return ``end_of_turn`` with the reader's template."""
        return end_of_turn(self.hf, self.chat_template, before, parts=self.media is not None)

    def pixels(self, media: Sequence[MediaReference]) -> dict[str, Tensor]:
        """Return the tensors of the images and videos that this rank encodes."""
        self.processor.share = self._share
        try:
            return self.processor.pixels(media)
        finally:
            self.processor.share = (0, 1)
