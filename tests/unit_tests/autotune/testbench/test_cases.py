# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from megatron.bridge.utils.errors import UserError
from scripts.testbench.cases import Case, read_cases
from scripts.testbench.output import spelled


def test_cases_are_read(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(
        json.dumps(
            {"model": "some/model", "cases": [{"seqlen": 64, "max_token_len": 200, "shape": "thd"}]}
        )
    )
    model, (case,) = read_cases(path)
    assert (model, case.samples, case.tokens) == ("some/model", 3, 192)
    assert Case(64, 2, 4).tokens == 128


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ({}, ["cases"]),
        ({"cases": []}, ["cases"]),
        ({"cases": [{}], "mode": 1}, ["mode"]),
        ({"cases": [3]}, ["case 0"]),
        ({"cases": [{}, {"seq_len": 4}]}, ["case 1", "seq_len", "seqlen"]),
        ({"cases": [{"seqlen": 0}]}, ["seqlen=0"]),
        ({"cases": [{"seqlen": True}]}, ["seqlen=True"]),
        ({"cases": [{"shape": "sbhd"}]}, ["shape", "thd"]),
        ({"cases": [{"system": "verl"}]}, ["system", "megatron"]),
        (
            {"cases": [{"micro_batch_size": 2, "batch_size": 3}]},
            ["micro_batch_size=2", "batch_size=3"],
        ),
        (
            {"cases": [{"seqlen": 64, "max_token_len": 32, "shape": "thd"}]},
            ["max_token_len=32", "seqlen=64"],
        ),
    ],
)
def test_a_wrong_case_is_named(tmp_path, cases, words):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    with pytest.raises(UserError) as caught:
        read_cases(path)
    assert all(word in str(caught.value) for word in words)


def test_values_are_spelled_in_their_largest_unit():
    assert spelled(2.5e9, "bytes") == "2.500 GB"
    assert spelled(2e-7, "s") == "0.200 us"
    assert spelled(0, "operations") == "0.000 MFLOP"
