# SPDX-License-Identifier: Apache-2.0
"""Data for pretraining: text to numbers, once, and a blend of two corpora.

python tutorials/data/00_text_to_blend.py
"""

from collections import Counter
from pathlib import Path

from megatron.bridge.data.config import DatasetRequest, GPTDatasetConfig
from megatron.bridge.data.preprocess import PreprocessConfig, preprocess
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent
OUT = Path("runs/tutorials/data")
TOKENIZER = str(DATA / "tokenizer")
OUT.mkdir(parents=True, exist_ok=True)

# JSONL has a document in each line. Plain text has one in each file, or, as here, in each line.
# --append-eod on the command line: without an end token a model never learns where a document ends.
for source, document in (("lighthouses.jsonl", "file"), ("logbook.txt", "line")):
    prefix = OUT / Path(source).stem
    config = PreprocessConfig(
        inputs=[DATA / source],
        output_prefix=prefix,
        tokenizer_model=TOKENIZER,
        text_document=document,
        append_eod=True,
        workers=1,
    )
    print(f"{prefix}.bin and .idx: {preprocess(config).summary()}")

# A corpus is named by its path without .bin. Seven samples in ten come from the first one, however large the two
# are; with None instead of the weights, each is taken in proportion to its size.
dataset = GPTDatasetConfig(
    seq_length=32,
    blend=([str(OUT / "lighthouses"), str(OUT / "logbook")], [0.7, 0.3]),
    split="80,10,10",  # of the documents of each corpus, in their order
    path_to_cache=str(OUT / "cache"),  # which sample is where; a large corpus takes minutes to index, once
)
tokenizer = HuggingFaceTokenizer(TOKENIZER)
train, valid, test = dataset.build(DatasetRequest(sizes=(200, 20, 20), tokenizer=tokenizer))

# A run draws samples in this order, under every parallel layout, and again after every restart.
where = Counter(int(train[number]["dataset_id"]) for number in range(200))
print(f"of 200 training samples {where[0]} are of lighthouses and {where[1]} of logbook")
print(f"the first one: {tokenizer.detokenize(train[0]['tokens'].tolist())!r}")
