# SPDX-License-Identifier: Apache-2.0
"""Conversations: what the loss covers, and several of them in one row.

python tutorials/data/01_chats_and_packing.py
"""

from pathlib import Path

from megatron.bridge.data.config import DatasetRequest, FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent
tokenizer = HuggingFaceTokenizer(str(DATA / "tokenizer"))
request = DatasetRequest(sizes=(48, 0, 0), tokenizer=tokenizer)


def shown(sample):
    """The text of a sample, with brackets around the part in the loss."""
    text, inside = "", False
    for token, trained in zip(sample.tokens.tolist(), sample.trained.tolist(), strict=True):
        if trained != inside:
            text, inside = text + "[]"[inside], trained
        text += tokenizer.detokenize([token])
    return text + "]" * inside


# The folder has training.jsonl, one conversation in a line: {"messages": [{"role": "user", "content": "..."},
# ...]}. The tokenizer's chat template renders it. The loss covers only the answers, and the token that ends them.
chats = FinetuningDatasetConfig(dataset_root=str(DATA / "chats"), seq_length=128)
train, _, _ = chats.build(request)
print(shown(train.rows.samples[0]))

# dataset.train_on selects the tokens: every answer of the assistant, only the last one, or everything.
for choice in ("assistant", "last", "everything"):
    chats = FinetuningDatasetConfig(
        dataset_root=str(DATA / "chats"), seq_length=128, train_on=choice
    )
    train, _, _ = chats.build(request)
    print(
        f"train_on={choice}: {train.report.trained} of {train.report.tokens} tokens are in the loss"
    )

# Conversations are short and rows are long, so most of a batch is padding. A packed row contains as many
# conversations as fit; attention and positions restart at each of them. The result of a step is the same, at less
# than a third of the cost here.
packed = FinetuningDatasetConfig(
    dataset_root=str(DATA / "chats"),
    seq_length=128,
    packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=128),
)
rows, _, _ = packed.build(request)
samples = sum(len(rows[number]["cu_seqlens"]) - 1 for number in range(10))
print(
    f"\n48 conversations fill {len(rows.rows)} packed rows to {rows.rows.fill:.0%}; ten rows contain {samples}"
)
print(f"samples of the first row start at {rows[0]['cu_seqlens'].tolist()[:-1]}")
