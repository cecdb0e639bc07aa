# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of GPT-2, SentencePiece and tiktoken, as Megatron-LM reads them, in Hugging Face's format."""

import base64
import binascii
import re
from pathlib import Path
from typing import Any

from megatron.bridge.utils import strict_json
from megatron.bridge.utils.atomic import refuse_unwritable
from megatron.bridge.utils.errors import UserError, one_line

END_OF_TEXT = "<|endoftext|>"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space

# Kinds of SentencePiece's models and pieces (``sentencepiece_model.proto``).
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_NEVER = -1e6  # score of a piece that texts do not contain, such as <s> or the byte <0x0A>

# Megatron-Core's ``TikTokenTokenizer``: the first special tokens, and the name of the others.
_TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_TIKTOKEN_FILLER = "<SPECIAL_{}>"


def write_gpt2_tokenizer(vocab_file: Path, merge_file: Path, folder: Path) -> Path:
    """Write byte-level BPE to ``folder``, and return it.

    Args:
        vocab_file: JSON with the id of each token.
        merge_file: Text with a merge in each line.
        folder: Directory to create.

    Raises:
        UserError: a file is missing or has another format.
    """
    from transformers import GPT2Tokenizer

    for path in (vocab_file, merge_file):
        if not path.is_file():
            raise UserError(f"{path} is not a file: check --vocab-file and --merge-file")
    try:
        tokenizer = GPT2Tokenizer(
            vocab=str(vocab_file), merges=str(merge_file), eos_token=END_OF_TEXT
        )
    except Exception as error:  # of the Rust library, which has no classes of errors
        raise UserError(
            f"{vocab_file} and {merge_file} are no tokenizer of GPT-2 ({one_line(error)}): give vocab.json and "
            "merges.txt"
        ) from error
    return _save(tokenizer, folder)


