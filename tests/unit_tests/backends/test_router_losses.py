# SPDX-License-Identifier: Apache-2.0
"""Routers count neither padding nor its share of a loss."""

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from tests.parity import EXPERTS
from tests.toy_run import initialize_by_name, toy_config

pytestmark = pytest.mark.usefixtures("one_rank")
REAL, LENGTH = 11, 32


def gradients(padding_mask, length, kind):
    """Counts of experts, and gradients of routers, of one sequence."""
    fields = EXPERTS | {"moe_router_load_balancing_type": kind, "calculate_per_token_loss": False}
    provider = toy_config(model=fields).model
    provider.register_pre_wrap_hook(initialize_by_name)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False)
    ids = torch.arange(5, 5 + length)[None]
    logits = model(ids, torch.arange(length)[None], None, padding_mask=padding_mask)
    (logits * 0).sum().backward()
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    return (
        torch.stack([router.local_tokens_per_expert for router in routers]),
        torch.stack([router.weight.grad for router in routers]),
    )


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_padding_changes_nothing(kind):
    counts, expected = gradients(None, REAL, kind)
    assert int(counts[0].sum()) == REAL * EXPERTS["moe_router_topk"]
    mask = torch.arange(LENGTH)[None] >= REAL
    padded_counts, measured = gradients(mask, LENGTH, kind)
    assert torch.equal(padded_counts, counts)
    assert float(expected.abs().max()) > 1e-5
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-8)
