# SPDX-License-Identifier: Apache-2.0
"""Megatron's fine-tuning format, and fill-in-the-middle, against rules written by hand."""

import json

import numpy as np
import pytest
import torch

from megatron.bridge.data.config import FIMConfig, GPTDatasetConfig
from megatron.bridge.data.datasets.sft import GPTSFTDataset
from megatron.bridge.data.fim import FIMDataset
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.utils.errors import UserError

LINES = [{"input": "to be or not to be", "output": "that"}, {"input": "who", "output": "me"}]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(file)


def learnt(row):
    return row["labels"][row["loss_mask"].bool()].tolist()


def test_the_label_and_its_space_are_learnt(path, tokenizer):
    dataset = GPTSFTDataset(
        path, tokenizer, max_seq_length=40, prompt_template="Q: {input} A: {output}", add_bos=True
    )
    row = dataset[1]
    answer = [*tokenizer.continue_tokens(" me"), tokenizer.eod]
    assert learnt(row) == answer
    context = [token for text in ("Q: ", "who", " A:") for token in tokenizer.continue_tokens(text)]
    assert row["tokens"][: len(context) + 1].tolist() == [0, *context]
    everything = GPTSFTDataset(path, tokenizer, max_seq_length=40, answer_only_loss=False)[1]
    assert learnt(everything) == everything["labels"][: int(everything["loss_mask"].sum())].tolist()


@pytest.mark.parametrize("method", ["left", "right"])
def test_only_one_field_is_cut(path, tokenizer, method):
    whole = tokenizer.continue_tokens(LINES[0]["input"])
    answer = [*tokenizer.continue_tokens(" that"), tokenizer.eod]
    room = len(whole) - 3 + len(answer) - 1
    row = GPTSFTDataset(path, tokenizer, max_seq_length=room, truncation_method=method)[0]
    kept = whole[3:] if method == "left" else whole[:-3]
    assert [*row["tokens"].tolist(), row["labels"][-1].item()] == [*kept, *answer]
    assert learnt(row) == answer


def test_rows_repeat_up_to_the_number_asked_for(path, tokenizer):
    dataset = GPTSFTDataset(path, tokenizer, max_seq_length=40, max_num_samples=5)
    assert len(dataset) == 5
    assert {tuple(dataset[i]["tokens"].tolist()) for i in (0, 1)} == {
        tuple(dataset[i]["tokens"].tolist()) for i in (2, 3)
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_template": "{output} {input}"}, r"must end with \{output\}"),
        ({"truncation_field": "context"}, "truncation_field='context' is no field"),
        (
            {"prompt_template": "{input} {more} {output}"},
            "data.jsonl:1: the field 'more' of the template is no text",
        ),
        (
            {"max_seq_length": 1, "prompt_template": "a lot of {input} {output}"},
            "keeps no token to learn",
        ),
    ],
)
def test_wrong_formats_are_named(path, tokenizer, values, message):
    with pytest.raises(UserError, match=message):
        GPTSFTDataset(path, tokenizer, **values)


# ------------------------------------------------------------------------------------------- fill in the middle


@pytest.fixture(scope="module")
def fim_tokenizer(tokenizer_dir, tmp_path_factory):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(tokenizer_dir)
    hf.add_special_tokens({"additional_special_tokens": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]})
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
    assert torch.equal(dataset[3]["tokens"], dataset[3]["tokens"]), "a sample depends on its number only"
    assert FIMDataset(samples, FIMConfig(rate=0.0), fim_tokenizer, 1)[0]["tokens"].equal(samples[0]["tokens"])


def test_what_is_lost_to_shorter_tokens_is_not_learnt(fim_tokenizer):
    """Characters as tokens of their own become fewer when they are tokenised again."""
    long = np.array([fim_tokenizer.continue_tokens(c)[0] for c in "the gentle rain from heaven the gentle rain"])
    text = torch.from_numpy(long)
    sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(len(long) - 1)}
    row = FIMDataset([sample], FIMConfig(rate=1.0), fim_tokenizer, seed=0)[0]
    end = int(row["loss_mask"].sum())
    assert 0 < end < len(long) - 1
    assert set(row["labels"][end:].tolist()) == {fim_tokenizer.eod}
    assert fim_tokenizer.eod not in row["labels"][:end].tolist()


def test_a_tokenizer_without_the_tokens_is_refused(tokenizer):
    with pytest.raises(UserError, match="<fim_prefix> is no single token"):
        FIMDataset([], FIMConfig(), tokenizer, 0)
    config = GPTDatasetConfig(seq_length=8, blend=(["a"], None), split="1", fim=FIMConfig(), eod_mask_loss=True)
    assert [text for text in config.problems() if "dataset.eod_mask_loss=True is worked out before" in text]
    assert FIMConfig(rate=2).problems() == ["dataset.fim.rate=2: it must lie in [0, 1]"]
