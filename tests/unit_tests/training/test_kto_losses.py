# SPDX-License-Identifier: Apache-2.0
"""The loss of KTO against its formula, answer by answer."""

import math

import pytest
import torch

from megatron.bridge.training.config import DPOConfig
from megatron.bridge.training.dpo import kto_losses

RATIOS = [0.7, -1.3, 2.4, -0.2, 0.0]
DESIRABLE = [True, True, False, False, True]


def naive(ratio, desirable, kl, settings):
    if desirable:
        return settings.desirable_weight * (1 - 1 / (1 + math.exp(-settings.beta * (ratio - kl))))
    return settings.undesirable_weight * (1 - 1 / (1 + math.exp(-settings.beta * (kl - ratio))))


@pytest.mark.parametrize("kl", [0.0, 0.9])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 1.7)])
def test_losses_are_those_of_the_formula(kl, weights):
    settings = DPOConfig(
        loss_type="kto", beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1]
    )
    found = kto_losses(torch.tensor(RATIOS), torch.tensor(DESIRABLE), torch.tensor(kl), settings)
    expected = [
        naive(ratio, good, kl, settings) for ratio, good in zip(RATIOS, DESIRABLE, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
