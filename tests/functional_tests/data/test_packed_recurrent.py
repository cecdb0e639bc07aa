# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers take the same step in every layout, and on packed samples: no sample sees another."""

import pytest
import torch

from tests.functional_tests.data.test_packed_gradients import check, one_step, write_samples
from tests.workers import leave

DELTA_NETS = {
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
MAMBA = {
    "hybrid_override_pattern": "M*-M",
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "mamba_num_groups": 2,
    "mamba_state_dim": 5,
    "mamba_conv_kernel": 3,
    "mamba_chunk_size": 8,
}
SHORT_CONVOLUTIONS = {"short_conv_layers": [1, 0, 1, 0], "linear_conv_kernel_dim": 3}
MAMBA1 = {
    "mamba_layers": [1, 0, 1, 0],
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "mamba_num_groups": 1,
    "mamba_state_dim": 5,
    "mamba_conv_kernel": 3,
    "mamba_dt_rank": 3,
}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "tp2": TP2,
    "tp2sp": {**TP2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
}


@pytest.fixture(
    scope="module",
    params=[DELTA_NETS, MAMBA, SHORT_CONVOLUTIONS, MAMBA1],
    ids=["delta nets", "mamba", "short convolutions", "mamba-1"],
)
def layers(request):
    return request.param


def step(folder, kind, layout, micro):
    torch.set_num_threads(1)
    return one_step(folder, kind, layout, micro)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def padded(samples, layers):
    """The step of one process on padded samples."""
    record = step(samples, "padded", layers, 2)
    leave()
    return record


@pytest.mark.parametrize(("kind", "micro"), [("packed", 1), ("padding-free", 4)])
def test_one_process(samples, layers, padded, kind, micro):
    record = step(samples, kind, layers, micro)
    leave()
    check([record], padded)


@pytest.mark.parametrize(("kind", "micro"), [("padded", 2), ("packed", 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes(two_workers, samples, layers, padded, layout, kind, micro):
    check(two_workers.run(step, samples, kind, {**layers, **LAYOUTS[layout]}, micro), padded)


@pytest.mark.slow
def test_tensor_and_context_parallel(four_workers, samples, layers):
    layout = {**LAYOUTS["tp2sp"], **LAYOUTS["cp2"]}
    wider = {**layers, "linear_num_key_heads": 4} if layers is DELTA_NETS else layers
    single = step(samples, "padded", wider, 2)
    leave()
    check(four_workers.run(step, samples, "packed", {**wider, **layout}, 1), single)
