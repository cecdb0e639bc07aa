# SPDX-License-Identifier: Apache-2.0
"""Samples of very different lengths, each on as many ranks as it needs, train as on one process."""

import json

import numpy as np
import pytest
import torch

from megatron.bridge.checkpoint import paths
from megatron.bridge.data.config import FinetuningDatasetConfig, PackedSequenceSpecs
from megatron.bridge.models.conversion.engine import stored_provider
from megatron.bridge.training.config import (
    DistributedDataParallelConfig,
    DistributedInitConfig,
    OptimizerConfig,
    SchedulerConfig,
    ValidationConfig,
)
from tests.functional_tests.checkpoint.runs import DROPOUT, STEPS, run_to
from tests.toy_run import VOCABULARY, run_toy, whole_weights
from tests.workers import leave

TOKENS = 64  # of a row; a rank holds a quarter
LENGTHS = [60, 5, 11, 3, 31, 9, 14, 4, 7, 27, 6, 16, 45, 8, 3, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("samples")
    random = np.random.default_rng(0)

    def words(count):
        return " ".join(map(str, random.integers(0, VOCABULARY - 1, count)))

    records = [
        {"prompt": f"{words(length // 3)} ", "completion": words(length - length // 3 - 1)}
        for length in LENGTHS
    ]
    for name in ("training", "validation"):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (root / f"{name}.jsonl").write_text(lines)
    return root


def arguments(folder, layout=None, **blocks):
    return {
        "model": {"seq_length": TOKENS, **(layout or {})},
        "train": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 4},
        "dataset": FinetuningDatasetConfig(
            dataset_root=str(folder),
            seq_length=TOKENS,
            do_test=False,
            packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=TOKENS),
        ),
        "validation": ValidationConfig(eval_interval=2, eval_iters=1),
        # the changes of weights are the gradients: Adam would divide rounding by rounding
        "optimizer": OptimizerConfig(
            optimizer="sgd", lr=0.3, min_lr=0.3, weight_decay=0.0, clip_grad=0.0, sgd_momentum=0.0
        ),
        "scheduler": SchedulerConfig(lr_decay_style="constant"),
        "ddp": DistributedDataParallelConfig(use_distributed_optimizer=False),
        **blocks,
    }


@pytest.fixture(scope="module")
def alone(folder):
    """One process, on rows as they are packed."""
    torch.set_num_threads(1)
    record = run_toy(arguments(folder))
    leave()
    return record


def shared(tokens=16, **layout):
    return {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": tokens, **layout}


LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}
LAYOUTS = {
    "all_gather": {},
    "ring": {"cp_comm_type": "p2p"},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tokens": 32},
    "stages": {"pipeline_model_parallel_size": 2, "tokens": 32},
    "interleaved": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "tokens": 32,
    },
    "recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def check(records, alone, tolerance=2e-6):
    assert [record.numbers for record in records] == [records[0].numbers] * len(records)
    assert records[0].losses == pytest.approx(alone.losses, rel=1e-6)
    assert records[0].grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)
    assert records[0].held_out == pytest.approx(alone.held_out, rel=1e-6)
    weights, expected = whole_weights(records), whole_weights([alone])
    assert max((weights[name] - expected[name]).abs().max() for name in expected) <= tolerance


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_losses_gradients_and_weights_are_those_of_one_process(four_workers, folder, alone, layout):
    check(four_workers.run(run_toy, arguments(folder, shared(**layout))), alone)


@pytest.mark.parametrize("model", [LATENT, EXPERTS], ids=["latent", "experts"])
def test_latent_attention_and_experts_of_several_ranks(four_workers, folder, model):
    torch.set_num_threads(1)
    alone = run_toy(arguments(folder, model))
    leave()
    layout = {"expert_model_parallel_size": 4} if model is EXPERTS else {}
    check(four_workers.run(run_toy, arguments(folder, shared(**model, **layout))), alone)


SHARDINGS = {
    "megatron_fsdp": {
        "ddp": DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
        )
    },
    "fsdp2": {"dist": DistributedInitConfig(use_torch_fsdp2=True)},
    "overlapped": {
        "ddp": DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        )
    },
}


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_shards_of_weights_stay_in_step(four_workers, folder, sharding):
    torch.set_num_threads(1)
    by_adam = {"optimizer": OptimizerConfig(lr=1e-3), "scheduler": SchedulerConfig()}
    alone = run_toy({**arguments(folder), **by_adam, "ddp": DistributedDataParallelConfig()})
    leave()
    several = {
        **arguments(folder, shared()),
        **by_adam,
        "ddp": DistributedDataParallelConfig(use_distributed_optimizer=False),
        **sharding,
    }
    # Adam's first step divides gradients by their size, and so multiplies the rounding of small ones
    check(four_workers.run(run_toy, several), alone, tolerance=2e-5)


def test_a_resumed_run_is_the_undisturbed_one(four_workers, folder, tmp_path):
    """Bitwise: losses, the tokens of each rank, and the digest of weights, optimizer and random states."""
    exact = arguments(folder, {**shared(), **DROPOUT})
    del exact["ddp"], exact["validation"], exact["train"]["train_iters"]
    exact["train"]["iterations_to_skip"] = [5]  # a skipped step has its own number of microbatches
    undisturbed = four_workers.run(
        run_to, tmp_path, STEPS, {**exact, "checkpoint": {"save_interval": 3}}
    )
    paths.write_tracker(tmp_path, 3)
    assert four_workers.run(run_to, tmp_path, STEPS, exact) == undisturbed
    assert undisturbed[0]["tokens"] != undisturbed[1]["tokens"]
    alone = stored_provider.read_for_layout(paths.resolve(tmp_path), None)
    assert not alone.hybrid_context_parallel, "one process exports it"
