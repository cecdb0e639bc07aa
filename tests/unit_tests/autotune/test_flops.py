# SPDX-License-Identifier: Apache-2.0
"""Operations against what torch counts while a model runs, and against the formulas of papers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.bridge.autotune import ranks
from megatron.bridge.models import flops
from megatron.bridge.peft.lora import LoRA
from tests.unit_tests.autotune.models import FAMILIES, SEQUENCE, provider


def counted(model, backward=False):
    """Operations of matrix products that torch dispatches, those of fused attention left out."""
    chunk = model.provide_distributed_model(wrap_with_ddp=False)[0]
    tokens = torch.randint(0, 500, (1, SEQUENCE))
    with FlopCounterMode(display=False) as counter:
        loss = chunk(
            input_ids=tokens, position_ids=torch.arange(SEQUENCE)[None], attention_mask=None, labels=tokens
        ).sum()
        if backward:
            loss.backward()
    products = counter.get_flop_counts()["Global"]
    return {str(name).removeprefix("aten."): count for name, count in products.items()}


def linear(model):
    return SEQUENCE * sum(flops._matrix(path, module) for path, module in model.named_modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_linear_layers_are_those_that_run(family):
    seen = counted(provider(family))
    assert linear(ranks.whole(provider(family))) == seen["mm"] + seen.get("addmm", 0)


def test_backward_is_twice_forward():
    seen = counted(provider("llama"), backward=True)
    assert 3 * linear(ranks.whole(provider("llama"))) == pytest.approx(
        seen["mm"], rel=2e-3
    )  # norms sum by products


def test_frozen_weights_have_no_gradient():
    whole = ranks.whole(provider("llama"))
    everything, forward = flops.training_flops(whole, SEQUENCE), flops.forward_flops(whole, SEQUENCE)
    assert everything == 3 * forward
    with ranks.as_stage(provider("llama"), 0), torch.device("meta"):
        LoRA(dim=4)([whole])
    assert 2 * forward < flops.training_flops(whole, SEQUENCE) < 2.4 * forward


@pytest.mark.parametrize(
    ("window", "keys"), [((-1, -1), 128.5), ((7, 0), 7.890625), (None, 128.5), ((999, 0), 128.5)]
)
def test_keys_that_a_query_sees(window, keys):
    class Core:
        pass

    core = Core()
    core.window = window
    by_hand = (
        sum(1 + min(query, 10**9 if window is None or window[0] < 0 else window[0]) for query in range(256)) / 256
    )
    assert flops._seen(core, 256) == pytest.approx(by_hand) == pytest.approx(keys)


def test_published_count_of_llama():
    """6 x parameters for each token, and 12 x layers x width x sequence / 2 for causal attention (Kaplan 2020)."""
    model = provider("llama")
    whole = ranks.whole(model)
    matrices = sum(p.numel() for name, p in whole.named_parameters() if p.dim() == 2 and "word_emb" not in name)
    expected = SEQUENCE * 6 * matrices + 6 * model.num_layers * model.hidden_size * SEQUENCE * (SEQUENCE + 1)
    assert flops.training_flops(whole, SEQUENCE) == expected
