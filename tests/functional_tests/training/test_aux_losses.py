# SPDX-License-Identifier: Apache-2.0
"""Losses beside that of the next token are Megatron-Core's own where its formula is right: in one microbatch."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron.bridge.backends.kernels import mtp_loss
from megatron.bridge.training.config import OptimizerConfig, SchedulerConfig, ValidationConfig
from tests import parity
from tests.toy_run import run_toy, whole_weights

pytestmark = pytest.mark.usefixtures("run_in_process")


def one_step(model, micro=8):
    """The record of one step, without an evaluation behind it."""
    torch.set_num_threads(1)
    train = {"train_iters": 1, "micro_batch_size": micro, "global_batch_size": 8}
    return run_toy(
        {
            "model": model,
            "train": train,
            "optimizer": OptimizerConfig(lr=1e-2, adam_eps=parity.EPSILON),
            "scheduler": SchedulerConfig(lr_decay_style="constant"),
            "validation": ValidationConfig(),
        }
    )


@pytest.mark.parametrize("model", ["2 further tokens", "2 further tokens, means of microbatches"])
def test_further_tokens(model, monkeypatch):
    fields = parity.MODELS[model].fields
    ours = one_step(fields)
    tracker = multi_token_prediction.MTPLossLoggingHelper
    tracker.clean_metrics_in_tracker()
    monkeypatch.setattr(mtp_loss, "process_mtp_loss", multi_token_prediction.process_mtp_loss)
    theirs = one_step(fields)
    assert gpt_model.process_mtp_loss is multi_token_prediction.process_mtp_loss
    expected = tracker.tracker["loss_values"].tolist()
    assert theirs.further == {}
    assert ours.further == {
        f"mtp_{depth} loss": [pytest.approx(value, rel=1e-6)]
        for depth, value in enumerate(expected, 1)
    }
    assert min(parity.moved(ours).values()) > 5e-6
    weights, reference = whole_weights([ours]), whole_weights([theirs])
    for name, weight in reference.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2.5e-7)


def test_routers():
    """In two microbatches; layers without experts do not count."""
    record = one_step(parity.EXPERTS, micro=4)
    expected = {}
    parallel_state.initialize_model_parallel()
    get_moe_metrics_tracker().report(
        loss_scale=1 / 2,
        iteration=1,
        num_layers=4,
        moe_layer_freq=parity.EXPERTS["moe_layer_freq"],
        total_loss_dict=expected,
    )
    assert record.further.keys() == {"load_balancing_loss", "z_loss"}
    for name, values in record.further.items():
        assert values == [pytest.approx(float(expected[name]), rel=1e-6)]
    assert record.further["load_balancing_loss"][0] == pytest.approx(1, abs=0.2)
