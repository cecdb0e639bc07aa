# SPDX-License-Identifier: Apache-2.0
"""Files that mistakes are made with."""

import json

from tests.toy_run import save_llama

YAML = {
    "broken": "train:\n  train_iters: [1, 2\n",
    "tabs": "train:\n\ttrain_iters: 5\n",
    "twice": "train:\n  train_iters: 1\ntrain:\n  micro_batch_size: 1\n",
    "misspelt": "train:\n  train_itres: 5\n",
    "empty": "",
    "good": "train:\n  train_iters: 5\n",
    "target": "_target_: os.system\n",
    "other": "_target_: megatron.bridge.training.config.TrainingConfig\n",
}


def make(tmp):
    """Fill ``tmp``."""
    for name, text in YAML.items():
        (tmp / f"{name}.yaml").write_text(text)
    (tmp / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("void", "a", "b"):
        (tmp / name).mkdir()
    (tmp / "half.bin").write_bytes(b"")
    _samples(tmp, "fields", [{"question": "1 + 1", "solution": "2"}] * 4)
    _samples(tmp, "samples", [{"input": "a b", "output": "c"}] * 8)
    _samples(tmp, "nojson", ['{"input": "a", "output": "b"}', "{input: a}"])
    (tmp / "train.jsonl").write_text('{"text": "a"}\n')
    save_llama(tmp / "llama", tie_word_embeddings=True)
    _tokenizer(tmp / "llama", "a b c d")
    _tokenizer(tmp / "tokens", "d c b a")


def _samples(tmp, folder, rows):
    (tmp / folder).mkdir()
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    for split in ("training", "validation"):
        (tmp / folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def _tokenizer(folder, words):
    """A tokenizer of whole words, in the form of transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *words.split()])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
