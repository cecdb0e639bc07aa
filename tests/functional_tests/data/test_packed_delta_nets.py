# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets take the same step in every layout, and on packed samples: no sample sees another."""

import pytest
import torch
import torch.distributed as dist

from tests.functional_tests.data.test_packed_gradients import check, one_step, write_samples

NETS = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_output_gate": True,
    "qk_layernorm": True,
}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS = {"tp2": TP2, "tp2sp": {**TP2, "sequence_parallel": True}, "cp2": {"context_parallel_size": 2}}


def step(folder, kind, layout, micro):
    return one_step(folder, kind, {**NETS, **layout}, micro)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def padded(samples):
    """The step of one process on padded samples."""
    torch.set_num_threads(1)
    record = step(samples, "padded", {}, 2)
    dist.destroy_process_group()
    return record


@pytest.mark.parametrize(("kind", "micro"), [("packed", 1), ("padding-free", 4)])
def test_one_process(samples, padded, kind, micro):
    record = step(samples, kind, {}, micro)
    dist.destroy_process_group()
    check([record], padded)


@pytest.mark.parametrize(("kind", "micro"), [("padded", 2), ("packed", 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes(two_workers, samples, padded, layout, kind, micro):
    check(two_workers.run(step, samples, kind, LAYOUTS[layout], micro), padded)


@pytest.mark.slow
def test_tensor_and_context_parallel(four_workers, samples, padded):
    layout = {**LAYOUTS["tp2sp"], **LAYOUTS["cp2"], "linear_num_key_heads": 4}
    torch.set_num_threads(1)
    single = step(samples, "padded", {"linear_num_key_heads": 4}, 2)
    dist.destroy_process_group()
    check(four_workers.run(step, samples, "packed", layout, 1), single)
