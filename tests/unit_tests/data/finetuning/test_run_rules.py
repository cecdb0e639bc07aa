# SPDX-License-Identifier: Apache-2.0
"""What data for fine-tuning sets and refuses in the config of a run."""

import pytest

from megatron.bridge.data.config import (
    BlendedDatasetConfig,
    FinetuningDatasetConfig,
    PackedSequenceSpecs,
)
from megatron.bridge.training.config.rules import violations
from megatron.bridge.training.config.rules.model import (
    packed_samples_fit_context_parallel,
    packed_samples_need_micro_batch_of_one,
)
from tests.refusals import refused, says
from tests.toy_run import SEQUENCE, toy_config

LAYOUT = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}


def data(packed=False, multiple=None, **values):
    specs = PackedSequenceSpecs(
        packed_sequence_size=SEQUENCE if packed else -1, pad_seq_to_mult=multiple
    )
    return FinetuningDatasetConfig(
        dataset_root=".", seq_length=SEQUENCE, packed_sequence_specs=specs, **values
    )


def validated(dataset, world_size=1, micro=1, **model):
    config = toy_config(
        model={"calculate_per_token_loss": False} | model,
        dataset=dataset,
        train={"micro_batch_size": micro},
    )
    resolved = config.resolve(world_size)
    return resolved.config, resolved.notes


def test_each_learnt_token_counts_the_same_and_it_is_told():
    config, notes = validated(data())
    assert config.model.calculate_per_token_loss
    assert [note for note in notes if "calculate_per_token_loss=True is used" in note]
    assert not [note for note in config.validate(1) if "per_token" in note], "told once"
    blend = BlendedDatasetConfig(seq_length=SEQUENCE, datasets=[data()], weights=[1])
    assert validated(blend)[0].model.calculate_per_token_loss


@pytest.mark.parametrize(
    ("values", "layout", "multiple"),
    [
        ({"packed": True}, {}, 1),
        ({"packed": True}, LAYOUT, 4),
        ({"padding_free": True}, LAYOUT, 8),
        ({"padding_free": True}, {"context_parallel_size": 2}, 4),
    ],
)
def test_samples_are_padded_as_the_layout_needs(values, layout, multiple):
    config, _ = validated(data(**values), world_size=4, **layout)
    assert config.dataset.sequence_multiple == multiple


def test_padding_free_stages_exchange_lengths():
    config, notes = validated(data(padding_free=True), 2, pipeline_model_parallel_size=2)
    assert config.model.variable_seq_lengths
    assert [note for note in notes if "variable_seq_lengths=True is used" in note]
    assert not validated(data(packed=True), 2, pipeline_model_parallel_size=2)[
        0
    ].model.variable_seq_lengths


def test_what_cannot_be_cut_is_refused():
    with refused("train.micro_batch_size=2", "train.micro_batch_size=1"):
        validated(data(packed=True), micro=2)
    with refused("dataset.packed_sequence_specs.pad_seq_to_mult=2", "4", "leave it unset"):
        validated(data(packed=True, multiple=2), 4, **LAYOUT)
    config, _ = validated(data(packed=True))
    rules = [packed_samples_need_micro_batch_of_one, packed_samples_fit_context_parallel]
    assert violations(rules, config, 1) == []


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        (data(packed=True, padding_free=True), ("dataset.padding_free=True", "remove one")),
        (
            data(split_turns=True, train_on="last"),
            ("dataset.split_turns=True", "dataset.train_on=last", "remove one"),
        ),
        (data(workers=0), ("dataset.workers=0", "at least 1")),
        (data(train_on="all"), ("dataset.train_on='all'", "assistant")),
        (
            data(multiple=5, padding_free=True),
            ("dataset.packed_sequence_specs.pad_seq_to_mult=5", "dataset.seq_length=32"),
        ),
    ],
)
def test_wrong_values_are_named(dataset, parts):
    (problem,) = dataset.problems()
    assert says(problem, *parts)


def test_how_a_blend_is_drawn_from_is_said_once():
    blend = BlendedDatasetConfig(
        seq_length=SEQUENCE, datasets=[data(), data(num_workers=2)], weights=[1, 1]
    )
    (problem,) = blend.problems()
    assert says(problem, "dataset.datasets[1].num_workers=2", "blend")


def test_a_packed_row_is_as_long_as_the_models():
    dataset = data()
    dataset.packed_sequence_specs = PackedSequenceSpecs(packed_sequence_size=16)
    (problem,) = dataset.problems()
    assert says(
        problem, "dataset.packed_sequence_specs.packed_sequence_size=16", "dataset.seq_length=32"
    )


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.01,
}


@pytest.mark.parametrize(
    ("values", "kind", "is_noted"),
    [
        ({"packed": True}, "seq_aux_loss", True),
        ({"padding_free": True}, ["seq_aux_loss"], True),
        ({}, "seq_aux_loss", False),
        ({"packed": True}, "aux_loss", False),
    ],
)
def test_a_row_of_several_samples_is_one_sequence_to_routers(values, kind, is_noted):
    experts = {**EXPERTS, "moe_router_load_balancing_type": kind}
    if isinstance(kind, list):
        experts["moe_aux_loss_coeff"] = [0.01]
    _, notes = validated(data(**values), **experts)
    assert any("a row counts as one sequence" in note for note in notes) == is_noted
