# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: which one a run uses, and what datasets need from it."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from megatron.bridge.utils import storage, strict_json
from megatron.bridge.utils.atomic import read_text
from megatron.bridge.utils.config.ranges import AT_LEAST_ONE
from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TOKEN = -1  # what Megatron-Core uses for "there is no such token": it occurs in no corpus


@dataclass
class TokenizerConfig:
    tokenizer_type: Literal["HuggingFaceTokenizer", "NullTokenizer"] = "HuggingFaceTokenizer"
    """``HuggingFaceTokenizer`` loads ``tokenizer_model``. ``NullTokenizer`` converts a text of numbers to those
    numbers, and only needs ``vocab_size``."""
    tokenizer_model: str | None = None
    """Directory or hub id that ``AutoTokenizer.from_pretrained`` accepts."""
    vocab_size: Annotated[int | None, AT_LEAST_ONE] = None
    """Number of token ids of a ``NullTokenizer``; the last one ends a document."""
    trust_remote_code: bool = False
    """Allow a tokenizer that brings its own Python code."""
    hf_tokenizer_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """More keywords of ``AutoTokenizer.from_pretrained``, such as ``use_fast``."""


class Tokenizer(Protocol):
    """What datasets and the training setup need from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        ...

    @property
    def eod(self) -> int:
        """The end-of-document token."""
        ...

    @property
    def pad(self) -> int:
        """The padding token; -1 if there is none, or if it is the end-of-sequence token."""
        ...

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What Megatron-Core hashes into the name of a cached index."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens that the tokenizer puts before it (such as BOS)."""
        ...

    def plain_tokens(self, text: str) -> list[int]:
        """Token ids of ``text`` alone, without special tokens."""
        ...

    def continue_tokens(self, text: str) -> list[int]:
        """Token ids of ``text`` that continues another text: without special tokens and without a dummy prefix."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, including special tokens."""
        ...


class HuggingFaceTokenizer:
    """A tokenizer of transformers with Megatron-Core's interface.

    Megatron-Core's own wrapper adds special tokens to the vocabulary when it loads a tokenizer. This one never
    changes the tokenizer, so that the ids are those of the checkpoint.
    """

    def __init__(self, path: str, trust_remote_code: bool = False, **options: Any) -> None:
        self.path = path
        self.trust_remote_code = trust_remote_code
        self.hf: PreTrainedTokenizerBase = load_hf_tokenizer(path, trust_remote_code, **options)

    @property
    def vocab_size(self) -> int:
        return len(self.hf)

    @property
    def eod(self) -> int:
        """The end-of-sequence token.

        Raises:
            UserError: the tokenizer defines none.
        """
        token = self.hf.eos_token_id
        if not isinstance(token, int):
            raise UserError(
                f"the tokenizer {self.path} defines no eos_token: set one in its tokenizer_config.json"
            )
        return token

    @property
    def pad(self) -> int:
        token = self.hf.pad_token_id
        return token if isinstance(token, int) and token != self.hf.eos_token_id else NO_TOKEN

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        return OrderedDict({"class": type(self).__qualname__, "tokenizer_path": str(self.path)})

    def tokenize(self, text: str) -> list[int]:
        return encode_beginning(self.hf, text)

    def plain_tokens(self, text: str) -> list[int]:
        return self.hf.encode(text, add_special_tokens=False)

    def continue_tokens(self, text: str) -> list[int]:
        return encode_continuation(self.hf, text)

    def detokenize(self, ids: Sequence[int]) -> str:
        text = self.hf.decode(list(ids))
        assert isinstance(text, str)
        return text


