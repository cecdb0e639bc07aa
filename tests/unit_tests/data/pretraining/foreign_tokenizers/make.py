# SPDX-License-Identifier: Apache-2.0
"""Write the files next to this script with ``sentencepiece`` and ``tiktoken`` themselves: ``python make.py``.

The tests compare ids with those that the libraries give, so neither is needed to run them.
"""

import base64
import json
from pathlib import Path

import sentencepiece
import tiktoken
import tiktoken._educational
from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[4]
TEXTS = [
    "Hello world",
    "  two  spaces, and a trailing one ",
    "tabs\tand\nlines\n\nmore",
    "don't stop at 12345 or 3.14!",
    "Zürich naïve ﬁn ½ ①",
    "日本語 и русский 🙂",
    "<s> is text </s>",
    "with <extra> inside<extra>",
    "under_score ▁ block",
    "",
    " ",
    "CamelCase HTTPServer x=y+1;",
]


def main() -> None:
    corpus = (ROOT / "README.md").read_text() + (ROOT / "docs" / "faq.md").read_text()
    lines = [line for line in corpus.splitlines() if line.strip()]
    ids = {}
    rules = (
        FOLDER / "rules.tsv"
    )  # code points and their replacement; SentencePiece's own are 240 kB
    rules.write_text("FB01\t66 69\n00BD\t31 2F 32\n0009\t20\n000A\t20\n")
    for name, options in {
        "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
        "bpe_llama": {
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "split_digits": True,
        },
        "unigram": {
            "model_type": "unigram",
            "user_defined_symbols": ["<extra>"],
            "normalization_rule_tsv": str(rules),
        },
    }.items():
        path = FOLDER / f"{name}.model"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=str(path.with_suffix("")),
            vocab_size=700,
            minloglevel=2,
            **options,
        )
        path.with_suffix(".vocab").unlink()
        ids[name] = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(TEXTS)
    pattern = tiktoken_tokenizer._PATTERN_TIKTOKEN_V2
    rules.unlink()
    ranks = tiktoken._educational.bpe_train(corpus[:40_000], 500, pattern, visualise=None)
    rows = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for token, rank in ranks.items()
    ]
    (FOLDER / "tiktoken.json").write_text(json.dumps(rows))
    for pattern in ("v1", "v2"):
        core = tiktoken_tokenizer.TikTokenTokenizer(
            str(FOLDER / "tiktoken.json"), num_special_tokens=20, pattern=pattern, vocab_size=480
        )
        ids[f"tiktoken {pattern}"] = [core.text_to_ids(text) for text in TEXTS]
    (FOLDER / "ids.json").write_text(json.dumps({"texts": TEXTS, "ids": ids}, indent=1) + "\n")


if __name__ == "__main__":
    main()
