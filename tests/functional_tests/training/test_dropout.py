# SPDX-License-Identifier: Apache-2.0
"""Which masks ranks draw: alike where they hold the same, different ones where each holds a part."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bridge.backends.attention.torch_attention import TorchAttention
from tests import parity
from tests.toy_run import run_toy, whole_weights

SHARE = 0.2
BOTH = {"hidden_dropout": SHARE, "attention_dropout": SHARE}
FULL = parity.FULL


def hidden_masks(layout):
    """What this rank keeps of hidden states in one step, an array for each time; and whether it is scaled up."""
    draw, masks, scaled = F.dropout, [], []

    def spy(states, p=0.5, training=True, inplace=False):
        kept = draw(states, p, training, inplace)
        if training and p > 0:
            masks.append((kept != 0).numpy())
            scaled.append(bool(torch.allclose(kept[kept != 0], states[kept != 0] / (1 - p))))
        return kept

    F.dropout = spy
    try:
        run_toy({"model": {"hidden_dropout": SHARE} | layout, "train": {"train_iters": 1}})
    finally:
        F.dropout = draw
    return masks, all(scaled)


def check_share(masks):
    """As many are dropped as asked for, within four standard deviations."""
    count = sum(mask.size for mask in masks)
    dropped = 1 - sum(int(mask.sum()) for mask in masks) / count
    assert abs(dropped - SHARE) < 4 * (SHARE * (1 - SHARE) / count) ** 0.5


def agreement(one, other):
    """The share of places that two lists of masks treat alike."""
    alike = sum(int((a == b).sum()) for a, b in zip(one, other, strict=True))
    return alike / sum(mask.size for mask in one)


INDEPENDENT = SHARE**2 + (1 - SHARE) ** 2


@pytest.mark.parametrize("layout", ["TP2", "TP2+SP", "PP2"])
def test_masks_of_hidden_states(two_workers, layout):
    (one, scaled), (other, other_scaled) = two_workers.run(
        hidden_masks, parity.LAYOUTS[layout].model
    )
    assert scaled
    assert other_scaled
    check_share(one)
    check_share(other)
    if layout == "PP2":
        # the first stage drops of the embedding, too: what is behind are two masks a layer
        one = [mask for index, mask in enumerate(one) if index % 5]
    assert len(one) == len(other) >= 16
    if layout == "TP2":
        assert agreement(one, other) == 1
    else:
        assert agreement(one, other) == pytest.approx(INDEPENDENT, abs=0.02)


def attention_mask():
    """What each head of this rank keeps of the causal probabilities, [heads, queries, keys]."""
    length, heads = 64, 4
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * length,
        num_attention_heads=heads,
        attention_dropout=SHARE,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
    )
    module = TorchAttention(config, 1, AttnMaskType.causal, "self")
    same = torch.zeros(length, 1, heads // 2, length)
    told = torch.eye(length).view(length, 1, 1, length).expand(-1, -1, heads // 2, -1)
    seen = module(same, same, told, None).view(length, heads // 2, length).transpose(0, 1)
    even = 1 / torch.arange(1, length + 1).view(1, length, 1)
    assert torch.allclose(seen[seen != 0], (even / (1 - SHARE)).expand_as(seen)[seen != 0])
    past = torch.ones(length, length).tril().bool()
    return (seen != 0)[:, past].numpy()


def test_masks_of_attention_belong_to_heads(two_workers):
    one, other = two_workers.run(attention_mask)
    check_share([one])
    check_share([other])
    assert agreement([one], [other]) == pytest.approx(INDEPENDENT, abs=0.03)
    assert agreement([one[0]], [one[1]]) == pytest.approx(INDEPENDENT, abs=0.03)


def train(layout):
    return run_toy({"model": BOTH | layout, "train": {"train_iters": 4}})


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("TP2+SP", id="TP2+SP"),
        pytest.param("PP2+VP2", id="PP2+VP2"),
        pytest.param("CP2, all-gather", id="CP2", marks=pytest.mark.slow),
        pytest.param("DP2, distributed optimizer", id="DP2", marks=pytest.mark.slow),
    ],
)
def test_a_layout_repeats_itself_and_recomputes_its_masks(two_workers, layout):
    """Bit by bit: two runs, and a third that computes every layer again in the backward pass."""
    model = parity.LAYOUTS[layout].model
    first, again, recomputed = (two_workers.run(train, model | extra) for extra in ({}, {}, FULL))
    plain = two_workers.run(train, model | dict.fromkeys(BOTH, 0.0))
    assert first[0].losses != plain[0].losses
    for other in (again, recomputed):
        assert [record.numbers for record in other] == [record.numbers for record in first]
        weights, expected = whole_weights(other), whole_weights(first)
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
