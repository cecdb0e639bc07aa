# SPDX-License-Identifier: Apache-2.0
"""A question about images, and its answer without caches: each token takes a pass over the whole text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.bridge.checkpoint.model_io import unwrap
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.processing import BY_SAMPLE, MediaProcessor
from megatron.bridge.data.records.chat_template import ChatTemplate, RenderedChat
from megatron.bridge.data.records.encoding import expand
from megatron.bridge.data.records.formats import Chat, parse
from megatron.bridge.inference.prompts import end_tokens
from megatron.bridge.models.conversion.check import compare_logits
from megatron.bridge.utils.errors import UserError


@dataclass(frozen=True)
class ImagePrompt:
    """The tokens of a question, ready for the answer, and its images."""

    tokens: list[int]
    images: tuple[Any, ...]
    processor: MediaProcessor
    hf: Any  # tokenizer of transformers
    folder: Path  # of the model's files

    @cached_property
    def pixels(self) -> dict[str, Tensor]:
        """The tensors of the images, which are decoded once for all tokens of an answer."""
        return self.processor.pixels(self.images)

    def inputs(self, answer: Sequence[int] = ()) -> tuple[Tensor, dict[str, Any]]:
        """Token ids [1, sequence] with those of the answer so far, and what else a Megatron model takes."""
        tokens = np.array([*self.tokens, *answer])
        extra: dict[str, Any] = {"media": self.pixels}
        if self.processor.has_grids:
            extra["position_ids"] = torch.from_numpy(self.processor.positions(tokens, self.images))[:, None]
        return torch.from_numpy(tokens)[None], extra

    def hf_inputs(self) -> dict[str, Tensor]:
        """What transformers' model takes beside token ids."""
        types = torch.tensor([[token in self.processor.token_ids for token in self.tokens]]).long()
        kinds = {"mm_token_type_ids": types, "token_type_ids": types}  # a model takes one of them, or none
        pixels = self.pixels
        if self.processor.kind in BY_SAMPLE:
            pixels = {name: value[None] for name, value in pixels.items()}
        return pixels | kinds


def image_prompt(folder: str | Path, images: Sequence[str], question: str) -> ImagePrompt:
    """A question about images, rendered by the model's chat template.

    Args:
        folder: of the model's config, tokenizer and image processor.
        images: paths.

    Raises:
        UserError: an image or the processor cannot be read, or the template has no place for images.
    """
    from transformers import AutoTokenizer

    hf: Any = AutoTokenizer.from_pretrained(folder)
    processor = MediaProcessor(MediaRules(str(folder), "/"), hf)
    parts = [{"type": "image", "image": str(Path(image).absolute())} for image in images]
    chat = parse({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]}, "--prompt")
    assert isinstance(chat, Chat)
    references = processor.references(((item.kind, item.raw) for item in chat.images), "--image-path")
    text = ChatTemplate(hf, processor.chat_template, parts=True).prompt(chat, "--prompt")
    text = expand(RenderedChat(text, [], []), references, processor, "--prompt").text
    tokens = hf.encode(text, add_special_tokens=False)
    return ImagePrompt(tokens, tuple(references), processor, hf, Path(folder))


def answer(chunks: Sequence[nn.Module], prompt: ImagePrompt, max_new_tokens: int) -> list[int]:
    """The most likely tokens behind ``prompt``, up to an end token; the same on every rank."""
    config: Any = unwrap(chunks[0]).config
    if config.bidirectional_prompt:
        raise UserError(f"{prompt.processor.kind}: generation is not supported, its prompts see both ways")
    ends, found = end_tokens(prompt.hf, prompt.folder), list[int]()
    while len(found) < max_new_tokens and not (found and found[-1] in ends):
        ids, extra = prompt.inputs(found)
        found.append(int(compare_logits.logits_of(chunks, ids, **extra)[0, -1, : config.vocab_size].argmax()))
    return found