class NullTokenizer:
    """Converts a text of numbers to the same numbers, for mock data and benchmarks."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.pad = NO_TOKEN

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        return OrderedDict({"class": type(self).__qualname__, "vocab_size": str(self.vocab_size)})

    def tokenize(self, text: str) -> list[int]:
        """The numbers in ``text``.

        Raises:
            UserError: a word is not a number below the vocabulary size.
        """
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise UserError(
                    f"the NullTokenizer reads numbers below tokenizer.vocab_size={self.vocab_size}, not {word!r}: "
                    f"for text, set tokenizer.tokenizer_type=HuggingFaceTokenizer"
                )
        return [int(word) for word in words]

    def plain_tokens(self, text: str) -> list[int]:
        return self.tokenize(text)

    def continue_tokens(self, text: str) -> list[int]:
        return self.tokenize(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that ``config`` describes.

    Raises:
        UserError: a value is missing, or the tokenizer cannot be loaded.
    """
    if config.tokenizer_type == "NullTokenizer":
        if config.vocab_size is None or config.vocab_size < 1:
            raise UserError(
                f"tokenizer.vocab_size={config.vocab_size}: a NullTokenizer needs a positive number"
            )
        return NullTokenizer(config.vocab_size)
    if config.tokenizer_type != "HuggingFaceTokenizer":
        raise UserError(
            f"tokenizer.tokenizer_type={config.tokenizer_type!r} is unknown: choose HuggingFaceTokenizer or "
            f"NullTokenizer"
        )
    if config.tokenizer_model is None:
        raise UserError(
            "tokenizer.tokenizer_model is not set: give a directory or hub id of a tokenizer"
        )
    if config.vocab_size is not None:
        raise UserError(
            f"tokenizer.vocab_size={config.vocab_size} is only for the NullTokenizer: remove it, because a "
            f"HuggingFaceTokenizer knows its own size"
        )
    options = {"trust_remote_code": config.trust_remote_code, **config.hf_tokenizer_kwargs}
    return HuggingFaceTokenizer(config.tokenizer_model, **options)


def tokenizer_key(tokenizer: Tokenizer) -> str:
    """A key that changes whenever the tokens of a text, or the text of a conversation, would change."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return json.dumps(tokenizer.unique_identifiers)
    hf: Any = tokenizer.hf
    model = (
        hf.backend_tokenizer.to_str() if hf.is_fast else json.dumps(hf.get_vocab(), sort_keys=True)
    )
    return json.dumps(
        [type(hf).__name__, model, hf.chat_template, hf.special_tokens_map], sort_keys=True
    )


def bos_token(tokenizer: Tokenizer) -> int | None:
    """The beginning-of-sequence token, if there is one."""
    token = tokenizer.hf.bos_token_id if isinstance(tokenizer, HuggingFaceTokenizer) else None
    return token if isinstance(token, int) else None


_ENDINGS = (
    ".json",
    ".jinja",
    ".model",
    ".txt",
    ".tiktoken",
    ".py",
)  # of a tokenizer's files in a bucket


def load_hf_tokenizer(
    path: str, trust_remote_code: bool = False, **options: Any
) -> "PreTrainedTokenizerBase":
    """``AutoTokenizer.from_pretrained``, with one sentence for whatever goes wrong."""
    from transformers import AutoTokenizer

    folder = storage.local(path).expanduser()
    storage.pull(folder, lambda name: name.endswith(_ENDINGS))
    path_or_id = str(folder) if folder.is_dir() else path
    try:
        # not mistral-common's tokenizers, where they are installed: those do not map tokens to characters
        hf = AutoTokenizer.from_pretrained(
            path_or_id, trust_remote_code=trust_remote_code, **{"mistral_format": False, **options}
        )
    except Exception as error:  # for damaged files, transformers raises almost anything
        if folder.is_dir():
            _name_damaged_file(folder)
            rule = "its tokenizer files are missing or damaged"
        elif folder.exists():
            rule = "it is a file: give its directory"
        else:
            rule = "it is not a directory, and not a hub id that can be loaded: give a directory with tokenizer files"
        reason = shorten(str(error).split(". ")[0], 200, placeholder=" ...")
        raise UserError(
            f"cannot load a tokenizer from {path}: {rule} ({type(error).__name__}: {reason})"
        ) from error
    if hf.eos_token is None and str(hf.init_kwargs.get("vocab_file")).endswith("tekken.json"):
        # Mistral's file does not say which of its special tokens these are
        hf.bos_token, hf.eos_token = "<s>", "</s>"
    return hf


def _name_damaged_file(folder: Path) -> None:
    """Raise an error for the first file of the tokenizer that is not what it must be, if there is one."""
    for path in sorted(folder.glob("*token*.json")):
        if not isinstance(strict_json.read(path), dict):
            raise UserError(f"{path} is not a JSON object: download it again")
    for path in sorted(folder.glob("*.jinja")):
        read_text(path, str(path))


def encode_beginning(hf: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text that something may follow: with BOS if the tokenizer adds it, and never with EOS.

    A text that begins with BOS gets no second one.
    """
    special = not _begins_with_bos(hf, text)
    ids = hf.encode(text, add_special_tokens=special)
    return _without_appended(ids, appended_tokens(hf)) if special else ids


