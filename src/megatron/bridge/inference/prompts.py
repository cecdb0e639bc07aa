# SPDX-License-Identifier: Apache-2.0
"""From texts and conversations to tokens, and which tokens end an answer.

End tokens are those of the generation config, the tokenizer and the chat template together. Each of the three alone
is often incomplete: a chat model's ``eos_token`` may end documents only, while its template ends turns with another
token.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.bridge.data.records.chat_template import ChatTemplate
from megatron.bridge.data.records.formats import Chat, parse
from megatron.bridge.utils.errors import UserError

Prompt = str | list[int]  # a text, or token ids
Messages = list[dict[str, Any]]  # a conversation with ``role`` and ``content``
_MARKER = "\ue000"  # of a private area: no template writes it itself


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


def parse_chat(messages: Any, where: str) -> Chat:
    """The conversation of a list of messages; ``where`` begins the message of an error."""
    parsed = parse({"messages": messages}, where)
    assert isinstance(parsed, Chat), "messages are a chat"
    if parsed.images:
        raise UserError(f"{where}: an image in a prompt is not supported: remove it")
    return parsed


def end_tokens(hf: Any, folder: Path | None) -> frozenset[int]:
    """All end tokens.

    Args:
        hf: tokenizer of transformers; None if there is none.
        folder: where ``generation_config.json`` and ``config.json`` may be.
    """
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


def end_of_turn(hf: Any, template: str | None = None, before: list[dict[str, Any]] | None = None) -> set[int]:
    """The special token that the chat template puts after an answer, found by rendering one.

    Args:
        hf: tokenizer of transformers.
        template: a template instead of the tokenizer's own.
        before: the conversation to answer; a question of one word when None.
    """
    if template is None and not hf.chat_template:
        return set()
    messages = [*(before or [{"role": "user", "content": "Hi"}]), {"role": "assistant", "content": _MARKER}]
    try:
        text = ChatTemplate(hf, template).render(parse_chat(messages, "a sample"), "everything", "a sample").text
    except UserError:  # a template that needs more than a question
        return set()
    ids = hf.encode(text.rpartition(_MARKER)[2].lstrip(), add_special_tokens=False)
    return {token for token in ids[:1] if token in hf.added_tokens_decoder}
