# SPDX-License-Identifier: Apache-2.0
"""Data for pretraining: tokenize two corpora, and blend them.

python tutorials/data/00_text_to_blend.py
"""

from collections import Counter
from pathlib import Path

from megatron.bridge.data.config import DatasetRequest, GPTDatasetConfig
from megatron.bridge.data.pretraining.preprocess import PreprocessConfig, preprocess
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer

DATA = Path(__file__).parent
OUT = Path("runs/tutorials/data")
TOKENIZER = str(DATA / "tokenizer")
OUT.mkdir(parents=True, exist_ok=True)

# JSONL has one document per line. Plain text has one document per file or, as here, per line. append_eod
# (--append-eod) ends each document with a token; without it, a model does not learn where documents end.
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

# A corpus is named by its path without .bin. 70 % of the samples come from the first corpus, whatever their sizes.
# With None instead of the weights, the shares are proportional to the sizes.
dataset = GPTDatasetConfig(
    seq_length=32,
    blend=([str(OUT / "lighthouses"), str(OUT / "logbook")], [0.7, 0.3]),
    split="80,10,10",  # of the documents of each corpus, in order
    path_to_cache=str(
        OUT / "cache"
    ),  # the index of the samples; it takes minutes for a large corpus, once
)
tokenizer = HuggingFaceTokenizer(TOKENIZER)
train, valid, test = dataset.build(DatasetRequest(sizes=(200, 20, 20), tokenizer=tokenizer))

# A run draws the samples in this order, under every parallel layout and after every restart.
where = Counter(int(train[number]["dataset_id"]) for number in range(200))
print(f"of 200 training samples, {where[0]} are from lighthouses and {where[1]} from logbook")
print(f"the first sample: {tokenizer.detokenize(train[0]['tokens'].tolist())!r}")