def appended_tokens(hf: "PreTrainedTokenizerBase") -> list[int]:
    """The special tokens that the tokenizer puts behind a text."""
    plain = hf.encode("a", add_special_tokens=False)
    special = hf.encode("a")
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[start + len(plain) :]
    return []


def encode_continuation(hf: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text that follows another one.

    SentencePiece tokenizers such as that of Llama 2 put a space before each text that they tokenize; a text that
    continues another one has none.
    """
    if not has_dummy_prefix(hf):
        return hf.encode(text, add_special_tokens=False)
    for anchor in _ANCHORS:
        before = hf.encode(anchor, add_special_tokens=False)
        ids = hf.encode(anchor + text, add_special_tokens=False)
        if ids[: len(before)] == before:
            return ids[len(before) :]
    return hf.encode(text, add_special_tokens=False)


TextRole = Literal["beginning", "document", "continuation"]
"""What a text is: the beginning of a sequence, with special tokens; all of one, without; or a part behind another."""
_ANCHORS = ("\n", "\0", ":", "a")
"""Texts to put before a continuation; one whose last token does not merge with it is used."""


def has_dummy_prefix(hf: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer puts a space before each text."""
    before = hf.encode("\n", add_special_tokens=False)
    after = hf.encode("\na", add_special_tokens=False)[len(before) :]
    return after != hf.encode("a", add_special_tokens=False)


def _begins_with_bos(hf: "PreTrainedTokenizerBase", text: str) -> bool:
    return isinstance(hf.bos_token, str) and bool(hf.bos_token) and text.startswith(hf.bos_token)


def _without_appended(ids: list[int], appended: list[int]) -> list[int]:
    has_them = bool(appended) and ids[-len(appended) :] == appended
    return ids[: -len(appended)] if has_them else ids


def encode_many(tokenizer: Tokenizer, texts: list[str], role: TextRole) -> list[list[int]]:
    """Token ids of each text.

    A Rust tokenizer encodes many texts at once, which is 2.5x as fast as one by one.

    Args:
        tokenizer: The tokenizer.
        texts: The texts.
        role: ``beginning`` for the ids of ``tokenize``, ``document`` for those of ``plain_tokens``, ``continuation``
            for those of ``continue_tokens``.
    """
    backend = _fast_backend(tokenizer.hf) if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if backend is None:
        encode_by_role = {
            "beginning": tokenizer.tokenize,
            "document": tokenizer.plain_tokens,
            "continuation": tokenizer.continue_tokens,
        }
        return list(map(encode_by_role[role], texts))
    hf = _hf_of(tokenizer)
    if role == "continuation" and has_dummy_prefix(hf):
        return _encode_continuations(hf, backend, texts)
    encodings = backend.encode_batch_fast(texts, add_special_tokens=role == "beginning")
    encoded: list[list[int]] = [encoding.ids for encoding in encodings]
    if role != "beginning":
        return encoded
    appended = appended_tokens(hf)
    return [
        encode_beginning(hf, text)
        if _begins_with_bos(hf, text)
        else _without_appended(ids, appended)
        for text, ids in zip(texts, encoded, strict=True)
    ]


def _encode_continuations(
    hf: "PreTrainedTokenizerBase", backend: Any, texts: list[str]
) -> list[list[int]]:
    """``encode_continuation`` of each text, of a tokenizer with a dummy prefix."""
    anchor = _ANCHORS[0]
    before = hf.encode(anchor, add_special_tokens=False)
    anchored = backend.encode_batch_fast(
        [anchor + text for text in texts], add_special_tokens=False
    )
    return [
        encoding.ids[len(before) :]
        if encoding.ids[: len(before)] == before
        else encode_continuation(hf, text)
        for text, encoding in zip(texts, anchored, strict=True)
    ]


def _hf_of(tokenizer: Tokenizer) -> "PreTrainedTokenizerBase":
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer.hf


def encode_with_offsets(
    hf: "PreTrainedTokenizerBase", texts: list[str]
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Token ids of each text without special tokens, and the first character and the end of each token."""
    backend = _fast_backend(hf)
    assert backend is not None, "only a fast tokenizer knows offsets"
    for encoding in backend.encode_batch(texts, add_special_tokens=False):
        yield encoding.ids, encoding.offsets


def _fast_backend(hf: "PreTrainedTokenizerBase") -> Any:
    backend: Any = getattr(hf, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast"):
        return None
    # a tokenizer.json may still hold both from its training; they would cut documents
    backend.no_truncation()
    backend.no_padding()
    return backend
