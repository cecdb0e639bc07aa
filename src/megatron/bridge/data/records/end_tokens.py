# SPDX-License-Identifier: Apache-2.0
"""Find the tokens that end an answer.

They come from the generation config, the tokenizer and the chat template, because each of them is often incomplete: a
chat model's ``eos_token`` may only end documents, while its template ends turns with another token.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.bridge.data.records.chat_template import ChatTemplate
from megatron.bridge.data.records.formats import Chat, parse
from megatron.bridge.utils.errors import UserError

_MARKER = "\ue000"  # in Unicode's private use area, so no template contains it


def end_tokens(hf: Any, folder: Path | None) -> frozenset[int]:
    """Return the end tokens of the tokenizer, its chat template, and the config files in ``folder``."""
    ids = declared_ends(folder)
    if hf is not None:
        ids |= {hf.eos_token_id} if isinstance(hf.eos_token_id, int) else set()
        ids |= end_of_turn(hf)
    return frozenset(ids)


def declared_ends(folder: Path | None) -> set[int]:
    """Return the end tokens of ``generation_config.json``, or else of ``config.json``, as transformers does."""
    names = ("generation_config.json", "config.json")
    files = (
        [folder / name for name in names if (folder / name).is_file()] if folder is not None else []
    )
    try:
        value = (
            json.loads(files[0].read_text(encoding="utf-8")).get("eos_token_id") if files else None
        )
    except (OSError, ValueError, AttributeError):
        return set()
    values = value if isinstance(value, list) else [value]
    return {token for token in values if isinstance(token, int)}


def end_of_turn(
    hf: Any,
    template: str | None = None,
    before: list[dict[str, Any]] | None = None,
    parts: bool = False,
) -> set[int]:
    """Return the special token that the chat template writes after an answer to ``before``, by rendering one."""
    if template is None and not hf.chat_template:
        return set()
    messages = [
        *(before or [{"role": "user", "content": "Hi"}]),
        {"role": "assistant", "content": _MARKER},
    ]
    try:
        chat = parse_chat(messages, "a sample")
        text = ChatTemplate(hf, template, parts=parts).render(chat, "everything", "a sample").text
    except UserError:  # the template needs more than a question
        return set()
    _, marker, rest = text.rpartition(_MARKER)
    ids = hf.encode(rest.lstrip(), add_special_tokens=False) if marker else []
    return {token for token in ids[:1] if token in hf.added_tokens_decoder}


def parse_chat(messages: list[dict[str, Any]] | Mapping[str, Any], location: str) -> Chat:
    """Parse a conversation; error messages begin with ``location``."""
    parsed = parse(messages if isinstance(messages, Mapping) else {"messages": messages}, location)
    assert isinstance(parsed, Chat), "messages are a chat"
    return parsed
