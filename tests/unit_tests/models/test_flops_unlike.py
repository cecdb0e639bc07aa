# SPDX-License-Identifier: Apache-2.0
"""Operations of models whose layers differ: what PyTorch counts in a forward pass, and what it does not see."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.bridge.backends.recurrent.gated_delta_net import CHUNK
from megatron.bridge.models.flops import flops_per_token
from tests.unit_tests.models.test_gpt_provider import toy
from tests.unit_tests.models.test_heterogeneous import provider_of
from tests.unit_tests.models.test_linear_attention import SIZES


def forward(provider, length):
    """(operations of a forward pass of one sequence, what PyTorch counts of it without attention)."""
    provider.seq_length = length
    (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False)
    ids = torch.arange(length)[None] % 100
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        chunk(input_ids=ids, position_ids=ids, attention_mask=None)
    counts = counter.get_flop_counts()["Global"].items()
    # torch counts the attention kernel of CPUs since some version between 2.11 and 2.15, without its causal mask
    counted = sum(count for operator, count in counts if "scaled_dot_product" not in str(operator))
    return flops_per_token([chunk], length) * length / 3, counted


def test_gated_delta_nets():
    length, layers, heads, keys, values = 3 * CHUNK, 2, 4, 6, 5
    found, counted = forward(toy(**SIZES | {"linear_attention_freq": [1] * layers}), length)
    masked = heads * CHUNK * (2 * keys + values)  # half of each product among a chunk's tokens
    solved = heads * CHUNK * (keys + values)  # the triangular systems
    convolved = 2 * 4 * (2 * 2 * keys + heads * values)  # 4 taps, 2 key heads
    first = CHUNK * heads * 4 * keys * values  # the state before a sequence is nothing
    assert found == pytest.approx(
        counted + layers * (length * (convolved + solved - masked) + first), rel=1e-12
    )


def test_layers_of_different_sizes():
    length, heads, width = 40, 6, 8
    found, counted = forward(provider_of(), length)
    attention = 2 * 2 * width * heads * (length + 1) / 2
    assert found == pytest.approx(
        counted + 3 * length * attention, rel=1e-12
    )  # one of four layers has none
