# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose layers differ train, go on from a checkpoint bitwise, and alike under other layouts."""

import pytest
import torch
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from tests.families import harness
from tests.families.rows import ROWS
from tests.toy_run import SEQUENCE, Record, toy_config, whole_weights

STEPS = 4
LAYOUTS = {
    "tp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    },
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


MODELS = (
    "qwen3_next",
    "nemotron_h_experts",
    "deci",
    "granitemoehybrid",
    "gemma4",
    "gemma4_experts",
)
REFUSED = {("gemma4", "pp2")}
IN_CI = {("qwen3_next", "tp2"), ("nemotron_h_experts", "cp2"), ("deci", "pp2")}
LIKE_OTHERS = ("granitemoehybrid", "gemma4")
"""On one process; each kind of layer is in another model, too."""
CELLS = [
    pytest.param(model, layout, marks=() if (model, layout) in IN_CI else pytest.mark.slow)
    for model in MODELS
    for layout in LAYOUTS
    if (model, layout) not in REFUSED
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(model, marks=[pytest.mark.slow] * (model in LIKE_OTHERS)) for model in MODELS
    ],
)
def toy(tmp_path_factory, request):
    """A checkpoint with random numbers."""
    directory = tmp_path_factory.mktemp(request.param) / "hf"
    harness.save(harness.hf_model(ROWS[request.param]), directory)
    return directory


def train(directory, layout, steps=STEPS, save=None):
    """What this rank records of a run of ``steps`` of the whole schedule."""
    provider = AutoBridge.from_hf_pretrained(directory).to_megatron_provider()
    for name, value in {"seq_length": SEQUENCE, "calculate_per_token_loss": True, **layout}.items():
        setattr(provider, name, value)
    if not provider.num_moe_experts:
        provider.expert_tensor_parallel_size = None
    config = toy_config(
        train={"train_iters": steps}, checkpoint=CheckpointConfig(save=save and str(save))
    )
    config.model, config.scheduler.lr_decay_iters = provider, STEPS
    record = Record()
    try:
        pretrain(config, forward_step, [record])
    finally:
        parallel_state.destroy_model_parallel()
    return record


@pytest.fixture(scope="module")
def single(toy):
    torch.set_num_threads(1)
    return train(toy, {})


def test_it_goes_on_from_its_checkpoint_bitwise(toy, single, tmp_path):
    assert single.losses[-1] < single.losses[0]
    before = train(toy, {}, STEPS // 2, tmp_path)
    after = train(toy, {}, STEPS, tmp_path)
    assert before.losses + after.losses == single.losses
    weights, expected = whole_weights([after]), whole_weights([single])
    assert weights.keys() == expected.keys()
    assert [
        name for name, weight in expected.items() if not torch.equal(weights[name], weight)
    ] == []


@pytest.mark.parametrize(("toy", "layout"), CELLS, indirect=["toy"])
def test_a_checkpoint_goes_on_under_another_layout(two_workers, toy, single, tmp_path, layout):
    train(toy, {}, STEPS // 2, tmp_path)
    for record in two_workers.run(train, toy, LAYOUTS[layout], STEPS, tmp_path):
        assert record.losses == pytest.approx(single.losses[STEPS // 2 :], rel=1e-5)


def test_short_convolutions_go_on_under_another_layout(two_workers, tmp_path):
    harness.save(harness.hf_model(ROWS["lfm2"]), tmp_path / "hf")
    whole = train(tmp_path / "hf", {})
    train(tmp_path / "hf", {}, STEPS // 2, tmp_path / "run")
    for record in two_workers.run(train, tmp_path / "hf", LAYOUTS["tp2"], STEPS, tmp_path / "run"):
        assert record.losses == pytest.approx(whole.losses[STEPS // 2 :], rel=1e-5)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("kimi_linear", "p2p"),
        pytest.param("lfm2", "all_gather", marks=pytest.mark.slow),
        pytest.param("jamba_dense", "all_gather", marks=pytest.mark.slow),
        pytest.param("falcon_h1", "p2p", marks=pytest.mark.slow),
        ("falcon_h1_groups", "a2a"),
    ],
)
def test_mixers_exchange_tokens_for_features(two_workers, tmp_path, row, kind):
    """Kimi delta attention, short convolutions, Mamba-1, and Mamba-2 with one group of heads and with several."""
    harness.save(harness.hf_model(ROWS[row]), tmp_path / "hf")
    single = train(tmp_path / "hf", {})
    layout = {"context_parallel_size": 2, "cp_comm_type": kind}
    records = two_workers.run(train, tmp_path / "hf", layout)
    for record in records:
        assert record.losses == pytest.approx(single.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(single.grad_norms, rel=5e-5)
    weights, expected = whole_weights(records), whole_weights([single])
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=5e-5, msg=name)


SPARSE = {"dsa_indexer_loss_coeff": 0.3, "mtp_num_layers": None}
SPARSE_LAYOUTS = {**LAYOUTS, "cp2": {**LAYOUTS["cp2"], "cp_comm_type": "all_gather"}}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A checkpoint, and a whole run of it on one process."""
    directory = tmp_path_factory.mktemp("deepseek_v32") / "hf"
    harness.save(harness.hf_model(ROWS["deepseek_v32"]), directory)
    return directory, train(directory, SPARSE)


@pytest.mark.parametrize("layout", SPARSE_LAYOUTS)
def test_indexers_learn_the_same_under_another_layout(two_workers, sparse, layout):
    directory, single = sparse
    records = two_workers.run(train, directory, {**SPARSE, **SPARSE_LAYOUTS[layout]})
    losses = single.further["indexer_loss"]
    assert losses[-1] < losses[0]
    for record in records:
        assert record.losses == pytest.approx(single.losses, rel=1e-4)
        assert record.further["indexer_loss"] == pytest.approx(losses, rel=1e-3)
    expected, found = whole_weights([single]), whole_weights(records)
    indexers = [name for name in expected if ".indexer." in name]
    assert indexers
    for name in indexers:  # the run moves them by a tenth
        assert (found[name] - expected[name]).norm() < 1e-3 * expected[name].norm(), name
