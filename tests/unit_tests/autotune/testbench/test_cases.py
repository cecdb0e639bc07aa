# SPDX-License-Identifier: Apache-2.0
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from megatron.bridge.recipes.sizes import size_of
from megatron.bridge.utils.errors import UserError
from scripts import testbench
from scripts.testbench.cases import Case, read_cases
from scripts.testbench.output import spelled

FILES = Path(testbench.__file__).parent


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


@pytest.mark.parametrize("path", sorted(FILES.glob("cases/*.json")), ids=lambda path: path.stem)
def test_the_files_of_models_are_read(path):
    model, cases = read_cases(path)
    assert size_of(model).provider().num_layers > 1
    assert {case.shape for case in cases} == {"bshd", "thd"}


def test_the_sample_of_user_buffers_has_each_product_once():
    settings = yaml.safe_load((FILES / "tp_comm_overlap_cfg.yaml").read_text())
    methods = Counter(values["method"] for values in settings.values())
    assert methods == {"ring_exchange": 4, "pipeline": 2, "bulk": 4}
    directions = ("fprop", "dgrad", "wgrad")
    products = {f"{name}_{each}" for name in ("qkv", "fc1") for each in directions}
    products |= {f"{name}_{each}" for name in ("proj", "fc2") for each in directions[:2]}
    assert set(settings) == products
