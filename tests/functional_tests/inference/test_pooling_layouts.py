# SPDX-License-Identifier: Apache-2.0
"""Scores and embeddings on several ranks against one process."""

import pytest
import torch
from transformers import AutoTokenizer

from megatron.bridge.inference.pooling import PooledModel
from tests.toy_heads import make
from tests.unit_tests.data.conftest import TEXT, tokenizer_dir  # noqa: F401 - a fixture

CASES = [
    ("LlamaForSequenceClassification", {"tp": 2}),
    ("LlamaForSequenceClassification", {"pp": 2}),
    ("Qwen3Model", {"tp": 2}),
    ("Qwen3MoeForSequenceClassification", {"ep": 2}),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_ranks_give_what_one_process_gives(tmp_path, tokenizer_dir, name, layout):  # noqa: F811
    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    make(name, tmp_path, 3, vocab_size=len(hf))
    hf.save_pretrained(tmp_path)
    texts = [TEXT[0], TEXT[1][:9], TEXT[2]]
    results = []
    for sizes in ({}, layout):
        with PooledModel(str(tmp_path), dtype="float32", **sizes) as model:
            results.append(torch.stack(model.pool(texts)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
