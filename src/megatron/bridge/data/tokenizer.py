# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: which one a run uses, and the small surface that datasets need of it."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron.bridge.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TOKEN = -1  # Megatron-Core's mark for "there is no such token": it occurs in no corpus


@dataclass
class TokenizerConfig:
    """Which tokenizer a run uses.

    Attributes:
        tokenizer_type: ``HuggingFaceTokenizer`` reads ``tokenizer_model``; ``NullTokenizer`` turns a text of
            numbers into those numbers and needs only ``vocab_size``.
        tokenizer_model: directory or hub id that ``AutoTokenizer.from_pretrained`` accepts.
        vocab_size: number of token ids of a ``NullTokenizer``; the last one ends a document.
        trust_remote_code: allow a tokenizer that brings its own Python code.
    """

    tokenizer_type: Literal["HuggingFaceTokenizer", "NullTokenizer"] = "HuggingFaceTokenizer"
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    trust_remote_code: bool = False


class Tokenizer(Protocol):
    """What datasets and the training set-up ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        ...

    @property
    def eod(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def pad(self) -> int:
        """The padding token, or -1 if the tokenizer has none of its own."""
        ...

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What Megatron-Core hashes into the name of a cached index."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens that the tokenizer puts around a text."""
        ...

    def continue_tokens(self, text: str) -> list[int]:
        """Token ids of ``text`` that goes on after other text: no special tokens."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        ...


class HuggingFaceTokenizer:
    """A tokenizer of transformers behind Megatron-Core's names.

    Megatron-Core's own wrapper adds special tokens to the vocabulary while loading; this one never changes the
    tokenizer, so that the ids are those of the checkpoint.
    """

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        self.path = path
        self.trust_remote_code = trust_remote_code
        self.hf: PreTrainedTokenizerBase = load_hf_tokenizer(path, trust_remote_code)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
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
        """The padding token, or -1 where it is missing or is the end-of-sequence token under another name."""
        token = self.hf.pad_token_id
        return token if isinstance(token, int) and token != self.hf.eos_token_id else NO_TOKEN

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Class and path."""
        return OrderedDict({"class": type(self).__qualname__, "tokenizer_path": str(self.path)})

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, with the tokenizer's own special tokens (such as BOS)."""
        return self.hf.encode(text)

    def continue_tokens(self, text: str) -> list[int]:
        """Token ids of ``text`` without special tokens."""
        return self.hf.encode(text, add_special_tokens=False)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included."""
        text = self.hf.decode(list(ids))
        assert isinstance(text, str)
        return text


class NullTokenizer:
    """Numbers in, the same numbers out: for mock data and benchmarks."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self.pad = NO_TOKEN

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Class and size."""
        return OrderedDict({"class": type(self).__qualname__, "vocab_size": str(self.vocab_size)})

    def tokenize(self, text: str) -> list[int]:
        """The numbers of ``text``.

        Raises:
            UserError: a word is no number below the vocabulary's size.
        """
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise UserError(
                    f"the NullTokenizer reads numbers below vocab_size={self.vocab_size}, not {word!r}: choose "
                    f"tokenizer_type=HuggingFaceTokenizer for text"
                )
        return [int(word) for word in words]

    def continue_tokens(self, text: str) -> list[int]:
        """The numbers of ``text``."""
        return self.tokenize(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """``ids`` as words."""
        return " ".join(str(token) for token in ids)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that ``config`` describes.

    Raises:
        UserError: a value is missing, or the tokenizer cannot be loaded.
    """
    if config.tokenizer_type == "NullTokenizer":
        if config.vocab_size is None or config.vocab_size < 1:
            raise UserError(f"tokenizer.vocab_size={config.vocab_size}: a NullTokenizer needs a positive number")
        return NullTokenizer(config.vocab_size)
    if config.tokenizer_type != "HuggingFaceTokenizer":
        raise UserError(
            f"tokenizer.tokenizer_type={config.tokenizer_type!r} is not known: choose HuggingFaceTokenizer or "
            f"NullTokenizer"
        )
    if config.tokenizer_model is None:
        raise UserError("tokenizer.tokenizer_model is not set: give a directory or hub id of a tokenizer")
    if config.vocab_size is not None:
        raise UserError(
            f"tokenizer.vocab_size={config.vocab_size} is for the NullTokenizer: a HuggingFaceTokenizer knows its "
            f"own size, so remove it"
        )
    return HuggingFaceTokenizer(config.tokenizer_model, config.trust_remote_code)


def tokenizer_key(tokenizer: Tokenizer) -> str:
    """Changes whenever the tokens of a text, or the text of a conversation, do."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return json.dumps(tokenizer.unique_identifiers)
    hf: Any = tokenizer.hf
    model = hf.backend_tokenizer.to_str() if hf.is_fast else json.dumps(hf.get_vocab(), sort_keys=True)
    return json.dumps([type(hf).__name__, model, hf.chat_template, hf.special_tokens_map], sort_keys=True)


def load_hf_tokenizer(path: str, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """``AutoTokenizer.from_pretrained`` with one sentence for what can go wrong."""
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    place = str(folder) if folder.is_dir() else path
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # of damaged files transformers raises nearly anything
        if folder.is_dir():
            rule = "its tokenizer files are missing or damaged"
        elif folder.exists():
            rule = "it is a file, give the directory"
        else:
            rule = "it is no directory, and as a hub id it cannot be had; give a directory with tokenizer files"
        reason = shorten(str(error).split(". ")[0], 200, placeholder=" ...")
        raise UserError(
            f"cannot load a tokenizer from {path}: {rule} ({type(error).__name__}: {reason})"
        ) from error


def batch_encoder(hf: "PreTrainedTokenizerBase") -> Callable[[list[str], bool], list[list[int]]]:
    """The fastest way to encode many texts: 2.5x that of one at a time, where the tokenizer is a Rust one.

    The function takes the texts, and whether the tokenizer adds its special tokens to each.
    """
    backend = _unlimited_backend(hf)
    if backend is None:

        def slow(texts: list[str], special: bool) -> list[list[int]]:
            return [hf.encode(text, add_special_tokens=special) for text in texts]

        return slow

    def fast(texts: list[str], special: bool) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]

    return fast


def encode_many(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    """Token ids of each text, with the special tokens that the tokenizer puts around a text or without."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return batch_encoder(tokenizer.hf)(texts, special)
    return [tokenizer.tokenize(text) if special else tokenizer.continue_tokens(text) for text in texts]


def encode_with_offsets(
    hf: "PreTrainedTokenizerBase", texts: list[str]
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """Token ids of each text without special tokens, and for each token its first and behind-last character."""
    backend = _unlimited_backend(hf)
    assert backend is not None, "only a fast tokenizer knows offsets"
    for encoding in backend.encode_batch(texts, add_special_tokens=False):
        yield encoding.ids, encoding.offsets


def _unlimited_backend(hf: "PreTrainedTokenizerBase") -> Any:
    """The Rust tokenizer, if there is one."""
    backend: Any = getattr(hf, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast"):
        return None
    backend.no_truncation()  # a tokenizer.json may carry both from its training; they would cut documents
    backend.no_padding()
    return backend
