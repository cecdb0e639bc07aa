# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another optimizer, activation or size than the run's ends in one sentence, or is noted."""

import pytest
import torch.nn.functional as F

from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.optim.optimizer_state import fits_optimizer
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.utils.console import console
from tests.refusals import refused
from tests.toy_run import save_llama, toy_config

UNSHARDED = {"ddp.use_distributed_optimizer": False}
SGD = {"optimizer.optimizer": "sgd", **UNSHARDED}
MUON = {"optimizer.optimizer": "muon", **UNSHARDED}


def run(checkpoint, changes=None):
    """What a run of two steps prints."""
    config = toy_config()
    config.train.train_iters = 2
    settings = {f"checkpoint.{name}": value for name, value in checkpoint.items()}
    for key, value in {**settings, **(changes or {})}.items():
        block, name = key.split(".")
        setattr(getattr(config, block), name, value)
    with console().capture() as capture:
        pretrain(config, forward_step)
    return capture.get()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Run folders by the optimizer that saved."""
    root = tmp_path_factory.mktemp("runs")
    for name, changes in {"adam": {}, "sgd": SGD, "muon": MUON}.items():
        run({"save": str(root / name)}, changes)
    return root


@pytest.mark.parametrize(
    ("saved", "changes", "states"),
    [
        ("adam", SGD, ("state of adam (exp_avg, exp_avg_sq)", "=sgd has momentum_buffer")),
        ("adam", MUON, ("state of adam (exp_avg, exp_avg_sq)", "=muon has momentum_buffer")),
        ("muon", {}, ("state of muon (", "=adam has exp_avg, exp_avg_sq")),
        ("sgd", {}, ("state of sgd or muon (momentum_buffer)", "=adam has exp_avg, exp_avg_sq")),
    ],
)
def test_the_state_of_another_optimizer_is_refused(folders, saved, changes, states):
    remedy = f"set optimizer.optimizer={saved}, or checkpoint.load_optim=false"
    with refused(str(folders / saved), *states, remedy):
        run({"load": str(folders / saved)}, changes)


def test_the_weights_alone_go_on_with_another_optimizer(folders):
    run({"load": str(folders / "adam"), "load_optim": False}, SGD)
    run({"load": str(folders / "sgd")}, SGD)


def test_which_states_an_optimizer_has():
    assert fits_optimizer("muon", {"momentum_buffer", "exp_avg", "exp_avg_sq"})
    assert fits_optimizer("muon", {"momentum_buffer"})  # matrices alone
    assert not fits_optimizer("adam", {"exp_avg"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_layers": 2}, ("model.num_layers is 2, in the checkpoint 4",)),
        ({"model.hidden_size": 64}, ("model.hidden_size is 64, in the checkpoint 32",)),
        ({"model.gated_linear_unit": False}, ("model.gated_linear_unit is False, in the",)),
        (
            {"model.activation_func": F.relu},
            ("is torch.nn.functional.relu, in the checkpoint torch.nn.functional.silu",),
        ),
    ],
)
def test_a_run_of_another_model_is_not_resumed(folders, changes, words):
    with refused("computes something else", *words, "checkpoint.allow_model_change"):
        run({"load": str(folders / "adam")}, changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_layers": 2}, ("it also holds decoder.layers.2.",)),
        ({"model.num_layers": 6}, ("it lacks decoder.layers.4.",)),
        ({"model.hidden_size": 64}, ("decoder.final_layernorm.weight is 32, the model's is 64",)),
        (
            {"model.gated_linear_unit": False},
            ("linear_fc1.weight is 128x32, the model's is 64x32",),
        ),
    ],
)
@pytest.mark.parametrize("start", ["pretrained_checkpoint", "load"])
def test_weights_of_other_shapes_are_refused(folders, changes, words, start):
    checkpoint = {start: str(folders / "adam"), "finetune": True}
    with refused("is not of this model", *words, "load it into the model it was saved from"):
        run(checkpoint, changes)


def test_weights_of_a_model_that_computes_something_else_are_noted(folders, tmp_path):
    path = str(folders / "adam")
    changes = {"model.activation_func": F.relu, "model.rotary_base": 7.0}
    for checkpoint in ({"load": path, "finetune": True}, {"pretrained_checkpoint": path}):
        assert "computes something else" not in run(checkpoint)
        printed = " ".join(run(checkpoint, changes).split())
        assert "activation_func is torch.nn.functional.relu, in the checkpoint torch.nn" in printed
        assert "model.rotary_base is 7.0, in the checkpoint 10000.0" in printed
    same = {"model.rotary_base": 500.0, "model.layernorm_epsilon": 1e-6}
    llama = {"pretrained_checkpoint": str(save_llama(tmp_path, num_hidden_layers=4))}
    assert "computes something else" not in run(llama, same)
    printed = " ".join(run(llama, {**same, "model.rotary_base": 7.0}).split())
    assert "model.rotary_base is 7.0, in the checkpoint 500.0" in printed
