# SPDX-License-Identifier: Apache-2.0
"""From texts and conversations to tokens, and which tokens end an answer.

End tokens are those of the generation config, the tokenizer and the chat template together. Each of the three alone
is often incomplete: a chat model's ``eos_token`` may end documents only, while its template ends turns with another
token.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.processing import MediaProcessor, chat_template
from megatron.bridge.data.media.references import MAX_PIXELS, MediaReference
from megatron.bridge.data.records.chat_template import ChatTemplate, RenderedChat
from megatron.bridge.data.records.encoding import expand
from megatron.bridge.data.records.formats import Chat, parse
from megatron.bridge.inference.prompt_images import PromptImages, TokensWithImages
from megatron.bridge.models.vision.merge import media_rows
from megatron.bridge.utils.errors import UserError

Prompt = str | list[int]  # a text, or token ids
Messages = list[dict[str, Any]] | Mapping[str, Any]
"""A conversation with ``role`` and ``content``, or a record of ``messages`` and of ``images`` beside them."""
_MARKER = "\ue000"  # of a private area: no template writes it itself


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_messages(question: str, images: Sequence[str | Path] = ()) -> list[dict[str, Any]]:
    """The message of a user about images at paths."""
    parts = [{"type": "image", "image": str(Path(image).absolute())} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}] if parts else question}]


class PromptReader:
    """From prompts to token ids.

    ``hf`` is a tokenizer of transformers, if there is one; ``template`` goes before those of the image processor and of
    the tokenizer; ``media`` is None for a model that sees no images; ``share`` is this rank, and how many there are, of
    those that share out images.
    """

    def __init__(
        self,
        hf: Any,
        template: str | None = None,
        media: MediaRules | None = None,
        share: tuple[int, int] = (0, 1),
        max_context: int | None = None,
    ) -> None:
        self.hf, self.media, self.max_context = hf, media, max_context
        self.template = template or (chat_template(media.processor_path) if media else None)
        self._share = share

    @cached_property
    def processor(self) -> MediaProcessor:
        """Loaded with the first image."""
        assert self.media is not None, "tokens() has refused images"
        return MediaProcessor(self.media, self.hf)

    def tokens(self, prompt: Prompt | Messages, where: str) -> list[int]:
        """Token ids of a text with its tokenizer's special tokens, or of a conversation; ``where`` is for errors."""
        if isinstance(prompt, Mapping) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            return self._of_chat(prompt, where)  # type: ignore[arg-type]
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt  # type: ignore[return-value]
        if not isinstance(prompt, str):
            raise UserError(f"{where} is a {type(prompt).__name__}: give a text or a list of token ids")
        if self.hf is None:
            raise UserError(f"{where} is a text and the model has no tokenizer: give token ids, or --tokenizer")
        bos = self.hf.bos_token
        # a rendered template begins with the token that the tokenizer would add
        return self.hf.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))

    def _of_chat(self, messages: Messages, where: str) -> list[int]:
        if self.hf is None:
            raise UserError(f"{where}: a conversation needs a tokenizer, which the model does not have")
        chat = parse_chat(messages, where)
        if chat.images:
            return self._with_images(chat, where)
        text = ChatTemplate(self.hf, self.template, parts=self.media is not None).prompt(chat, where)
        return self.hf.encode(text, add_special_tokens=False)

    def _with_images(self, chat: Chat, where: str) -> TokensWithImages:
        if self.media is None:
            raise UserError(
                f"{where}: the prompt has images, and the model has no image processor: remove them, or give the "
                "folder of a vision-language model with its preprocessor_config.json"
            )
        found = self.processor.references(((item.kind, item.raw) for item in chat.images), where)
        text = ChatTemplate(self.hf, self.template or self.processor.chat_template, parts=True).prompt(chat, where)
        text = expand(RenderedChat(text, [], []), found, self.processor, where).text
        tokens = np.array(self.hf.encode(text, add_special_tokens=False))
        rows = media_rows(torch.from_numpy(tokens), *self.processor.token_ids).numpy()
        self._check_images(found, len(tokens), int((rows >= 0).sum()), where)
        positions = self.processor.positions(tokens, found) if self.processor.has_grids else None
        return TokensWithImages(tokens.tolist(), PromptImages(tuple(found), rows, positions))

    def _check_images(self, media: Sequence[MediaReference], length: int, placeholders: int, where: str) -> None:
        """Refuse now, on all ranks, what would fail while others wait for their answers; what is too much, first."""
        if self.max_context is not None and length > self.max_context:
            raise UserError(
                f"{where}: the prompt with its images has {length} tokens, and the context {self.max_context}: give "
                "fewer or smaller images"
            )
        if (size := sum(item.height * item.width for item in media)) > MAX_PIXELS:
            raise UserError(f"{where}: the images have {size:,} pixels, more than {MAX_PIXELS:,}: make them smaller")
        if placeholders != (wanted := self.processor.total_tokens(media)):
            raise UserError(
                f"{where}: the prompt has {placeholders} tokens that stand for parts of images, and its images have "
                f"{wanted}: remove the token from the text"
            )
        for item in media:
            self.processor.pixels([item])

    def end_of_turn(self, before: list[dict[str, Any]] | None = None) -> set[int]:
        """``end_of_turn`` of the reader's template."""
        return end_of_turn(self.hf, self.template, before, parts=self.media is not None)

    def pixels(self, media: Sequence[MediaReference]) -> dict[str, Tensor]:
        """The tensors of this rank's share of images and videos."""
        self.processor.share = self._share
        try:
            return self.processor.pixels(media)
        finally:
            self.processor.share = (0, 1)


def parse_chat(messages: Messages, where: str) -> Chat:
    """The conversation of messages; ``where`` begins the message of an error."""
    parsed = parse(messages if isinstance(messages, Mapping) else {"messages": messages}, where)
    assert isinstance(parsed, Chat), "messages are a chat"
    return parsed


def end_tokens(hf: Any, folder: Path | None) -> frozenset[int]:
    """All end tokens, also of ``generation_config.json`` and ``config.json`` in the folder."""
    found = declared_ends(folder)
    if hf is not None:
        found |= {hf.eos_token_id} if isinstance(hf.eos_token_id, int) else set()
        found |= end_of_turn(hf)
    return frozenset(found)


def declared_ends(folder: Path | None) -> set[int]:
    """The end tokens of ``generation_config.json``, or else of ``config.json``: those of transformers."""
    names = ("generation_config.json", "config.json")
    files = [folder / name for name in names if (folder / name).is_file()] if folder is not None else []
    try:
        value = json.loads(files[0].read_text(encoding="utf-8")).get("eos_token_id") if files else None
    except (OSError, ValueError, AttributeError):
        return set()
    values = value if isinstance(value, list) else [value]
    return {token for token in values if isinstance(token, int)}


def end_of_turn(
    hf: Any, template: str | None = None, before: list[dict[str, Any]] | None = None, parts: bool = False
) -> set[int]:
    """The special token that the chat template puts after an answer to ``before``, found by rendering one."""
    if template is None and not hf.chat_template:
        return set()
    messages = [*(before or [{"role": "user", "content": "Hi"}]), {"role": "assistant", "content": _MARKER}]
    try:
        chat = parse_chat(messages, "a sample")
        text = ChatTemplate(hf, template, parts=parts).render(chat, "everything", "a sample").text
    except UserError:  # a template that needs more than a question
        return set()
    _, marker, rest = text.rpartition(_MARKER)
    ids = hf.encode(rest.lstrip(), add_special_tokens=False) if marker else []
    return {token for token in ids[:1] if token in hf.added_tokens_decoder}
