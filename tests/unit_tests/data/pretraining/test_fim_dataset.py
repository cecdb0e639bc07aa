# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle: what a rearranged document is made of."""

import numpy as np
import pytest
import torch

from megatron.bridge.data.config import FIMConfig, GPTDatasetConfig
from megatron.bridge.data.pretraining.gpt_builder import FIMDataset
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from tests.refusals import refused, says


@pytest.fixture(scope="module")
def fim_tokenizer(tokenizer_dir, tmp_path_factory):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    hf.add_special_tokens(
        {"additional_special_tokens": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]}
    )
    directory = tmp_path_factory.mktemp("fim")
    hf.save_pretrained(directory)
    return HuggingFaceTokenizer(str(directory))


def rows(tokenizer, texts, length):
    ids = [token for text in texts for token in [*tokenizer.continue_tokens(text), tokenizer.eod]]
    ids = (ids + [tokenizer.eod] * length)[: length + 1]
    text = torch.tensor(ids)
    return [{"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(length)}]


def put_together(text):
    """The document that a rearranged one came from."""
    body = text.removeprefix("<fim_prefix>")
    if body.startswith("<fim_suffix>"):
        suffix, rest = body.removeprefix("<fim_suffix>").split("<fim_middle>")
        return rest + suffix
    prefix, rest = body.split("<fim_suffix>")
    suffix, middle = rest.split("<fim_middle>")
    return prefix + middle + suffix


def test_rearranged_documents_hold_all_of_the_text(fim_tokenizer):
    texts = ["def f(x): return x", "print(1)", "Grüße 🙂"]
    samples = rows(fim_tokenizer, texts, 120) * 30
    dataset = FIMDataset(samples, FIMConfig(rate=0.7), fim_tokenizer, seed=1)
    kinds = set()
    for row in dataset:
        text = fim_tokenizer.detokenize([*row["tokens"].tolist(), row["labels"][-1].item()])
        documents = text.split("</s>")[:3]
        assert [put_together(d) if d.startswith("<fim") else d for d in documents] == texts
        kinds |= {d[12:24] == "<fim_suffix>" if d.startswith("<fim") else None for d in documents}
        assert torch.equal(row["tokens"][1:], row["labels"][:-1])
        assert len(row["tokens"]) == 120
    assert kinds == {True, False, None}
    assert torch.equal(dataset[3]["tokens"], dataset[3]["tokens"]), (
        "a sample depends on its number only"
    )
    assert FIMDataset(samples, FIMConfig(rate=0.0), fim_tokenizer, 1)[0]["tokens"].equal(
        samples[0]["tokens"]
    )


def test_what_is_lost_to_shorter_tokens_is_not_learnt(fim_tokenizer):
    """Characters as tokens of their own become fewer when they are tokenised again."""
    long = np.array(
        [fim_tokenizer.continue_tokens(c)[0] for c in "the gentle rain from heaven the gentle rain"]
    )
    text = torch.from_numpy(long)
    sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(len(long) - 1)}
    row = FIMDataset([sample], FIMConfig(rate=1.0), fim_tokenizer, seed=0)[0]
    end = int(row["loss_mask"].sum())
    assert 0 < end < len(long) - 1
    assert set(row["labels"][end:].tolist()) == {fim_tokenizer.eod}
    assert fim_tokenizer.eod not in row["labels"][:end].tolist()


def test_a_tokenizer_without_the_tokens_is_refused(tokenizer):
    with refused("dataset.fim", "<fim_prefix>"):
        FIMDataset([], FIMConfig(), tokenizer, 0)
    config = GPTDatasetConfig(
        seq_length=8, blend=(["a"], None), split="1", fim=FIMConfig(), eod_mask_loss=True
    )
    (problem,) = config.problems()
    assert says(problem, "dataset.eod_mask_loss=True", "dataset.fim", "remove one")
    (problem,) = FIMConfig(rate=2).problems()
    assert says(problem, "dataset.fim.rate=2", "0 and 1")
