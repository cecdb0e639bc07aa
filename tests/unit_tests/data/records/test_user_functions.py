# SPDX-License-Identifier: Apache-2.0
"""A ``dataset.process_example_fn`` that does not fit is one sentence with its name, the record and the line of code."""

import json
import os
import pathlib
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.utils.config.coerce import coerce
from megatron.bridge.utils.errors import UserError
from tests.refusals import refused

RULES = EncodingRules(max_tokens=33)
RECORDS = [("data.jsonl:7", {"question": "1 2", "answer": "3"})]
KEY = "dataset.process_example_fn"


def encode(function):
    return RecordEncoder(NullTokenizer(96), replace(RULES, process_example_fn=function))(RECORDS)


def misspelled(record):
    return {"input": record["questoin"], "output": record["answer"]}


def three(record, tokenizer, more):
    return record


def refusing(record):
    raise UserError("the record has no question: add one")


@pytest.mark.parametrize("function", [int, time.time, os.getcwd, three, os])
def test_what_cannot_be_called_with_a_record_is_refused_before_the_first_one(function):
    with refused(f"{KEY}=", "write it as function(record), or function(record, tokenizer)"):
        encode(function)


@pytest.mark.parametrize("function", [os.system, pathlib.Path])
def test_a_function_of_something_else_is_one_sentence(function):
    with refused("data.jsonl:7: ", f"{KEY}=", "TypeError", "name another one"):
        encode(function)


def test_a_mistake_in_a_function_is_named_with_its_line():
    with refused("data.jsonl:7: ", f"{KEY}=", "misspelled", "KeyError: 'questoin'", f"{__file__}:"):
        encode(misspelled)


def test_a_result_that_is_no_record_is_refused():
    with refused("data.jsonl:7: ", f"{KEY}=json.dumps returns a str", "a dict, or None to drop it"):
        encode(json.dumps)


def test_a_sentence_of_a_function_is_left_as_it_is():
    with pytest.raises(UserError, match=r"^the record has no question: add one$"):
        encode(refusing)


def test_functions_that_fit_get_what_they_ask_for():
    tokenizers = []

    def with_tokenizer(record, tokenizer=None):
        tokenizers.append(tokenizer)
        return {"input": record["question"], "output": record["answer"]}

    assert len(encode(with_tokenizer).samples) == 1
    assert isinstance(tokenizers[0], NullTokenizer)
    assert len(encode(lambda record: {"text": record["question"]}).samples) == 1


@pytest.mark.parametrize("name", ["os", "json", "nn", "Tensor_", "float32"])
def test_a_bare_name_of_no_function_is_refused(name):
    with refused("must be the name of a function", repr(name)):
        coerce(name, Callable)
