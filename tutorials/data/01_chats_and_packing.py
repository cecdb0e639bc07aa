# SPDX-License-Identifier: Apache-2.0
"""Conversations: what of them is learnt, and several of them in one row.

python tutorials/data/01_chats_and_packing.py
"""

from pathlib import Path

from megatron.bridge.data.config import DatasetRequest, FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent
tokenizer = HuggingFaceTokenizer(str(DATA / "tokenizer"))
request = DatasetRequest(sizes=(48, 0, 0), tokenizer=tokenizer)


def shown(example):
    """The text of a sample, with brackets around what is learnt."""
    text, learning = "", False
    for token, learnt in zip(example.tokens.tolist(), example.trained.tolist(), strict=True):
        if learnt != learning:
            text, learning = text + "[]"[learning], learnt
        text += tokenizer.detokenize([token])
    return text + "]" * learning


# The folder has training.jsonl, one conversation in a line: {"messages": [{"role": "user", "content": "..."},
# ...]}. The tokenizer's chat template makes text of it. Only answers are learnt, with the token that ends them.
chats = FinetuningDatasetConfig(dataset_root=str(DATA / "chats"), seq_length=128)
train, _, _ = chats.build(request)
print(shown(train.rows.examples[0]))

# dataset.train_on chooses: every answer of the assistant, the last one, all behind the last question, everything.
for choice in ("assistant", "last", "everything"):
    chats = FinetuningDatasetConfig(dataset_root=str(DATA / "chats"), seq_length=128, train_on=choice)
    train, _, _ = chats.build(request)
    print(f"train_on={choice}: {train.report.trained} of {train.report.tokens} tokens are learnt")

# Conversations are short and rows are long: most of a batch is padding. Packed, each row holds as many as fit, and
# attention and positions start anew at each of them. The step that is taken is the same; it costs less than a
# third here.
packed = FinetuningDatasetConfig(
    dataset_root=str(DATA / "chats"),
    seq_length=128,
    packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=128),
)
rows, _, _ = packed.build(request)
samples = sum(len(rows[number]["cu_seqlens"]) - 1 for number in range(10))
print(f"\n48 conversations are {len(rows.rows)} packed rows, {rows.rows.fill:.0%} full; ten rows hold {samples}")
print(f"samples of the first row begin at {rows[0]['cu_seqlens'].tolist()[:-1]}")
