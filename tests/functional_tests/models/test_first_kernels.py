# SPDX-License-Identifier: Apache-2.0
"""A new model's convolutions differ from rank to rank, as those of one process do from feature to feature."""

import pytest

from tests.unit_tests.models.test_gpt_provider import toy
from tests.unit_tests.models.test_linear_attention import MAMBA, SIZES


def kernels(changes):
    """The convolution that this rank starts with."""
    (chunk,) = toy(
        **changes, vocab_size=100, tensor_model_parallel_size=2
    ).provide_distributed_model(wrap_with_ddp=False)
    kernels = [
        weight for name, weight in chunk.decoder.layers[0].named_parameters() if "conv1d" in name
    ]
    return kernels[0].detach().numpy()


@pytest.mark.parametrize("changes", [SIZES, MAMBA, {"short_conv_layers": [1, 0]}])
def test_ranks_start_with_kernels_of_their_own(two_workers, changes):
    first, second = two_workers.run(kernels, changes)
    assert first.shape == second.shape
    assert abs(first - second).mean() > 0.1
