# SPDX-License-Identifier: Apache-2.0
"""From texts and conversations to tokens."""

from collections.abc import Sequence
from typing import Any

from megatron.bridge.data.records.chat_template import ChatTemplate
from megatron.bridge.inference.ends import parse_chat
from megatron.bridge.utils.errors import UserError

Prompt = str | list[int]  # a text, or token ids
Messages = list[dict[str, Any]]  # a conversation with ``role`` and ``content``


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def prompt_tokens(hf: Any, prompt: Prompt, where: str) -> list[int]:
    """Token ids of a prompt; a text gets the special tokens that its tokenizer adds, once."""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise UserError(f"{where} is a {type(prompt).__name__}: give a text or a list of token ids")
    if hf is None:
        raise UserError(f"{where} is a text and the model has no tokenizer: give token ids, or --tokenizer")
    bos = hf.bos_token
    # a rendered template begins with the token that the tokenizer would add
    return hf.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))


def chat_tokens(hf: Any, messages: Messages, template: str | None, where: str) -> list[int]:
    """Token ids of a conversation, ready for the answer."""
    if hf is None:
        raise UserError(f"{where}: a conversation needs a tokenizer, which the model does not have")
    text = ChatTemplate(hf, template).prompt(parse_chat(messages, where), where)
    return hf.encode(text, add_special_tokens=False)