def write_sentencepiece_tokenizer(model_file: Path, folder: Path) -> Path:
    """Write a SentencePiece model (unigram or BPE) to ``folder``, and return it.

    Its ids are those of SentencePiece. Control symbols such as ``<s>`` are not recognized in texts, as by
    SentencePiece; user-defined symbols are.

    Args:
        model_file: The file that SentencePiece writes, usually ``tokenizer.model``.
        folder: Directory to create.

    Raises:
        UserError: the file is missing, or not a model of one of these kinds.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    proto = _read_sentencepiece(model_file)
    backend = _sentencepiece_backend(proto, model_file)
    pieces = proto.pieces
    backend.add_special_tokens(
        [AddedToken(piece.piece, normalized=False) for piece in pieces if piece.type == _CONTROL]
    )
    trainer = proto.trainer_spec
    names = {"bos": trainer.bos_id, "eos": trainer.eos_id, "pad": trainer.pad_id}
    special = {f"{name}_token": pieces[index].piece for name, index in names.items() if index >= 0}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=trainer.unk_piece,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **special,
    )
    return _save(tokenizer, folder)


def _read_sentencepiece(path: Path) -> Any:
    from google.protobuf.message import DecodeError
    from transformers.convert_slow_tokenizer import import_protobuf

    if not path.is_file():
        raise UserError(
            f"--tokenizer-model {path} is not a file: give the model that SentencePiece wrote"
        )
    model_pb2: Any = import_protobuf()
    proto = model_pb2.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise UserError(f"{path} is not a model of SentencePiece ({one_line(error)})") from error
    if not proto.pieces:
        raise UserError(f"{path} is not a model of SentencePiece: it has no pieces")
    return proto


def _sentencepiece_backend(proto: Any, path: Path) -> Any:
    """Return the tokenizer that splits texts as the model does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    trainer = proto.trainer_spec
    symbols = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
    if trainer.model_type == _UNIGRAM:
        scores = [
            (piece.piece, piece.score if piece.type in (_NORMAL, _USER_DEFINED) else _NEVER)
            for piece in proto.pieces
        ]
        model = models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    elif trainer.model_type == _BPE:
        model = models.BPE(
            {piece.piece: index for index, piece in enumerate(proto.pieces)},
            _merges_by_score(proto),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
            ignore_merges=bool(symbols),  # a symbol is a token without merges
        )
    else:
        raise UserError(
            f"{path} splits texts into words or characters (model_type={trainer.model_type}): only unigram and BPE "
            "models have a form in Hugging Face's format"
        )
    backend = Tokenizer(model)
    backend.normalizer = _sentencepiece_normalizer(proto.normalizer_spec)
    if symbols:
        longest_first = sorted(symbols, key=len, reverse=True)
        pattern = Regex("|".join(map(re.escape, longest_first)))
        backend.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _sentencepiece_normalizer(spec: Any) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        # only spaces: SentencePiece's own rules have replaced the other whitespace
        steps.append(normalizers.Replace(Regex("^ +| +$"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _merges_by_score(proto: Any) -> list[tuple[str, str]]:
    """Return the pairs of pieces that form a piece, best first: SentencePiece merges the pair with the best piece."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((score, left, right))
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in merges]


def write_tiktoken_tokenizer(
    vocab_file: Path,
    folder: Path,
    pattern: str = "v2",
    special_count: int = 1000,
    vocab_size: int | None = None,
) -> Path:
    """Write a vocabulary of Megatron-LM's ``TikTokenizer`` to ``folder``, and return it.

    Args:
        vocab_file: JSON list of ``{"rank": 0, "token_bytes": "AA==", "token_str": ...}``, in order.
        folder: Directory to create.
        pattern: How texts are split into words: ``v1`` or ``v2``, as in ``--tiktoken-pattern``.
        special_count: Ids before those of the file, as in ``--tiktoken-num-special-tokens``.
        vocab_size: Ids in all, of which the last of the file are left out; all if None.

    Raises:
        UserError: the file is missing or has another format, or a value has no meaning.
    """
    from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    patterns = {
        "v1": tiktoken_tokenizer._PATTERN_TIKTOKEN_V1,
        "v2": tiktoken_tokenizer._PATTERN_TIKTOKEN_V2,
    }
    if pattern not in patterns:
        raise UserError(f"--tiktoken-pattern {pattern} is unknown: give v1 or v2")
    if special_count < len(_TIKTOKEN_SPECIAL):
        raise UserError(
            f"--tiktoken-num-special-tokens {special_count} is below {len(_TIKTOKEN_SPECIAL)}, the special tokens "
            "that Megatron-LM always has"
        )
    tokens = _read_tiktoken(vocab_file)
    if vocab_size is not None:
        tokens = tokens[: max(0, vocab_size - special_count)]
    special = [*_TIKTOKEN_SPECIAL]
    special += [_TIKTOKEN_FILLER.format(index) for index in range(len(special), special_count)]
    vocabulary = {name: index for index, name in enumerate(special)}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    vocabulary |= {_printable(token): special_count + rank for token, rank in ranks.items()}
    model = models.BPE(vocabulary, _merges_by_rank(ranks), ignore_merges=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[pattern]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    names = ("unk", "bos", "eos", "mask", "pad", "cls", "sep")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in zip(names, _TIKTOKEN_SPECIAL, strict=True)},
    )
    return _save(tokenizer, folder)


def _read_tiktoken(path: Path) -> list[bytes]:
    """Return the tokens by rank."""
    if not path.is_file():
        raise UserError(
            f"--tokenizer-model {path} is not a file: give the JSON file of TikTokenizer"
        )
    wrong = UserError(
        f'{path} is not a vocabulary of TikTokenizer: write a JSON list of {{"rank": 0, "token_bytes": "AA=="}} in '
        "the order of ranks"
    )
    try:
        rows = strict_json.loads(path.read_text())
        tokens = [base64.b64decode(row["token_bytes"], validate=True) for row in rows]
        in_order = [row["rank"] for row in rows] == list(range(len(rows)))
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise wrong from error
    if not in_order or tokens[:256] != [bytes([byte]) for byte in range(256)]:
        raise wrong
    return tokens


def _merges_by_rank(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that form a token, the one with the lowest rank first, as tiktoken merges them."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((_printable(left), _printable(right)))
    return merges


def _printable(token: bytes) -> str:
    """Return the characters in which byte-level BPE writes bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    return "".join(characters[byte] for byte in token)


def _save(tokenizer: Any, folder: Path) -> Path:
    with refuse_unwritable(str(folder), "choose another --output-prefix"):
        tokenizer.save_pretrained(folder)
    return folder
