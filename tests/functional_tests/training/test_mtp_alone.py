# SPDX-License-Identifier: Apache-2.0
"""Training of multi-token-prediction layers alone: the rest of the model is frozen."""

import pytest
import torch

from megatron.bridge.training.config import CheckpointConfig, OptimizerConfig, ValidationConfig
from tests.functional_tests.conftest import leave
from tests.refusals import refused
from tests.toy_run import first_weight, run_toy, whole_weights

FROZEN = ["embedding.*", "decoder.*", "output_layer.*"]
STEPS = 2


def arguments(layout=None, frozen=(), steps=STEPS, **blocks):
    return {
        "model": {"mtp_num_layers": 1, **(layout or {})},
        "train": {"train_iters": steps, "frozen": list(frozen)},
        "optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.0, clip_grad=0.0),
        "validation": ValidationConfig(),
    } | blocks


def split(weights):
    """Those of the MTP layers, and the others."""
    of_mtp = {name: value for name, value in weights.items() if name.startswith("mtp.")}
    return of_mtp, {name: value for name, value in weights.items() if name not in of_mtp}


def test_only_the_mtp_layers_change_and_as_they_do_with_the_others(run_in_process):
    alone = run_toy(arguments(frozen=FROZEN))
    of_mtp, others = split(whole_weights([alone]))
    for name, value in others.items():
        assert torch.equal(value, first_weight(name, value.shape)), name
    # the first step has a learning rate of 0, so both take the second one from the same weights
    together = run_toy(arguments())
    expected, _ = split(whole_weights([together]))
    for name, value in of_mtp.items():
        assert not torch.equal(value, first_weight(name, value.shape)), name
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
    assert alone.further["mtp_1 loss"] == together.further["mtp_1 loss"]


def test_two_processes_learn_what_one_does(run_in_process, two_workers):
    alone = run_toy(arguments(frozen=FROZEN, steps=4))
    for layout in ({"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}, {}):
        records = two_workers.run(run_toy, arguments(layout, FROZEN, 4))
        for rank in records:
            assert rank.further["mtp_1 loss"] == pytest.approx(
                alone.further["mtp_1 loss"], rel=1e-6
            )
            assert rank.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)


def test_a_run_of_mtp_layers_resumes_exactly(run_in_process, tmp_path):
    save = CheckpointConfig(save=str(tmp_path / "parts"), save_interval=2)
    straight = run_toy(arguments(frozen=FROZEN, steps=4))
    leave()
    stopped = arguments(frozen=FROZEN, steps=4, checkpoint=save)
    stopped["train"]["exit_interval"] = 2
    run_toy(stopped)
    leave()
    resumed = run_toy(arguments(frozen=FROZEN, steps=4, checkpoint=save))
    assert resumed.further["mtp_1 loss"] == straight.further["mtp_1 loss"][2:]
    leave()


def test_stages_without_trained_parameters_are_named(run_in_process, two_workers):
    with pytest.raises(RuntimeError, match="leaves nothing to train on a pipeline stage"):
        two_workers.run(run_toy, arguments({"pipeline_model_parallel_size": 2}, FROZEN))
    with refused("train.frozen", "mpt"):
        run_toy(arguments(frozen=["mpt.*"]))
