# SPDX-License-Identifier: Apache-2.0
"""Uneven pipeline stages: each split that does not come out is refused in a sentence, each that does passes."""

import pytest

from megatron.bridge.utils.errors import UserError
from tests.toy_run import toy_config

FIRST, LAST, LAYOUT, EMBEDDING, LOSS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
VP2 = {"virtual_pipeline_model_parallel_size": 2}

# (pipeline-parallel size, fields of a model of four layers, what the sentence says)
REFUSED = [
    (1, {FIRST: 4}, [f"model.{FIRST}=4 has no effect", "pipeline_model_parallel_size > 1"]),
    (1, {LOSS: True}, [f"model.{LOSS}=True has no effect"]),
    (1, {LAYOUT: "EttttL"}, [f"model.{LAYOUT}=EttttL has no effect"]),
    (
        2,
        {FIRST: 1, LOSS: True},
        [f"model.{FIRST}=1 and model.{LOSS}=True set the same", "keep one"],
    ),
    (2, {LAYOUT: "Ett|ttL", LAST: 2}, [f"model.{LAST}=2 and model.{LAYOUT}=Ett|ttL set the same"]),
    (2, {FIRST: 0}, [f"model.{FIRST}=0: a stage has 1 or more layers"]),
    (2, {FIRST: 4}, ["leaves 0 layers for the 1 other stages", "a multiple of 1"]),
    (2, {FIRST: 5}, ["leaves -1 layers for the 1 other stages"]),
    (
        2,
        {FIRST: 3, LAST: 2},
        [f"{FIRST}=3 and model.{LAST}=2 of model.num_layers=4 leaves -1", "must be 0"],
    ),
    (4, {FIRST: 2}, ["leaves 2 layers for the 3 other stages", "a multiple of 3"]),
    (
        2,
        VP2 | {FIRST: 1},
        [f"model.{FIRST}=1: a stage has multiples of", "virtual_pipeline_model_parallel_size=2"],
    ),
    (
        2,
        VP2 | {FIRST: 2, "num_layers": 5},
        ["leaves 3 layers for the 1 other stages x 2 virtual", "multiple of 2"],
    ),
    (
        2,
        {EMBEDDING: True},
        [f"{EMBEDDING}=True makes 5 of model.num_layers=4", "2 stages", "use 3 or 5 layers"],
    ),
    (
        2,
        VP2 | {EMBEDDING: True, LOSS: True},
        ["makes 6", "4 stages, virtual ones counted", "use 2 or 6 layers"],
    ),
    (2, {LAYOUT: "Ett|tL"}, [f"model.{LAYOUT}=Ett|tL must hold", "4 layers (t)", "in this order"]),
    (2, {LAYOUT: "tEt|ttL"}, ["must hold the embedding (E)", "in this order"]),
    (2, {LAYOUT: "Ett|tt"}, ["and the loss (L)"]),
    (2, {LAYOUT: "Ett|ttLx"}, ["cannot be read", "x", "t a layer"]),
    (2, {LAYOUT: [["embedding", "layer"], ["loss"]]}, ["cannot be read", "layer"]),
    (2, {LAYOUT: "Ett|ttmL"}, ["must hold", "4 layers (t) and the loss"]),
    (2, {LAYOUT: "Ett|ttL", "mtp_num_layers": 1}, ["4 layers (t)", "1 MTP layers (m)"]),
    (
        2,
        {LAYOUT: "Et|t|ttL"},
        ["has 3 stages, no multiple of model.pipeline_model_parallel_size=2"],
    ),
    (
        2,
        {LAYOUT: "Et|t|t|tL"},
        ["has 4 stages", "set model.virtual_pipeline_model_parallel_size=2"],
    ),
    (
        2,
        VP2 | {LAYOUT: "Ett|ttL"},
        ["has 2 stages", "set model.virtual_pipeline_model_parallel_size=null"],
    ),
]
PASSING = [
    (2, {FIRST: 3}),
    (2, {FIRST: 1, LAST: 3}),
    (3, {FIRST: 1, LAST: 1}),
    (2, VP2 | {FIRST: 4, "num_layers": 6}),
    (2, {EMBEDDING: True, "num_layers": 3}),
    (2, {EMBEDDING: True, LOSS: True}),
    (2, {LAYOUT: "Et*3|tL"}),
    (2, {LAYOUT: [["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]]}),
    (2, VP2 | {LAYOUT: "E|tt|t|tL"}),
    (2, {LAYOUT: "Ett|ttmL", "mtp_num_layers": 1}),
]


@pytest.mark.parametrize(("size", "fields", "words"), REFUSED)
def test_a_split_that_does_not_come_out_is_refused(size, fields, words):
    with pytest.raises(UserError) as refusal:
        toy_config({"pipeline_model_parallel_size": size} | fields).validate(size)
    said = str(refusal.value)
    assert any(all(word in line for word in words) for line in said.splitlines()), said
    assert "Megatron-Core refuses" not in said


@pytest.mark.parametrize(("size", "fields"), PASSING)
def test_a_split_that_comes_out_passes(size, fields):
    toy_config({"pipeline_model_parallel_size": size} | fields).validate(size)
