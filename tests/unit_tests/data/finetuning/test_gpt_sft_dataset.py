# SPDX-License-Identifier: Apache-2.0
"""Megatron's fine-tuning format against rules written by hand."""

import json

import pytest

from megatron.bridge.data.datasets.sft import GPTSFTDataset
from tests.refusals import refused

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
    ("values", "parts"),
    [
        (
            {"prompt_template": "{output} {input}"},
            ("prompt_template='{output} {input}'", "{output}"),
        ),
        ({"truncation_field": "context"}, ("truncation_field='context'", "prompt_template=")),
        (
            {"prompt_template": "{input} {more} {output}"},
            ("data.jsonl:1: ", "'more'", "input, output"),
        ),
        (
            {"max_seq_length": 1, "prompt_template": "a lot of {input} {output}"},
            ("data.jsonl:1: ", "max_seq_length=1"),
        ),
    ],
)
def test_wrong_formats_are_named(path, tokenizer, values, parts):
    with refused(*parts):
        GPTSFTDataset(path, tokenizer, **values)
