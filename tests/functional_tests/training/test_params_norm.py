# SPDX-License-Identifier: Apache-2.0
"""The norm of all weights, each counted once, under every layout; and what else ranks find out together."""

import json

import pytest

from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    LoggerConfig,
    ValidationConfig,
)
from tests.toy_run import run_toy, whole_weights

TIED = {"share_embeddings_and_output_weights": True}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
}
LAYOUTS = {
    "TP2+SP, tied": TIED | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2, tied": TIED | {"pipeline_model_parallel_size": 2},
    "DP2, distributed optimizer": {},
    "DP2": {},
    "CP2": {"context_parallel_size": 2},
    "EP2": EXPERTS | {"expert_model_parallel_size": 2},
    "EP2, tensor parallel": EXPERTS
    | {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    | {"expert_tensor_parallel_size": 1},
}


def train(name, folder):
    model = LAYOUTS[name]
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}
    ddp = {
        "DP2": {"use_distributed_optimizer": False},
        "DP2, distributed optimizer": overlapped,
    }.get(name, {})
    return run_toy(
        {
            "model": model,
            "train": {"train_iters": 2},
            "ddp": DistributedDataParallelConfig(**ddp),
            "validation": ValidationConfig(),
            "logger": LoggerConfig(log_interval=5, log_dir=str(folder), log_params_norm=True),
        }
    )


def logged(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_is_that_of_the_whole_weights(two_workers, tmp_path, name):
    records = two_workers.run(train, name, tmp_path)
    weights = whole_weights(records)
    assert ("output_layer.weight" in weights) != (
        "share_embeddings_and_output_weights" in LAYOUTS[name]
    )
    expected = sum(weight.double().square().sum() for weight in weights.values()).sqrt().item()
    row = logged(tmp_path)
    assert row["params norm"] == pytest.approx(expected, rel=1e-6)
    assert 0 < row["memory GB"] <= row["peak memory GB"]
    assert 0 <= row["data wait"] < row["step time"]
