# SPDX-License-Identifier: Apache-2.0
"""Scales of losses that a backward pass sets do not leak from one test into the next."""

import pytest
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

SCALES = {
    scaler: scaler.main_loss_backward_scale
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler, DSAIndexerLossAutoScaler)
}


@pytest.fixture(autouse=True)
def no_loss_scale_left(monkeypatch):
    for scaler, scale in SCALES.items():
        monkeypatch.setattr(scaler, "main_loss_backward_scale", scale)
